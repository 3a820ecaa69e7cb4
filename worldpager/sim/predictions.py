"""Predictions that are written down before a run and held against it afterwards.

A prediction file names everything it depends on: the inputs, the machine it assumes, the code that
computed it, when, and for each criterion the value and the tolerance. A hash over all of it shows
later changes. A run confirms or refutes it; nothing is adjusted in between.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError, field_validator

import worldpager
from worldpager.errors import ConfigError
from worldpager.pager.policies import WriteBack
from worldpager.prefetch.planner import PATH_AHEAD
from worldpager.prefetch.poses import Floats
from worldpager.quant.codec import get_codec
from worldpager.sim.closed_form import chunk_bytes
from worldpager.sim.devices import DiskModel
from worldpager.sim.machines import MachineProfile
from worldpager.sim.presets import get_preset
from worldpager.sim.simulator import HostModel, SimChunk, SimConfig, Simulator

SINK_CODEC = "bf16"
STALL_SHARE = 1e-3
"""Waits below this share of the compute time, all together, count as no stall."""

Value = bool | int | float | None


class Inputs(BaseModel):
    """What a rollout depends on, besides the machine. ``None`` where a limit or a time is not set.

    ``poses``: hash of the camera path, see :func:`poses_hash`; ``path`` and ``seed`` say in words
    where it came from. ``known_ahead``: chunks whose poses are known before they begin.
    ``tokens_kept``: the share of a chunk's tokens that ``pruning`` keeps on average, which is
    assumed beforehand and observed by the run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "builtin"
    codec: str = "int4"
    chunks: int
    path: str
    seed: int = 0
    poses: str
    dram_bytes: int
    retrieve: int = 3
    retrieval: str = "camera"
    pruning: str = "none"
    tokens_kept: float = 1.0
    eviction: str = "redundant"
    on_miss: str = "nearest"
    read_limit: int | None = None
    write_limit: int | None = None
    chunk_time: float | None = None
    known_ahead: int = max(PATH_AHEAD)
    prefetch: bool = True
    write_back: WriteBack = WriteBack()


class Outcome(BaseModel):
    """What a rollout did, criterion by criterion; chunk numbers count from 1."""

    model_config = ConfigDict(frozen=True)

    spill_chunk: int | None
    first_read_chunk: int | None
    stalled: bool
    stall_ms: float
    bytes_read: int
    bytes_written: int
    stale_windows: int

    @classmethod
    def of(cls, metrics: Mapping[str, Any]) -> Outcome:
        """From the columns of ``metrics.jsonl``, simulated or real."""
        stall = float(np.sum(np.asarray(metrics["stall_ms"], dtype=np.float64)))
        wall = np.asarray(metrics["wall_ms"], dtype=np.float64)
        compute = float(np.sum(wall - np.asarray(metrics["boundary_ms"], dtype=np.float64)))
        return cls(
            spill_chunk=metrics["spill_chunk"][-1],
            first_read_chunk=metrics["first_read_chunk"][-1],
            stalled=stall > STALL_SHARE * compute,
            stall_ms=stall,
            bytes_read=int(metrics["bytes_read_total"][-1]),
            bytes_written=int(metrics["bytes_written_total"][-1]),
            stale_windows=int(np.sum(np.asarray(metrics["stale"], dtype=np.bool_))),
        )


class Tolerance(BaseModel):
    """By how much an observation may differ: the larger of an absolute and a relative bound."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    absolute: float = 0.0
    relative: float = 0.0

    def bound(self, predicted: Value) -> float:
        """The larger of the two for this value; 0 where there is nothing to differ by."""
        if predicted is None or isinstance(predicted, bool):
            return 0.0
        return max(self.absolute, self.relative * abs(predicted))

    def allows(self, predicted: Value, observed: Value) -> bool:
        """Whether ``observed`` confirms ``predicted``; what never happens only confirms itself."""
        if predicted is None or observed is None or isinstance(predicted, bool):
            return predicted == observed
        return abs(observed - predicted) <= self.bound(predicted)


class Criterion(BaseModel):
    """One thing that is predicted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    predicted: Value
    tolerance: Tolerance

    @field_validator("name")
    @classmethod
    def _of_an_outcome(cls, name: str) -> str:
        if name not in Outcome.model_fields:
            raise ValueError(f"no outcome is called {name!r}")
        return name


class Verdict(BaseModel):
    """A criterion after the run."""

    name: str
    predicted: Value
    observed: Value
    tolerance: Tolerance
    met: bool


class Prediction(BaseModel):
    """The content of a prediction file.

    ``version``, ``code``: of the package that predicted. ``machine``: None for a disk without any
    bound but the inputs' limits. ``host``: what the memory's own work was taken to cost.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    created: AwareDatetime
    version: str
    code: str
    inputs: Inputs
    machine: MachineProfile | None
    host: HostModel
    criteria: tuple[Criterion, ...]
    hash: str = ""

    def digest(self) -> str:
        """Hash over everything but the hash itself."""
        content = self.model_dump(mode="json", exclude={"hash"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def judge(self, outcome: Outcome) -> list[Verdict]:
        """Each criterion against what a run did."""
        verdicts = []
        for criterion in self.criteria:
            seen = getattr(outcome, criterion.name)
            met = criterion.tolerance.allows(criterion.predicted, seen)
            verdicts.append(Verdict(**dict(criterion), observed=seen, met=met))
        return verdicts


def sim_config(
    inputs: Inputs, machine: MachineProfile | None = None, host: HostModel | None = None
) -> SimConfig:
    """The simulation of a rollout with ``inputs`` on ``machine``.

    Compute time is the one given, else the published one, else real time. ``host``: in place of
    what the machine's profile says. Raises
    :class:`ConfigError` for an unknown model or codec.
    """
    geometry, codec = get_preset(inputs.model), get_codec(inputs.codec)
    return SimConfig(
        pool_bytes=inputs.dram_bytes,
        chunk_bytes=chunk_bytes(geometry, codec, inputs.tokens_kept).stored,
        compute_seconds=inputs.chunk_time
        or geometry.compute_seconds
        or geometry.video_seconds_per_chunk,
        retrieve=inputs.retrieve,
        sink_chunks=geometry.sink_chunks,
        sink_chunk_bytes=chunk_bytes(geometry, get_codec(SINK_CODEC)).stored,
        retrieval=inputs.retrieval,
        eviction=inputs.eviction,
        on_miss=inputs.on_miss,
        read_limit=inputs.read_limit,
        write_limit=inputs.write_limit,
        known_ahead=inputs.known_ahead,
        prefetch=inputs.prefetch,
        write_back=inputs.write_back,
        disk=DiskModel() if machine is None else machine.disk_model(),
        host=host or (HostModel() if machine is None else machine.host_model(geometry)),
    )


def predict(
    inputs: Inputs,
    path: Floats,
    machine: MachineProfile | None = None,
    host: HostModel | None = None,
    *,
    tolerances: Mapping[str, Tolerance] | None = None,
    now: datetime | None = None,
) -> Prediction:
    """Simulate the rollout along ``path`` and say what it will do.

    ``tolerances``: in place of :func:`default_tolerances`, by criterion. Raises
    :class:`ConfigError` where ``path`` is not the one that ``inputs`` names.
    """
    if inputs.poses != poses_hash(path) or inputs.chunks != len(path):
        raise ConfigError("the camera path is not the one that the prediction's inputs name")
    config = sim_config(inputs, machine, host)
    simulator = Simulator(config, path)
    outcome = Outcome.of(columns(simulator.run()))
    seconds = sum(config.seconds_of(chunk) for chunk in range(len(path)))
    chosen = default_tolerances(seconds, len(path)) | dict(tolerances or {})
    prediction = Prediction(
        created=now or datetime.now(UTC),
        version=_version(),
        code=code_hash(),
        inputs=inputs,
        machine=machine,
        host=config.host,
        criteria=tuple(
            Criterion(name=name, predicted=value, tolerance=chosen[name]) for name, value in outcome
        ),
    )
    return prediction.model_copy(update={"hash": prediction.digest()})


def default_tolerances(compute_seconds: float, chunks: int) -> dict[str, Tolerance]:
    """Exact, but for the first read (1 chunk), the stall (10 %, and what counts as none) and stale
    windows (1 % of all, at least 1).
    """
    exact = Tolerance()
    return {
        "spill_chunk": exact,
        "first_read_chunk": Tolerance(absolute=1),
        "stalled": exact,
        "stall_ms": Tolerance(absolute=STALL_SHARE * compute_seconds * 1e3, relative=0.1),
        "bytes_read": exact,
        "bytes_written": exact,
        "stale_windows": Tolerance(absolute=max(1.0, 0.01 * chunks)),
    }


def columns(chunks: Iterable[SimChunk]) -> dict[str, list[Any]]:
    """Simulated chunks as the columns of a ``metrics.jsonl``."""
    rows = list(chunks)
    return {name: [getattr(row, name) for row in rows] for name in SimChunk.__dataclass_fields__}


def poses_hash(path: Floats) -> str:
    """Hash of a camera path ``[chunks, frames, 4, 4]``: of its shape and its values to a millionth,
    so that another machine's last bits do not matter.
    """
    shape = "x".join(str(length) for length in path.shape)
    values = np.round(np.asarray(path, dtype=np.float64), 6) + 0.0  # no negative zeros
    return hashlib.sha256(shape.encode() + values.astype("<f8").tobytes()).hexdigest()


def code_hash() -> str:
    """Hash of every source file of this package: what computed a prediction."""
    root = Path(worldpager.__file__).parent
    total = hashlib.sha256()
    for source in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        total.update(source.relative_to(root).as_posix().encode() + b"\0")
        total.update(hashlib.sha256(source.read_bytes()).digest())
    return total.hexdigest()


def _version() -> str:
    try:
        return version("worldpager")
    except PackageNotFoundError:
        return "unknown"


def write_prediction(prediction: Prediction, path: Path) -> None:
    """Write a new file. Raises :class:`ConfigError` where ``path`` exists: a prediction that can be
    replaced predicts nothing.
    """
    text = prediction.model_dump_json(indent=2) + "\n"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists, and a prediction is never overwritten; choose another name"
        ) from None


def read_prediction(path: Path) -> Prediction:
    """The prediction in ``path``. Raises :class:`ConfigError` where it is none, or was changed
    since it was written.
    """
    try:
        prediction = Prediction.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the prediction {path}: {error.strerror}") from None
    except (ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a prediction: {str(error).splitlines()[0]}") from None
    if prediction.hash != prediction.digest():
        raise ConfigError(f"{path} was changed after it was written: its hash does not fit")
    return prediction

"""What all reproductions share: rows of paper, simulated, measured; one rollout done both ways.

A :class:`Case` is a rollout of a published model on the published machine. The simulator runs it as
it is. The machine at hand runs it smaller: every size times ``scale``, every time times ``T' / T``,
every bandwidth times both, so that all happens at the same chunks; measured times are given divided
by ``T' / T`` again, which multiplies this machine's own overheads along with them.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from worldpager.cli.frontends import synthetic_rollout
from worldpager.model_adapter.driving import ChunkMetrics, RolloutConfig
from worldpager.pager.policies import WriteBack
from worldpager.prefetch.actions import upright_poses
from worldpager.prefetch.poses import Floats
from worldpager.quant.codec import get_codec
from worldpager.sim.closed_form import chunk_bytes
from worldpager.sim.devices import DiskModel
from worldpager.sim.machines import MACHINES
from worldpager.sim.presets import ModelGeometry, get_preset
from worldpager.sim.simulator import HostModel, SimConfig, Simulator

Value = float | int | str | None
Columns = Mapping[str, npt.NDArray[Any]]
SINK_CODEC = "bf16"


class Row(BaseModel):
    """One figure: as published, as simulated for the published machine, as measured here. None
    where there is none.
    """

    what: str
    unit: str = ""
    paper: Value = None
    simulated: Value = None
    measured: Value = None


class Series(BaseModel):
    """One line or set of marks of the figure."""

    label: str
    x: list[float]
    y: list[float]
    marks: bool = False


class Chart(BaseModel):
    """The figure's axes and what is on them."""

    x: str
    y: str
    series: list[Series]
    log_x: bool = False
    floor: float | None = None
    """Linear below this and logarithmic above; None for a linear axis."""


class Reproduction(BaseModel):
    """One table or figure: all that is written to its JSON file."""

    name: str
    title: str
    source: str
    settings: dict[str, Value]
    rows: list[Row]
    charts: list[Chart] = []
    notes: list[str] = []


def there_and_back(chunks: int, frames: int) -> Floats:
    """A walk along a bend to places never seen before, and back over the same frames: chunk ``t``
    revisits ``chunks - 1 - t``. Poses ``[chunks, frames, 4, 4]``.
    """
    count = -(-chunks // 2) * frames
    yaw = np.radians(150 * np.arange(count) / count)
    place = np.zeros((count, 3))
    place[:, 0] = np.cumsum(np.sin(yaw)) * 0.1 / frames
    place[:, 2] = np.cumsum(np.cos(yaw)) * 0.1 / frames
    out = upright_poses(place, yaw, np.zeros(count))
    both = np.concatenate([out, out[::-1]])[: chunks * frames]
    return both.reshape(chunks, frames, 4, 4)


@dataclass(frozen=True, slots=True)
class Case:
    """One rollout in the published sizes. ``pool``: bytes; bandwidths in bytes per second, None for
    the disk's own. ``lru`` stands in for the paper's eviction, ``redundant`` is our default.
    """

    chunks: int
    pool: int
    model: str = "matrix-game-2"
    codec: str = "int4"
    retrieve: int = 3
    eviction: str = "lru"
    on_miss: str = "stale"  # as published; WorldPager's own default is another
    prefetch: bool = True
    read_bandwidth: float | None = None
    write_bandwidth: float | None = None
    write_back: WriteBack = field(default_factory=WriteBack)
    positions: str = "moving"

    @property
    def geometry(self) -> ModelGeometry:
        return get_preset(self.model)

    @property
    def seconds(self) -> float:
        """Compute time per chunk."""
        geometry = self.geometry
        return geometry.compute_seconds or geometry.video_seconds_per_chunk

    @property
    def stored(self) -> int:
        """Bytes of a stored chunk."""
        return chunk_bytes(self.geometry, get_codec(self.codec)).stored

    @property
    def path(self) -> Floats:
        return there_and_back(self.chunks, self.geometry.frames_per_chunk)


@dataclass(frozen=True)
class Lab:
    """Where and how cases are run. ``simulated``, ``measured``: what is wanted. ``scale``: of the
    bytes; ``chunk_time``: seconds of compute of a measured chunk; ``folder``: for its stores.
    ``say`` takes a line of progress.
    """

    simulated: bool
    measured: bool
    scale: Fraction
    chunk_time: float
    folder: Path
    say: Callable[[str], None] = print

    @cached_property
    def _codec_rates(self) -> dict[str, float]:
        from worldpager.cli.measuring import measure_codec

        return measure_codec()

    def host_of(self, case: Case) -> HostModel:
        """What encoding and decoding a chunk of ``case`` costs here at this scale."""
        kv_bytes, rates = 2 * self.smaller(case).geometry.kv_elements_per_chunk, self._codec_rates
        return HostModel(
            encode_seconds=kv_bytes / rates["encode_bandwidth"],
            decode_seconds=kv_bytes / rates["decode_bandwidth"],
        )

    def smaller(self, case: Case) -> Case:
        """``case`` with the scaled model and pool; the pool holds as many chunks as before."""
        small = replace(case, model=f"{case.model}@{self.scale}")
        return replace(small, pool=case.pool * small.stored // case.stored)

    def slower(self, case: Case) -> float:
        """``T' / T``: by how much a measured chunk is shorter than a published one."""
        return self.chunk_time / case.seconds

    def limit(self, case: Case, bandwidth: float | None) -> int | None:
        """A bandwidth of the published sizes and times, here."""
        if bandwidth is None:
            return None
        small = self.smaller(case)
        return round(bandwidth * small.stored / case.stored / self.slower(case))

    def simulate(self, case: Case, machine: str = "rtx4090-32gib") -> Columns:
        """Run ``case`` on a modelled machine."""
        return self._simulate(case, MACHINES[machine].disk_model(), HostModel())

    def foresee(self, case: Case) -> Columns:
        """Predict :meth:`measure`: the scaled case with this machine's codec, times scaled back."""
        small = self.smaller(case)
        small = replace(
            small,
            read_bandwidth=self.limit(case, case.read_bandwidth),
            write_bandwidth=self.limit(case, case.write_bandwidth),
        )
        host = self.host_of(case)
        columns = self._simulate(small, DiskModel(), host, self.chunk_time)
        return _stretched(columns, 1 / self.slower(case))

    def _simulate(
        self,
        case: Case,
        disk: DiskModel,
        host: HostModel,
        seconds: float | None = None,
    ) -> Columns:
        geometry = case.geometry
        config = SimConfig(
            pool_bytes=case.pool,
            chunk_bytes=case.stored,
            compute_seconds=seconds or case.seconds,
            retrieve=case.retrieve,
            sink_chunks=geometry.sink_chunks,
            sink_chunk_bytes=chunk_bytes(geometry, get_codec(SINK_CODEC)).stored,
            eviction=case.eviction,
            on_miss=case.on_miss,
            prefetch=case.prefetch,
            write_back=case.write_back,
            read_limit=_whole(case.read_bandwidth),
            write_limit=_whole(case.write_bandwidth),
            disk=disk,
            host=host,
        )
        return table([row.as_dict() for row in Simulator(config, case.path).run()])

    def measure(
        self, case: Case, label: str, each: Callable[[ChunkMetrics], None] | None = None
    ) -> Columns:
        """As :meth:`run`, times scaled back to the published ones."""
        return _stretched(self.run(case, label, each), 1 / self.slower(case))

    def run(
        self, case: Case, label: str, each: Callable[[ChunkMetrics], None] | None = None
    ) -> Columns:
        """Run ``case`` here, scaled, with real bytes; its store is removed afterwards.

        ``each`` is told of every chunk. Times are those of this machine.
        """
        self.say(f"measuring {label}: {case.chunks} chunks")
        small = self.smaller(case)
        with self.scratch() as folder:
            config = RolloutConfig(
                chunks=case.chunks,
                path=case.path,
                dram_bytes=small.pool,
                store_dir=folder / "store",
                out_dir=folder,
                codec=case.codec,
                retrieve=case.retrieve,
                eviction=case.eviction,
                on_miss=case.on_miss,
                prefetch=case.prefetch,
                write_back=case.write_back,
                positions=case.positions,
                read_limit=self.limit(case, case.read_bandwidth),
                write_limit=self.limit(case, case.write_bandwidth),
                chunk_time=self.chunk_time,
            )
            rollout = synthetic_rollout(small.geometry, case.retrieve)
            columns: dict[str, npt.NDArray[Any]] = {}
            for metrics in rollout(config):
                for name, value in numbers(metrics.as_dict()):
                    # there from the first chunk, so that keeping them is no growth of memory
                    columns.setdefault(name, np.full(case.chunks, np.nan))[metrics.chunk] = value
                if each is not None:
                    each(metrics)
        return columns

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for one rollout's store, removed afterwards."""
        self.folder.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="store-", dir=self.folder))
        try:
            yield made
        finally:
            shutil.rmtree(made)

    @property
    def settings(self) -> dict[str, Value]:
        """How it was measured, for the record."""
        return {
            "scale of bytes": str(self.scale),
            "measured chunk time, ms": 1e3 * self.chunk_time,
        }


_TIMES = ("wall_ms", "model_ms", "boundary_ms", "stall_ms", "decode_ms", "encode_ms")


def _stretched(columns: Columns, factor: float) -> Columns:
    return {n: values * factor if n in _TIMES else values for n, values in columns.items()}


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def table(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Rows of metrics as columns of numbers."""
    made = [dict(numbers(row)) for row in rows]
    return {name: np.array([row[name] for row in made]) for name in made[0]}


def numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What can be put into a column; a chunk number that is still missing is NaN."""
    for name, value in row.items():
        if value is None:
            yield name, math.nan
        elif isinstance(value, (int, float)):
            yield name, float(value)


def last(columns: Columns, name: str) -> int | None:
    """The last value of a counter, None where it never was set."""
    value = float(columns[name][-1])
    return None if np.isnan(value) else int(value)


def median(values: npt.NDArray[Any]) -> float:
    return round(float(np.median(values)), 3)


def p99(values: npt.NDArray[Any]) -> float:
    return round(float(np.percentile(values, 99)), 3)

"""Predictions registered before real runs, then held against them; writes docs/validation.md.

    python benchmarks/validation.py --folder validation            # all of it, a quarter of an hour
    python benchmarks/validation.py --folder validation --minutes 8   # go on for so long

Registers every prediction of the design first, then runs what has not run yet, with real bytes
through the real pager, then writes the whole table. Nothing in the folder is ever replaced.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from steady import steadied  # beside this file

from worldpager.cli.frontends import synthetic_rollout
from worldpager.cli.measuring import measure_disk
from worldpager.cli.recording import Recording, claimed
from worldpager.cli.reproduction.base import there_and_back
from worldpager.cli.runs import read_run
from worldpager.cli.validate import check_held_out
from worldpager.model_adapter.driving import RolloutConfig
from worldpager.prefetch.actions import upright_poses
from worldpager.prefetch.paths import make_path
from worldpager.prefetch.poses import Floats
from worldpager.prefetch.retrieval import get_policy
from worldpager.prefetch.retriever import Retriever
from worldpager.quant.codec import get_codec
from worldpager.sim.closed_form import chunk_bytes
from worldpager.sim.machines import DiskProfile, HostProfile, MachineProfile
from worldpager.sim.predictions import (
    Inputs,
    Outcome,
    Prediction,
    poses_hash,
    predict,
    read_prediction,
    write_prediction,
)
from worldpager.sim.presets import get_preset
from worldpager.sim.simulator import HostModel

CHUNK_TIME = 0.2
MODELS = ("matrix-game-2@1/600", "lingbot-world@1/4800", "longlive@1/1600")
CODECS = ("int4", "int8")
BANDWIDTHS = (0.45, 0.69, 1.6, 4.4, 10.0)
"""Chunks that could be read in one chunk's compute time. Chosen so that no few reads in a row end
within a few per cent of the end of a chunk, where milliseconds decide what is in time."""
PATHS = ("yaw-return", "loop", "walk", "random")
POOLS = {13: 80, 40: 110, 120: 170}
"""Chunk at which the pool is full, and the run's length."""
MODES = ("stale", "wait", "on demand")
RUNS = 30
HOST_ROUNDS = 3
HOST_CHUNKS = 36
"""Of the runs that tell what the memory's own work costs."""
FACTORS = {
    "model": MODELS, "codec": CODECS, "bandwidth": BANDWIDTHS, "path": PATHS,
    "pool": tuple(POOLS), "mode": MODES,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the design."""

    number: int
    model: str
    codec: str
    bandwidth: float
    path: str
    pool: int
    mode: str

    @property
    def name(self) -> str:
        return f"{self.number:02}"


def design(runs: int = RUNS, seed: int = 3) -> list[Cell]:
    """Every level as often as every other, in the arrangement (of 300 shuffles) in which the most
    pairs of levels of two factors meet.
    """
    rng = np.random.default_rng(seed)
    best: tuple[int, list[tuple[object, ...]]] = (-1, [])
    for _ in range(300):
        columns = [rng.permutation(np.resize(np.arange(len(f)), runs)) for f in FACTORS.values()]
        pairs = {
            (i, j, a, b)
            for i in range(len(columns))
            for j in range(i)
            for a, b in zip(columns[i], columns[j], strict=True)
        }
        rows = [
            tuple(levels[k] for levels, k in zip(FACTORS.values(), row, strict=True))
            for row in zip(*columns, strict=True)
        ]
        best = max(best, (len(pairs), rows), key=lambda each: each[0])
    return [Cell(number, *row) for number, row in enumerate(best[1], 1)]  # type: ignore[arg-type]


def random_path(chunks: int, frames: int, seed: int) -> Floats:
    """A camera with random accelerations, drawn back to the middle: ``[chunks, frames, 4, 4]``."""
    rng, count = np.random.default_rng(seed), chunks * frames
    state, speed, track = np.zeros(3), np.zeros(3), np.empty((count, 3))
    for frame in range(count):  # x and z in units, yaw in radians
        speed = 0.97 * speed + rng.normal(0, (0.012, 0.012, 0.02), 3) - 0.002 * state * (1, 1, 0)
        state = state + speed
        track[frame] = state
    place = np.stack([track[:, 0], np.zeros(count), track[:, 1]], axis=1)
    return upright_poses(place, track[:, 2], np.zeros(count)).reshape(chunks, frames, 4, 4)


def poses_of(cell: Cell) -> Floats:
    chunks, frames = POOLS[cell.pool], get_preset(cell.model).frames_per_chunk
    if cell.path == "random":
        return random_path(chunks, frames, cell.number)
    return make_path(cell.path, chunks, frames, cell.number)


def inputs_of(cell: Cell, path: Floats) -> Inputs:
    """What the run is given. The pool holds half a chunk more than the chunks before the spill."""
    geometry, codec = get_preset(cell.model), get_codec(cell.codec)
    stored = chunk_bytes(geometry, codec).stored
    sink = chunk_bytes(geometry, get_codec("bf16")).stored
    pool = geometry.sink_chunks * sink + (cell.pool - 1 - geometry.sink_chunks) * stored
    return Inputs(
        model=cell.model,
        codec=cell.codec,
        chunks=len(path),
        path=cell.path,
        seed=cell.number,
        poses=poses_hash(path),
        dram_bytes=pool + stored // 2,
        on_miss="stale" if cell.mode == "stale" else "wait",
        prefetch=cell.mode != "on demand",
        read_limit=round(cell.bandwidth * stored / CHUNK_TIME),
        chunk_time=CHUNK_TIME,
    )


def config_of(inputs: Inputs, path: Floats, folder: Path) -> RolloutConfig:
    names = ("chunks", "codec", "dram_bytes", "on_miss", "prefetch", "read_limit", "chunk_time",
             "seed")  # fmt: skip
    given = {name: getattr(inputs, name) for name in names}
    return RolloutConfig(path=path, store_dir=folder / "store", out_dir=folder, **given)


# ---- before: the machine and the predictions -----------------------------------------------------


def measure_host(model: str, codec: str, folder: Path) -> HostModel:
    """What the memory's work costs here: of several runs there and back, on demand, the one with
    the least, for what else the machine does only adds. Decoding includes all of a boundary that
    is neither encoding nor waiting.
    """
    rounds = [_host_round(model, codec, folder / str(number)) for number in range(HOST_ROUNDS)]
    least = np.min(rounds, axis=0)
    return HostModel(*(float(value) for value in least))


def _host_round(model: str, codec: str, folder: Path) -> tuple[float, float, float, float]:
    geometry = get_preset(model)
    path = there_and_back(HOST_CHUNKS, geometry.frames_per_chunk)
    inputs = inputs_of(Cell(0, model, codec, 4.0, "", 13, "on demand"), path)
    run_once(inputs, path, folder)
    metrics = read_run(folder).metrics
    served = np.array([len(chunks) for chunks in metrics["retrieved"]])
    others = metrics["boundary_ms"] - metrics["encode_ms"] - metrics["stall_ms"]
    one = metrics["hits.nvme"] == 1
    limit = 1e3 * chunk_bytes(geometry, get_codec(codec)).stored / (inputs.read_limit or 1)
    wake = max(0.0, float(np.median(metrics["stall_ms"][one])) - limit) / 1e3
    return (
        float(np.median(metrics["encode_ms"][10:])) / 1e3,
        float(np.median(others[served > 0] / served[served > 0])) / 1e3,
        _plan_seconds(path) + wake,
        wake,
    )


def _plan_seconds(path: Floats) -> float:
    retriever = Retriever(get_policy("camera"), k=3, sink=0, recent=1)
    times = []
    for chunk in range(1, len(path) - 10):
        retriever.note(chunk - 1, np.asarray(path[chunk - 1][:, :3]).mean(0).ravel().tolist())
        began = time.perf_counter()
        retriever.plan(chunk, path[chunk], path[chunk - 1], path[chunk + 1 : chunk + 9])
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def register(folder: Path, cells: Iterable[Cell]) -> None:
    """Measure the machine, then write every prediction down; once."""
    predictions = folder / "predictions"
    if predictions.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    print("measuring the disk and the memory's own work", flush=True)
    disk = measure_disk(folder)
    hosts = {
        (model, codec): measure_host(
            model, codec, folder / "host" / f"{model}-{codec}".replace("/", "-")
        )
        for model in MODELS
        for codec in CODECS
    }
    machine = _machine(disk)
    machine.save(folder / "machine.json")
    making = folder / "predictions.tmp"
    making.mkdir()
    for cell in cells:
        path, host = poses_of(cell), hosts[cell.model, cell.codec]
        inputs = steadied(inputs_of(cell, path), path, machine, host)
        prediction = predict(inputs, path, machine, host)
        write_prediction(prediction, making / f"{cell.name}.json")
    making.rename(predictions)


def _machine(disk: DiskProfile) -> MachineProfile:
    import psutil

    memory = psutil.virtual_memory().total
    return MachineProfile(
        name=platform.node() or "here", memory_bytes=memory, limit_bytes=memory,
        limit_source="host memory", host=HostProfile(cpus=psutil.cpu_count()), disk=disk,
        date=time.strftime("%Y-%m-%d"), how="measured before the predictions were registered",
    )  # fmt: skip


# ---- the runs ------------------------------------------------------------------------------------


def run_once(inputs: Inputs, path: Floats, folder: Path) -> None:
    """A rollout as ``worldpager rollout`` records it."""
    geometry = get_preset(inputs.model)
    with claimed(folder):
        recording = Recording(
            config_of(inputs, path, folder), inputs.path, geometry,
            synthetic_rollout(geometry, inputs.retrieve),
        )  # fmt: skip
        recording.run(compare=False)
    for file in sorted((folder / "store").rglob("*"), reverse=True):
        file.unlink() if not file.is_dir() else file.rmdir()
    (folder / "store").rmdir()


def run_all(folder: Path, cells: Iterable[Cell], minutes: float) -> None:
    """Run what has not run, for at most so long."""
    deadline = time.monotonic() + 60 * minutes
    for cell in cells:
        target = folder / "runs" / cell.name
        if target.exists() and _complete(target):
            continue
        if target.exists():  # kept beside, and counted in the document
            target.rename(target.with_name(f"{cell.name}-interrupted-{time.time_ns()}"))
        if time.monotonic() > deadline:
            return
        print(f"run {cell.name}: {cell}", flush=True)
        inputs = read_prediction(folder / "predictions" / f"{cell.name}.json").inputs
        run_once(inputs, poses_of(cell), target)


def _complete(folder: Path) -> bool:
    summary = folder / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["status"] == "complete"


# ---- after: the table ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """One run beside its prediction. ``late``: chunks longer than the planned time, with 1 %."""

    cell: Cell
    said: Outcome
    seen: Outcome
    prediction: Prediction
    late: int

    @property
    def checks(self) -> dict[str, bool | None]:
        """Criterion by criterion; None where one does not apply."""
        said, seen = self.said, self.seen
        near = (
            said.first_read_chunk == seen.first_read_chunk
            if said.first_read_chunk is None or seen.first_read_chunk is None
            else abs(said.first_read_chunk - seen.first_read_chunk) <= 1
        )
        size = abs(seen.stall_ms - said.stall_ms) <= 0.1 * said.stall_ms
        return {
            "spill chunk exact": said.spill_chunk == seen.spill_chunk,
            "first read exact": said.first_read_chunk == seen.first_read_chunk,
            "first read within 1 chunk": near,
            "zero against non-zero stall": said.stalled == seen.stalled,
            "non-zero stall within 10 %": size if said.stalled else None,
            "bytes read exact": said.bytes_read == seen.bytes_read,
            "bytes written exact": said.bytes_written == seen.bytes_written,
        }


REQUIRED = {
    "spill chunk exact": "all", "first read exact": "90 %", "first read within 1 chunk": "all",
    "zero against non-zero stall": "all", "non-zero stall within 10 %": "90 %",
    "bytes read exact": "all", "bytes written exact": "all",
}  # fmt: skip


def results(folder: Path, cells: Iterable[Cell]) -> list[Result]:
    made = []
    for cell in cells:
        if not _complete(folder / "runs" / cell.name):
            continue
        prediction = read_prediction(folder / "predictions" / f"{cell.name}.json")
        run = read_run(folder / "runs" / cell.name)
        check_held_out(prediction, run)
        said = Outcome(**{c.name: c.predicted for c in prediction.criteria})  # type: ignore[arg-type]
        made.append(Result(cell, said, Outcome.of(run.metrics), prediction, run.late_chunks))
    return made


def document(made: list[Result], planned: int, notes: str) -> str:
    checks = [result.checks for result in made]
    lines = [
        "# Validation: predictions registered before the runs",
        "",
        f"{len(made)} of {planned} runs of `python benchmarks/validation.py`, real bytes through "
        "the real pager, each held against a prediction that was written down, with its hash, "
        "before the first of them began. The whole table follows, failures included.",
        "",
        "| criterion | met | of | asked for |",
        "| --- | --- | --- | --- |",
    ]
    for name, asked in REQUIRED.items():
        applicable = [check[name] for check in checks if check[name] is not None]
        lines.append(f"| {name} | {sum(map(bool, applicable))} | {len(applicable)} | {asked} |")
    whole = sum(all(met is not False for met in check.values()) for check in checks)
    lines += [f"| every criterion of a run | {whole} | {len(checks)} | |", "", notes.strip(), ""]
    lines += ["## Every run", "",
              "`predicted / observed` where they differ, one value where they agree. Bandwidth: "
              "chunks that could be read in a chunk's compute time. Reads and writes in bytes. "
              "Stall: all waits of the run, in ms.", "",
              "| run | model | codec | path | pool full at | bandwidth | mode | first read |"
              " stall | bytes read | bytes written | stale windows | missed |",
              "| --- " * 13 + "|"]  # fmt: skip
    for result, check in zip(made, checks, strict=True):
        cell, said, seen = result.cell, result.said, result.seen
        bandwidth = _bandwidth(result.prediction.inputs)
        missed = ", ".join(name for name, met in check.items() if met is False)
        lines.append(
            f"| {cell.name} | {cell.model} | {cell.codec} | {cell.path} | "
            f"{_both(said.spill_chunk, seen.spill_chunk)} | {bandwidth:.3g} | {cell.mode} | "
            f"{_both(said.first_read_chunk, seen.first_read_chunk)} | "
            f"{said.stall_ms:.0f} / {seen.stall_ms:.0f} | "
            f"{_both(said.bytes_read, seen.bytes_read)} | "
            f"{_both(said.bytes_written, seen.bytes_written)} | "
            f"{_both(said.stale_windows, seen.stale_windows)} | {missed} |"
        )
    return "\n".join(lines) + "\n"


def _bandwidth(inputs: Inputs) -> float:
    """In chunks per chunk's compute time."""
    stored = chunk_bytes(get_preset(inputs.model), get_codec(inputs.codec)).stored
    return (inputs.read_limit or 0) * CHUNK_TIME / stored


def _both(said: int | None, seen: int | None) -> str:
    return str(said) if said == seen else f"{said} / {seen}"


def setting(made: list[Result], folder: Path) -> str:
    """How it was measured."""
    broken = len(list((folder / "runs").glob("*-interrupted-*")))
    first = made[0].prediction
    disk = first.machine.disk if first.machine else None
    late = sum(result.late for result in made)
    chunks = sum(result.prediction.inputs.chunks for result in made)
    return (
        f"Predicted {first.created:%Y-%m-%d %H:%M} UTC by code {first.code[:12]}, chunk time "
        f"{1e3 * CHUNK_TIME:.0f} ms, disk {disk.file_system if disk else '-'} "
        f"({disk.method if disk else '-'}); {late} of {chunks} chunks took over 1 % longer than "
        f"planned. Runs interrupted and begun again: {broken}. Models: {', '.join(MODELS)}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("validation"))
    parser.add_argument("--minutes", type=float, default=1e6, help="of runs in this call, at most")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of runs, to try it out")
    parser.add_argument(
        "--document", type=Path, help="where to write it; default FOLDER/validation.md"
    )
    parser.add_argument("--notes", type=Path, help="text to set before the table")
    options = parser.parse_args()
    cells = [c for c in design() if not options.only or c.number in options.only]
    register(options.folder, cells)
    run_all(options.folder, cells, options.minutes)
    made = results(options.folder, cells)
    notes = options.notes.read_text(encoding="utf-8") if options.notes else ""
    target = options.document or options.folder / "validation.md"
    if made:
        target.write_text(
            document(made, len(cells), f"{setting(made, options.folder)}\n\n{notes}"),
            encoding="utf-8",
        )
        (options.folder / "results.json").write_text(
            json.dumps([{**asdict(r.cell), **r.checks} for r in made], indent=1) + "\n",
            encoding="utf-8",
        )
    left = len(cells) - len(made)
    print(f"{target}: {len(made)} runs" + (f", {left} still to do" if left else ""))


if __name__ == "__main__":
    main()

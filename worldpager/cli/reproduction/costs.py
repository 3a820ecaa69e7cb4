"""Cost per design: what a chunk takes with each kind of memory."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from worldpager.cli.frontends import kv_spec
from worldpager.cli.reproduction.base import Case, Columns, Lab, Reproduction, Row, median, p99
from worldpager.model_adapter.driving import one_thread
from worldpager.model_adapter.synthetic import SyntheticFrontend
from worldpager.sim import published
from worldpager.sim.closed_form import stall_on_demand_seconds
from worldpager.sim.machines import MACHINES

_HOST = MACHINES["rtx4090-32gib"]
REPEATS = 5
SMALL_POOL_CHUNKS = 12
"""Pool of the measured tiers, small enough that 36 chunks spill and come back."""


@dataclass(frozen=True, slots=True)
class _Design:
    codec: str
    copied: bool
    """Whether the window's chunks are copied to the GPU while the model waits."""
    pool_chunks: int | None = None


_DESIGNS = {
    "synchronous, DRAM bf16": _Design("bf16", True),
    "prefetched, DRAM bf16": _Design("bf16", False),
    "synchronous, DRAM int4": _Design("int4", True),
    "tiers int4": _Design("int4", False, SMALL_POOL_CHUNKS),
}


def reproduce(lab: Lab) -> Reproduction:
    """Chunk time, median and P99, and stall, for 36 chunks there and back."""
    rows = []
    for name, cost in published.COSTS.items():
        if cost.median is None:
            gpu = _HOST.gpu_kv_bytes or 0
            stop = 1 + gpu // Case(1, gpu, codec="bf16").stored
            rows.append(Row(what=f"{name}: exhausted", unit="chunk", paper=21, simulated=stop))
            continue
        simulated, measured = _simulated(lab, name), _measured(lab, name)
        figures = ("median", "P99", "stall, median", "stall, P99")
        paper = (cost.median, cost.p99, cost.stall, None)
        for figure, *values in zip(figures, paper, simulated, measured, strict=True):
            if any(value is not None for value in values):
                row = dict(zip(("paper", "simulated", "measured"), values, strict=True))
                rows.append(Row(what=f"{name}: {figure}", unit="ms", **row))
    return Reproduction(
        name="costs",
        title="Cost per design (Matrix-Game 2.0, 36 chunks there and back)",
        source=published.SOURCE,
        settings={**lab.settings, "chunks measured per design": _count()},
        rows=rows,
        notes=[
            "The paper's 188 ms between the sliding window and the others is attention over a "
            "longer window: the GPU's, not the memory's. Simulated and measured chunks have the "
            "published 1210.5 ms of compute, the sliding window its 1022.9.",
            "Simulated stalls of the synchronous designs are three chunks over 24.8 GB/s, a rate "
            "that follows from these very figures: a check of consistency, no prediction.",
            "Measured on a CPU there is no copy to a GPU. What a measured chunk takes beyond its "
            "compute is encoding one chunk and decoding three on this processor, on the model "
            "thread; on a GPU both are its kernels. So synchronous and prefetched differ here only "
            "by codec; only the tiers touch the disk: their pool holds "
            f"{SMALL_POOL_CHUNKS} chunks.",
        ],
    )


def _count() -> int:
    return REPEATS * (published.COST_CHUNKS - published.COST_SKIPPED)


def _case(design: _Design) -> Case:
    case = Case(published.COST_CHUNKS, _HOST.pool_bytes, codec=design.codec, eviction="redundant")
    chunks = design.pool_chunks
    return case if chunks is None else replace(case, pool=chunks * case.stored)


def _simulated(lab: Lab, name: str) -> tuple[float | None, ...]:
    if not lab.simulated:
        return (None,) * 4
    if name not in _DESIGNS:
        return published.COSTS[name].median, None, 0.0, None
    design = _DESIGNS[name]
    case = _case(design)
    columns = lab.simulate(case)
    copy = 0.0
    if design.copied and _HOST.gpu is not None and _HOST.gpu.copy_bandwidth is not None:
        copy = 1e3 * stall_on_demand_seconds(case.retrieve * case.stored, _HOST.gpu.copy_bandwidth)
    return _figures(columns, copy)


def _measured(lab: Lab, name: str) -> tuple[float | None, ...]:
    if not lab.measured:
        return (None,) * 4
    if name not in _DESIGNS:
        return _sliding(lab)
    case = _case(_DESIGNS[name])
    return _figures(_joined([lab.measure(case, name) for _ in range(REPEATS)]))


def _figures(columns: Columns, copy: float = 0.0) -> tuple[float | None, ...]:
    per_run = columns["chunk"] >= published.COST_SKIPPED
    wall, stall = columns["wall_ms"][per_run] + copy, columns["stall_ms"][per_run] + copy
    return median(wall), p99(wall), median(stall), p99(stall)


def _joined(runs: list[Columns]) -> Columns:
    return {name: np.concatenate([run[name] for run in runs]) for name in runs[0]}


def _sliding(lab: Lab) -> tuple[float | None, ...]:
    """The frontend alone: its ring caches roll, and nothing is kept."""
    cost = published.COSTS["sliding window, nothing stored"]
    case = Case(published.COST_CHUNKS, _HOST.pool_bytes)
    slower = lab.slower(case)
    compute = slower * (cost.median or 0.0) / 1e3
    spec = kv_spec(lab.smaller(case).geometry, 0)
    lab.say("measuring the sliding window")
    walls = []
    with one_thread():
        for _ in range(REPEATS):
            frontend = SyntheticFrontend(spec)
            for chunk in range(case.chunks):
                began = time.perf_counter()
                frontend.cache.open([])
                frontend.generate(chunk)
                time.sleep(max(0.0, compute - (time.perf_counter() - began)))
                if chunk >= published.COST_SKIPPED:
                    walls.append(1e3 * (time.perf_counter() - began) / slower)
    return median(np.array(walls)), p99(np.array(walls)), 0.0, 0.0

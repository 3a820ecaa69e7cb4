"""Where designs stop: whatever they keep in ends."""

from __future__ import annotations

from dataclasses import replace

from worldpager.cli.reproduction.base import Case, Lab, Reproduction, Row, last
from worldpager.errors import PositionError
from worldpager.model_adapter.driving import ChunkMetrics
from worldpager.sim import published
from worldpager.sim.closed_form import positional_horizon_chunks
from worldpager.sim.machines import MACHINES

CHUNK_TIME = 0.02
BEYOND = 6
"""Chunks run past the expected end, to see that it is one."""


def reproduce(lab: Lab) -> Reproduction:
    """The chunk for which each design's memory has no room, or whose position has no row."""
    lab, rows = replace(lab, chunk_time=min(lab.chunk_time, CHUNK_TIME)), []
    for name, stop in published.STOPS.items():
        row = Row(what=name, unit="chunk", paper="not reached" if stop is None else stop)
        if name == "no position handling":
            _positions(lab, row)
        elif stop is None:
            _tiers(lab, row)
        else:
            case = _case(name, stop)
            if lab.simulated:
                row.simulated = last(lab.simulate(case), "spill_chunk")
            if lab.measured:
                row.measured = last(lab.measure(case, name), "spill_chunk")
        rows.append(row)
    return Reproduction(
        name="stops",
        title="Where designs stop (Matrix-Game 2.0)",
        source=published.SOURCE,
        settings=lab.settings,
        rows=rows,
        notes=[
            "A design without a disk stops where the pager's pool, in that codec and of that size, "
            "has no room: its spill chunk. The GPU's is a pool of the 9.3 GiB that exhaustion at "
            "chunk 21 implies, so that row is a consistency check.",
            f"64 GiB: the paper's model says {published.STOP_PREDICTED_64}, its run stopped at "
            f"{published.STOPS['DRAM int4, 64 GiB']}; no single reserve gives both.",
        ],
    )


def _case(name: str, stop: int) -> Case:
    small, large = MACHINES["rtx4090-32gib"], MACHINES["rtx4090-64gib"]
    pool = large.pool_bytes if "64" in name else small.pool_bytes
    if name.startswith("GPU"):
        pool = small.gpu_kv_bytes or 0
    return Case(stop + BEYOND, pool, codec="bf16" if "bf16" in name else "int4")


def _positions(lab: Lab, row: Row) -> None:
    case = Case(400, MACHINES["rtx4090-32gib"].pool_bytes, positions="absolute")
    geometry = case.geometry
    if lab.simulated:
        row.simulated = positional_horizon_chunks(
            geometry.position_table_rows, geometry.frames_per_chunk
        )
    if lab.measured:
        row.measured = _chunks_until_refused(lab, case)


def _chunks_until_refused(lab: Lab, case: Case) -> int | str:
    """Chunks that a rollout with absolute positions completes."""
    done = 0

    def count(metrics: ChunkMetrics) -> None:
        nonlocal done
        done += 1

    try:
        lab.measure(case, "no position handling", count)
    except PositionError:
        return done
    return "not reached"


def _tiers(lab: Lab, row: Row) -> None:
    case = Case(600, MACHINES["rtx4090-32gib"].pool_bytes, eviction="redundant")
    if lab.simulated:
        chunks = len(lab.simulate(case)["chunk"])
        row.simulated = "not reached" if chunks == case.chunks else chunks
    if lab.measured:
        chunks = len(lab.measure(case, "tiers")["chunk"])
        row.measured = "not reached" if chunks == case.chunks else chunks

"""Stall against read bandwidth, prefetched and on demand."""

from __future__ import annotations

import numpy as np

from worldpager.cli.reproduction.base import (
    Case,
    Chart,
    Columns,
    Lab,
    Reproduction,
    Row,
    Series,
    median,
    p99,
)
from worldpager.sim import published
from worldpager.sim.closed_form import stall_on_demand_seconds, stall_prefetched_seconds
from worldpager.units import format_rate

CHUNKS, POOL_CHUNKS = 90, 12
PREFETCHED, ON_DEMAND, NEVER = "prefetched, waits", "on demand", "prefetched, never waits"
_DESIGNS = {
    PREFETCHED: {"on_miss": "wait"},
    ON_DEMAND: {"on_miss": "wait", "prefetch": False},
    NEVER: {"on_miss": "stale"},
}


def reproduce(lab: Lab) -> Reproduction:
    """The wait of a chunk on the way back, where every window needs one chunk more from NVMe."""
    rows: list[Row] = []
    lines: dict[str, Series] = {}
    for bandwidth in published.BANDWIDTHS:
        for name in _DESIGNS:
            _one(lab, bandwidth, name, rows, lines)
    chart = Chart(
        x="read bandwidth, GB/s",
        y="stall per chunk, ms",
        series=list(lines.values()),
        log_x=True,
        floor=10.0,
    )
    return Reproduction(
        name="bandwidth",
        title="Stall against read bandwidth (Matrix-Game 2.0)",
        source=published.SOURCE,
        settings={
            **lab.settings,
            "chunks": CHUNKS,
            "pool, chunks": POOL_CHUNKS,
            "closed form, threshold of 1 new chunk, GB/s": round(
                _case(0.0, PREFETCHED).stored / _case(0.0, PREFETCHED).seconds / 1e9, 4
            ),
        },
        rows=rows,
        charts=[chart],
        notes=[
            "The paper gives a figure without numbers: prefetched, a median of 0 down to 0.25 GB/s "
            "with a P99 above 0; on demand, a stall at every bandwidth.",
            "'waits' waits for what is late, as the closed form assumes; 'never waits' serves the "
            "previous set instead, as published, and says so: its stalls are 0 by rule, and what "
            "it costs is the count of stale windows.",
            "Marks in the figure: 'predicted' is the closed form with one new chunk a step, "
            "'foreseen for here' the simulator with this machine's codec, run before the "
            "measurement. This processor encodes and decodes while the disk reads, so its chunks "
            "last longer and stall later than the published machine's.",
        ],
    )


def _case(bandwidth: float, name: str) -> Case:
    case = Case(CHUNKS, 0, read_bandwidth=bandwidth or None)
    return Case(CHUNKS, POOL_CHUNKS * case.stored, read_bandwidth=bandwidth or None,
                **_DESIGNS[name])  # type: ignore[arg-type]  # fmt: skip


def _one(lab: Lab, bandwidth: float, name: str, rows: list[Row], lines: dict[str, Series]) -> None:
    case, at = _case(bandwidth, name), format_rate(bandwidth)
    simulated = lab.simulate(case) if lab.simulated else None
    foreseen = lab.foresee(case) if lab.measured else None
    measured = lab.measure(case, f"{at}, {name}") if lab.measured else None
    zero = 0.0 if name != ON_DEMAND and bandwidth >= published.ZERO_STALL_DOWN_TO else None
    paper: tuple[float | str | None, ...] = (
        ">0" if name == ON_DEMAND else zero,
        None,
        None,
    )
    sim, seen, ahead = (_figures(columns) for columns in (simulated, measured, foreseen))
    for index, (figure, unit) in enumerate(
        (("median stall", "ms"), ("P99 stall", "ms"), ("stale windows", "chunks"))
    ):
        if (figure == "stale windows") != (name == NEVER):
            continue
        rows.append(
            Row(what=f"{at}, {name}: {figure}", unit=unit, paper=paper[index],
                simulated=sim[index], measured=seen[index])
        )  # fmt: skip
    if name == NEVER:
        return
    closed = (
        stall_on_demand_seconds(case.stored, bandwidth)
        if name == ON_DEMAND
        else stall_prefetched_seconds(case.stored, bandwidth, case.seconds)
    )
    for label, value, marks in (
        (f"{name}: predicted", 1e3 * closed, True),
        (f"{name}: foreseen for here", ahead[0], True),
        (f"{name}: simulated", sim[0], False),
        (f"{name}: measured", seen[0], False),
        (f"{name}: measured, P99", seen[1], False),
    ):
        if value is not None:
            line = lines.setdefault(label, Series(label=label, x=[], y=[], marks=marks))
            line.x.append(bandwidth / 1e9)
            line.y.append(value)


def _figures(columns: Columns | None) -> tuple[float | None, ...]:
    """Median and P99 of the stall on the way back, and stale windows in all."""
    if columns is None:
        return None, None, None
    back = columns["chunk"] >= CHUNKS // 2 + POOL_CHUNKS
    stall = columns["stall_ms"][back]
    return median(stall), p99(stall), int(np.sum(columns["stale"]))

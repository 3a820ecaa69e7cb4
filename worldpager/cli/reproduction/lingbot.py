"""LingBot-World's read path: 256 chunks, on demand and with WorldPager."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from worldpager.cli.reproduction.base import Case, Columns, Lab, Reproduction, Row, last, median
from worldpager.sim import published

MODEL = "lingbot-world-1.3b"
_GIB = 2**30


def reproduce(lab: Lab) -> Reproduction:
    """First write, first read and waits for 32 and 64 GiB."""
    rows = []
    for name, paper in published.LINGBOT.items():
        if paper.first_write is None:
            continue
        for ours in ("as published", "our eviction") if "World" in name else ("as published",):
            case = _case(name, ours)
            label = name if ours == "as published" else f"{name}, our eviction"
            runs = {
                "simulated": lab.simulate(case) if lab.simulated else None,
                "measured": lab.measure(case, label) if lab.measured else None,
            }
            published_values = (
                (paper.first_write, paper.first_read, None, paper.wait, paper.most)
                if ours == "as published"
                else (None,) * 5
            )
            figures = {
                how: None
                if columns is None
                else (
                    last(columns, "spill_chunk"),
                    last(columns, "first_read_chunk"),
                    int(columns["chunk_reads_total"][-1]),
                    median(waits) if len(waits := _waits(columns)) else 0.0,
                    round(float(columns["stall_ms"].max()), 3),
                )
                for how, columns in runs.items()
            }
            for index, (what, unit) in enumerate(
                (
                    ("first write for room", "chunk"),
                    ("first read", "chunk"),
                    ("chunks read", "chunks"),
                    ("wait, median where reading", "ms"),
                    ("wait, greatest", "ms"),
                )
            ):
                values = {how: None if f is None else f[index] for how, f in figures.items()}
                rows.append(
                    Row(what=f"{label}: {what}", unit=unit, paper=published_values[index], **values)
                )
    return Reproduction(
        name="lingbot",
        title="LingBot-World, 256 chunks there and back",
        source=published.SOURCE,
        settings={**lab.settings, "reserve, GiB": published.LINGBOT_RESERVE / _GIB},
        rows=rows,
        notes=[
            "Inferred from the paper's own figures: the geometry (30 layers of 1536, 1508 tokens a "
            "frame, 4 frames a chunk) and the 4.13 GiB reserve from the first writes, the "
            "there-and-back path from the first reads.",
            "'as published' evicts the least recently used: of our three policies the one that "
            "gives the published first reads, chosen for that. Our default reads less.",
            "Waits on demand cannot be compared: the paper's disk is not described (simulated with "
            "3.82 GB/s), and the measured one is this machine's own, not slowed to the scale.",
        ],
    )


def _case(name: str, ours: str) -> Case:
    host = 64 if "64" in name else 32
    on_demand = name.startswith("on demand")
    return Case(
        published.LINGBOT_CHUNKS,
        host * _GIB - published.LINGBOT_RESERVE,
        model=MODEL,
        eviction="lru" if ours == "as published" else "redundant",
        on_miss="wait" if on_demand else "stale",
        prefetch=not on_demand,
    )


def _waits(columns: Columns) -> npt.NDArray[np.float64]:
    """Waits of the chunks whose window needed the disk: from the first read on."""
    first = last(columns, "first_read_chunk")
    stall: npt.NDArray[np.float64] = columns["stall_ms"]
    return stall[:0] if first is None else stall[first - 1 :]

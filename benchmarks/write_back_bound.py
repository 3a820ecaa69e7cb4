"""Does background write-back make chunks longer? Against the published bounds.

    python benchmarks/write_back_bound.py --folder bound --runs 2   # two runs more, a minute each

Every run is the published experiment, scaled: 256 chunks there and back, Matrix-Game 2.0, with a
pool that is full at chunk 226. A rise is the median chunk time of an interval less that of the
interval of the same run in which the pool is not full. Printed is its mean over all runs in the
folder, with a 95 % bootstrap interval (chunks drawn again within each run and interval), beside
the published share of the chunk time.
"""

from __future__ import annotations

import argparse
import json
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt

from worldpager.cli.reproduction.base import Lab
from worldpager.cli.reproduction.write_back import BACKGROUND, background_case
from worldpager.sim import published

BASE = "pool not full"
PUBLISHED_MS = 1210.5
"""Chunk time that the published rises belong to."""
DRAWS = 4000
Times = dict[str, npt.NDArray[np.float64]]


def run(lab: Lab) -> dict[str, list[float]]:
    """Chunk times of one run in milliseconds, by interval."""
    columns = lab.run(background_case(), BACKGROUND)
    number = columns["chunk"] + 1
    return {
        name: columns["wall_ms"][(number > first) & (number <= end)].tolist()
        for name, (first, end) in published.INTERVALS.items()
    }


def rises(runs: list[Times], interval: str, rng: np.random.Generator | None = None) -> float:
    """Mean over runs of the rise in ``interval``; ``rng`` draws the chunks again."""

    def median(times: npt.NDArray[np.float64]) -> float:
        return float(np.median(times if rng is None else rng.choice(times, len(times))))

    return float(np.mean([median(r[interval]) - median(r[BASE]) for r in runs]))


def show(runs: list[Times]) -> None:
    rng = np.random.default_rng(0)
    base = float(np.mean([np.median(r[BASE]) for r in runs]))
    print(f"{len(runs)} runs, chunk time while the pool is not full {base:.2f} ms")
    for interval, rise in published.WRITE_BACK[BACKGROUND].items():
        if interval == BASE:
            continue
        drawn = [rises(runs, interval, rng) for _ in range(DRAWS)]
        low, high = np.percentile(drawn, [2.5, 97.5])
        bound = rise / PUBLISHED_MS * base
        print(
            f"{interval}: {rises(runs, interval):+.3f} ms [{low:+.3f}, {high:+.3f}], bound "
            f"{bound:.3f} ms ({100 * rise / PUBLISHED_MS:.2f} %): "
            f"{'below it' if high < bound else 'not shown to be below it'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("bound"))
    parser.add_argument("--runs", type=int, default=2, help="to add to those in the folder")
    parser.add_argument("--scale", type=Fraction, default=Fraction(1, 1200), help="of the bytes")
    parser.add_argument("--chunk-time", type=float, default=0.2, help="seconds of compute")
    options = parser.parse_args()
    lab = Lab(False, True, options.scale, options.chunk_time, options.folder)
    options.folder.mkdir(parents=True, exist_ok=True)
    for _ in range(options.runs):
        times = run(lab)
        file = options.folder / f"run-{time.time_ns()}.json"
        file.write_text(json.dumps(times) + "\n", encoding="utf-8")
    files = sorted(options.folder.glob("run-*.json"))
    show([{k: np.array(v) for k, v in json.loads(f.read_text()).items()} for f in files])


if __name__ == "__main__":
    main()

"""Which fallback makes better pictures when reads cannot keep up: the previous set or the nearest?

Rolls the built-in model along paths that come back, its reads throttled, once with each fallback,
and compares frames with those of the first visit to the same view. Chunks whose window was stale in
both rollouts of a pair count for the comparison; the interval is a bootstrap over worlds.

Run: ``python benchmarks/fallbacks.py [--chunks 120] [--seeds 6]``
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from worldpager.cli.recording import read_frames
from worldpager.cli.revisits import find_revisits, pair_psnr
from worldpager.model_adapter.rollout import RolloutConfig, run_rollout
from worldpager.prefetch.paths import make_path

CHUNK_SECONDS = 0.08
CHUNK_BYTES = 40_960
FALLBACKS = ("stale", "nearest")
FRAMES = 3


def rollout(path_name: str, seed: int, reads_per_chunk: float, on_miss: str, chunks: int):
    """Stale flags by chunk, and PSNR in dB by revisiting frame: ``(flags, {frame: dB})``."""
    path = make_path(path_name, chunks, FRAMES, seed)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        config = RolloutConfig(
            chunks=chunks,
            path=path,
            dram_bytes=12 * CHUNK_BYTES + 2**17,
            store_dir=out / "store",
            out_dir=out,
            on_miss=on_miss,
            read_limit=int(reads_per_chunk * CHUNK_BYTES / CHUNK_SECONDS),
            chunk_time=CHUNK_SECONDS,
            seed=seed,
            known_ahead=0,
        )
        stale = [metrics.stale for metrics in run_rollout(config)]
        revisits = find_revisits(path)
        values = np.concatenate(list(pair_psnr(read_frames(out), revisits)))
    return np.array(stale), dict(zip(revisits.again.tolist(), values.tolist(), strict=True))


def by_chunk(values: dict[int, float], chunks: np.ndarray) -> list[float]:
    """Mean PSNR of each of ``chunks`` that revisits something."""
    out = []
    for chunk in chunks.tolist():
        frames = [values[f] for f in range(FRAMES * chunk, FRAMES * chunk + FRAMES) if f in values]
        out += [float(np.mean(frames))] if frames else []
    return out


def interval(differences: np.ndarray) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    draws = rng.integers(0, len(differences), (2000, len(differences)))
    low, high = np.percentile(differences[draws].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--paths", nargs="*", default=["yaw-return", "loop", "walk"])
    parser.add_argument("--reads", type=float, nargs="*", default=[0.5, 1.5])
    given = parser.parse_args()
    print("| path | reads a chunk | stale windows, previous / nearest | revisit PSNR on them | "
          "nearest - previous, 95 % | all revisits |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- |")
    for path in given.paths:
        for reads in given.reads:
            found = {name: ([], [], []) for name in FALLBACKS}
            for seed in range(given.seeds):
                runs = {n: rollout(path, seed, reads, n, given.chunks) for n in FALLBACKS}
                both = np.flatnonzero(runs["stale"][0] & runs["nearest"][0])
                for name, (stale, values) in runs.items():
                    found[name][0].append(stale.mean())
                    if by_chunk(values, both):
                        found[name][1].append(float(np.mean(by_chunk(values, both))))
                    found[name][2].extend(values.values())
            previous, nearest = (np.array(found[name][1]) for name in FALLBACKS)
            share = " / ".join(f"{100 * np.mean(found[name][0]):.0f} %" for name in FALLBACKS)
            every = " / ".join(f"{np.mean(found[name][2]):.1f}" for name in FALLBACKS)
            if len(previous):
                low, high = interval(nearest - previous)
                on_stale = f"{previous.mean():.1f} / {nearest.mean():.1f} dB"
                gap = f"{(nearest - previous).mean():+.2f} ({low:+.2f} to {high:+.2f})"
            else:
                on_stale, gap = "-", "-"
            print(f"| {path} | {reads} | {share} | {on_stale} | {gap} | {every} dB |", flush=True)


if __name__ == "__main__":
    main()

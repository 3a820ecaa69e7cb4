"""What a codec costs a rollout: PSNR of revisits against first visits, by codec, prints Markdown.

    python benchmarks/codec_revisits.py --chunks 150 --seeds 6

Each rollout is the built-in model's own, everything in it generated, with a pool for 20 chunks and
a window that waits for its chunks, so that nothing depends on the disk. Differences to bf16 are
taken pair of frames by pair of frames in the same world on the same path; intervals are 95 %
bootstrap intervals over worlds.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from worldpager.cli.revisits import find_revisits, pair_psnr
from worldpager.model_adapter.rollout import RolloutConfig, run_rollout
from worldpager.prefetch.paths import make_path
from worldpager.quant.codec import codec_names

PATHS = ("yaw-return", "loop")
NO_MEMORY = "no memory"


def revisit_psnr(codec: str, path_name: str, chunks: int, seed: int) -> float:
    """Mean PSNR in dB over the revisited frames of one rollout."""
    path = make_path(path_name, chunks, 3, seed)
    with tempfile.TemporaryDirectory() as folder:
        config = RolloutConfig(
            chunks=chunks, path=path, dram_bytes=5 << 20, store_dir=Path(folder) / "store",
            out_dir=Path(folder), codec="int4" if codec == NO_MEMORY else codec,
            retrieve=0 if codec == NO_MEMORY else 3, on_miss="wait", seed=seed,
        )  # fmt: skip
        for _ in run_rollout(config):
            pass
        frames = np.fromfile(Path(folder) / "frames.bin", np.uint8).reshape(-1, 32, 32, 3)
    return float(np.concatenate(list(pair_psnr(frames, find_revisits(path)))).mean())


def interval(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean."""
    rng = np.random.default_rng(0)
    means = rng.choice(values, (10_000, len(values))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--chunks", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    worlds = [(path, seed) for path in PATHS for seed in range(options.seeds)]
    found = {
        codec: np.array([revisit_psnr(codec, p, options.chunks, s) for p, s in worlds])
        for codec in (*codec_names(), NO_MEMORY)
    }
    print("| codec | revisit PSNR dB | against bf16 dB | 95 % interval |\n|---|---|---|---|")
    for codec, values in found.items():
        change = values - found["bf16"]
        low, high = interval(change)
        print(
            f"| {codec} | {values.mean():.2f} | {change.mean():+.3f} | {low:+.3f} to {high:+.3f} |"
        )


if __name__ == "__main__":
    main()

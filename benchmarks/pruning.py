"""What pruning costs and saves on the built-in model: revisits of rooms that were seen before.

The first lap of a turning camera is observed, then the model turns back and generates what it sees
again, from memory alone. Every policy runs the same rooms with the same noise. Figures in
docs/pruning.md come from::

    python benchmarks/pruning.py --rooms 16 --codec bf16
    python benchmarks/pruning.py --rooms 16 --codec int4 none worldkv:0.25 decoprune:0.01
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from worldpager.model_adapter.builtin import RolloutPipeline, WorldModel, load_model
from worldpager.model_adapter.builtin.recall import revisit_psnr, roll_out, turning_path
from worldpager.model_adapter.builtin.rooms import Room, render
from worldpager.model_adapter.builtin.scenes import FRAMES
from worldpager.model_adapter.config import MemoryConfig
from worldpager.model_adapter.memory import WorldMemory
from worldpager.model_adapter.pruning import CleanProbe
from worldpager.model_adapter.rollout import MemoryHook, builtin_spec

LAP, CHUNKS = 36, 60
POLICIES = (
    "none",
    "worldkv:0.5",
    "worldkv:0.25",
    "worldkv-pooled:0.25",
    "worldkv-paper:0.25",
    "random/worldkv:0.25",
    "reversed/worldkv:0.25",
    "decoprune:0.005",
    "decoprune:0.01",
    "random/decoprune:0.01",
    "reversed/decoprune:0.01",
    "decoprune:0.02",
    "random/decoprune:0.02",
    "reversed/decoprune:0.02",
    "temporal-difference:0.25",
    "forcingkv:0.25",
)


@dataclass
class Tally:
    """One policy's figures, an entry a room: mean PSNR in dB; and over all its commits."""

    psnr: list[float]
    tokens: list[int]
    nbytes: list[int]
    encode: list[float]
    ratio: float = 0.0


class Counting(MemoryHook):
    """Notes what each boundary committed, the sink's apart."""

    def __init__(self, memory: WorldMemory, path: np.ndarray, tally: Tally) -> None:
        super().__init__(memory, path)
        self._tally = tally

    def __call__(self, chunk: int, pipeline: RolloutPipeline) -> None:
        super().__call__(chunk, pipeline)
        last = self._memory.last
        if chunk > 1:
            self._tally.tokens.append(last.stored_tokens)
            self._tally.nbytes.append(last.stored_bytes)
            self._tally.encode.append(last.encode_ms)


def run(model: WorldModel, policy: str, codec: str, retrieve: int, room: int, tally: Tally) -> None:
    poses = turning_path(CHUNKS, lap=LAP)
    truth = render(Room.random(20_000 + room), poses.reshape(-1, 4, 4))
    truth = truth.reshape(CHUNKS, FRAMES, 32, 32, 3)
    with tempfile.TemporaryDirectory() as folder:
        config = MemoryConfig(
            store=Path(folder) / "s", dram=2**25, codec=codec, pruning=policy, on_miss="wait"
        )
        with WorldMemory(config, builtin_spec(model.config, retrieve, "builtin")) as memory:
            pipeline = RolloutPipeline(
                model,
                room,
                retrieve_chunks=retrieve,
                before_chunk=Counting(memory, poses, tally),
                probe=CleanProbe(cell=(model.config.patch, model.config.patch)),
            )
            frames = roll_out(pipeline, poses, observed=truth[:LAP])
            tally.ratio = memory.status().pruning_ratio
    tally.psnr.append(float(np.mean(revisit_psnr(frames, poses, LAP))))


def interval(values: np.ndarray) -> tuple[float, float]:
    """95 % bootstrap interval of the mean."""
    rng = np.random.default_rng(0)
    means = rng.choice(values, (10_000, len(values))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rooms", type=int, default=8)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--codec", default="bf16")
    parser.add_argument("--retrieve", type=int, default=3)
    parser.add_argument("policies", nargs="*", default=POLICIES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model()
    base: np.ndarray | None = None
    print(f"{options.codec}, {options.retrieve} retrieved, {options.rooms} rooms")
    print("| policy | PSNR | against none | kept | PR | bytes a chunk | encode ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for policy in options.policies:
        tally = Tally([], [], [], [])
        for room in range(options.first, options.first + options.rooms):
            run(model, policy, options.codec, options.retrieve, room, tally)
        psnr = np.array(tally.psnr)
        base = psnr if base is None else base
        low, high = interval(psnr - base)
        print(
            f"| `{policy}` | {psnr.mean():.2f} | {(psnr - base).mean():+.2f} "
            f"({low:+.2f} to {high:+.2f}) | {np.mean(tally.tokens) / 48:.1%} | {tally.ratio:.1%} "
            f"| {np.mean(tally.nbytes):.0f} | {np.median(tally.encode):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

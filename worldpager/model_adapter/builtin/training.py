"""Training of the built-in world model, from a seed, on one CPU core.

    python -m worldpager.model_adapter.builtin.training --minutes 80 --out weights.safetensors

A sequence is six chunks of one random room in the order of an inference window: sink, three
retrieved, recent, current. Clean and noisy copies lie side by side: a noisy chunk attends to the
clean chunks before it and to itself, so every chunk is a target with the ones before it as its
context. What makes the model recall, and go on recalling in a long rollout:

- three of four chunks have a pose near that of an earlier one, at a random place in the order;
- context chunks are dropped at random, so that a window of sink and recent alone also occurs;
- temporal positions vary: contiguous, a gap behind the sink, or gaps anywhere in the table;
- clean copies are perturbed, and on every second pass over a batch some are replaced by what the
  model itself predicted on the first, so that its own output is a context that it knows.

The learning rate is annealed over the steps, or over the minutes if these run out first. Only where
the steps decide does the seed alone fix the result (to the processor's rounding). The shipped
weights: seed 0, 8,037 steps in 86 minutes of one shared core, the minutes deciding.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from worldpager.model_adapter.builtin.model import WorldModel, config_text
from worldpager.model_adapter.builtin.recall import window_recall
from worldpager.model_adapter.builtin.scenes import (
    CHUNKS,
    FRAMES,
    jumping,
    make_scenes,
    rollout_like,
)

BATCH = 16
PEAK_RATE = 1e-3
WARMUP_STEPS = 100
EMA_DECAY = 0.998
CHECKPOINT_STEPS = 500

_OWN_OUTPUT_LIMIT = 0.06
"""Mean squared error, in [-1, 1] units, up to which a prediction may stand in for a clean chunk."""


def random_positions(rng: np.random.Generator, rows: int) -> NDArray[np.int64]:
    """First frames of a sequence's chunks in the RoPE table, ascending: int64 `[CHUNKS]`."""
    kind = rng.random()
    if kind < 0.25:
        return np.arange(CHUNKS) * FRAMES
    if kind < 0.75:
        current = rng.integers(FRAMES * (CHUNKS - 1), rows - FRAMES)
        behind = np.arange(CHUNKS - 2, -1, -1) * FRAMES
        return np.concatenate([[0], current - behind])
    return np.sort(rng.choice(rows // FRAMES, size=CHUNKS, replace=False)) * FRAMES


def visible_chunks(rng: np.random.Generator, batch: int) -> Tensor:
    """Which earlier chunks each chunk sees: bool `[B, CHUNKS, CHUNKS]`, `[target, context]`."""
    seen = rng.random((batch, CHUNKS, CHUNKS)) < 0.9
    for sample, target in zip(*np.nonzero(rng.random((batch, CHUNKS)) < 0.15), strict=True):
        seen[sample, target, 1 : target - 1] = False
        seen[sample, target, max(0, target - 1)] = True
    return torch.from_numpy(seen & np.tri(CHUNKS, k=-1, dtype=bool))


def attention_masks(seen: Tensor, tokens_per_chunk: int) -> list[Tensor]:
    """What to add to each chunk's scores: bf16 `[2 * B, 1, 1, (i + 1) * tokens]` for chunk i."""
    scores = torch.where(seen, 0.0, -torch.inf).to(torch.bfloat16)
    both = scores.repeat_interleave(2, 0).repeat_interleave(tokens_per_chunk, 2)
    out = []
    for i in range(CHUNKS):
        mask = both[:, i, : (i + 1) * tokens_per_chunk].clone()
        mask[:, i * tokens_per_chunk :] = 0.0
        out.append(mask[:, None, None])
    return out


def random_levels(rng: np.random.Generator, batch: int) -> Tensor:
    """Noise levels drawn towards noise, one in five pure noise: float32 `[B, CHUNKS]`."""
    u = rng.random((batch, CHUNKS))
    level = np.where(rng.random((batch, CHUNKS)) < 0.2, 1.0, 4 * u / (1 + 3 * u))
    return torch.from_numpy(level.astype(np.float32))


def by_chunk(x: Tensor) -> Tensor:
    """Per-chunk values `[B, CHUNKS]` as a factor for frames `[B, CHUNKS * FRAMES, 3, H, W]`."""
    return x.repeat_interleave(FRAMES, 1)[:, :, None, None, None]


def perturbed(frames: Tensor, rng: np.random.Generator, noise: torch.Generator) -> Tensor:
    """Clean frames as a rollout would have them: noise, blur and tint on about half the chunks."""
    batch = frames.shape[0]

    def amount(share: float, most: float) -> Tensor:
        value = rng.uniform(0, most, (batch, CHUNKS)) * (rng.random((batch, CHUNKS)) < share)
        return by_chunk(torch.from_numpy(value.astype(np.float32)))

    soft = F.avg_pool2d(
        F.pad(frames.flatten(0, 1), (1, 1, 1, 1), mode="replicate"), 3, stride=1
    ).view_as(frames)
    tint = torch.randn(*frames.shape[:3], 1, 1, generator=noise)
    grain = torch.randn(frames.shape, generator=noise)
    out = torch.lerp(frames, soft, amount(0.4, 1.0))
    return out + amount(0.4, 0.08) * tint + amount(0.5, 0.2) * grain


def train(out: Path, steps: int, minutes: float, seed: int, scratch: Path) -> None:
    """Train for `steps`, or less if `minutes` run out first; the rate is annealed either way."""
    torch.manual_seed(seed)
    rng, noise = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    model, averaged = WorldModel(), WorldModel()
    averaged.load_state_dict(model.state_dict())
    averaged.requires_grad_(False)
    config = model.config
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.97), weight_decay=0.01)
    started, average_loss = time.monotonic(), 0.0
    scenes, context, step, progress = None, None, 0, 0.0

    while progress < 1.0:
        if scenes is None or context is None:
            scenes = make_scenes(
                rng, [(rollout_like if rng.random() < 0.6 else jumping)(rng) for _ in range(BATCH)]
            )
            context = perturbed(scenes.frames, rng, noise)
            second_pass = False
        else:
            second_pass = True
        progress = max(step / steps, (time.monotonic() - started) / (60 * minutes))
        rate = PEAK_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
        rate *= 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        for group in optimiser.param_groups:
            group["lr"] = rate

        starts = np.stack([random_positions(rng, config.rope_rows) for _ in range(BATCH)])
        places = torch.from_numpy((starts[:, :, None] + np.arange(FRAMES)).reshape(BATCH, -1))
        level = random_levels(rng, BATCH)
        grain = torch.randn(scenes.frames.shape, generator=noise)
        noisy = torch.lerp(scenes.frames, grain, by_chunk(level))
        masks = attention_masks(visible_chunks(rng, BATCH), config.tokens_per_chunk)
        with torch.autocast("cpu", torch.bfloat16):
            predicted = model.denoise_copies(
                torch.cat([context, noisy], 1),
                torch.cat([torch.zeros_like(level), level], 1),
                scenes.poses.repeat(1, 2, 1, 1),
                places.repeat(1, 2),
                masks,
            )[:, CHUNKS * FRAMES :]
        error = (predicted - scenes.frames).square().view(BATCH, CHUNKS, -1).mean(-1)
        loss = error.mean()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

        if second_pass:
            scenes = context = None
        else:
            own = (error.detach() < _OWN_OUTPUT_LIMIT) & torch.from_numpy(
                rng.random((BATCH, CHUNKS)) < 0.5
            )
            context = torch.where(
                by_chunk(own), predicted.detach(), perturbed(scenes.frames, rng, noise)
            )
        decay = min(EMA_DECAY, (1 + step) / (10 + step))
        with torch.no_grad():
            for kept, new in zip(averaged.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 1 - decay)
        average_loss += (loss.item() - average_loss) * max(0.01, 1 / (step + 1))
        step += 1
        last = progress >= 1.0
        if last or step % CHECKPOINT_STEPS == 0 or step in (20, 100, 250):
            facts = {"steps": str(step), "seed": str(seed), "config": config_text(config)}
            facts |= {name: f"{value:.2f}" for name, value in window_recall(averaged).items()}
            facts["loss"] = f"{average_loss:.4f}"
            facts["minutes"] = f"{(time.monotonic() - started) / 60:.1f}"
            print(" ".join(f"{k}={v}" for k, v in facts.items() if k != "config"), flush=True)
            weights = {name: value.contiguous() for name, value in averaged.state_dict().items()}
            target = out if last else scratch / f"step{step:05d}.safetensors"
            save_file(weights, str(target), metadata=facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--minutes", type=float, default=80.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/train"), help="checkpoints")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.scratch.mkdir(parents=True, exist_ok=True)
    train(args.out, args.steps, args.minutes, args.seed, args.scratch)


if __name__ == "__main__":
    main()

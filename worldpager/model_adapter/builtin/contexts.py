"""What a chunk has before it in training: what a memory and a long rollout would leave of a world.

A memory shows only some of the old chunks, at other positions, with fewer tokens and with errors in
their keys and values. A rollout shows the model its own pictures. Here both are drawn at random.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from worldpager.model_adapter.builtin.layers import Beside
from worldpager.model_adapter.builtin.model import ModelConfig, WorldModel, denoise
from worldpager.model_adapter.builtin.scenes import FRAMES

CHUNKS = 9
"""Chunks of a sequence in training: sink, six retrieved, recent, current."""
MOST_DAMAGE = 0.25
"""Largest relative error of stored keys and values; rounding to 4 bits makes about 0.1."""

Masks = NDArray[np.bool_]


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


def visible_chunks(rng: np.random.Generator, batch: int) -> Masks:
    """Which earlier chunks each chunk sees: bool `[B, CHUNKS, CHUNKS]`, `[target, context]`.

    Now and then sink and predecessor alone. In half of the others nearly all, else any share.
    """
    share = np.where(rng.random((batch, CHUNKS, 1)) < 0.5, 0.9, rng.random((batch, CHUNKS, 1)))
    seen: Masks = rng.random((batch, CHUNKS, CHUNKS)) < share
    for sample, target in zip(*np.nonzero(rng.random((batch, CHUNKS)) < 0.12), strict=True):
        seen[sample, target, 1 : target - 1] = False
        seen[sample, target, max(0, target - 1)] = True
    seen &= np.tri(CHUNKS, k=-1, dtype=bool)
    return seen


def kept_tokens(rng: np.random.Generator, batch: int, config: ModelConfig) -> Masks:
    """Which tokens are left of each stored chunk: bool `[B, CHUNKS, tokens_per_chunk]`.

    In every other sequence chunks lose tokens at random, of all frames or of all but the first. The
    first chunk, which is the sink, loses none.
    """
    frame = config.tokens_per_frame
    ratio = np.where(rng.random((batch, CHUNKS)) < 0.8, rng.uniform(0.1, 1, (batch, CHUNKS)), 1.0)
    ratio[rng.random(batch) < 0.5] = 1.0
    ratio[:, 0] = 1.0
    kept: Masks = rng.random((batch, CHUNKS, config.tokens_per_chunk)) < ratio[..., None]
    kept[rng.random((batch, CHUNKS)) < 0.4, :frame] = True
    return kept


def attention_masks(seen: Masks, kept: Masks) -> list[Tensor]:
    """What to add to each chunk's scores: bf16 `[2 * B, 1, 1, (i + 1) * tokens]` for chunk i.

    A chunk sees all tokens of its predecessor and of itself, and of older ones those that are left.
    """
    batch, chunks = kept.shape[:2]
    out = []
    for i in range(chunks):
        left = kept[:, : i + 1].copy()
        left[:, max(0, i - 1) :] = True
        left[:, :i] &= seen[:, i, :i, None]
        scores = torch.where(torch.from_numpy(left.reshape(batch, -1)), 0.0, -torch.inf)
        out.append(scores.to(torch.bfloat16).repeat_interleave(2, 0)[:, None, None])
    return out


def random_context(rng: np.random.Generator, batch: int, config: ModelConfig) -> Beside:
    """What each chunk of a batch sees of the ones before it; half of the old chunks are damaged."""
    damage = rng.uniform(0, MOST_DAMAGE, (batch, CHUNKS)) * (rng.random((batch, CHUNKS)) < 0.5)
    damage[:, 0] = 0.0
    masks = attention_masks(visible_chunks(rng, batch), kept_tokens(rng, batch, config))
    return Beside(masks, torch.from_numpy(damage.astype(np.float32)))


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


@torch.no_grad()
def dreamed(
    model: WorldModel, frames: Tensor, poses: Tensor, starts: NDArray[np.int64], seen: int
) -> Tensor:
    """Sequences as the model makes them up, chunk by chunk; the first `seen` chunks are given.

    frames `[B, CHUNKS * FRAMES, 3, H, W]` and poses; `starts` `[CHUNKS]`: as `random_positions`.
    """
    batch, tokens = len(frames), model.config.tokens_per_frame
    cache = model.new_cache(batch, CHUNKS * FRAMES * tokens)
    out = frames.clone()
    for chunk, start in enumerate(starts):
        rows = slice(chunk * FRAMES, (chunk + 1) * FRAMES)
        first = int(start) * tokens
        for layer in cache:
            layer["global_end_index"].fill_(first)
        if chunk >= seen:
            noise = torch.randn_like(frames[:, rows])
            out[:, rows] = denoise(model, noise, poses[:, rows], cache, first).clamp(-1, 1)
        model(out[:, rows], torch.zeros(batch), poses[:, rows], kv_cache=cache, current_start=first)
    return out


@dataclass(frozen=True)
class Truth:
    """What chunks should look like: frames as in `Scenes`, and `counts` `[B, CHUNKS]`, 0 or 1."""

    frames: Tensor
    counts: Tensor


def truth_of_a_dream(frames: Tensor, poses: Tensor, dream: Tensor, limit: float) -> Truth:
    """What a made-up sequence has to hold to: its own first visit, where a chunk repeats its poses.

    Else the true `frames`, where the dream came within the mean squared error `limit` of them; else
    nothing is known.
    """
    batch = len(frames)
    dreams, views = (x.view(batch, CHUNKS, FRAMES, *x.shape[2:]) for x in (dream, poses))
    target = frames.view_as(dreams).clone()
    counts = (dreams - target).square().mean((2, 3, 4, 5)) < limit
    for chunk in range(CHUNKS - 1, 0, -1):
        for first in range(chunk):
            for order in ([0, 1, 2], [2, 1, 0]):
                apart = (views[:, first][:, order] - views[:, chunk]).abs().amax((1, 2, 3))
                same = apart < 1e-5
                target[same, chunk] = dreams[same, first][:, order]
                counts[same, chunk] = True
    return Truth(target.view_as(frames), counts.float())

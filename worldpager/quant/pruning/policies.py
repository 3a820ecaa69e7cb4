"""Pruning policies: what of a finished chunk is stored, decided once, when it is committed.

A policy ranks the tokens of a chunk on rows of KV, before anything is quantised, so a codec's
layout per token is the same whether tokens were dropped or not. All layers keep equally many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from worldpager.errors import ConfigError
from worldpager.quant.pruning.baselines import block_scores, strip_scores
from worldpager.quant.pruning.consistency import (
    CleanPredictions,
    Variant,
    spatial_floor,
    threshold_mask,
    token_scores,
)
from worldpager.quant.pruning.preference import (
    ALWAYS,
    Ids,
    Preference,
    Scores,
    random_order,
)
from worldpager.quant.pruning.similarity import Form, kept_per_chunk, key_similarity, novelty


@dataclass(frozen=True, slots=True, eq=False)
class FinishedChunk:
    """A chunk as a policy sees it.

    ``keys``: of each layer ``[tokens, heads, head_dim]``, as cached, tokens in the order frame,
    row, column. ``predictions``: for policies that score by them.
    """

    chunk: int
    frames: int
    keys: Sequence[torch.Tensor]
    predictions: CleanPredictions | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the whole chunk."""
        return len(self.keys[0])

    @property
    def first_id(self) -> int:
        """Id of its first token: ids count all tokens of a rollout and are never reused."""
        return self.chunk * self.tokens


class PruningPolicy(Protocol):
    """Decides which tokens of a chunk to keep. Pure: equal chunks give equal answers."""

    name: str
    needs_predictions: bool
    """Whether it scores by a sampler's clean predictions."""

    def prefer(self, chunk: FinishedChunk) -> list[Preference] | None:
        """A preference for each layer, or a single one for all; ``None`` to keep every token."""

    def most_tokens(self, frames: int, frame_tokens: int) -> int:
        """Tokens that no stored chunk exceeds, so that a pool's least size can be told."""


class KeySimilarity:
    """WorldKV's compression, layer by layer: see :mod:`.similarity`. ``value``: the keep ratio."""

    needs_predictions = False

    def __init__(
        self, name: str, value: float = 0.5, *, form: Form = "centroid", pooled: bool = False
    ) -> None:
        kept_per_chunk(value, 1, 1)  # checks the ratio
        self.name, self.ratio, self._form, self._pooled = name, value, form, pooled

    def prefer(self, chunk: FinishedChunk) -> list[Preference] | None:
        found = []
        for keys in chunk.keys:
            similarity = key_similarity(keys, chunk.frames, form=self._form)
            preference = novelty(similarity, self.ratio, pooled=self._pooled)
            if preference is None:
                return None
            found.append(preference)
        return found

    def most_tokens(self, frames: int, frame_tokens: int) -> int:
        return kept_per_chunk(self.ratio, frames, frame_tokens)


class Consistency:
    """DeCoPrune: see :mod:`.consistency`. ``value``: the threshold gamma. ``floor``: tokens kept in
    every 4 x 4 block, 0 for no such floor.

    A chunk of which nothing would stay keeps its best token, since a block holds at least one.
    """

    needs_predictions = True

    def __init__(
        self, name: str, value: float = 0.10, *, variant: Variant = "mse", floor: int = 0
    ) -> None:
        threshold_mask([], value)  # checks it
        self.name, self.gamma, self._variant, self._floor = name, value, variant, floor

    def prefer(self, chunk: FinishedChunk) -> list[Preference] | None:
        if chunk.predictions is None:
            return None
        raw = token_scores(chunk.predictions, self._variant)
        if len(raw) != chunk.tokens:
            raise ConfigError(
                f"the clean predictions of chunk {chunk.chunk} are {chunk.predictions.grid} "
                f"tokens, the chunk has {chunk.tokens}"
            )
        mask = threshold_mask(raw, self.gamma, self._variant)
        scores = -raw if self._variant == "cosine" else raw
        if self._floor:
            mask = spatial_floor(scores, mask, chunk.predictions.grid, least=self._floor)
            scores = np.where(mask, np.inf, scores)
        count = max(1, int(mask.sum()))
        return [
            Preference(
                np.where(np.isfinite(raw), scores, np.inf), np.zeros_like(mask, int), (count,)
            )
        ]

    def most_tokens(self, frames: int, frame_tokens: int) -> int:
        return frames * frame_tokens


class Strips:
    """ForcingKV's strips within a chunk: the first frame, and of the other frames' strips the share
    ``value`` that is least like the frame before. One choice for all layers, by the first.
    """

    needs_predictions = False

    def __init__(self, name: str, value: float = 0.5, *, strips: int = 6) -> None:
        kept_per_chunk(value, 1, 1)
        self.name, self.ratio, self._strips = name, value, strips

    def prefer(self, chunk: FinishedChunk) -> list[Preference] | None:
        size = chunk.tokens // chunk.frames
        strips = math.gcd(self._strips, size)
        keys = _by_frame(chunk.keys[0], chunk.frames)
        likeness = strip_scores(keys, strips)
        owner = np.repeat(np.arange(strips), size // strips)
        return [_least_alike(likeness, owner, self.ratio, protected=0)]

    def most_tokens(self, frames: int, frame_tokens: int) -> int:
        return frames * frame_tokens


class TemporalDifference:
    """DeCoPrune's temporal difference baseline within a chunk: blocks of ``block`` x ``block``
    tokens, of which the share ``value`` least like the frame after is kept, and the last frame.
    One choice for all layers, by the second layer where there is one.
    """

    needs_predictions = False

    def __init__(self, name: str, value: float = 0.5, *, block: int = 4) -> None:
        kept_per_chunk(value, 1, 1)
        self.name, self.ratio, self._block = name, value, block

    def prefer(self, chunk: FinishedChunk) -> list[Preference] | None:
        size = chunk.tokens // chunk.frames
        keys = _by_frame(chunk.keys[min(1, len(chunk.keys) - 1)], chunk.frames)
        rows = next(side for side in range(math.isqrt(size), 0, -1) if size % side == 0)
        grid = (rows, size // rows)
        down, across = (side // math.gcd(side, self._block) for side in grid)
        likeness, owner = block_scores(keys, grid, (down, across))
        return [_least_alike(likeness, owner, self.ratio, protected=chunk.frames - 1)]

    def most_tokens(self, frames: int, frame_tokens: int) -> int:
        return frames * frame_tokens


def _by_frame(keys: torch.Tensor, frames: int) -> torch.Tensor:
    """``[frames * T, ...]`` as ``[frames, T, ...]``."""
    return keys.reshape(frames, -1, *keys.shape[1:])


def _least_alike(likeness: Scores, owner: Ids, ratio: float, protected: int) -> Preference:
    """Keep the frame ``protected`` and the share ``ratio`` of all other frames' parts that are
    least alike. ``likeness`` ``[frames - 1, parts]``; ``owner`` ``[T]``: the part of each token.
    """
    # parts are of one size; whole ones are kept because their tokens share one score and stand by
    # one another in the order of (score, part)
    order = np.lexsort((np.arange(likeness.size), likeness.reshape(-1)))
    rank = np.empty(likeness.size)
    rank[order] = -np.arange(likeness.size)
    by_token = rank.reshape(likeness.shape)[:, owner]
    frames, size = len(likeness) + 1, len(owner)
    scores, groups = np.zeros((frames, size)), np.zeros((frames, size), np.int64)
    others = [frame for frame in range(frames) if frame != protected]
    scores[others] = by_token
    groups[protected] = ALWAYS
    parts = max(1, math.ceil(round(ratio * likeness.size, 6)))
    count = parts * size // likeness.shape[1]
    return Preference(scores.reshape(-1), groups.reshape(-1), (count,))


class RandomControl:
    """As many tokens as ``base`` keeps, in the same groups, but drawn at random."""

    def __init__(self, base: PruningPolicy, seed: int = 0) -> None:
        self.name = f"random/{base.name}"
        self.needs_predictions = base.needs_predictions
        self._base, self._seed = base, seed

    def prefer(self, chunk: FinishedChunk) -> list[Preference] | None:
        found = self._base.prefer(chunk)
        return (
            None
            if found is None
            else [
                p.reordered(random_order(chunk.tokens, self._seed + layer, chunk.first_id))
                for layer, p in enumerate(found)
            ]
        )

    def most_tokens(self, frames: int, frame_tokens: int) -> int:
        return self._base.most_tokens(frames, frame_tokens)


class ReversedControl:
    """As many tokens as ``base`` keeps, in the same groups, but those it would drop first."""

    def __init__(self, base: PruningPolicy) -> None:
        self.name = f"reversed/{base.name}"
        self.needs_predictions = base.needs_predictions
        self._base = base

    def prefer(self, chunk: FinishedChunk) -> list[Preference] | None:
        found = self._base.prefer(chunk)
        return None if found is None else [p.reordered(-p.scores) for p in found]

    def most_tokens(self, frames: int, frame_tokens: int) -> int:
        return self._base.most_tokens(frames, frame_tokens)

"""WorldKV's compression: of a chunk keep one anchor frame, and of the others what is unlike it.

A token is the vector of its keys over all heads, as cached (rotated), in float32. Its similarity
``s`` to the anchor frame takes one of two forms:

- ``centroid``, as released: the cosine to the mean of the anchor's keys.
- ``mean``, as in the paper: the mean over the anchor's tokens of the cosines to them.

They rank alike only where all anchor keys are of one norm. The least similar tokens are kept, in
each other frame alike or pooled over all of them. A chunk of F frames of T tokens keeps
``T + (F - 1) * max(1, ceil(ratio * T))`` tokens either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch

from worldpager.errors import ConfigError
from worldpager.quant.pruning.preference import ALWAYS, Ids, Preference, Scores

Form = Literal["centroid", "mean"]
Reduce = Callable[[torch.Tensor], torch.Tensor]
_TINY = 1e-8


def kept_per_frame(ratio: float, frame_tokens: int) -> int:
    """``max(1, ceil(ratio * T))``; raises :class:`ConfigError` unless ``ratio`` is in [0, 1].

    Rounded before the ceiling: 0.07 of 100 tokens are 7, though 0.07 * 100 is above 7 in floats.
    """
    if not 0 <= ratio <= 1:
        raise ConfigError(f"a keep ratio is between 0 and 1, not {ratio}")
    return max(1, math.ceil(round(ratio * frame_tokens, 6)))


def kept_per_chunk(ratio: float, frames: int, frame_tokens: int) -> int:
    """Tokens that a chunk keeps: the anchor frame whole, :func:`kept_per_frame` of each other."""
    return frame_tokens + (frames - 1) * min(frame_tokens, kept_per_frame(ratio, frame_tokens))


def budget_ratio(chunks: int, budget: float, frames: int) -> float:
    """The ratio at which ``chunks`` chunks take the tokens of ``budget`` whole ones: 6 into 3
    chunks of 3 frames at 0.25.

    Raises :class:`ConfigError` where the anchor frames alone take more, or one frame is all.
    """
    room = frames * budget / max(chunks, 1)
    if chunks < 1 or frames < 2 or not 1 <= room <= frames:
        raise ConfigError(
            f"{chunks} chunks of {frames} frames cannot be compressed into {budget}: each keeps "
            "one frame whole and at most all"
        )
    return (room - 1) / (frames - 1)


def key_similarity(
    keys: torch.Tensor,
    frames: int,
    anchor: int = 0,
    form: Form = "centroid",
    reduce: Reduce | None = None,
) -> Scores:
    """Similarity of each token to the anchor frame: float64 ``[frames, T]``.

    ``keys``: ``[frames * T, heads, head_dim]``, any float type. ``reduce``: where heads are split
    over several processes, sums a tensor over all of them; what is summed are dot products and
    squares, so that all arrive at the same tokens. Raises :class:`ConfigError` where the tokens
    are not whole frames or the anchor is none of them.
    """
    if frames < 1 or len(keys) % frames or not 0 <= anchor < frames:
        raise ConfigError(f"{len(keys)} tokens are not {frames} frames with anchor {anchor}")
    total = reduce or (lambda part: part)
    flat = keys.reshape(len(keys), -1).float()
    size = len(keys) // frames
    fixed = flat[anchor * size : (anchor + 1) * size]
    if form == "mean":
        fixed = fixed / total(fixed.square().sum(1)).sqrt().clamp_min(_TINY)[:, None]
    target = fixed.mean(0)
    dot, squares = total(flat @ target), total(flat.square().sum(1))
    if form == "mean":
        cosine = dot / (squares.sqrt() + _TINY)
    else:
        cosine = dot / (squares.sqrt() * total(target.square().sum()).sqrt() + _TINY)
    return cosine.reshape(frames, size).double().numpy()


def novelty(
    similarity: Scores, ratio: float, anchor: int = 0, pooled: bool = False
) -> Preference | None:
    """Keep the anchor and the least similar tokens; ``None`` where all are kept.

    ``similarity``: ``[frames, T]``.
    """
    frames, size = similarity.shape
    keep = kept_per_frame(ratio, size)
    if keep >= size or frames == 1:
        return None
    groups = np.zeros((frames, size), np.int64)
    others = [frame for frame in range(frames) if frame != anchor]
    if not pooled:
        groups[others] = np.arange(len(others))[:, None]
    groups[anchor] = ALWAYS
    counts = (keep * len(others),) if pooled else (keep,) * len(others)
    return Preference(-similarity.reshape(-1), groups.reshape(-1), counts)


def compress_set(
    chunks: Sequence[torch.Tensor],
    frames: int,
    ratio: float,
    *,
    form: Form = "centroid",
    rotate: bool = False,
) -> list[Ids]:
    """A retrieval set compressed when it is used: the kept tokens of each chunk, ascending.

    ``chunks``: keys ``[frames * T, heads, head_dim]`` of each. ``rotate``: the i-th chunk's anchor
    is frame ``i mod frames``, so that a set keeps every phase. With :func:`budget_ratio` several
    chunks fit a fixed budget. Source: WorldKV's retrieval-time path, per frame.
    """
    kept = []
    for i, keys in enumerate(chunks):
        anchor = i % frames if rotate else 0
        preference = novelty(key_similarity(keys, frames, anchor, form), ratio, anchor)
        every = np.arange(len(keys), dtype=np.int64)
        kept.append(every if preference is None else preference.ids())
    return kept

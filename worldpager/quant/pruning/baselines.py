"""What pruning is compared with: adjacent frames' likeness, and windows of whole frames."""

from __future__ import annotations

import numpy as np
import torch

from worldpager.errors import ConfigError
from worldpager.quant.pruning.preference import Ids, Scores

_TINY = 1e-8


def _cosine(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Cosine of tokens' keys, all heads joined: ``[..., heads, head_dim]`` to ``[...]``."""
    a, b = left.flatten(-2).float(), right.flatten(-2).float()
    norms: torch.Tensor = a.norm(dim=-1).clamp_min(_TINY) * b.norm(dim=-1).clamp_min(_TINY)
    return (a * b).sum(-1) / norms


def strip_scores(keys: torch.Tensor, strips: int) -> Scores:
    """Likeness of each strip to the same strip one frame earlier: float64 ``[frames - 1, strips]``.

    ``keys``: ``[frames, T, heads, head_dim]``; a strip is a run of ``T / strips`` tokens, its
    likeness the mean cosine of tokens in the same place. Source: ForcingKV.
    """
    frames, size = keys.shape[:2]
    if strips < 1 or size % strips or frames < 2:
        raise ConfigError(f"frames of {size} tokens cannot be cut into {strips} equal strips")
    cosine = _cosine(keys[:-1], keys[1:])
    return cosine.reshape(frames - 1, strips, -1).mean(-1).double().numpy()


def block_scores(
    keys: torch.Tensor, grid: tuple[int, int], blocks: tuple[int, int]
) -> tuple[Scores, Ids]:
    """Likeness of each block to the same block one frame later, and each token's block.

    ``keys``: ``[frames, rows * columns, heads, head_dim]``; ``grid``: rows and columns of a frame;
    ``blocks``: how many blocks there are down and across. Returns float64 ``[frames - 1, blocks]``
    and int64 ``[rows * columns]``. Source: DeCoPrune's temporal difference baseline.
    """
    (rows, columns), (down, across) = grid, blocks
    if rows * columns != keys.shape[1] or rows % down or columns % across or len(keys) < 2:
        raise ConfigError(f"frames of {rows} x {columns} tokens cannot be cut into {blocks} blocks")
    row = np.arange(rows) // (rows // down)
    column = np.arange(columns) // (columns // across)
    owner = (row[:, None] * across + column).reshape(-1).astype(np.int64)
    cosine = _cosine(keys[:-1], keys[1:]).double().numpy()
    likeness = [np.bincount(owner, frame) / np.bincount(owner) for frame in cosine]
    return np.array(likeness), owner


def middle_start(chunk: int, frames: int = 4, chunks: int = 32) -> int:
    """First frame of the part that ForcingKV chooses from: the last ``chunks`` chunks."""
    return max(0, chunk - chunks) * frames


def sink_and_recent(frames_seen: int, frame_tokens: int, sink: int, recent: int) -> Ids:
    """Ids of the tokens that a streaming window keeps of ``frames_seen`` frames: the first ``sink``
    and the last ``recent`` frames, ascending and each once. Source: StreamingLLM's window, as the
    static heads of DeCoPrune's HS variant have it too.
    """
    if min(frames_seen, sink, recent) < 0 or frame_tokens < 1:
        raise ConfigError("frames and tokens of a window cannot be negative")
    first = min(sink, frames_seen)
    frames = [*range(first), *range(max(first, frames_seen - recent), frames_seen)]
    tokens = np.arange(frame_tokens, dtype=np.int64)
    return (np.array(frames, np.int64)[:, None] * frame_tokens + tokens).reshape(-1)

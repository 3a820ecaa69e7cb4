"""What retrieval knows of a page's keys: taken once, at commit, with the temporal rotation removed.

Source: WorldAttention (HKV): layer 0 alone decides for all layers; each token's temporal rotation
is undone at its own position, the spatial one stays; heads are joined and the page's tokens, then
the batch, averaged. For Quest's bound their range is taken instead.
"""

from __future__ import annotations

import numpy as np
import torch

from worldpager.model_adapter.frontend import KVSpec
from worldpager.prefetch.keys import KeyKind, StoredRow, Vector, bounds_row, stored_row


def page_row(spec: KVSpec, k: torch.Tensor, position: float, kind: KeyKind) -> StoredRow | None:
    """The row of a page; None where ``kind`` asks for nothing and where keys are not finite.

    ``k``: layer 0's keys as cached, ``[batch, tokens, heads, head_dim]``, whole frames;
    ``position``: temporal position that the first frame's keys are rotated to.
    """
    if not kind:
        return None
    frames = k.view(k.shape[0], -1, spec.tokens_per_frame, *k.shape[2:]).float()
    # A frame's tokens turn alike, so their mean may be turned in their place.
    frames = frames.mean(2, keepdim=True) if kind == "mean" else frames.clone()
    if spec.rope is not None:
        for frame in range(frames.shape[1]):
            rotation = spec.rope.temporal_rotation(-(position + frame))
            if rotation is not None:
                rotation.apply_(frames[:, frame])
    rows = frames.flatten(1, 2).flatten(2)  # [batch, tokens or frames, width]
    if not rows.isfinite().all():
        return None
    if kind == "mean":
        return stored_row(rows.mean(1).mean(0).numpy())
    return stored_row(bounds_row(rows.amin((0, 1)).numpy(), rows.amax((0, 1)).numpy()))


def mean_query(q: torch.Tensor) -> Vector:
    """The query that retrieval asks with: the mean over batch and tokens of layer 0's queries
    ``[batch, tokens, heads, head_dim]``, normed but not rotated, as float32 ``[heads * head_dim]``.
    """
    return np.ascontiguousarray(q.float().mean((0, 1)).flatten().cpu().numpy())

"""Stored blocks for tests of attention: encoded as the pager does it, with keys moved in time."""

from __future__ import annotations

import numpy as np
import torch

from worldpager.model_adapter.attention.segments import StoredKV
from worldpager.quant import BlockLabel, BlockShape, RopeLayout, block_size, get_codec, write_block


def stored(
    tokens: int,
    heads: int = 2,
    dim: int = 16,
    codec: str = "int4",
    shift: float = 0.0,
    page: tuple[int, int] | None = None,
    seed: int = 0,
    offset: float = 2.0,
) -> StoredKV:
    """A block of random K and V; keys share an ``offset`` per channel, as real ones do."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, tokens, heads, dim, generator=generator)
    k += offset * torch.randn(heads, dim, generator=generator)
    used = get_codec(codec)
    block = np.empty(block_size(used, BlockShape(tokens, heads, dim)), np.uint8)
    header = write_block(block, used, BlockLabel(0, seed, 0, 1, 0.0, 0, 0), k, v)
    return StoredKV(block, header, RopeLayout.wan(dim).temporal_rotation(shift), page)

"""Compiled loop of attention over stored blocks: codes to scaled levels, nothing else.

What the codec's decoder does after that (Hadamard transform, signs, means, rotation in time) is
linear and the same for all tokens of a block, so attention does it to queries and outputs instead.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from worldpager.quant.kernels import get_u16, half_to_float, kernel, store_row
from worldpager.quant.rotated import grid


@cache
def byte_levels() -> npt.NDArray[np.uint64]:
    """The two fp32 levels that a byte of 4-bit codes stands for, as one word: uint64 ``[256]``."""
    levels, byte = grid(4).table, np.arange(256)
    return np.stack([levels[byte & 15], levels[byte >> 4]], 1).view(np.uint64)[:, 0].copy()


@kernel
def scaled_levels(
    data: Any,
    shape: Any,
    ends: Any,
    bits: Any,
    pairs: Any,
    table: Any,
    heads: Any,
    tokens: Any,
    words: Any,
    strides: Any,
    kind: Any,
) -> None:
    """``level(code) * scale`` of a range of ``heads`` and ``tokens`` (first, end) of K or of V.

    ``data``: scales ``[tokens][heads][groups]``, then packed codes. ``pairs``: see
    :func:`byte_levels`; ``table``: level of each code. ``words``: where ``[heads, tokens, D]`` of
    the element ``kind`` goes, with element ``strides``. Means hidden in sign bits are left out.
    """
    all_tokens, all_heads, dim = shape
    both = np.empty((dim + 1) // 2, np.uint64)
    row = both.view(np.float32)[:dim]
    groups, row_bytes = len(ends), dim * bits // 8
    codes_at = all_tokens * all_heads * groups * 2
    for h in range(heads[0], heads[1]):
        for t in range(tokens[0], tokens[1]):
            index = t * all_heads + h
            source = data[codes_at + index * row_bytes : codes_at + (index + 1) * row_bytes]
            if bits == 4:
                for i in range(row_bytes):
                    both[i] = pairs[source[i]]
            else:
                for i in range(row_bytes // 3):
                    word = np.uint32(source[3 * i]) | np.uint32(source[3 * i + 1]) << np.uint32(8)
                    word |= np.uint32(source[3 * i + 2]) << np.uint32(16)
                    for j in range(8):
                        row[8 * i + j] = table[np.uint32(word >> np.uint32(3 * j)) & np.uint32(7)]
            first = 0
            for g in range(groups):
                bare = get_u16(data, (index * groups + g) * 2) & np.uint16(0x7FFF)
                scale = half_to_float(np.uint16(bare))
                for i in range(first, ends[g]):
                    row[i] *= scale
                first = ends[g]
            start = (h - heads[0]) * strides[0] + (t - tokens[0]) * strides[1]
            store_row(words, start, strides[2], kind, row)

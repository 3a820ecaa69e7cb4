"""Compiled loops of attention over stored blocks: codes to scaled levels, nothing else.

What the codec's decoder does after that (Hadamard transform, signs, means, rotation in time) is
linear and the same for all tokens of a block, so attention does it to queries and outputs instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from worldpager.quant.kernels import (
    BF16,
    float_to_bf16,
    float_to_half,
    get_u16,
    half_to_float,
    kernel,
)


@kernel
def row_levels(data: Any, index: Any, codes_at: Any, ends: Any, bits: Any, table: Any, row: Any):  # type: ignore[no-untyped-def]
    """``level(code) * scale`` of row ``index``, fp32 ``[D]``; a mean's bit in a scale is left out.

    ``data``: scales ``[rows][groups]``, then packed codes from ``codes_at``. ``table``: level of
    each code.
    """
    groups, row_bytes = len(ends), len(row) * bits // 8
    source = data[codes_at + index * row_bytes : codes_at + (index + 1) * row_bytes]
    first = 0
    for g in range(groups):
        bare = get_u16(data, (index * groups + g) * 2) & np.uint16(0x7FFF)
        scale = half_to_float(np.uint16(bare))
        part = row[first : ends[g]]
        if bits == 4:
            packed = source[first // 2 : ends[g] // 2]
            for i in range(len(packed)):
                part[2 * i] = table[packed[i] & np.uint8(15)] * scale
                part[2 * i + 1] = table[packed[i] >> np.uint8(4)] * scale
        else:
            packed = source[3 * first // 8 : 3 * ends[g] // 8]
            for i in range(len(packed) // 3):
                word = np.uint32(packed[3 * i]) | np.uint32(packed[3 * i + 1]) << np.uint32(8)
                word |= np.uint32(packed[3 * i + 2]) << np.uint32(16)
                for j in range(8):
                    code = np.uint32(np.uint32(word) >> np.uint32(3 * j)) & np.uint32(7)
                    part[8 * i + j] = table[code] * scale
        first = ends[g]


@kernel
def levels_to_fp32(
    data: Any, shape: Any, ends: Any, bits: Any, table: Any, head: Any, token: Any, out: Any
) -> None:
    """Scaled levels of K or of V: ``out`` fp32 ``[heads, tokens, D]``, from ``head``, ``token`` on.

    ``shape``: the block's tokens, heads and channels; the rest as in :func:`row_levels`.
    """
    codes_at = shape[0] * shape[1] * len(ends) * 2
    for h in range(out.shape[0]):
        for t in range(out.shape[1]):
            index = (token + t) * shape[1] + head + h
            row_levels(data, index, codes_at, ends, bits, table, out[h, t])


@kernel
def levels_to_16_bits(
    data: Any, shape: Any, ends: Any, bits: Any, table: Any, head: Any, token: Any, out: Any,
    kind: Any,
) -> None:  # fmt: skip
    """The same, rounded to bf16 or fp16 (``kind``), as uint16 words."""
    row = np.empty(shape[2], np.float32)
    codes_at = shape[0] * shape[1] * len(ends) * 2
    for h in range(out.shape[0]):
        for t in range(out.shape[1]):
            index = (token + t) * shape[1] + head + h
            row_levels(data, index, codes_at, ends, bits, table, row)
            target = out[h, t]
            if kind == BF16:
                for i in range(len(row)):
                    target[i] = float_to_bf16(row[i])
            else:
                for i in range(len(row)):
                    target[i] = float_to_half(row[i])

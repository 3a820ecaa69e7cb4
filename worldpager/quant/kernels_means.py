"""Compiled loops for the means of key channels: what they are, and how they travel in a block."""

from __future__ import annotations

from typing import Any

import numpy as np

from worldpager.quant.kernels import float_to_half, half_to_float, kernel, load_row
from worldpager.quant.lanes import LANES, load, splat, store
from worldpager.quant.tiles import load_tile, padded


@kernel
def channel_means(words: Any, strides: Any, kind: Any, shape: Any, mean: Any) -> None:
    """Mean over tokens of each channel, rounded to fp16: fp32 ``[heads * head_dim]``.

    A head keeps its means only where they bring its tokens nearer to zero: where
    ``|x - mean|^2 / |x|^2``, on which a token's error depends, averages below one. So a few tokens
    far from the rest cannot spoil the rest, and heads with zero rows keep them zero.
    """
    tokens, heads, dim = shape
    row, total = np.empty(dim, np.float32), np.zeros(heads * dim, np.float64)
    for t in range(tokens):
        for h in range(heads):
            load_row(words, t * strides[0] + h * strides[1], strides[2], kind, row, 0, dim)
            sums = total[h * dim : (h + 1) * dim]
            for i in range(dim):
                sums[i] += row[i]
    for i in range(heads * dim):
        middle = min(max(total[i] / tokens, -65504.0), 65504.0)
        mean[i] = half_to_float(float_to_half(np.float32(middle)))
    gain = np.zeros(heads, np.float64)
    size = padded(dim) * LANES
    rows, tile = np.zeros(size, np.float32), np.empty(size, np.float32)
    ratios = np.empty(LANES, np.float32)
    for t0 in range(0, tokens, LANES):
        lanes = min(LANES, tokens - t0)
        for h in range(heads):
            load_tile(words, strides, kind, t0, lanes, h, dim, rows, tile)
            store(ratios, 0, rest_ratio(tile, mean[h * dim : (h + 1) * dim]))
            for lane in range(lanes):
                gain[h] += 1.0 - ratios[lane]
    for h in range(heads):
        if not gain[h] > 0.0:
            mean[h * dim : (h + 1) * dim] = np.float32(0.0)


@kernel
def rest_ratio(tile: Any, mean: Any) -> Any:
    """Per token, its energy without the means over that with them."""
    before, after = splat(np.float32(0.0)), splat(np.float32(0.0))
    for i in range(len(mean)):
        value = load(tile, i * LANES)
        rest = value - splat(mean[i])
        before, after = before + value * value, after + rest * rest
    return after / before


@kernel
def put_means(mean: Any, shape: Any, groups: Any, out: Any) -> None:
    """Spread the bits of each head's fp16 means over the sign bits of its scales."""
    _, heads, dim = shape
    for h in range(heads):
        for i in range(dim):
            word = np.uint32(float_to_half(mean[h * dim + i]))
            for j in range(16):
                t, g = divmod(16 * i + j, groups)
                bit = np.uint8((word >> np.uint32(j)) & np.uint32(1))
                out[((t * heads + h) * groups + g) * 2 + 1] |= np.uint8(bit << np.uint8(7))


@kernel
def get_means(data: Any, shape: Any, groups: Any, mean: Any) -> None:
    """Inverse of :func:`put_means`."""
    _, heads, dim = shape
    for h in range(heads):
        for i in range(dim):
            word = np.uint32(0)
            for j in range(16):
                t, g = divmod(16 * i + j, groups)
                byte = np.uint32(data[((t * heads + h) * groups + g) * 2 + 1])
                word |= np.uint32((byte >> np.uint32(7)) << np.uint32(j))
            mean[h * dim + i] = half_to_float(np.uint16(word))

"""Tiles of 16 tokens of one head, stored ``[head_dim][16]``: made, transformed, written back.

Every inner loop runs over 16 independent tokens, so that no sum depends on the width of the
machine's vectors. Rows are padded to multiples of 16 channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from worldpager.quant.kernels import BF16, kernel, load_row, row_is_finite, store_row
from worldpager.quant.lanes import LANES
from worldpager.quant.lanes_tiles import butterflies_2, butterflies_8, butterflies_16, transpose


@kernel
def padded(dim: Any) -> Any:
    """``dim`` rounded up to whole vectors."""
    return (dim + LANES - 1) // LANES * LANES


@kernel
def direct(strides: Any, kind: Any, lanes: Any, dim: Any) -> Any:
    """Whether tiles come from the caller's rows, and go there, without scratch in between."""
    return kind == BF16 and strides[2] == 1 and lanes == LANES and dim % LANES == 0


@kernel
def load_tile(
    words: Any, strides: Any, kind: Any, t0: Any, lanes: Any, h: Any, dim: Any, rows: Any, tile: Any
) -> None:
    """Fill ``tile`` with ``lanes`` tokens from ``t0``, zeros after them; ``rows``: scratch."""
    start = t0 * strides[0] + h * strides[1]
    if direct(strides, kind, lanes, dim):
        for i in range(0, dim, LANES):
            transpose(words, start + i, strides[0], tile, i * LANES, LANES)
        return
    pitch = len(rows) // LANES
    for lane in range(lanes):
        load_row(words, start + lane * strides[0], strides[2], kind, rows, lane * pitch, dim)
    if lanes < LANES:
        rows[lanes * pitch :] = np.float32(0.0)
    for i in range(0, pitch, LANES):
        transpose(rows, i, pitch, tile, i * LANES, LANES)


@kernel
def store_tile(
    tile: Any, words: Any, strides: Any, kind: Any, t0: Any, lanes: Any, h: Any, dim: Any, rows: Any
) -> None:
    """Inverse of :func:`load_tile`, rounded to nearest even."""
    start = t0 * strides[0] + h * strides[1]
    if direct(strides, kind, lanes, dim):
        for i in range(0, dim, LANES):
            transpose(tile, i * LANES, LANES, words, start + i, strides[0])
        return
    pitch = len(rows) // LANES
    for i in range(0, pitch, LANES):
        transpose(tile, i * LANES, LANES, rows, i, pitch)
    for lane in range(lanes):
        store_row(words, start + lane * strides[0], strides[2], kind, rows, lane * pitch, dim)


@kernel
def transform_tile(tile: Any, blocks: Any) -> None:
    """Block-diagonal Hadamard along the first axis of ``tile``, in place, not normalised.

    Each block in few passes of up to four stages, with the textbook's sums in its order.
    """
    first = 0
    for b in range(len(blocks)):
        end, step = first + blocks[b] * LANES, LANES
        while first + step < end:
            stages = 2
            if first + 16 * step == end or first + 128 * step < end:
                stages = 16
            elif first + 8 * step <= end:
                stages = 8
            for start in range(first, end, stages * step):
                for at in range(start, start + step, LANES):
                    if stages == 16:
                        butterflies_16(tile, at, step, tile, at, step)
                    elif stages == 8:
                        butterflies_8(tile, at, step, tile, at, step)
                    else:
                        butterflies_2(tile, at, step, tile, at, step)
            step *= stages
        first = end


@kernel
def rows_are_finite(
    words: Any, strides: Any, kind: Any, t0: Any, lanes: Any, h: Any, dim: Any, rows: Any
) -> Any:
    """Whether ``lanes`` tokens from ``t0`` hold neither NaN nor infinity; ``rows``: scratch."""
    for lane in range(lanes):
        start = (t0 + lane) * strides[0] + h * strides[1]
        load_row(words, start, strides[2], kind, rows, 0, dim)
        if not row_is_finite(rows[:dim]):
            return False
    return True

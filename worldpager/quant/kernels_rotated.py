"""Compiled loops of the rotated codecs: key means, Hadamard transform, packing.

They work on tiles of 16 tokens of one head, stored ``[head_dim][16]``: every inner loop runs over
16 independent tokens and no sum depends on the width of the machine's vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from worldpager.quant.kernels import (
    NON_FINITE,
    OK,
    TOO_LARGE,
    float_to_half,
    get_u16,
    half_to_float,
    kernel,
    load_row,
    put_u16,
    row_is_finite,
    store_row,
    turn_row,
)
from worldpager.quant.kernels_search import LANES, group_codes, search_scales, set_ladder


@kernel
def load_tile(
    words: Any,
    strides: Any,
    kind: Any,
    t0: Any,
    lanes: Any,
    h: Any,
    mean: Any,
    weight: Any,
    row: Any,
    tile: Any,
) -> Any:
    """Fill ``tile`` with ``weight * (x - mean)`` of ``lanes`` tokens from ``t0``, zeros after them.

    False if a value is not finite.
    """
    for lane in range(lanes):
        load_row(words, (t0 + lane) * strides[0] + h * strides[1], strides[2], kind, row)
        if not row_is_finite(row):
            return False
        for i in range(len(row)):
            tile[i * LANES + lane] = (row[i] - mean[i]) * weight[i]
    for lane in range(lanes, LANES):
        for i in range(len(row)):
            tile[i * LANES + lane] = np.float32(0.0)
    return True


@kernel
def channel_means(words: Any, strides: Any, kind: Any, shape: Any, mean: Any) -> None:
    """Mean over tokens of each channel, rounded to fp16: fp32 ``[heads * head_dim]``.

    A head keeps its means only where they bring its tokens nearer to zero: where
    ``|x - mean|^2 / |x|^2``, on which a token's error depends, averages below one. So a few tokens
    far from the rest cannot spoil the rest, and heads with zero rows keep them zero.
    """
    tokens, heads, dim = shape
    row, total = np.empty(dim, np.float32), np.empty(dim, np.float64)
    for h in range(heads):
        total[:] = 0.0
        for t in range(tokens):
            load_row(words, t * strides[0] + h * strides[1], strides[2], kind, row)
            for i in range(dim):
                total[i] += row[i]
        for i in range(dim):
            middle = min(max(total[i] / tokens, -65504.0), 65504.0)
            mean[h * dim + i] = half_to_float(float_to_half(np.float32(middle)))
        middles = mean[h * dim : (h + 1) * dim]
        gain = np.float64(0.0)
        for t in range(tokens):
            load_row(words, t * strides[0] + h * strides[1], strides[2], kind, row)
            before, after = np.float32(0.0), np.float32(0.0)
            for i in range(dim):
                rest = row[i] - middles[i]
                before += row[i] * row[i]
                after += rest * rest
            gain += 1.0 - after / before
        if not gain > 0.0:
            middles[:] = np.float32(0.0)


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


@kernel
def transform_tile(tile: Any, blocks: Any) -> None:
    """Block-diagonal Hadamard along the first axis of ``tile``, in place, not normalised.

    Two stages of the textbook transform at a time, with its sums in its order.
    """
    first = 0
    for b in range(len(blocks)):
        end, run = first + blocks[b] * LANES, LANES
        while first + 4 * run <= end:
            for start in range(first, end, 4 * run):
                p, q = tile[start : start + run], tile[start + run : start + 2 * run]
                r, s = (
                    tile[start + 2 * run : start + 3 * run],
                    tile[start + 3 * run : start + 4 * run],
                )
                for i in range(run):
                    low, high = p[i] + q[i], r[i] + s[i]
                    low_rest, high_rest = p[i] - q[i], r[i] - s[i]
                    p[i], r[i] = low + high, low - high
                    q[i], s[i] = low_rest + high_rest, low_rest - high_rest
            run *= 4
        if first + 2 * run == end:
            p, q = tile[first : first + run], tile[first + run : end]
            for i in range(run):
                p[i], q[i] = p[i] + q[i], p[i] - q[i]
        first = end


@kernel
def pack_tile(codes: Any, bits: Any, lanes: Any, dim: Any, out: Any, at: Any, pitch: Any) -> None:
    """Write each lane's codes as a little-endian bit string at ``at + lane * pitch``."""
    for lane in range(lanes):
        target = out[at + lane * pitch : at + lane * pitch + dim * bits // 8]
        if bits == 4:
            for i in range(dim // 2):
                low, high = codes[2 * i * LANES + lane], codes[(2 * i + 1) * LANES + lane]
                target[i] = low | (high << np.uint8(4))
        else:
            for i in range(dim // 8):
                word = np.uint32(0)
                for j in range(8):
                    code = np.uint32(codes[(8 * i + j) * LANES + lane])
                    word = np.uint32(word | (code << np.uint32(3 * j)))
                target[3 * i] = np.uint8(word & np.uint32(0xFF))
                target[3 * i + 1] = np.uint8((word >> np.uint32(8)) & np.uint32(0xFF))
                target[3 * i + 2] = np.uint8(word >> np.uint32(16))


@kernel
def add_carried(tile: Any, dim: Any, t0: Any, lanes: Any, carried: Any, share: Any) -> None:
    """Add ``share`` of what the same places of the frame before lost, to all but rows of zeros.

    ``carried``: fp32 ``[tokens of a frame, head_dim]``, in the place of token ``t`` the error of
    the last one there.
    """
    for lane in range(lanes):
        lost = carried[(t0 + lane) % len(carried)]
        empty = True
        for i in range(dim):
            empty = empty and tile[i * LANES + lane] == np.float32(0.0)
        if not empty:
            for i in range(dim):
                tile[i * LANES + lane] += share * lost[i]


@kernel
def note_lost(
    part: Any, codes: Any, first: Any, end: Any, t0: Any, lanes: Any, table: Any, scales: Any,
    carried: Any,
) -> None:  # fmt: skip
    """Put the errors of channels ``first`` to ``end`` into ``carried``."""
    for lane in range(lanes):
        lost, scale = carried[(t0 + lane) % len(carried)], half_to_float(scales[lane])
        for i in range(end - first):
            at = i * LANES + lane
            lost[first + i] = part[at] - table[codes[at]] * scale


@kernel
def encode_rotated(
    words: Any,
    strides: Any,
    kind: Any,
    shape: Any,
    ends: Any,
    bits: Any,
    mean: Any,
    weight: Any,
    blocks: Any,
    levels: Any,
    middles: Any,
    tries: Any,
    table: Any,
    frame_tokens: Any,
    share: Any,
    out: Any,
) -> Any:
    """fp16 scales ``[tokens][heads][groups]``, then codes ``[tokens][heads][head_dim]``, packed.

    ``mean``: fp32 ``[heads * head_dim]``, subtracted from every token. ``weight``: sign over the
    root of the Hadamard block size, per channel. ``share``: of a row's error, added to the row
    ``frame_tokens`` later, where that is at least a tile; ``table``: level of each code.
    """
    tokens, heads, dim = shape
    carries = LANES <= frame_tokens < tokens
    carried = np.empty((frame_tokens if carries else 1, dim), np.float32)
    row = np.empty(dim, np.float32)
    tile = np.empty(dim * LANES, np.float32)
    codes = np.empty(dim * LANES, np.uint8)
    work, ladder = np.empty((6, LANES), np.float32), np.empty((7, LANES), np.float32)
    steps, scales = np.empty(LANES, np.float32), np.empty(LANES, np.uint16)
    groups, row_bytes = len(ends), dim * bits // 8
    codes_at = tokens * heads * groups * 2
    for h in range(heads):
        carried[:] = np.float32(0.0)
        for t0 in range(0, tokens, LANES):
            lanes = min(LANES, tokens - t0)
            middle = mean[h * dim : (h + 1) * dim]
            if not load_tile(words, strides, kind, t0, lanes, h, middle, weight, row, tile):
                return NON_FINITE
            transform_tile(tile, blocks)
            if carries:
                add_carried(tile, dim, t0, lanes, carried, share)
            first = 0
            for g in range(groups):
                n = ends[g] - first
                part = tile[first * LANES : ends[g] * LANES]
                if not search_scales(part, n, levels, middles, tries, work, ladder, steps, scales):
                    return TOO_LARGE
                set_ladder(ladder, middles, steps)
                half = np.uint8(1 << (bits - 1))
                found = codes[first * LANES : ends[g] * LANES]
                group_codes(part, n, ladder, half, found)
                if carries:
                    note_lost(part, found, first, ends[g], t0, lanes, table, scales, carried)
                for lane in range(lanes):
                    put_u16(out, (((t0 + lane) * heads + h) * groups + g) * 2, scales[lane])
                first = ends[g]
            at = codes_at + (t0 * heads + h) * row_bytes
            pack_tile(codes, bits, lanes, dim, out, at, heads * row_bytes)
    return OK


@kernel
def unpack_tile(
    data: Any,
    at: Any,
    pitch: Any,
    bits: Any,
    lanes: Any,
    first: Any,
    end: Any,
    table: Any,
    scales: Any,
    tile: Any,
) -> None:
    """Scaled levels of channels ``first`` to ``end`` of ``lanes`` rows of codes.

    The codes of row ``lane`` start at byte ``at + lane * pitch``.
    """
    if bits == 4:
        for i in range(first // 2, end // 2):
            for lane in range(lanes):
                byte = np.uint32(data[at + lane * pitch + i])
                tile[2 * i * LANES + lane] = table[byte & np.uint32(15)] * scales[lane]
                tile[(2 * i + 1) * LANES + lane] = table[byte >> np.uint32(4)] * scales[lane]
        return
    for i in range(first // 8, end // 8):
        for lane in range(lanes):
            byte = at + lane * pitch + 3 * i
            word = np.uint32(data[byte]) | np.uint32(data[byte + 1]) << np.uint32(8)
            word |= np.uint32(data[byte + 2]) << np.uint32(16)
            for j in range(8):
                code = np.uint32((np.uint32(word) >> np.uint32(3 * j)) & np.uint32(7))
                tile[(8 * i + j) * LANES + lane] = table[code] * scales[lane]


@kernel
def decode_rotated(
    data: Any,
    shape: Any,
    ends: Any,
    bits: Any,
    mean: Any,
    weight: Any,
    blocks: Any,
    table: Any,
    cos: Any,
    sin: Any,
    words: Any,
    strides: Any,
    kind: Any,
) -> None:
    """Inverse of :func:`encode_rotated`, rotating each row on the way.

    ``weight``: sign over the root of the Hadamard block size, per channel. ``table``: level of each
    code.
    """
    tokens, heads, dim = shape
    row, scales = np.empty(dim, np.float32), np.empty(LANES, np.float32)
    tile = np.zeros(dim * LANES, np.float32)
    groups, row_bytes = len(ends), dim * bits // 8
    codes_at = tokens * heads * groups * 2
    for t0 in range(0, tokens, LANES):
        lanes = min(LANES, tokens - t0)
        for h in range(heads):
            at = codes_at + (t0 * heads + h) * row_bytes
            pitch = heads * row_bytes
            first = 0
            for g in range(groups):
                for lane in range(lanes):
                    index = ((t0 + lane) * heads + h) * groups + g
                    word = np.uint16(get_u16(data, index * 2) & np.uint16(0x7FFF))
                    scales[lane] = half_to_float(word)
                unpack_tile(data, at, pitch, bits, lanes, first, ends[g], table, scales, tile)
                first = ends[g]
            transform_tile(tile, blocks)
            for lane in range(lanes):
                for i in range(dim):
                    row[i] = tile[i * LANES + lane] * weight[i] + mean[h * dim + i]
                turn_row(row, cos, sin)
                start = (t0 + lane) * strides[0] + h * strides[1]
                store_row(words, start, strides[2], kind, row)

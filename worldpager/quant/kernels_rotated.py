"""Compiled loops of the rotated codecs: from rows to scales and packed codes, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from worldpager.quant.kernels import (
    NON_FINITE,
    OK,
    TOO_LARGE,
    get_u16,
    half_to_float,
    kernel,
    put_u16,
)
from worldpager.quant.kernels_search import group_codes, half_to_lanes, search_scales
from worldpager.quant.lanes import (
    LANES,
    bits_of,
    load,
    lookup,
    select,
    size_of,
    splat,
    store,
)
from worldpager.quant.lanes_tiles import transpose
from worldpager.quant.tiles import load_tile, padded, rows_are_finite, store_tile, transform_tile


@kernel
def pack_tile(codes: Any, bits: Any, dim: Any, packed: Any) -> None:
    """Each lane's codes as a little-endian bit string: ``packed`` is ``[words][16]``."""
    at, shift, word = 0, np.uint32(0), splat(np.uint32(0))
    for i in range(dim):
        code = load(codes, i * LANES)
        word = word | (code << splat(shift))
        shift = np.uint32(shift + bits)
        if shift >= np.uint32(32):
            store(packed, at, word)
            at += LANES
            shift = np.uint32(shift - np.uint32(32))
            word = splat(np.uint32(0))
            if shift > np.uint32(0):
                word = code >> splat(np.uint32(bits - shift))
    if shift > np.uint32(0):
        store(packed, at, word)


@kernel
def put_rows(
    packed: Any, lanes: Any, row_bytes: Any, strings: Any, out: Any, at: Any, pitch: Any
) -> None:
    """Write each lane's bit string to ``at + lane * pitch``; ``strings``: scratch."""
    width = len(strings) // LANES
    if lanes == LANES and row_bytes == width:
        for i in range(0, width // 4, LANES):
            transpose(packed, i * LANES, LANES, out, at + i * 4, pitch)
        return
    for i in range(0, width // 4, LANES):
        transpose(packed, i * LANES, LANES, strings, i * 4, width)
    for lane in range(lanes):
        for i in range(row_bytes):
            out[at + lane * pitch + i] = strings[lane * width + i]


@kernel
def add_carried(tile: Any, dim: Any, at: Any, carried: Any, share: Any) -> None:
    """Add ``share`` of what the same places of the frame before lost, to all but rows of zeros.

    ``carried``: fp32 ``[head_dim][pitch]``, the errors of those places from ``at`` on.
    """
    pitch, seen = len(carried) // dim, splat(np.uint32(0))
    for i in range(dim):
        seen = seen | bits_of(size_of(load(tile, i * LANES)))
    empty = seen < splat(np.uint32(1))
    for i in range(dim):
        value = load(tile, i * LANES)
        made_up = value + splat(share) * load(carried, i * pitch + at)
        store(tile, i * LANES, select(empty, value, made_up))


@kernel
def note_lost(
    tile: Any, codes: Any, first: Any, end: Any, table: Any, scales: Any, at: Any, carried: Any,
    pitch: Any,
) -> None:  # fmt: skip
    """Put the errors of channels ``first`` to ``end`` into ``carried`` from ``at`` on."""
    levels, scale = load(table, 0), half_to_lanes(load(scales, 0))
    for i in range(first, end):
        rest = load(tile, i * LANES) - lookup(levels, load(codes, i * LANES)) * scale
        store(carried, i * pitch + at, rest)


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
    buckets: Any,
    table: Any,
    frame_tokens: Any,
    share: Any,
    out: Any,
) -> Any:
    """fp16 scales ``[tokens][heads][groups]``, then codes ``[tokens][heads][head_dim]``, packed.

    ``mean``: fp32 ``[heads * head_dim]``, subtracted from every token. ``weight``: sign over the
    root of the Hadamard block size, per channel. ``share``: of a row's error, added to the row
    ``frame_tokens`` later, where that is at least a tile; ``table``: level of each code, of 16.
    """
    tokens, heads, dim = shape
    carries = LANES <= frame_tokens < tokens
    # An odd number of cache lines, so that the channels of a tile do not meet in one set.
    pitch = ((frame_tokens + tokens) // LANES + 2 | 1) * LANES if carries else 0
    carried = np.zeros(pitch * dim, np.float32)
    size = padded(dim) * LANES
    rows, tile = np.zeros(size, np.float32), np.empty(size, np.float32)
    sizes, found = np.empty(size, np.float32), np.empty(4 * LANES, np.float32)
    codes, packed = np.empty(size, np.uint32), np.empty(size, np.uint32)
    groups, row_bytes = len(ends), dim * bits // 8
    strings = np.empty((row_bytes + 63) // 64 * 64 * LANES, np.uint8)
    scales, half = np.empty(LANES, np.uint32), np.uint32(1 << (bits - 1))
    codes_at = tokens * heads * groups * 2
    for h in range(heads):
        for t0 in range(0, tokens, LANES):
            lanes = min(LANES, tokens - t0)
            load_tile(words, strides, kind, t0, lanes, h, dim, rows, tile)
            for i in range(dim):
                middle = splat(mean[h * dim + i])
                store(tile, i * LANES, (load(tile, i * LANES) - middle) * splat(weight[i]))
            transform_tile(tile, blocks)
            if carries and t0 + lanes > frame_tokens:
                add_carried(tile, dim, t0, carried, share)
            first = 0
            for g in range(groups):
                n = ends[g] - first
                part = tile[first * LANES : ends[g] * LANES]
                if not search_scales(
                    part, n, levels, middles, tries, buckets, lanes, sizes, found, scales
                ):
                    finite = rows_are_finite(words, strides, kind, t0, lanes, h, dim, rows)
                    return TOO_LARGE if finite else NON_FINITE
                group_codes(part, n, load(found, 0), middles, half, codes[first * LANES :])
                if carries:
                    at = frame_tokens + t0
                    note_lost(tile, codes, first, ends[g], table, scales, at, carried, pitch)
                for lane in range(lanes):
                    at = (((t0 + lane) * heads + h) * groups + g) * 2
                    put_u16(out, at, np.uint16(scales[lane]))
                first = ends[g]
            pack_tile(codes, bits, dim, packed)
            at = codes_at + (t0 * heads + h) * row_bytes
            put_rows(packed, lanes, row_bytes, strings, out, at, heads * row_bytes)
    return OK


@kernel
def get_rows(
    data: Any, at: Any, pitch: Any, lanes: Any, row_bytes: Any, strings: Any, packed: Any
) -> None:
    """Inverse of :func:`put_rows`; behind each lane's bit string stands anything."""
    width = len(strings) // LANES
    if lanes == LANES and at + (LANES - 1) * pitch + width <= len(data):
        for i in range(0, width // 4, LANES):
            transpose(data, at + i * 4, pitch, packed, i * LANES, LANES)
        return
    for lane in range(lanes):
        for i in range(row_bytes):
            strings[lane * width + i] = data[at + lane * pitch + i]
    for i in range(0, width // 4, LANES):
        transpose(strings, i * 4, width, packed, i * LANES, LANES)


@kernel
def unpack_tile(
    packed: Any, bits: Any, first: Any, end: Any, table: Any, scales: Any, tile: Any
) -> None:
    """Scaled levels of channels ``first`` to ``end`` of each lane's bit string."""
    levels, scale = load(table, 0), load(scales, 0)
    for i in range(first, end):
        at = np.uint32(i * bits)
        word, shift = np.intp(at >> np.uint32(5)), np.uint32(at & np.uint32(31))
        code = load(packed, word * LANES) >> splat(shift)
        if shift + bits > np.uint32(32):
            code = code | (
                load(packed, (word + 1) * LANES) << splat(np.uint32(np.uint32(32) - shift))
            )
        store(tile, i * LANES, lookup(levels, code) * scale)


@kernel
def finish_tile(tile: Any, dim: Any, mean: Any, weight: Any, cos: Any, sin: Any) -> None:
    """Signs, norms and means, then the rotation of the leading pairs, in place."""
    for i in range(dim):
        value = load(tile, i * LANES) * splat(weight[i]) + splat(mean[i])
        store(tile, i * LANES, value)
    for i in range(len(cos)):
        re, im = load(tile, 2 * i * LANES), load(tile, (2 * i + 1) * LANES)
        c, s = splat(cos[i]), splat(sin[i])
        store(tile, 2 * i * LANES, re * c - im * s)
        store(tile, (2 * i + 1) * LANES, re * s + im * c)


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
    code, 16 entries.
    """
    tokens, heads, dim = shape
    groups, row_bytes = len(ends), dim * bits // 8
    rows = np.empty(padded(dim) * LANES, np.float32)
    tile, scales = np.zeros(padded(dim) * LANES, np.float32), np.empty(LANES, np.float32)
    strings = np.zeros((row_bytes + 63) // 64 * 64 * LANES, np.uint8)
    packed = np.empty(len(strings) // 4, np.uint32)
    codes_at = tokens * heads * groups * 2
    for t0 in range(0, tokens, LANES):
        lanes = min(LANES, tokens - t0)
        for h in range(heads):
            at = codes_at + (t0 * heads + h) * row_bytes
            get_rows(data, at, heads * row_bytes, lanes, row_bytes, strings, packed)
            first = 0
            for g in range(groups):
                for lane in range(lanes):
                    index = ((t0 + lane) * heads + h) * groups + g
                    word = np.uint16(get_u16(data, index * 2) & np.uint16(0x7FFF))
                    scales[lane] = half_to_float(word)
                unpack_tile(packed, bits, first, ends[g], table, scales, tile)
                first = ends[g]
            transform_tile(tile, blocks)
            finish_tile(tile, dim, mean[h * dim : (h + 1) * dim], weight, cos, sin)
            store_tile(tile, words, strides, kind, t0, lanes, h, dim, rows)

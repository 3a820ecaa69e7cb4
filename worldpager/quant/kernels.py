"""Compiled loops shared by the codecs: reading rows, rotating them, writing them, small codecs.

A *row* is one head of one token: ``head_dim`` values. Tensors arrive as the flat uint16 words of
their storage plus element strides, so one compiled version serves every dtype and layout. All
arithmetic is fp32 in a fixed order, without fused or reassociated operations, so that every
machine encodes to the same bytes. Each kernel is one call on one thread without the interpreter
lock; callers run layers in parallel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from worldpager.quant import lanes
from worldpager.quant.lanes import LANES

OK, NON_FINITE, TOO_LARGE = 0, 1, 2
"""What an encoder returns: done, a NaN or infinity was met, a scale would not fit 16 bits."""
FP32, BF16, FP16 = 0, 1, 2
"""Element kinds of the flat words handed to a kernel."""

_F = TypeVar("_F", bound=Callable[..., Any])


def kernel(function: _F) -> _F:
    """Compile ``function`` on first use, cached on disk where there is a place for a cache."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}
    try:
        return cast(_F, numba.njit(cache=True, **options)(function))
    except RuntimeError:  # no writable cache directory: compile once a process instead
        return cast(_F, numba.njit(**options)(function))


@intrinsic
def _float_of(_context, bits):  # type: ignore[no-untyped-def]
    """The fp32 value with the given uint32 pattern."""

    def generate(_context, builder, _signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def _bits_of(_context, value):  # type: ignore[no-untyped-def]
    """The uint32 pattern of an fp32 value."""

    def generate(_context, builder, _signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


float_of: Any = _float_of
bits_of: Any = _bits_of


@kernel
def half_to_float(word: Any) -> Any:
    """fp16 pattern to fp32, exact; infinities and NaN stay what they are."""
    bits = np.uint32(word)
    size = np.uint32(bits & np.uint32(0x7FFF))
    value = float_of(np.uint32(size << np.uint32(13))) * np.float32(2.0**112)
    grown = bits_of(value)
    if size >= np.uint32(0x7C00):
        grown = np.uint32(grown | np.uint32(0x7F800000))
    return float_of(np.uint32(grown | ((bits & np.uint32(0x8000)) << np.uint32(16))))


@kernel
def float_to_half(value: Any) -> Any:
    """fp32 to fp16 pattern, nearest even; infinity where the value does not fit."""
    bits = bits_of(value)
    sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    odd = np.uint32((size >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32((size - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13))
    # Adding 0.5 lines a subnormal's last bit up with the last bit of 0.5, which rounds it.
    small = np.uint32(bits_of(float_of(size) + np.float32(0.5)) - np.uint32(0x3F000000))
    half = small if size < np.uint32(0x38800000) else normal
    if size >= np.uint32(0x477FF000):
        half = np.uint32(0x7C00)
    if size > np.uint32(0x7F800000):
        half = np.uint32(0x7E00)
    return np.uint16(half | sign)


@kernel
def float_to_bf16(value: Any) -> Any:
    """fp32 to bf16 pattern, nearest even."""
    bits = bits_of(value)
    odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    if np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        rounded = np.uint32((bits >> np.uint32(16)) | np.uint32(0x40))
    return np.uint16(rounded)


@kernel
def bf16_to_float(word: Any) -> Any:
    """bf16 pattern to fp32, exact."""
    return float_of(np.uint32(np.uint32(word) << np.uint32(16)))


@kernel
def load_row(words: Any, start: Any, step: Any, kind: Any, row: Any, at: Any, n: Any) -> None:
    """Read ``n`` elements at element offset ``start``, ``step`` apart, to ``row[at:]`` as fp32.

    No slice is taken where speed matters: each costs two atomic counts of references.
    """
    if kind == BF16 and step == 1:
        for i in range(0, n - LANES + 1, LANES):
            lanes.store(row, at + i, lanes.load(words, start + i))
        for i in range(n // LANES * LANES, n):
            row[at + i] = bf16_to_float(words[start + i])
    elif kind == FP32:
        base = words[2 * start : 2 * (start + (n - 1) * step + 1)]
        for i in range(n):
            low, high = np.uint32(base[2 * step * i]), np.uint32(base[2 * step * i + 1])
            row[at + i] = float_of(np.uint32(low | (high << np.uint32(16))))
    elif kind == BF16:
        for i in range(n):
            row[at + i] = bf16_to_float(words[start + i * step])
    else:
        base = words[start : start + (n - 1) * step + 1]
        for i in range(n):
            row[at + i] = half_to_float(base[i * step])


@kernel
def store_row(words: Any, start: Any, step: Any, kind: Any, row: Any, at: Any, n: Any) -> None:
    """Write ``n`` elements of ``row[at:]`` (fp32) at element offset ``start``, ``step`` apart,
    rounded to nearest even.
    """
    if kind == BF16 and step == 1:
        for i in range(0, n - LANES + 1, LANES):
            lanes.store(words, start + i, lanes.load(row, at + i))
        for i in range(n // LANES * LANES, n):
            words[start + i] = float_to_bf16(row[at + i])
    elif kind == FP32:
        base = words[2 * start : 2 * (start + (n - 1) * step + 1)]
        for i in range(n):
            bits = bits_of(row[at + i])
            base[2 * step * i] = np.uint16(bits & np.uint32(0xFFFF))
            base[2 * step * i + 1] = np.uint16(bits >> np.uint32(16))
    elif kind == BF16:
        for i in range(n):
            words[start + i * step] = float_to_bf16(row[at + i])
    else:
        base = words[start : start + (n - 1) * step + 1]
        for i in range(n):
            base[i * step] = float_to_half(row[at + i])


@kernel
def row_is_finite(row: Any) -> Any:
    """Whether no value of ``row`` is NaN or infinite."""
    worst = np.uint32(0)
    for i in range(len(row)):
        worst = max(worst, np.uint32(bits_of(row[i]) & np.uint32(0x7FFFFFFF)))
    return worst < np.uint32(0x7F800000)


@kernel
def largest(row: Any) -> Any:
    """Largest magnitude of a finite row."""
    worst = np.uint32(0)
    for i in range(len(row)):
        worst = max(worst, np.uint32(bits_of(row[i]) & np.uint32(0x7FFFFFFF)))
    return float_of(worst)


@kernel
def turn_row(row: Any, cos: Any, sin: Any) -> None:
    """Rotate the leading ``len(cos)`` interleaved pairs of ``row`` in place."""
    for i in range(len(cos)):
        re, im = row[2 * i], row[2 * i + 1]
        row[2 * i] = re * cos[i] - im * sin[i]
        row[2 * i + 1] = re * sin[i] + im * cos[i]


@kernel
def put_u16(out: Any, at: Any, word: Any) -> None:
    """Write a little-endian 16-bit word at byte ``at``."""
    out[at] = np.uint8(word & np.uint16(0xFF))
    out[at + 1] = np.uint8(word >> np.uint16(8))


@kernel
def get_u16(data: Any, at: Any) -> Any:
    """Read a little-endian 16-bit word at byte ``at``."""
    return np.uint16(np.uint16(data[at]) | (np.uint16(data[at + 1]) << np.uint16(8)))


@kernel
def encode_bf16(words: Any, strides: Any, kind: Any, shape: Any, out: Any) -> Any:
    """``[tokens, heads, head_dim]`` to bf16 words, row-major."""
    tokens, heads, dim = shape
    row = np.empty(dim, np.float32)
    for t in range(tokens):
        for h in range(heads):
            load_row(words, t * strides[0] + h * strides[1], strides[2], kind, row, 0, dim)
            if not row_is_finite(row):
                return NON_FINITE
            at = (t * heads + h) * dim * 2
            target = out[at : at + 2 * dim]
            worst = np.uint16(0)
            for i in range(dim):
                word = float_to_bf16(row[i])
                worst = max(worst, np.uint16(word & np.uint16(0x7FFF)))
                target[2 * i] = np.uint8(word & np.uint16(0xFF))
                target[2 * i + 1] = np.uint8(word >> np.uint16(8))
            if worst >= np.uint16(0x7F80):
                return TOO_LARGE
    return OK


@kernel
def decode_bf16(
    data: Any, shape: Any, cos: Any, sin: Any, words: Any, strides: Any, kind: Any
) -> None:
    """Inverse of :func:`encode_bf16`, rotating each row on the way."""
    tokens, heads, dim = shape
    row = np.empty(dim, np.float32)
    for t in range(tokens):
        for h in range(heads):
            at = (t * heads + h) * dim * 2
            source = data[at : at + 2 * dim]
            for i in range(dim):
                low, high = np.uint32(source[2 * i]), np.uint32(source[2 * i + 1])
                row[i] = float_of(np.uint32((low << np.uint32(16)) | (high << np.uint32(24))))
            turn_row(row, cos, sin)
            store_row(words, t * strides[0] + h * strides[1], strides[2], kind, row, 0, dim)


@kernel
def encode_int8(words: Any, strides: Any, kind: Any, shape: Any, ends: Any, out: Any) -> Any:
    """Symmetric groups: bf16 scales (rounded up) of all rows, then int8 codes of all rows."""
    tokens, heads, dim = shape
    row = np.empty(dim, np.float32)
    codes_at = tokens * heads * len(ends) * 2
    for t in range(tokens):
        for h in range(heads):
            load_row(words, t * strides[0] + h * strides[1], strides[2], kind, row, 0, dim)
            if not row_is_finite(row):
                return NON_FINITE
            index, first = t * heads + h, 0
            for g in range(len(ends)):
                part = row[first : ends[g]]
                step = bits_of(largest(part) / np.float32(127.0))
                word = np.uint16((step + np.uint32(0xFFFF)) >> np.uint32(16))
                put_u16(out, (index * len(ends) + g) * 2, word)
                scale = bf16_to_float(word)
                if scale == np.float32(0.0):
                    scale = np.float32(1.0)  # the group is zero and so are its codes
                at = codes_at + index * dim
                target = out[at + first : at + ends[g]]
                for i in range(len(part)):
                    target[i] = np.uint8(np.int32(np.rint(part[i] / scale)))
                first = ends[g]
    return OK


@kernel
def decode_int8(
    data: Any,
    shape: Any,
    ends: Any,
    cos: Any,
    sin: Any,
    words: Any,
    strides: Any,
    kind: Any,
) -> None:
    """Inverse of :func:`encode_int8`, rotating each row on the way."""
    tokens, heads, dim = shape
    row = np.empty(dim, np.float32)
    codes_at = tokens * heads * len(ends) * 2
    for t in range(tokens):
        for h in range(heads):
            index, first = t * heads + h, 0
            at = codes_at + index * dim
            for g in range(len(ends)):
                scale = bf16_to_float(get_u16(data, (index * len(ends) + g) * 2))
                source, part = data[at + first : at + ends[g]], row[first : ends[g]]
                for i in range(len(part)):
                    part[i] = np.float32(np.int8(source[i])) * scale
                first = ends[g]
            turn_row(row, cos, sin)
            store_row(words, t * strides[0] + h * strides[1], strides[2], kind, row, 0, dim)


@kernel
def encode_absmax(words: Any, strides: Any, kind: Any, shape: Any, ends: Any, out: Any) -> Any:
    """Symmetric groups: fp16 scales of all rows, then 4-bit codes (value + 8) of all rows."""
    tokens, heads, dim = shape
    row = np.empty(dim, np.float32)
    codes = np.empty(dim, np.uint8)
    codes_at = tokens * heads * len(ends) * 2
    for t in range(tokens):
        for h in range(heads):
            load_row(words, t * strides[0] + h * strides[1], strides[2], kind, row, 0, dim)
            if not row_is_finite(row):
                return NON_FINITE
            index, first = t * heads + h, 0
            for g in range(len(ends)):
                part, target = row[first : ends[g]], codes[first : ends[g]]
                word = float_to_half(largest(part) / np.float32(7.0))
                if word >= np.uint16(0x7C00):
                    return TOO_LARGE
                put_u16(out, (index * len(ends) + g) * 2, word)
                scale = half_to_float(word)
                for i in range(len(part)):
                    level = np.rint(part[i] / scale) if scale > np.float32(0.0) else np.float32(0)
                    level = min(max(level, np.float32(-7.0)), np.float32(7.0))
                    target[i] = np.uint8(np.int32(level) + 8)
                first = ends[g]
            at = codes_at + index * (dim // 2)
            packed = out[at : at + dim // 2]
            for i in range(dim // 2):
                packed[i] = codes[2 * i] | (codes[2 * i + 1] << np.uint8(4))
    return OK


@kernel
def decode_absmax(
    data: Any,
    shape: Any,
    ends: Any,
    cos: Any,
    sin: Any,
    words: Any,
    strides: Any,
    kind: Any,
) -> None:
    """Inverse of :func:`encode_absmax`, rotating each row on the way."""
    tokens, heads, dim = shape
    row = np.empty(dim, np.float32)
    codes_at = tokens * heads * len(ends) * 2
    for t in range(tokens):
        for h in range(heads):
            index, first = t * heads + h, 0
            for g in range(len(ends)):
                scale = half_to_float(get_u16(data, (index * len(ends) + g) * 2))
                at = codes_at + index * (dim // 2)
                source = data[at + first // 2 : at + ends[g] // 2]
                part = row[first : ends[g]]
                for i in range(len(source)):
                    code = np.int32(source[i])
                    part[2 * i] = np.float32((code & 15) - 8) * scale
                    part[2 * i + 1] = np.float32((code >> 4) - 8) * scale
                first = ends[g]
            turn_row(row, cos, sin)
            store_row(words, t * strides[0] + h * strides[1], strides[2], kind, row, 0, dim)

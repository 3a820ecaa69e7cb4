"""What is done to a tile of 16 rows in registers: turning it, and the butterflies of a Hadamard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from worldpager.quant.lanes import LANES, WORDS, kind_in, place, read, write

_QUARTERS = range(0, LANES, 4)
_SINGLES = [q + i for q in _QUARTERS for i in (0, LANES, 1, LANES + 1)]
_PAIRS = [q + i for q in _QUARTERS for i in (0, 1, LANES, LANES + 1)]
_EVEN_QUARTERS = [q + i for q in (0, 8, LANES, LANES + 8) for i in range(4)]


def _mixed(builder: Any, rows: list[Any], picks: list[int], step: int, i: int, j: int) -> list[Any]:
    """The lanes ``picks`` of two rows one after the other, and those ``step`` further."""
    masks = [ir.Constant(WORDS.vector, [p + more for p in picks]) for more in (0, step)]
    return [builder.shuffle_vector(rows[i], rows[j], mask) for mask in masks]


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """16 vectors of 16 turned over their diagonal: 64 shuffles, each one instruction of AVX-512."""
    for start in _QUARTERS:
        a, b = (_mixed(builder, rows, _SINGLES, 2, i, i + 1) for i in (start, start + 2))
        four = [a[0], b[0], a[1], b[1]]
        rows[start : start + 2] = _mixed(builder, four, _PAIRS, 2, 0, 1)
        rows[start + 2 : start + 4] = _mixed(builder, four, _PAIRS, 2, 2, 3)
    for column in range(4):
        a, b = (_mixed(builder, rows, _EVEN_QUARTERS, 4, i, i + 4) for i in (column, column + 8))
        four = [a[0], b[0], a[1], b[1]]
        rows[column], rows[column + 8] = _mixed(builder, four, _EVEN_QUARTERS, 4, 0, 1)
        rows[column + 4], rows[column + 12] = _mixed(builder, four, _EVEN_QUARTERS, 4, 2, 3)
    return rows


def _butterflies(builder: Any, values: list[Any]) -> list[Any]:
    """The Hadamard transform of a list, with the textbook's sums in the textbook's order."""
    half = 1
    while half < len(values):
        for i in (i for i in range(len(values)) if not i & half):
            low, high = values[i], values[i + half]
            values[i], values[i + half] = builder.fadd(low, high), builder.fsub(low, high)
        half *= 2
    return values


def _in_registers(count: int, change: Callable[[Any, list[Any]], list[Any]]) -> Any:
    """``f(source, at, step, target, to, stride)``: read ``count`` vectors of 16 elements ``step``
    elements apart, change them together, and write them ``stride`` elements apart.

    Arrays of uint16 hold bf16; elements of an array of bytes are 4 bytes.
    """

    @intrinsic
    def apply(_context, source, at, step, target, to, stride):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            def lanes(array: Any, where: Any, i: int) -> Any:
                value, first, pitch = where
                offset = builder.add(first, builder.mul(pitch, ir.Constant(pitch.type, i)))
                return place(context, builder, array, value, offset)

            values = [
                read(builder, lanes(source, args[:3], i), kind_in(source)) for i in range(count)
            ]
            for i, value in enumerate(change(builder, values)):
                write(builder, value, lanes(target, args[3:], i), kind_in(target))
            return context.get_dummy_value()

        at_types = [types.intp] * 2
        return types.void(source, *at_types, target, *at_types), generate

    return apply


transpose = _in_registers(LANES, _transposed)
"""Element ``i`` of row ``j`` becomes element ``j`` of row ``i``."""
butterflies_2 = _in_registers(2, _butterflies)
"""One stage of a Hadamard transform on 16 columns at once."""
butterflies_8 = _in_registers(8, _butterflies)
"""Three stages of it."""
butterflies_16 = _in_registers(16, _butterflies)
"""Four stages of it."""

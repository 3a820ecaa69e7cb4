"""Sixteen values side by side, for kernels: the machine's widest vectors under our own control.

Loops that a compiler vectorises by itself come out at half the width or not at all, depending on
its version. These two kinds of value become LLVM vectors, and from there whatever the machine has:
one register of AVX-512, two of AVX2, four of NEON. Every operation is the exact IEEE one on each
lane, never fused or reassociated, so results are the same everywhere; :func:`near` is the exception
that says so.

``FLOATS``: 16 fp32 values. ``WORDS``: 16 uint32 values. Kernels get them from :func:`load` and
:func:`splat`, and use Python's operators on them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils as _cgutils
from numba.core import config as _config
from numba.extending import intrinsic, models, overload, register_model

LANES = 16

cgutils: Any = _cgutils  # numba types neither
config: Any = _config

_F32, _I32 = ir.FloatType(), ir.IntType(32)


class _Lanes(types.Type):
    """The numba type of 16 values of one LLVM type."""

    def __init__(self, name: str, element: Any) -> None:
        super().__init__(name=f"{name}x16")
        self.vector = ir.VectorType(element, LANES)


FLOATS, WORDS = _Lanes("float32", _F32), _Lanes("uint32", _I32)
HALVES = _Lanes("uint16", ir.IntType(16))  # bf16 patterns, in memory only
MASK = _Lanes("bool", ir.IntType(1))


@register_model(_Lanes)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: _Lanes) -> None:
        super().__init__(manager, kind, kind.vector)  # type: ignore[no-untyped-call]


def _table_lookups() -> bool:
    """Whether the machine that numba compiles for looks 16 floats up in one instruction."""
    if config.CPU_NAME or config.CPU_FEATURES is not None or not config.ENABLE_AVX:
        return False  # compiled for another machine than this one
    return bool(binding.get_host_cpu_features().get("avx512f", False))


TABLES = _table_lookups()


def constant(value: int) -> Any:
    return ir.Constant(WORDS.vector, [value] * LANES)


def _operation(given: tuple[Any, ...], result: Any, emit: Callable[..., Any]) -> Any:
    """An operation on lanes: ``emit(builder, *values)`` writes its instructions."""

    def generate(_context, builder, _signature, args):  # type: ignore[no-untyped-def]
        return emit(builder, *args)

    if len(given) == 1:

        @intrinsic
        def one(_context, a):  # type: ignore[no-untyped-def]
            return (result(*given), generate) if a == given[0] else None

        return one

    if len(given) == 2:

        @intrinsic
        def two(_context, a, b):  # type: ignore[no-untyped-def]
            return (result(*given), generate) if (a, b) == given else None

        return two

    @intrinsic
    def three(_context, a, b, c):  # type: ignore[no-untyped-def]
        return (result(*given), generate) if (a, b, c) == given else None

    return three


def _overload(symbol: Any, kind: _Lanes, result: _Lanes, emit: Callable[..., Any]) -> None:
    """Give Python's operator ``symbol`` a meaning between two values of ``kind``."""
    found = _operation((kind, kind), result, emit)

    @overload(symbol)
    def implement(a, b):  # type: ignore[no-untyped-def]
        return (lambda a, b: found(a, b)) if a == kind and b == kind else None


_overload(operator.add, FLOATS, FLOATS, lambda b, x, y: b.fadd(x, y))
_overload(operator.sub, FLOATS, FLOATS, lambda b, x, y: b.fsub(x, y))
_overload(operator.mul, FLOATS, FLOATS, lambda b, x, y: b.fmul(x, y))
_overload(operator.truediv, FLOATS, FLOATS, lambda b, x, y: b.fdiv(x, y))
_overload(operator.ge, FLOATS, MASK, lambda b, x, y: b.fcmp_ordered(">=", x, y))
_overload(operator.lt, FLOATS, MASK, lambda b, x, y: b.fcmp_ordered("<", x, y))
_overload(operator.add, WORDS, WORDS, lambda b, x, y: b.add(x, y))
_overload(operator.sub, WORDS, WORDS, lambda b, x, y: b.sub(x, y))
_overload(operator.and_, WORDS, WORDS, lambda b, x, y: b.and_(x, y))
_overload(operator.or_, WORDS, WORDS, lambda b, x, y: b.or_(x, y))
_overload(operator.xor, WORDS, WORDS, lambda b, x, y: b.xor(x, y))
_overload(operator.lshift, WORDS, WORDS, lambda b, x, y: b.shl(x, y))
_overload(operator.rshift, WORDS, WORDS, lambda b, x, y: b.lshr(x, y))
_overload(operator.ge, WORDS, MASK, lambda b, x, y: b.icmp_unsigned(">=", x, y))
_overload(operator.lt, WORDS, MASK, lambda b, x, y: b.icmp_unsigned("<", x, y))

bits_of = _operation((FLOATS,), WORDS, lambda b, x: b.bitcast(x, WORDS.vector))
"""The patterns of 16 floats."""
floats_of = _operation((WORDS,), FLOATS, lambda b, x: b.bitcast(x, FLOATS.vector))
"""The floats of 16 patterns."""
select = _operation((MASK, FLOATS, FLOATS), FLOATS, lambda b, m, x, y: b.select(m, x, y))
"""``x`` where the mask holds, else ``y``."""
select_words = _operation((MASK, WORDS, WORDS), WORDS, lambda b, m, x, y: b.select(m, x, y))
"""As :func:`select`, of words."""
size_of = _operation((FLOATS,), FLOATS, lambda b, x: b.bitcast(
    b.and_(b.bitcast(x, WORDS.vector), constant(0x7FFFFFFF)), FLOATS.vector
))  # fmt: skip
"""Magnitudes."""


def _machine(builder: Any, name: str, *args: Any) -> Any:
    """Call an LLVM intrinsic that gives floats."""
    kind = ir.FunctionType(FLOATS.vector, [arg.type for arg in args])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, args)


near = _operation((FLOATS, FLOATS, FLOATS), FLOATS, lambda b, x, y, z: _machine(
    b, "llvm.fmuladd.v16f32", x, y, z
))  # fmt: skip
"""About ``a * b + c``: rounded once or twice, whichever the machine does faster."""


def _emit_lookup(builder: Any, table: Any, index: Any) -> Any:
    if TABLES:
        return _machine(builder, "llvm.x86.avx512.permvar.sf.512", table, index)
    place = cgutils.alloca_once(builder, ir.ArrayType(_F32, LANES))
    builder.store(table, builder.bitcast(place, FLOATS.vector.as_pointer()), align=4)
    index = builder.and_(index, constant(LANES - 1))
    found = ir.Constant(FLOATS.vector, ir.Undefined)
    for lane in range(LANES):
        at = builder.extract_element(index, ir.Constant(_I32, lane))
        entry = builder.load(builder.gep(place, [ir.Constant(_I32, 0), at]))
        found = builder.insert_element(found, entry, ir.Constant(_I32, lane))
    return found


lookup = _operation((FLOATS, WORDS), FLOATS, _emit_lookup)
"""The table's entry at the last four bits of each word."""


@intrinsic
def _splat(_context, value):  # type: ignore[no-untyped-def]
    """One fp32 or uint32 in every lane."""
    kind = FLOATS if value == types.float32 else WORDS

    def generate(_context, builder, _signature, args):  # type: ignore[no-untyped-def]
        first = ir.Constant(kind.vector, ir.Undefined)
        first = builder.insert_element(first, args[0], ir.Constant(_I32, 0))
        return builder.shuffle_vector(first, first, ir.Constant(WORDS.vector, [0] * LANES))

    return (kind(value), generate) if value in (types.float32, types.uint32) else None


def kind_in(array: Any) -> _Lanes:
    """What 16 lanes at an element of ``array`` are in memory."""
    return {types.float32: FLOATS, types.uint16: HALVES}.get(array.dtype, WORDS)


def place(context: Any, builder: Any, array: Any, value: Any, at: Any) -> Any:
    """Pointer to 16 lanes at element ``at`` of a contiguous array."""
    data = context.make_array(array)(context, builder, value).data
    return builder.bitcast(builder.gep(data, [at]), kind_in(array).vector.as_pointer())


def round_to_bf16(builder: Any, value: Any) -> Any:
    """The bf16 patterns nearest to 16 floats, ties to even."""
    bits = builder.bitcast(value, WORDS.vector)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.add(builder.add(bits, constant(0x7FFF)), odd)
    size = builder.and_(bits, constant(0x7FFFFFFF))
    number = builder.icmp_unsigned("<=", size, constant(0x7F800000))
    patterns = builder.select(number, rounded, builder.or_(bits, constant(0x400000)))
    return builder.trunc(builder.lshr(patterns, constant(16)), HALVES.vector)


def read(builder: Any, source: Any, kind: _Lanes) -> Any:
    """16 elements at the pointer ``source``, bf16 patterns as floats."""
    value = builder.load(source, align=1)
    if kind == HALVES:
        wide = builder.shl(builder.zext(value, WORDS.vector), constant(16))
        return builder.bitcast(wide, FLOATS.vector)
    return value


def write(builder: Any, value: Any, target: Any, kind: _Lanes) -> None:
    """Inverse of :func:`read`, rounded to nearest even."""
    given = round_to_bf16(builder, value) if kind == HALVES else value
    builder.store(given, target, align=1)


@intrinsic
def _load(_context, array, at):  # type: ignore[no-untyped-def]
    """16 elements of a contiguous fp32, uint32 or (bf16, as floats) uint16 array from ``at``."""
    kind = kind_in(array)

    def generate(context, builder, _signature, args):  # type: ignore[no-untyped-def]
        return read(builder, place(context, builder, array, *args), kind)

    return (FLOATS if kind == HALVES else kind)(array, types.intp), generate


@intrinsic
def _store(_context, array, at, value):  # type: ignore[no-untyped-def]
    """Inverse of :func:`load`, floats rounded to nearest even where the array is of uint16."""

    def generate(context, builder, _signature, args):  # type: ignore[no-untyped-def]
        write(builder, args[2], place(context, builder, array, *args[:2]), kind_in(array))
        return context.get_dummy_value()

    return types.void(array, types.intp, value), generate


splat: Any = _splat
load: Any = _load
store: Any = _store

"""Compiled search for the scale of a group, for 16 groups at once.

Groups lie side by side, ``[values][16]``; each lane is one group, and sums run down a lane one
value after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from worldpager.quant.kernels import kernel
from worldpager.quant.lanes import (
    LANES,
    TABLES,
    bits_of,
    floats_of,
    load,
    lookup,
    near,
    select,
    select_words,
    size_of,
    splat,
    store,
)

BUCKET = np.float32(0.25)
"""Width of a bucket in steps: narrower than the distance of two midpoints of any grid."""
_FIRST = np.float32(2.0**23)  # added to a small number, leaves it rounded in the last bits
_SMALLEST, _LARGEST = np.float32(2.0**-80), np.float32(2.0**80)


@kernel
def half_to_lanes(words: Any) -> Any:
    """fp16 patterns of finite, non-negative numbers to fp32, exact."""
    return floats_of(words << splat(np.uint32(13))) * splat(np.float32(2.0**112))


@kernel
def lanes_to_half(value: Any) -> Any:
    """Non-negative fp32 to fp16 patterns, nearest even; infinity for what does not fit and NaN."""
    bits = bits_of(value)
    odd = (bits >> splat(np.uint32(13))) & splat(np.uint32(1))
    normal = (bits - splat(np.uint32(0x38000000 - 0xFFF)) + odd) >> splat(np.uint32(13))
    # Adding 0.5 lines a subnormal's last bit up with the last bit of 0.5, which rounds it.
    small = bits_of(value + splat(np.float32(0.5))) - splat(np.uint32(0x3F000000))
    half = select_words(bits < splat(np.uint32(0x38800000)), small, normal)
    return select_words(bits >= splat(np.uint32(0x477FF000)), splat(np.uint32(0x7C00)), half)


@kernel
def level_by_ladder(size: Any, step: Any, middles: Any, levels: Any) -> Any:
    """The level nearest to ``size / step``, ties to the larger."""
    level = splat(levels[0])
    for j in range(7):
        level = select(size >= splat(middles[j]) * step, splat(levels[j + 1]), level)
    return level


@kernel
def sums_by_ladder(sizes: Any, n: Any, step: Any, middles: Any, levels: Any) -> Any:
    """Per lane ``sum |y| level`` and ``sum level^2`` over the ``n`` values of a group."""
    dot, square = splat(np.float32(0.0)), splat(np.float32(0.0))
    for i in range(n):
        size = load(sizes, i * LANES)
        level = level_by_ladder(size, step, middles, levels)
        dot, square = dot + size * level, square + level * level
    return dot, square


@kernel
def sums_by_table(sizes: Any, n: Any, step: Any, buckets: Any) -> Any:
    """As :func:`sums_by_ladder`, to the bit, for ordinary magnitudes.

    A magnitude's bucket, found roughly, tells the one midpoint that is left to compare with.
    """
    middle, below, above = load(buckets, 0), load(buckets, LANES), load(buckets, 2 * LANES)
    scale, first = splat(np.float32(1.0) / BUCKET) / step, splat(_FIRST)
    dot, square = splat(np.float32(0.0)), splat(np.float32(0.0))
    for i in range(n):
        size = load(sizes, i * LANES)
        bucket = bits_of(near(size, scale, first))
        reached = size >= lookup(middle, bucket) * step
        level = select(reached, lookup(above, bucket), lookup(below, bucket))
        dot, square = dot + size * level, square + level * level
    return dot, square


@kernel
def ordinary(most: Any) -> Any:
    """Whether all 16 largest magnitudes are zero or far from the ends of fp32's range."""
    for lane in range(LANES):
        if most[lane] != np.float32(0.0) and not _SMALLEST < most[lane] < _LARGEST:
            return False
    return True


@kernel
def search_scales(
    part: Any,
    n: Any,
    levels: Any,
    middles: Any,
    tries: Any,
    buckets: Any,
    lanes: Any,
    sizes: Any,
    found: Any,
    scales: Any,
) -> Any:
    """Best step (``found[0]``) and stored fp16 scale (``scales``) of each of 16 groups of ``n``
    values; False where one of the first ``lanes`` has no scale that fits.

    For each step, ``tries`` times the largest magnitude, the codes are the nearest levels of
    ``y / step`` and the scale is ``<y, y> / <y, level>``, so that the decoded vector keeps its
    inner product with the original; the least squared error wins, the first among equals.
    """
    most, energy = splat(np.float32(0.0)), splat(np.float32(0.0))
    for i in range(n):
        value = load(part, i * LANES)
        size = size_of(value)
        store(sizes, i * LANES, size)
        most = select(size >= most, size, most)
        energy = energy + value * value
    store(found, LANES, most)
    table = TABLES and ordinary(found[LANES : 2 * LANES])
    error, best = splat(np.float32(np.inf)), splat(np.float32(1.0))
    word = splat(np.uint32(0))
    for candidate in range(len(tries)):
        step = most * splat(tries[candidate])
        if table:
            dot, square = sums_by_table(sizes, n, step, buckets)
        else:
            dot, square = sums_by_ladder(sizes, n, step, middles, levels)
        half = lanes_to_half(energy / dot)
        scale = half_to_lanes(half)
        rest = energy - splat(np.float32(2.0)) * scale * dot + scale * scale * square
        rest = select_fitting(half, rest)
        better = rest < error
        error, best = select(better, rest, error), select(better, step, best)
        word = select_words(better, half, word)
    store(found, 0, best)
    store(scales, 0, word)
    store(found, 2 * LANES, error)
    store(found, 3 * LANES, energy)
    for lane in range(lanes):
        silent = found[3 * LANES + lane] == np.float32(0.0) and found[LANES + lane] == 0
        if not silent and not found[2 * LANES + lane] < np.float32(np.inf):
            return False
    return True


@kernel
def select_fitting(half: Any, rest: Any) -> Any:
    """``rest``, infinite where the scale does not fit 16 bits."""
    fits = half < splat(np.uint32(0x7C00))
    return select(fits, rest, splat(np.float32(np.inf)))


@kernel
def group_codes(part: Any, n: Any, step: Any, middles: Any, half: Any, codes: Any) -> None:
    """Codes of a group: ``half + index`` from zero up, ``half - 1 - index`` below."""
    up, down = splat(half), splat(np.uint32(half - np.uint32(1)))
    one = splat(np.uint32(1))
    for i in range(n):
        value = load(part, i * LANES)
        size = size_of(value)
        index = splat(np.uint32(0))
        for j in range(7):
            index = select_words(size >= splat(middles[j]) * step, index + one, index)
        first = select_words(value < splat(np.float32(0.0)), down, up)
        store(codes, i * LANES, index ^ first)

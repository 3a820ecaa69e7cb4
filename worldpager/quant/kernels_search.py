"""Compiled search for the scale of a group, for 16 groups at once.

Groups lie side by side, ``[values][16]``; each lane is one group, and sums run down a lane one
value after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from worldpager.quant.kernels import float_to_half, half_to_float, kernel

LANES = 16


@kernel
def magnitude(value: Any, ladder: Any, lane: Any) -> Any:
    """Index of the level nearest to ``value / step`` in magnitude, ties to the larger.

    ``ladder``: ``[7][16]`` midpoints between levels, times the step of each lane.
    """
    size = abs(value)
    index = np.uint8(0)
    index = np.uint8(1) if size >= ladder[0, lane] else index
    index = np.uint8(2) if size >= ladder[1, lane] else index
    index = np.uint8(3) if size >= ladder[2, lane] else index
    index = np.uint8(4) if size >= ladder[3, lane] else index
    index = np.uint8(5) if size >= ladder[4, lane] else index
    index = np.uint8(6) if size >= ladder[5, lane] else index
    index = np.uint8(7) if size >= ladder[6, lane] else index
    return index


@kernel
def set_ladder(ladder: Any, middles: Any, steps: Any) -> None:
    """``ladder[j][lane] = middles[j] * steps[lane]``."""
    for j in range(7):
        for lane in range(LANES):
            ladder[j, lane] = middles[j] * steps[lane]


@kernel
def nearest(size: Any, ladder: Any, lane: Any, levels: Any) -> Any:
    """Level nearest to a magnitude ``size``, as :func:`magnitude` but the level itself."""
    level = levels[1] if size >= ladder[0, lane] else levels[0]
    level = levels[2] if size >= ladder[1, lane] else level
    level = levels[3] if size >= ladder[2, lane] else level
    level = levels[4] if size >= ladder[3, lane] else level
    level = levels[5] if size >= ladder[4, lane] else level
    level = levels[6] if size >= ladder[5, lane] else level
    return levels[7] if size >= ladder[6, lane] else level


@kernel
def sums(part: Any, n: Any, levels: Any, ladder: Any, dot: Any, square: Any) -> None:
    """Per lane ``sum |y| level`` and ``sum level^2`` over the ``n`` (even) values of a group.

    Two values a round, added one after the other, so that the sums wait less for their last term.
    """
    eight = (levels[0], levels[1], levels[2], levels[3], levels[4], levels[5], levels[6], levels[7])
    for lane in range(LANES):
        dot[lane] = np.float32(0.0)
        square[lane] = np.float32(0.0)
    for i in range(0, n, 2):
        row = part[i * LANES : (i + 1) * LANES]
        next_row = part[(i + 1) * LANES : (i + 2) * LANES]
        for lane in range(LANES):
            size, next_size = abs(row[lane]), abs(next_row[lane])
            level = nearest(size, ladder, lane, eight)
            next_level = nearest(next_size, ladder, lane, eight)
            dot[lane] = (dot[lane] + size * level) + next_size * next_level
            square[lane] = (square[lane] + level * level) + next_level * next_level


@kernel
def search_scales(
    part: Any,
    n: Any,
    levels: Any,
    middles: Any,
    tries: Any,
    work: Any,
    ladder: Any,
    steps: Any,
    scales: Any,
) -> Any:
    """Best step and stored fp16 scale for each of 16 groups of ``n`` values; False if too large.

    For each step, ``tries`` times the largest magnitude, the codes are the nearest levels of
    ``y / step`` and the scale is ``<y, y> / <y, level>``, so that the decoded vector keeps its
    inner product with the original; the least squared error wins, the first among equals.
    """
    most, energy, error, dot, square, step = work[0], work[1], work[2], work[3], work[4], work[5]
    for lane in range(LANES):
        most[lane] = np.float32(0.0)
        energy[lane] = np.float32(0.0)
        error[lane] = np.float32(np.inf)
        steps[lane] = np.float32(1.0)
        scales[lane] = np.uint16(0)
    for i in range(n):
        row = part[i * LANES : i * LANES + LANES]
        for lane in range(LANES):
            value = row[lane]
            most[lane] = max(most[lane], abs(value))
            energy[lane] += value * value
    for candidate in range(len(tries)):
        for lane in range(LANES):
            step[lane] = most[lane] * tries[candidate]
        set_ladder(ladder, middles, step)
        sums(part, n, levels, ladder, dot, square)
        for lane in range(LANES):
            word = float_to_half(energy[lane] / dot[lane])
            scale = half_to_float(word)
            rest = energy[lane] - np.float32(2.0) * scale * dot[lane] + scale * scale * square[lane]
            better = rest < error[lane]
            error[lane] = rest if better else error[lane]
            scales[lane] = word if better else scales[lane]
            steps[lane] = step[lane] if better else steps[lane]
    for lane in range(LANES):
        if most[lane] > np.float32(0.0) and not error[lane] < np.float32(np.inf):
            return False
    return True


@kernel
def group_codes(part: Any, n: Any, ladder: Any, half: Any, codes: Any) -> None:
    """Codes of a group: ``half + index`` from zero up, ``half - 1 - index`` below."""
    for i in range(n):
        row = part[i * LANES : i * LANES + LANES]
        target = codes[i * LANES : i * LANES + LANES]
        for lane in range(LANES):
            index = magnitude(row[lane], ladder, lane)
            up, down = np.uint8(half + index), np.uint8(half - np.uint8(1) - index)
            target[lane] = down if row[lane] < np.float32(0.0) else up

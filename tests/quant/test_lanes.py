"""Both ways to search for a scale give the same sums, and lanes do what numpy does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldpager.quant.kernels import float_to_half, kernel
from worldpager.quant.kernels_search import lanes_to_half, sums_by_ladder, sums_by_table
from worldpager.quant.lanes import LANES, load, store
from worldpager.quant.lanes_tiles import transpose
from worldpager.quant.rotated import grid


@kernel
def both(sizes, n, step, middles, levels, buckets, out):
    steps = load(step, 0)
    dot, square = sums_by_ladder(sizes, n, steps, middles, levels)
    store(out, 0, dot)
    store(out, LANES, square)
    dot, square = sums_by_table(sizes, n, steps, buckets)
    store(out, 2 * LANES, dot)
    store(out, 3 * LANES, square)


@pytest.mark.parametrize("bits", [3, 4])
@given(seed=st.integers(0, 2**32 - 1), power=st.integers(-70, 70), near=st.booleans())
@settings(max_examples=40)
def test_the_table_and_the_ladder_agree_to_the_bit(
    bits: int, seed: int, power: int, near: bool
) -> None:
    draw, g = np.random.default_rng(seed), grid(bits)
    sizes = np.abs(draw.standard_normal((64, LANES))).astype(np.float32)
    steps = (sizes.max(0) * draw.choice(g.steps, LANES)).astype(np.float32)
    if near:  # a midpoint between levels, one place in the last bit beside it at most
        middles = draw.choice(g.middles[np.isfinite(g.middles)], sizes.shape)
        sizes = (middles * steps).astype(np.float32)
        sizes = np.nextafter(sizes, draw.choice([0, 1, 2], sizes.shape) * sizes)
    unit = np.float32(2.0**power)
    sizes, steps = (sizes * unit).astype(np.float32), (steps * unit).astype(np.float32)
    out = np.empty(4 * LANES, np.float32)
    both(sizes.ravel(), 64, steps, g.middles, g.magnitudes, g.buckets, out)
    assert np.array_equal(out[: 2 * LANES], out[2 * LANES :])


@kernel
def halves(values, words):
    store(words, 0, lanes_to_half(load(values, 0)))


@given(words=st.lists(st.integers(0, 0x7F7FFFFF), min_size=LANES, max_size=LANES))
def test_lanes_round_to_half_like_one_value(words: list[int]) -> None:
    values, found = np.array(words, np.uint32).view(np.float32), np.empty(LANES, np.uint32)
    halves(values, found)
    assert found.tolist() == [float_to_half(value) for value in values]


@kernel
def turn(source, target):
    transpose(source, 0, LANES, target, 0, LANES)


def test_transpose_turns_a_tile_over_its_diagonal() -> None:
    source = np.arange(256, dtype=np.uint32)
    target = np.empty_like(source)
    turn(source, target)
    assert np.array_equal(target.reshape(16, 16), source.reshape(16, 16).T)

"""Attention over stored blocks is attention over what they decode to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.blocks import stored
from worldpager.errors import CodecError, ConfigError
from worldpager.model_adapter.attention import paged
from worldpager.model_adapter.attention.paged import attend_segments, segments_reference
from worldpager.model_adapter.attention.segments import DenseKV, Segment


def queries(count: int, batch: int = 1, heads: int = 2, dim: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(batch, count, heads, dim, generator=generator)


def dense(tokens: int, batch: int = 1, heads: int = 2, dim: int = 16) -> DenseKV:
    generator = torch.Generator().manual_seed(tokens)
    k, v = torch.randn(2, batch, tokens, heads, dim, generator=generator)
    return DenseKV(k, v)


def check(q: torch.Tensor, segments: list[Segment], error: float = 2e-5) -> None:
    out = attend_segments(q, segments)
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    expected = segments_reference(q, segments)
    torch.testing.assert_close(out.float(), expected, atol=error, rtol=error)


@settings(max_examples=25)
@given(
    st.sampled_from(["int4", "int3"]),
    st.sampled_from([16, 24, 40, 96, 128]),
    st.lists(st.tuples(st.integers(1, 60), st.floats(-400, 400)), min_size=1, max_size=3),
    st.integers(1, 40),
    st.integers(0, 30),
)
def test_exact_to_decoding_first(
    codec: str, dim: int, blocks: list[tuple[int, float]], count: int, recent: int
) -> None:
    segments: list[Segment] = [
        stored(tokens, dim=dim, codec=codec, shift=shift, seed=i)
        for i, (tokens, shift) in enumerate(blocks)
    ]
    if recent:
        segments.insert(1, dense(recent, dim=dim))
    check(queries(count, dim=dim), segments)


@pytest.mark.parametrize("shift", [0.0, -7.5])
@pytest.mark.parametrize("codec", ["int4", "int3"])
def test_key_means_become_a_bias(codec: str, shift: float) -> None:
    block = stored(300, codec=codec, shift=shift, offset=5.0)
    assert block.moved_means is not None and float(block.moved_means.abs().max()) > 3
    check(queries(20), [dense(10), block])


def test_pages_of_a_block() -> None:
    pages = [stored(300, shift=4.0, page=page) for page in ((0, 100), (100, 101), (101, 300))]
    whole = stored(300, shift=4.0)
    assert [page.tokens for page in pages] == [100, 1, 199]
    check(queries(20), list(pages))
    torch.testing.assert_close(
        attend_segments(queries(20), pages), attend_segments(queries(20), [whole])
    )


def test_batch_items_see_their_own_heads() -> None:
    check(queries(20, batch=2), [dense(12, batch=2), stored(30, heads=4, shift=3.0)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    q = queries(20, dim=64).to(dtype)
    check(q, [dense(12, dim=64), stored(48, dim=64, shift=3.0)], error=0.03)


def test_a_small_scratch_and_several_threads_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = queries(20, heads=3)
    segments = [dense(9, heads=3), stored(600, heads=3, shift=3.0), stored(40, heads=3, seed=1)]
    expected = attend_segments(q, segments)
    monkeypatch.setattr(paged, "SCRATCH", 4000)
    torch.testing.assert_close(attend_segments(q, segments), expected, atol=2e-5, rtol=2e-5)
    monkeypatch.setattr(paged, "SCRATCH", 8 << 20)
    monkeypatch.setattr(paged, "_FEW", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(attend_segments(q, segments), expected)


def test_extreme_scores_do_not_overflow() -> None:
    q = queries(8) * 200
    check(q, [dense(9), stored(300, offset=20.0), stored(20, shift=9.0, seed=3)], error=1e-3)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        attend_segments(queries(4), [])
    with pytest.raises(CodecError, match="heads"):
        attend_segments(queries(4, heads=3), [stored(10)])
    with pytest.raises(CodecError, match="int8"):
        stored(10, codec="int8")
    for page in ((0, 11), (5, 5), (-1, 4)):
        with pytest.raises(CodecError, match="page"):
            stored(10, page=page)

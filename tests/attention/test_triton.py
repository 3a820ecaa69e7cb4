"""The Triton kernels' arithmetic, in Triton's interpreter, against the torch references."""

from __future__ import annotations

import os

import pytest
import torch

from tests.attention.blocks import stored
from worldpager.errors import CodecError
from worldpager.model_adapter.attention.paged import (
    attend_segments,
    fill_levels,
    segments_reference,
)
from worldpager.model_adapter.attention.routing import route
from worldpager.model_adapter.attention.segments import DenseKV
from worldpager.model_adapter.attention.sparse import sparse_reference

pytest.importorskip("triton", reason="needs the extra `triton`")


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where tensors lie; without a CUDA device the test session runs Triton's interpreter."""
    if request.param == "cuda":
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled for the CUDA device here, not interpreted")
    return "cpu"


@pytest.mark.parametrize(
    "queries, keys, batch, block, dim",
    [(40, 70, 2, 16, 16), (33, 80, 1, 24, 24), (16, 128, 1, 64, 32)],
)
def test_chosen_blocks(device: str, queries: int, keys: int, batch: int, block: int, dim: int):
    from worldpager.model_adapter.attention.triton_kernels import attend_blocks_triton

    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(batch, n, 2, dim, generator=generator).to(device) for n in (queries, keys, keys)
    )
    chosen = route(q * 3, k, block=block, tau_min=0.3)
    assert 0 < chosen.density < 1
    out = attend_blocks_triton(q, k, v, chosen)
    torch.testing.assert_close(out, sparse_reference(q, k, v, chosen), atol=1e-4, rtol=1e-4)
    # the interpreter's dot takes bf16 for integers, so 16 bits are fp16 there
    low = [x.half() if device == "cpu" else x.bfloat16() for x in (q, k, v)]
    torch.testing.assert_close(
        attend_blocks_triton(*low, chosen).float(), out, atol=0.05, rtol=0.05
    )


@pytest.mark.parametrize(
    "tokens, dim, shift, page",
    [(70, 16, 0.0, None), (300, 16, 5.0, (40, 290)), (20, 96, -3.0, None), (65, 128, 2.0, None)],
)
def test_stored_blocks(
    device: str, tokens: int, dim: int, shift: float, page: tuple[int, int] | None
) -> None:
    """The kernel inside :func:`attend_segments`, which calls it for tensors on a CUDA device."""
    from worldpager.model_adapter.attention.triton_kernels import attend_levels_triton

    block = stored(tokens, dim=dim, shift=shift, page=page)
    q = torch.randn(2, 20, dim, generator=torch.Generator().manual_seed(2))
    levels = torch.empty(2, 2, block.tokens, dim)
    fill_levels(levels, block, (0, 2), (block.first, block.stop))
    scores = q @ levels[0].transpose(1, 2) * dim**-0.5
    out, weight = attend_levels_triton(q.to(device), block)
    torch.testing.assert_close(out.cpu(), scores.softmax(-1) @ levels[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(weight.cpu(), scores.logsumexp(-1), atol=1e-4, rtol=1e-4)


def test_three_bits_are_refused(device: str) -> None:
    from worldpager.model_adapter.attention.triton_kernels import attend_levels_triton

    with pytest.raises(CodecError, match="int4"):
        attend_levels_triton(torch.zeros(2, 4, 16, device=device), stored(9, codec="int3"))


@pytest.mark.gpu
def test_a_window_on_the_gpu() -> None:
    """Dense and stored segments in 16 bits on the device, against fp32 on the CPU."""
    q = torch.randn(1, 40, 2, 64, generator=torch.Generator().manual_seed(2))
    k, v = torch.randn(2, 1, 30, 2, 64, generator=torch.Generator().manual_seed(3))
    block = stored(700, dim=64, shift=3.0)
    there = [x.cuda().bfloat16() for x in (q, k, v)]
    out = attend_segments(there[0], [DenseKV(*there[1:]), block])
    expected = segments_reference(q, [DenseKV(k, v), block])
    torch.testing.assert_close(out.float().cpu(), expected, atol=0.03, rtol=0.03)

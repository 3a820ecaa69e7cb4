"""The Triton kernels' arithmetic, in Triton's interpreter, against the torch references."""

from __future__ import annotations

import os

import pytest
import torch

from worldpager.model_adapter.attention.routing import route
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

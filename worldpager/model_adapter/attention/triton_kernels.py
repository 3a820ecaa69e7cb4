"""Triton kernels: attention over chosen blocks, and over int4 blocks as they are stored.

Needs the extra ``triton``; imported when tensors are on a CUDA device. With ``TRITON_INTERPRET=1``
set before the import they run on CPU tensors, which is how their arithmetic is tested.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from worldpager.model_adapter.attention.routing import Selection


@triton.jit
def _chosen_blocks(
    q: Any, k: Any, v: Any, out: Any, order: Any, count: Any, scale: Any,
    queries: Any, keys: Any, heads: Any, key_blocks: Any,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """One query block of one head: online softmax over the key blocks chosen for it.

    Tensors are contiguous ``[B, tokens, H, D]``. ``ROWS`` and ``WIDE``: ``BLOCK`` and ``DIM``
    rounded up to powers of two.
    """
    block, item = tl.program_id(0), tl.program_id(1)
    first = tl.program_id(1) // heads * heads  # the batch item's first head
    row, channel = tl.arange(0, ROWS), tl.arange(0, WIDE)
    at = block * BLOCK + row
    real = (row < BLOCK) & (at < queries)
    pitch = heads * DIM
    query_base = (first * queries + item - first) * DIM
    key_base = (first * keys + item - first) * DIM
    inside = real[:, None] & (channel < DIM)[None, :]
    where = query_base + at[:, None] * pitch + channel[None, :]
    query = tl.load(q + where, mask=inside, other=0.0)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDE], tl.float32)
    entry = item * tl.num_programs(0) + block
    for i in range(tl.load(count + entry)):
        chosen = tl.load(order + entry * key_blocks + i)
        token = chosen * BLOCK + row
        there = (row < BLOCK) & (token < keys)
        source = key_base + token[:, None] * pitch + channel[None, :]
        within = there[:, None] & (channel < DIM)[None, :]
        key = tl.load(k + source, mask=within, other=0.0)
        value = tl.load(v + source, mask=within, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(there[None, :], score, float("-inf"))
        above = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp(score - above[:, None])
        shrink = tl.exp(most - above)
        total = total * shrink + tl.sum(weight, 1)
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        most = above
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + where, mixed.to(out.dtype.element_ty), mask=inside)


def attend_blocks_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: Selection
) -> torch.Tensor:
    """See :func:`~worldpager.model_adapter.attention.sparse.attend_blocks`; one launch."""
    batch, queries, heads, dim = q.shape
    q, k, v = (x.contiguous() for x in (q, k, v))
    out = torch.empty_like(q)
    query_blocks, key_blocks = chosen.order.shape[-2:]
    _chosen_blocks[(query_blocks, batch * heads)](
        q, k, v, out, chosen.order.contiguous(), chosen.count.contiguous(), dim**-0.5,
        queries, k.shape[1], heads, key_blocks,
        BLOCK=chosen.block,
        ROWS=max(16, triton.next_power_of_2(chosen.block)),
        DIM=dim,
        WIDE=max(16, triton.next_power_of_2(dim)),
    )  # fmt: skip
    return out

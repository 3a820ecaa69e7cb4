"""Triton kernels: attention over chosen blocks, and over int4 blocks as they are stored.

Needs the extra ``triton``; imported when tensors are on a CUDA device. With ``TRITON_INTERPRET=1``
set before the import they run on CPU tensors, which is how their arithmetic is tested.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from worldpager.errors import CodecError
from worldpager.model_adapter.attention.routing import Selection
from worldpager.model_adapter.attention.segments import StoredKV
from worldpager.quant.groups import GROUP, group_count
from worldpager.quant.rotated import grid


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


@triton.jit
def _levels(codes: Any, at: Any, group: Any, scales: Any, table: Any, inside: Any) -> Any:
    """Scaled levels of the even and of the odd channels that the bytes at ``at`` hold."""
    byte = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    word = tl.load(scales + group, mask=inside, other=0) & 0x7FFF
    scale = word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    even = tl.load(table + (byte & 15), mask=inside, other=0.0) * scale
    odd = tl.load(table + (byte >> 4), mask=inside, other=0.0) * scale
    return even, odd


@triton.jit
def _stored_block(
    q_even: Any, q_odd: Any, codes_k: Any, scales_k: Any, codes_v: Any, scales_v: Any, table: Any,
    out_even: Any, out_odd: Any, weight_out: Any, scale: Any,
    queries: Any, first: Any, stop: Any, heads: Any,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Some queries of one head over tokens ``first`` to ``stop`` of a stored 4-bit block.

    Byte ``i`` of a row holds channels ``2i`` and ``2i + 1``, so even and odd channels are kept
    apart: ``[heads, queries, HALF]`` for queries and outputs alike. ``WIDE``: ``HALF`` rounded up
    to a power of two. ``GROUPS`` scales a row, of ``GROUP`` bytes each, the last with what is left.
    """
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    byte, token = tl.arange(0, WIDE), tl.arange(0, KEYS)
    real = row < queries
    inside = real[:, None] & (byte < HALF)[None, :]
    where = (head * queries + row)[:, None] * HALF + byte[None, :]
    even = tl.load(q_even + where, mask=inside, other=0.0)
    odd = tl.load(q_odd + where, mask=inside, other=0.0)
    group = tl.minimum(byte // GROUP, GROUPS - 1)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed_even = tl.zeros([ROWS, WIDE], tl.float32)
    mixed_odd = tl.zeros([ROWS, WIDE], tl.float32)
    for start in range(first, stop, KEYS):
        there = start + token < stop
        index = (start + token) * heads + head
        at = index[:, None] * HALF + byte[None, :]
        of = index[:, None] * GROUPS + group[None, :]
        within = there[:, None] & (byte < HALF)[None, :]
        key_even, key_odd = _levels(codes_k, at, of, scales_k, table, within)
        score = tl.dot(even, tl.trans(key_even.to(even.dtype)), input_precision="ieee")
        score += tl.dot(odd, tl.trans(key_odd.to(odd.dtype)), input_precision="ieee")
        score = tl.where(there[None, :], score * scale, float("-inf"))
        above = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp(score - above[:, None])
        shrink = tl.exp(most - above)
        total = total * shrink + tl.sum(weight, 1)
        value_even, value_odd = _levels(codes_v, at, of, scales_v, table, within)
        low = weight.to(even.dtype)
        mixed_even = mixed_even * shrink[:, None]
        mixed_even += tl.dot(low, value_even.to(even.dtype), input_precision="ieee")
        mixed_odd = mixed_odd * shrink[:, None]
        mixed_odd += tl.dot(low, value_odd.to(even.dtype), input_precision="ieee")
        most = above
    tl.store(out_even + where, mixed_even / total[:, None], mask=inside)
    tl.store(out_odd + where, mixed_odd / total[:, None], mask=inside)
    tl.store(weight_out + head * queries + row, most + tl.log(total), mask=real)


def attend_levels_triton(
    queries: torch.Tensor, segment: StoredKV
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of turned queries ``[heads, queries, D]`` over a stored ``int4`` block's levels.

    Returns mixed values, rotated as stored, fp32 as ``queries``, and the log of the sums of
    exponentials, fp32 ``[heads, queries]``. One launch; K and V are never written down. Raises
    :class:`CodecError` for 3-bit codes.
    """
    if segment.bits != 4:
        raise CodecError("the GPU kernel reads int4 blocks; store in int4 or attend on the CPU")
    heads, count, dim = queries.shape
    tokens, groups = segment.shape.tokens, group_count(dim)
    payload = segment.on(queries.device).view(2, -1)
    cut = tokens * heads * groups * 2
    scales = payload[:, :cut].contiguous().view(torch.int16)
    codes = payload[:, cut:]
    table = torch.from_numpy(grid(4).table).to(queries.device)
    even, odd = (queries[..., i::2].contiguous() for i in range(2))
    mixed = torch.empty(2, heads, count, dim // 2, device=queries.device)
    weight = torch.empty(heads, count, device=queries.device)
    rows = 64 if count > 16 else 16
    _stored_block[(triton.cdiv(count, rows), heads)](
        even, odd, codes[0], scales[0], codes[1], scales[1], table,
        mixed[0], mixed[1], weight, dim**-0.5,
        count, segment.first, segment.stop, heads,
        ROWS=rows, KEYS=64, HALF=dim // 2, WIDE=max(16, triton.next_power_of_2(dim // 2)),
        GROUPS=groups, GROUP=GROUP // 2,
    )  # fmt: skip
    return torch.stack([mixed[0], mixed[1]], -1).flatten(-2), weight

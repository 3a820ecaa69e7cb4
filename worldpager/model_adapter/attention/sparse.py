"""Attention over chosen key blocks only, and HSA's sum of it with the compressed branch.

On the CPU the chosen blocks of several query blocks are gathered side by side and attended to with
batched matrix products, so that only the chosen share of keys is read and multiplied. Query blocks
with about the same number of chosen blocks go together, which keeps padding small.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from worldpager.errors import ConfigError
from worldpager.model_adapter.attention.linear import LinearWeights, attend_rows
from worldpager.model_adapter.attention.routing import BLOCK, TAU_MAX, TAU_MIN, Selection, route

_TOGETHER = 8
"""Query blocks attended to in one batched product: few, so that scores and gathered keys stay in
the cache; enough for torch's threads."""


def sparse_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: Selection
) -> torch.Tensor:
    """The definition: dense scores, what was not chosen masked out. fp32 as ``q``.

    ``q`` ``[B, queries, H, D]``, ``k``, ``v`` ``[B, keys, H, D]``, any float dtype and device. A
    query block for which nothing was chosen gets zeros. Source: WorldAttention (HSA).
    """
    _check(q, k, v, chosen)
    mask = chosen.mask
    for axis, tokens in ((2, q.shape[1]), (3, k.shape[1])):
        mask = mask.repeat_interleave(chosen.block, axis).narrow(axis, 0, tokens)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.float())


def attend_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: Selection
) -> torch.Tensor:
    """The same, touching chosen blocks only; in ``q``'s dtype.

    Shapes as in :func:`sparse_reference`; ``q``, ``k`` and ``v`` of one dtype and device. On CUDA a
    Triton kernel does it, on the CPU gathered batched products. Raises :class:`ConfigError` where
    the selection was made for other lengths.
    """
    _check(q, k, v, chosen)
    if q.is_cuda:
        from worldpager.model_adapter.attention.triton_kernels import attend_blocks_triton

        return attend_blocks_triton(q, k, v, chosen)
    return _attend_gathered(q, k, v, chosen)


def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block: int = BLOCK,
    tau_min: float = TAU_MIN,
    tau_max: float = TAU_MAX,
) -> torch.Tensor:
    """Head-adaptive block-sparse attention, for any model and without training.

    ``q`` ``[B, queries, H, D]``, ``k``, ``v`` ``[B, keys, H, D]`` of one dtype, keys after RoPE;
    returns as ``q``. Source: WorldAttention (HSA), adaptive branch.
    """
    chosen = route(q, k, block=block, tau_min=tau_min, tau_max=tau_max)
    return attend_blocks(q, k, v, chosen)


def hsa_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weights: LinearWeights,
    *,
    rows: tuple[torch.Tensor, torch.Tensor] | None = None,
    segment: int | None = None,
    tau_min: float = TAU_MIN,
    tau_max: float = TAU_MAX,
) -> torch.Tensor:
    """HSA in full: ``sparse + sigmoid(W q + b) * linear``, in ``q``'s dtype and shape.

    Shapes as in :func:`sparse_attention`. ``rows``: compressed K and V of this window, as
    :meth:`CompressedTier.rows` gives them; by default they are computed from ``k`` and ``v`` in
    segments of ``segment`` tokens. Source: WorldAttention (HSA), gated fusion.
    """
    sparse = sparse_attention(q, k, v, block=weights.block, tau_min=tau_min, tau_max=tau_max)
    if rows is None:
        rows = (
            weights.compress(k, weights.proj_k, segment),
            weights.compress(v, weights.proj_v, segment),
        )
    fused = sparse.float() + weights.gate(q) * attend_rows(q, *rows)
    return fused.to(q.dtype)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: Selection) -> None:
    blocks = [-(-x.shape[1] // chosen.block) for x in (q, k)]
    wanted = [q.shape[0], q.shape[2], *blocks]
    if list(chosen.order.shape) != wanted or k.shape != v.shape:
        raise ConfigError(
            f"the selection is for [batch, heads, query blocks, key blocks] = "
            f"{list(chosen.order.shape)}, the tensors need {wanted} and K and V alike"
        )


def _attend_gathered(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: Selection
) -> torch.Tensor:
    batch, queries, heads, dim = q.shape
    block, key_blocks = chosen.block, chosen.order.shape[-1]
    # one row a block, [B * H * blocks, block * D], so that gathering is copying whole rows
    query_rows = _in_blocks(q, block)
    key_rows, value_rows = _in_blocks(k, block).flatten(1), _in_blocks(v, block).flatten(1)
    out = torch.zeros_like(query_rows)
    counts = chosen.count.flatten()
    base = torch.arange(batch * heads).repeat_interleave(chosen.count.shape[-1]) * key_blocks
    ids = chosen.order.flatten(0, 2) + base[:, None]
    by_count = counts.argsort(stable=True)
    by_count = by_count[counts[by_count] > 0]
    if not len(by_count):
        return torch.zeros_like(q)
    scratch = [key_rows.new_empty(_TOGETHER * int(counts.max()), block * dim) for _ in range(2)]
    missing = key_blocks * block - k.shape[1]  # tokens that the last block lacks
    for items in torch.split(by_count, _TOGETHER):
        most = int(counts[items[-1]])
        rows = ids[items, :most].reshape(-1)
        keys, values = (
            torch.index_select(source, 0, rows, out=target[: len(rows)]).view(
                len(items), 1, most * block, dim
            )
            for source, target in zip((key_rows, value_rows), scratch, strict=True)
        )
        mask = _mask(
            counts[items],
            rows.view(len(items), most) % key_blocks == key_blocks - 1,
            block,
            missing,
        )
        mixed = F.scaled_dot_product_attention(query_rows[items][:, None], keys, values, mask)
        out[items] = mixed[:, 0]
    return out.view(batch, heads, -1, dim)[:, :, :queries].transpose(1, 2).contiguous()


def _in_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """``[B, tokens, H, D]`` to ``[B * H * blocks, block, D]``, the last block filled with zeros."""
    x = F.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % block))
    return x.reshape(-1, block, x.shape[-1])


def _mask(
    counts: torch.Tensor, last: torch.Tensor, block: int, missing: int
) -> torch.Tensor | None:
    """Which gathered keys are real, bool ``[items, 1, 1, chosen * block]``; ``None`` for all.

    Not real are those that fill up an item (``counts`` ``[items]`` are chosen), and the ``missing``
    tokens at the end of the last key block (``last``: bool ``[items, chosen]``).
    """
    items, most = last.shape
    real = (torch.arange(most) < counts[:, None])[..., None].expand(-1, -1, block)
    if missing:
        tail = torch.arange(block) >= block - missing
        real = real & ~(last[..., None] & tail)
    return None if bool(real.all()) else real.reshape(items, 1, 1, -1)

"""Attention over segments, of which stored ones are read as they are: 4.25 bits a value.

A stored block is ``K = R (e * H z + mean)`` and ``V = e * H z``, ``z`` being scaled levels. So a
query meets ``z`` after one matrix product (its own rotation back in time and the codec's), the mean
adds one bias per query and block, and values stay rotated until the very end, since attention only
mixes them. Segments are attended to one after the other and combined by the log of the sum of
exponentials: the online softmax, a segment at a time. On the CPU a few heads of a block are turned
into levels at a time, in a scratch of :data:`SCRATCH` bytes, and attended to by torch's own kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np
import torch

from worldpager.errors import CodecError, ConfigError
from worldpager.model_adapter.attention.kernels import levels_to_16_bits, levels_to_fp32
from worldpager.model_adapter.attention.segments import (
    DenseKV,
    Segment,
    StoredKV,
    head_rotation,
)
from worldpager.quant.groups import group_ends
from worldpager.quant.kernels import BF16, FP16
from worldpager.quant.rotated import grid

SCRATCH = 8 << 20
"""Bytes for a few heads' levels, keys and values together: they stay in the cache."""

_FEW = 1 << 16
"""Values that are not worth a second thread."""

Part = tuple[torch.Tensor, torch.Tensor]


def attend_segments(q: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
    """Softmax attention, scale ``1 / sqrt(D)``, over all segments as if they were one K and V.

    ``q`` ``[B, queries, H, D]`` after RoPE, bf16, fp16 or fp32; returns the same, contiguous.
    Stored blocks have the batch folded into heads, ``[tokens, B * H, D]``; dense segments are taken
    in ``q``'s dtype. As exact as decoding the blocks to that dtype and attending to it all. Raises
    :class:`ConfigError` without segments, :class:`CodecError` for blocks of another shape.
    """
    if not segments:
        raise ConfigError("attention needs at least one segment")
    stored = [x for x in segments if isinstance(x, StoredKV)]
    dense = [(_fold(x.k), _fold(x.v)) for x in segments if isinstance(x, DenseKV)]
    for segment in stored:
        _check(q, segment)
    queries, out = _fold(q), torch.empty_like(q, memory_format=torch.contiguous_format)
    results = out.transpose(1, 2)  # [B, H, queries, D]
    back = head_rotation(q.shape[3]).T.to(q.device)
    for heads in _groups(queries, stored):
        some = queries[heads]
        plain, rotated = _Mixture(some), _Mixture(some)
        for k, v in dense:
            plain.add(*_attend(some, k[heads].to(q.dtype), v[heads].to(q.dtype)))
        for segment in stored:
            _add_stored(rotated, some, segment, heads)
        if stored:
            plain.add(rotated.out @ back, rotated.weight)
        for i, head in enumerate(range(heads.start, heads.stop)):
            results[divmod(head, q.shape[2])] = plain.out[i]
    return out


def segments_reference(q: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
    """The definition: decode every stored segment to fp32, attend to it all at once, in fp32.

    Shapes as in :func:`attend_segments`; takes the memory that it saves. CPU only.
    """
    parts = [
        (x.k, x.v) if isinstance(x, DenseKV) else x.decode(len(q), torch.float32) for x in segments
    ]
    k, v = (torch.cat([part[i].float() for part in parts], 1) for i in range(2))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), v)


class _Mixture:
    """Attention over what was added so far: ``out`` ``[heads, queries, D]`` and ``weight``
    ``[heads, queries]``, the log of the sum of exponentials, both fp32.
    """

    def __init__(self, queries: torch.Tensor) -> None:
        self.out = torch.zeros_like(queries, dtype=torch.float32)
        self.weight = torch.full_like(self.out[..., 0], -torch.inf)

    def add(self, out: torch.Tensor, weight: torch.Tensor) -> None:
        """Mix in attention over other keys."""
        self.out.lerp_(out.float(), torch.sigmoid(weight - self.weight)[..., None])
        torch.logaddexp(self.weight, weight, out=self.weight)


def _check(q: torch.Tensor, segment: StoredKV) -> None:
    shape, heads = segment.shape, q.shape[0] * q.shape[2]
    if (shape.heads, shape.head_dim) != (heads, q.shape[3]):
        raise CodecError(
            f"queries {list(q.shape)} need blocks of {heads} heads of {q.shape[3]}, not {shape}"
        )


def _fold(x: torch.Tensor) -> torch.Tensor:
    """``[B, tokens, H, D]`` as ``[B * H, tokens, D]``; a view for a single batch item."""
    return x.transpose(1, 2).flatten(0, 1)


def _groups(queries: torch.Tensor, stored: Sequence[StoredKV]) -> Iterator[slice]:
    """Heads to go through together: all on a GPU, else as many as the scratch has room for."""
    heads, count, dim = queries.shape
    rows = max([count, *(segment.tokens for segment in stored)])
    room = SCRATCH // (2 * rows * dim * queries.element_size())
    step = heads if queries.is_cuda else min(heads, max(1, room))
    for head in range(0, heads, step):
        yield slice(head, min(head + step, heads))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Part:
    """Attention ``[heads, tokens, D]`` and the log of the sums that normalised it, fp32."""
    parts = [x[None] for x in (q, k, v)]
    if q.is_cuda:
        out, weight = torch.ops.aten._scaled_dot_product_flash_attention(*parts)[:2]
    else:
        out, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts)
    return out[0], weight[0]


def _add_stored(mixture: _Mixture, queries: torch.Tensor, segment: StoredKV, heads: slice) -> None:
    """Mix in a stored segment's values, rotated as they are stored."""
    turned = queries.float() @ segment.query_matrix.to(queries.device)
    bias: torch.Tensor | float = 0.0
    if segment.moved_means is not None:
        means = segment.moved_means[heads].to(queries.device)
        bias = torch.einsum("hqd,hd->hq", queries.float(), means) * queries.shape[2] ** -0.5
    turned = turned.to(queries.dtype)
    if queries.is_cuda:
        from worldpager.model_adapter.attention.triton_kernels import attend_levels_triton

        out, weight = attend_levels_triton(turned, segment)
        mixture.add(out, weight + bias)
        return
    step = max(1, SCRATCH // (2 * len(queries) * queries.shape[2] * queries.element_size()))
    scratch = queries.new_empty(2, len(queries), min(step, segment.tokens), queries.shape[2])
    for first in range(segment.first, segment.stop, step):
        end = min(first + step, segment.stop)
        levels = scratch[:, :, : end - first]
        fill_levels(levels, segment, (heads.start, heads.stop), (first, end))
        out, weight = _attend(turned, *levels)
        mixture.add(out, weight + bias)


def fill_levels(
    levels: torch.Tensor, segment: StoredKV, heads: tuple[int, int], tokens: tuple[int, int]
) -> None:
    """Write a block's scaled levels into ``levels`` ``[2, heads, tokens, D]`` (K, then V).

    ``heads`` and ``tokens``: ranges of the block. Shared among torch's number of threads, none of
    which holds the interpreter lock.
    """
    shape = segment.shape
    dims = (shape.tokens, shape.heads, shape.head_dim)
    block = (dims, group_ends(shape.head_dim), segment.bits, grid(segment.bits).table)
    workers = torch.get_num_threads() if levels.numel() > _FEW else 1
    cuts = [tokens[0] + (tokens[1] - tokens[0]) * i // workers for i in range(workers + 1)]

    def fill(half: int, start: int, stop: int) -> None:
        data, out = segment.halves[half], levels[half][:, start - tokens[0] : stop - tokens[0]]
        if out.dtype == torch.float32:
            levels_to_fp32(data, *block, heads[0], start, out.numpy())
        else:
            kind = BF16 if out.dtype == torch.bfloat16 else FP16
            words = out.view(torch.int16).numpy().view(np.uint16)
            levels_to_16_bits(data, *block, heads[0], start, words, kind)

    jobs = [(half, *span) for half in range(2) for span in pairwise(cuts)]
    if workers == 1:
        for job in jobs:
            fill(*job)
        return
    for done in [_threads(workers).submit(fill, *job) for job in jobs]:
        done.result()


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="worldpager-levels")

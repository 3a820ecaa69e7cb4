"""Layers of the built-in world model: rotary positions, attention over a KV cache, the block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldpager.model_adapter.attention.paged import attend_segments
from worldpager.model_adapter.attention.segments import DenseKV, StoredKV
from worldpager.model_adapter.attention.sparse import sparse_attention
from worldpager.model_adapter.builtin.config import ModelConfig


class LayerCache(TypedDict):
    """One layer's KV: bf16 `[B, capacity, heads, head_dim]` and two int64 tensors of shape [1].

    `global_end_index` is the absolute token offset after the last token written, and
    `local_end_index` the row after it. `memory`: stored blocks to attend to besides.
    """

    k: Tensor
    v: Tensor
    global_end_index: Tensor
    local_end_index: Tensor
    memory: NotRequired[Sequence[StoredKV]]


@dataclass(frozen=True)
class Beside:
    """How C chunks lie side by side in training, `[clean | noisy]`, instead of in a cache.

    `masks`: for chunk i `[2 * B, 1, 1, (i + 1) * tokens]`, added to scores. `damage` `[B, C]`: what
    storing does to a chunk's keys and values, as the ratio of error to value (root mean squares).
    """

    masks: Sequence[Tensor]
    damage: Tensor


def rope_angles(rows: int, pairs: int, theta: float) -> Tensor:
    """Angle of each position and pair in radians: float64 `[rows, pairs]`."""
    frequency = theta ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    return torch.arange(rows, dtype=torch.float64)[:, None] * frequency


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs (2i, 2i + 1) of `[..., L, H, D]`; cos and sin `[..., L, D / 2]`."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class HeadNorm(nn.Module):
    """Root-mean-square norm over the channels of each head, with a learnt gain."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain


class SelfAttention(nn.Module):
    """Attention over the cache and the current chunk; in training over chunks side by side.

    `max_attention_size` and `sink_tokens` (both in tokens) may be set from outside between chunks,
    and so may `sparse`: the share of attention mass to keep, or `None` for all of it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.max_attention_size = config.rope_rows * config.tokens_per_frame
        self.sink_tokens = config.tokens_per_chunk
        self.sparse: float | None = None
        self.frame_tokens = config.tokens_per_frame
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm_q = HeadNorm(config.head_dim)
        self.norm_k = HeadNorm(config.head_dim)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_cache: LayerCache | None = None,
        current_start: int = 0,
        beside: Beside | None = None,
    ) -> Tensor:
        """x `[B, L, width]`; cos and sin `[B or 1, L, head_dim / 2]`; returns `[B, L, width]`."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, self.head_dim).unbind(2)
        q = rotate(self.norm_q(q), cos, sin)
        k = rotate(self.norm_k(k), cos, sin)
        if kv_cache is not None:
            # The cache holds bf16; float32 queries meet it in float32, in contiguous copies, so
            # the same window gives the same bits in a ring of any size.
            k, v = self._append(kv_cache, k, v, current_start)
            mixed = self._attend(q, k, v, kv_cache.get("memory", ()))
        elif beside is not None:
            mixed = _side_by_side(q.to(v.dtype), k.to(v.dtype), v, beside)
        else:
            raise TypeError("attention needs a cache, or chunks side by side")
        projected: Tensor = self.out(mixed.reshape(batch, length, width))
        return projected

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, memory: Sequence[StoredKV]) -> Tensor:
        """Attention to the cache, `[B, W, H, D]` float32, and to stored blocks; as `q`."""
        if memory:
            return attend_segments(q, [DenseKV(k, v), *memory])
        if self.sparse is not None:
            return sparse_attention(q, k, v, block=self.frame_tokens, tau_min=self.sparse)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    def _append(
        self, cache: LayerCache, k: Tensor, v: Tensor, current_start: int
    ) -> tuple[Tensor, Tensor]:
        """Write the chunk into the cache; the window that it attends to, `[B, W, H, D]` float32."""
        length = k.shape[1]
        current_end = current_start + length
        fresh = current_end - int(cache["global_end_index"])
        filled = int(cache["local_end_index"])
        capacity = cache["k"].shape[1]
        if fresh not in (0, length) or filled + fresh < length:
            raise ValueError(
                f"the chunk at token {current_start} neither follows nor repeats the last one: the "
                f"cache ends at {current_end - fresh} with {filled} rows filled; set "
                "global_end_index and local_end_index to where the chunk begins"
            )
        if fresh > 0 and filled + fresh > capacity:
            evicted = filled + fresh - capacity
            kept = filled - evicted - self.sink_tokens
            if kept < 0:
                raise ValueError(
                    f"a ring of {capacity} tokens cannot hold a sink of {self.sink_tokens} and a "
                    f"chunk of {length}: allocate more"
                )
            for rows in (cache["k"], cache["v"]):
                first = self.sink_tokens + evicted
                moved = rows[:, first : first + kept].clone()
                rows[:, self.sink_tokens : self.sink_tokens + kept] = moved
            filled -= evicted
        end = filled + fresh
        start = end - length
        cache["k"][:, start:end] = k.to(cache["k"].dtype)
        cache["v"][:, start:end] = v.to(cache["v"].dtype)
        cache["global_end_index"].fill_(current_end)
        cache["local_end_index"].fill_(end)
        window = slice(max(0, end - self.max_attention_size), end)
        return cache["k"][:, window].float(), cache["v"][:, window].float()


def _side_by_side(q: Tensor, k: Tensor, v: Tensor, beside: Beside) -> Tensor:
    """Attention of `[clean | noisy]` chunks to the clean chunks before them and to themselves.

    q, k, v `[B, 2 * C * tokens, H, D]`. A chunk sees its predecessor as it was made, as it would in
    a window, and older ones as stored. Chunk by chunk, since under one mask two thirds of the
    scores would be wasted.
    """
    batch, _, heads, channels = q.shape
    chunks = len(beside.masks)
    q, k, v = (x.view(batch, 2, chunks, -1, heads, channels) for x in (q, k, v))
    stored_k, stored_v = (damaged(x[:, :1], beside.damage) for x in (k, v))
    out = torch.empty_like(q)
    for i, mask in enumerate(beside.masks):
        old = max(0, i - 1)
        keys, values = (
            torch.cat([stored[:, :, :old], x[:, :1, old:i]], 2)
            .flatten(2, 3)
            .expand(-1, 2, -1, -1, -1)
            for stored, x in ((stored_k, k), (stored_v, v))
        )
        keys, values = (
            torch.cat([context, x[:, :, i]], 2).flatten(0, 1).transpose(1, 2)
            for context, x in ((keys, k), (values, v))
        )
        # By hand: the fused kernel's backward is five times slower on so few queries.
        query = q[:, :, i].flatten(0, 1).transpose(1, 2) * channels**-0.5
        mixed = torch.softmax(query @ keys.transpose(-1, -2) + mask, dim=-1).to(v.dtype) @ values
        out[:, :, i] = mixed.transpose(1, 2).view(batch, 2, -1, heads, channels)
    return out


def damaged(x: Tensor, damage: Tensor) -> Tensor:
    """`[B, 1, C, tokens, H, D]` with Gaussian errors of relative size `damage` `[B, C]`."""
    size = damage[:, None, :, None, None, None].to(x.dtype)
    with torch.no_grad():
        error = torch.randn_like(x) * x.square().mean(-1, keepdim=True).sqrt() * size
    return x + error


class Block(nn.Module):
    """Attention and MLP, each modulated by the noise level (adaptive layer norm)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.self_attn = SelfAttention(config)
        self.mlp = nn.Sequential(
            nn.Linear(width, config.mlp_ratio * width),
            nn.SiLU(),
            nn.Linear(config.mlp_ratio * width, width),
        )
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(
        self,
        x: Tensor,
        level: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_cache: LayerCache | None = None,
        current_start: int = 0,
        beside: Beside | None = None,
    ) -> Tensor:
        """x `[B, L, width]`, level `[B, G, width]` for G equal groups of tokens."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(level).chunk(6, dim=-1)
        h = modulate(self.norm1(x), shift1, scale1)
        h = self.self_attn(
            h, cos, sin, kv_cache=kv_cache, current_start=current_start, beside=beside
        )
        x = x + gated(h, gate1)
        h = self.mlp(modulate(self.norm2(x), shift2, scale2))
        return x + gated(h, gate2)


def _grouped(x: Tensor, groups: int) -> Tensor:
    return x.view(x.shape[0], groups, -1, x.shape[-1])


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Scale and shift `[B, L, C]` group by group: shift and scale `[B, G, C]`."""
    groups = shift.shape[1]
    return (_grouped(x, groups) * (1 + scale.unsqueeze(2)) + shift.unsqueeze(2)).view_as(x)


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply `[B, L, C]` group by group by `[B, G, C]`."""
    return (_grouped(x, gate.shape[1]) * gate.unsqueeze(2)).view_as(x)

"""A small stand-in for AnyFlow-FAR: all frames encoded anew after every chunk, old ones packed."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.frontends import wan
from tests.frontends.wan import DIM, HEAD_DIM, HEADS, LATENT, LAYERS, STEPS

CHUNK, GRID, FULL = 2, 4, 2
PLACES = (GRID // 2) ** 2
"""Tokens of a frame in full; packed it has one."""


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.double().unflatten(3, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(3).to(x.dtype)


class Attention(nn.Module):
    """``full`` chunks that are no longer in full are attended to by ``exact``, where it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.o = nn.Linear(DIM, DIM)
        self.exact: list[torch.Tensor] | None = None
        self.turns: torch.Tensor | None = None

    def forward(
        self, hidden_states: torch.Tensor, rotary_emb: Any, kv_cache: Any, kv_cache_flag: Any
    ) -> torch.Tensor:
        parts = self.qkv(hidden_states).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        q, k, v = (y.transpose(1, 2) for y in parts)
        q, k = (F.rms_norm(y, (HEAD_DIM,)) * 1.2 for y in (q, k))
        packed, full, turns = (
            kv_cache["compressed_cache"],
            kv_cache["full_cache"],
            rotary_emb["key"],
        )
        if kv_cache_flag["is_cache_step"]:
            cut = kv_cache_flag["num_compressed_tokens"]
            both = torch.stack([k, v])
            packed[:, :, :, :cut] = both[:, :, :, :cut]
            full[:, :, :, : k.shape[2] - cut] = both[:, :, :, cut:]
        else:
            old = kv_cache_flag["num_cached_compressed_tokens"]
            end = kv_cache_flag["num_cached_full_tokens"]
            past = [packed[:, :, :, :old], full[:, :, :, :end]]
            if self.exact is not None and self.turns is not None:
                done, size = kv_cache_flag["num_cached_chunks"], CHUNK * PLACES
                if done > len(self.exact):
                    self.exact.append(full[:, :, :, end - size : end].clone())
                gone = self.exact[: max(0, done - FULL)]
                past[1:1] = gone
                more = self.turns[:, :, : len(gone) * size]
                turns = torch.cat([turns[:, :, :old], more, turns[:, :, old:]], dim=2)
            past_k, past_v = torch.cat(past, dim=3)
            k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        q, k = rotate(q, rotary_emb["query"]), rotate(k, turns)
        seen = F.scaled_dot_product_attention(q, k, v)
        return self.o(seen.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn1 = Attention()


class Rope(nn.Module):
    def forward(self, far_cfg: Any, device: Any) -> dict[str, torch.Tensor]:
        cut, frames = far_cfg["num_compressed_frames"], far_cfg["total_frames"]
        height, width = far_cfg["full_frame_shape"]
        side = HEAD_DIM // 6
        table = wan.wan_table(wan.TABLE)
        time, tall, wide = table.split([HEAD_DIM // 2 - 2 * side, side, side], dim=1)
        parts = (
            time[:frames].view(frames, 1, 1, -1).expand(-1, height, width, -1),
            tall[:height].view(1, height, 1, -1).expand(frames, -1, width, -1),
            wide[:width].view(1, 1, width, -1).expand(frames, height, -1, -1),
        )
        turns = torch.cat(parts, dim=-1)
        key = torch.cat([turns[:cut, 0, 0], turns[cut:].flatten(0, 2)])[None, None]
        return {"query": key, "key": key}


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            full_chunk_limit=FULL + 1, chunk_partition=(CHUNK,) * 6, patch_size=(1, 2, 2),
            compressed_patch_size=(1, 4, 4), attention_head_dim=HEAD_DIM,
            num_attention_heads=HEADS, rope_max_seq_len=wan.TABLE,
        )  # fmt: skip
        self.rope = Rope()
        self.embed = nn.Linear(4 * LATENT, DIM)
        self.pack = nn.Linear(16 * LATENT, DIM)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(DIM, 4 * LATENT)

    def forward(
        self, hidden_states: torch.Tensor, chunk_partition: list[int], kv_cache: Any,
        kv_cache_flag: Any,
    ) -> torch.Tensor:  # fmt: skip
        flag, whole = kv_cache_flag, sum(chunk_partition)
        caching = flag["is_cache_step"]
        cut = sum(chunk_partition[: max(0, len(chunk_partition) - FULL - (not caching))])
        flag["num_compressed_tokens"] = flag["num_cached_compressed_tokens"] = cut
        flag["num_cached_full_tokens"] = (sum(chunk_partition[:-1]) - cut) * PLACES
        frames = patches(hidden_states, 2)
        y = self.embed(frames[:, cut:] if caching else frames).flatten(1, 2)
        if caching:
            y = torch.cat([self.pack(patches(hidden_states[:, :cut], 4)).flatten(1, 2), y], dim=1)
        shape = (GRID // 2, GRID // 2)
        cfg = {"total_frames": whole, "num_compressed_frames": cut, "full_frame_shape": shape}
        rotary = self.rope(far_cfg=cfg, device=y.device)
        rotary["query"] = rotary["query"][:, :, -y.shape[1] :]
        for index, block in enumerate(self.blocks):
            y = y + block.attn1(
                hidden_states=y, rotary_emb=rotary, kv_cache=kv_cache[index], kv_cache_flag=flag
            )
        if caching:
            return y
        return self.head(y).view_as(frames).unflatten(3, (LATENT, 2, 2)).permute(
            0, 1, 3, 2, 4, 5
        ).reshape(hidden_states.shape)  # fmt: skip


def patches(x: torch.Tensor, side: int) -> torch.Tensor:
    """``[batch, frames, channels, height, width]`` as tokens of ``side`` by ``side``."""
    x = x.unflatten(4, (-1, side)).unflatten(3, (-1, side)).permute(0, 1, 3, 5, 2, 4, 6)
    return x.flatten(4).flatten(2, 3)


class Pipeline(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = Transformer()

    def run(self, chunks: int, lead: int = 0) -> list[torch.Tensor]:
        model, made = self.transformer, torch.Generator().manual_seed(1)
        dtype, partition = model.head.weight.dtype, ([lead] if lead else []) + [CHUNK] * chunks
        noise = torch.randn(1, sum(partition), LATENT, GRID, GRID, generator=made).to(dtype)
        sizes = {"full_cache": FULL + 1, "compressed_cache": chunks}
        caches = {
            layer: {
                name: torch.zeros(2, 1, HEADS, size * CHUNK * PLACES, HEAD_DIM, dtype=dtype)
                for name, size in sizes.items()
            }
            for layer in range(LAYERS)
        }
        for block in model.blocks:
            if block.attn1.exact is not None:
                block.attn1.exact = []
        flag = {"num_cached_chunks": 0, "is_cache_step": False}
        out = list(noise.split(partition, dim=1))
        for index, x in enumerate(out):
            given = {"chunk_partition": partition[: index + 1], "kv_cache": caches}
            for _ in STEPS:
                x = x - 0.5 * model(hidden_states=x, kv_cache_flag=copy.copy(flag), **given)
            out[index] = x
            so_far = torch.cat(out[: index + 1], dim=1)
            model(hidden_states=so_far, kv_cache_flag={**flag, "is_cache_step": True}, **given)
            flag["num_cached_chunks"] += 1
        return out


def keep_exactly(pipeline: Any) -> None:
    """Attend to all that is no longer in full, as it was when it was finished."""
    cfg = {
        "total_frames": 40, "num_compressed_frames": 0, "full_frame_shape": (GRID // 2, GRID // 2),
    }  # fmt: skip
    for block in pipeline.transformer.blocks:
        block.attn1.exact = []
        block.attn1.turns = pipeline.transformer.rope(cfg, None)["key"]

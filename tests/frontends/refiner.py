"""A small stand-in for the refiner of SANA-WM: a cache object, a history that is cut by frames."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.frontends.wan import DIM, HEAD_DIM, HEADS, LATENT, LAYERS, STEPS, TOKENS, attend

BLOCK = 3
Rotary = tuple[torch.Tensor, torch.Tensor]


def turn(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Neighbours turned, all heads at once: ``[batch, tokens, channels]``."""
    cos, sin = rotary
    crossed = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(2)
    return (x.float() * cos + crossed.float() * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.o = nn.Linear(DIM, DIM)

    def forward(
        self, x: torch.Tensor, here: Rotary, sink: Rotary | None, held: Any, mode: str
    ) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = (F.rms_norm(y, (DIM,)) * 1.2 for y in (q, k))
        if mode == "capture_pre_rope":
            held.sink_k_pre, held.sink_v = k.clone(), v.clone()
        q, k = turn(q, here), turn(k, here)
        if mode == "inject_and_capture_post_rope":
            held.captured = (k.clone(), v.clone())
        if mode != "capture_pre_rope" and sink is not None:
            parts = [(turn(held.sink_k_pre, sink), held.sink_v), (k, v)]
            if held.history_k is not None:
                parts.insert(1, (held.history_k, held.history_v))
            k, v = (torch.cat(both, dim=1) for both in zip(*parts, strict=True))
        heads = [y.unflatten(2, (HEADS, HEAD_DIM)) for y in (q, k, v)]
        return self.o(attend(*heads).flatten(2))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, patch_size=1,
            rope_type="interleaved",
        )  # fmt: skip
        self.embed = nn.Linear(LATENT, DIM)
        self.transformer_blocks = nn.ModuleList([Attention() for _ in range(LAYERS)])
        self.head = nn.Linear(DIM, LATENT)

    def build_rotary_emb_for_absolute_positions(
        self, batch_size: int, frame_positions: list[float], height: int, width: int, device: Any
    ) -> Rotary:
        grids = torch.meshgrid(
            torch.tensor(frame_positions, dtype=torch.float32), torch.arange(float(height)),
            torch.arange(float(width)), indexing="ij",
        )  # fmt: skip
        places = torch.stack(grids, dim=-1).flatten(0, 2)
        speeds = 1.5 ** -torch.arange(DIM // 6)
        angles = (places[:, None] * speeds[:, None]).flatten(1)  # t, h, w in turn
        angles = F.pad(angles, (DIM // 2 - angles.shape[1], 0)).repeat_interleave(2, -1)[None]
        return angles.cos(), angles.sin()

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotary: Rotary,
        kv_cache: Any = None,
        kv_cache_mode: str = "",
    ) -> torch.Tensor:
        y = self.embed(hidden_states)
        for block, held in zip(self.transformer_blocks, kv_cache.layer_caches, strict=True):
            y = y + block(y, rotary, kv_cache.sink_pe, held, kv_cache_mode)
        return self.head(y)


class Pipeline(nn.Module):
    """``shown``: frames of sink and history, ``kv_max_frames`` of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = Transformer()
        self.shown = 11

    def run(self, chunks: int) -> list[torch.Tensor]:
        dtype, made = self.transformer.head.weight.dtype, torch.Generator().manual_seed(1)
        latents = torch.randn(1, 1 + chunks * BLOCK, TOKENS, LATENT, generator=made).to(dtype)
        layers = [
            SimpleNamespace(sink_k_pre=None, sink_v=None, history_k=None, history_v=None)
            for _ in range(LAYERS)
        ]
        cache, model = SimpleNamespace(layer_caches=layers, sink_pe=None), self.transformer

        def rotary(first: int, frames: int) -> Rotary:
            return model.build_rotary_emb_for_absolute_positions(
                batch_size=1, frame_positions=list(range(first, first + frames)), height=1,
                width=TOKENS, device="cpu",
            )  # fmt: skip

        def forward(x: torch.Tensor, first: int, mode: str) -> torch.Tensor:
            return model(
                hidden_states=x.flatten(1, 2), rotary=rotary(first, x.shape[1]), kv_cache=cache,
                kv_cache_mode=mode,
            ).view_as(x)  # fmt: skip

        forward(latents[:, :1], 0, "capture_pre_rope")
        out, history = [], 0
        for first in range(1, latents.shape[1], BLOCK):
            cache.sink_pe = rotary(first - history - 1, 1)
            x = latents[:, first : first + BLOCK]
            for _ in STEPS:
                x = x - 0.5 * forward(x, first, "inject")
            forward(x, first, "inject_and_capture_post_rope")
            history = min(history + BLOCK, self.shown - 1)
            for held in layers:
                for name, new in zip(("history_k", "history_v"), held.captured, strict=True):
                    old = getattr(held, name)
                    new = new if old is None else torch.cat([old, new], dim=1)
                    setattr(held, name, new[:, -(self.shown - 1) * TOKENS :])
            out.append(x)
        return out

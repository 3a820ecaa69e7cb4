"""A small stand-in for LingBot-World: a cache list local to ``generate``, a folder with the path.

Version 2.0 has a local window, and ignores ``local_end_index`` where it has none. The pretrained
model has guidance, and so two lists.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.frontends.wan import (
    COLUMNS,
    DIM,
    HEAD_DIM,
    HEADS,
    LATENT,
    LAYERS,
    ROWS,
    TABLE,
    TOKENS,
    Cache,
    attend,
    empty_cache,
    rotate,
    wan_table,
    write,
)  # fmt: skip


class SelfAttention(nn.Module):
    def __init__(self, local: int, sink: int, counts_from_start: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, HEAD_DIM
        self.local_attn_size, self.sink_size = local, sink
        self.counts_from_start = counts_from_start
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.o = nn.Linear(DIM, DIM)

    def forward(
        self,
        x: torch.Tensor,
        freqs: torch.Tensor,
        kv_cache: dict[str, Any],
        current_start: int = 0,
        max_attention_size: int = 1_000_000,
    ) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        q, k = (F.rms_norm(y, (HEAD_DIM,)) * 1.2 for y in (q, k))
        frame = current_start // TOKENS
        q, k = rotate(q, freqs, frame), rotate(k, freqs, frame)
        end = current_start + k.shape[1]
        rolls = self.local_attn_size != -1
        if self.counts_from_start and not rolls:
            kv_cache["local_end_index"].fill_(int(kv_cache["global_end_index"]))
        place = write(kv_cache, k, v, end, self.sink_size * TOKENS, rolls)
        seen = slice(max(0, place - max_attention_size), place)
        x = attend(q, kv_cache["k"][:, seen], kv_cache["v"][:, seen])
        return self.o(x.flatten(2))


class Block(nn.Module):
    def __init__(self, local: int, sink: int, counts_from_start: bool) -> None:
        super().__init__()
        self.self_attn = SelfAttention(local, sink, counts_from_start)
        self.ffn = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))

    def forward(
        self, x: torch.Tensor, freqs: torch.Tensor, cache: Any, start: int, most: int
    ) -> torch.Tensor:
        x = x + self.self_attn(x, freqs, cache, start, most)
        return x + self.ffn(F.layer_norm(x, (DIM,)))


class Model(nn.Module):
    """Takes a list of one sample ``[channels, frames, height, width]``."""

    def __init__(self, local: int, sink: int, counts_from_start: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(4 * LATENT, DIM)
        self.camera = nn.Linear(16, DIM)
        self.time = nn.Linear(1, DIM)
        self.blocks = nn.ModuleList([Block(local, sink, counts_from_start) for _ in range(LAYERS)])
        self.head = nn.Linear(DIM, 4 * LATENT)
        self.freqs = wan_table(TABLE)

    def forward(
        self,
        x: list[torch.Tensor],
        t: torch.Tensor,
        context: torch.Tensor,
        kv_cache: Cache,
        poses: torch.Tensor,
        current_start: int = 0,
        max_attention_size: int = 1_000_000,
    ) -> list[torch.Tensor]:
        frames, height, width = x[0].shape[1:]
        patches = x[0].unflatten(3, (width // 2, 2)).unflatten(2, (height // 2, 2))
        y = self.embed(patches.permute(1, 2, 4, 0, 3, 5).flatten(3).flatten(0, 2)[None])
        y = y + context + self.time(t.view(1, 1, 1).to(y.dtype))
        y = y + self.camera(poses.flatten(1)).repeat_interleave(TOKENS, 0)
        for block, cache in zip(self.blocks, kv_cache, strict=True):
            y = block(y, self.freqs, cache, current_start, max_attention_size)
        y = self.head(y)[0].unflatten(0, (frames, height // 2, width // 2))
        y = y.unflatten(3, (LATENT, 2, 2)).permute(3, 0, 1, 4, 2, 5)
        return [y.flatten(4).flatten(2, 3)]


class Pipeline(nn.Module):
    """Version 1, and 2.0 where ``local_attn_size`` is given.

    ``shown``: frames that version 1 lets a forward read, its ``max_attention_size``.
    """

    def __init__(
        self,
        shown: int | None = None,
        local: int | None = None,
        sink: int = 0,
        guided: bool = False,
    ) -> None:
        super().__init__()
        self.sp_size = 1
        if local is not None:
            self.local_attn_size, self.sink_size = local, sink
            self.infer_mode = "causal_pretrain" if guided else "causal_fast"
        self.shown = shown
        self.model = Model(-1 if local is None else local, sink, local is not None)

    @property
    def pipe_dtype(self) -> torch.dtype:
        return self.model.head.weight.dtype

    def _initialize_self_kv_cache(
        self, num_layers: int, shape: list[int], dtype: torch.dtype, device: str
    ) -> Cache:
        assert (num_layers, shape[2:]) == (LAYERS, [HEADS, HEAD_DIM])
        return empty_cache(shape[0], shape[1], dtype)

    def generate(
        self, prompt: str, action_path: str | None = None, chunk_size: int = 3, frame_num: int = 81
    ) -> list[torch.Tensor]:
        poses = np.load(Path(action_path or ".") / "poses.npy")
        video = min((frame_num - 1) // 4, (len(poses) - 1) // 4) * 4 + 1
        frames = (video - 1) // 4 + 1
        frames -= frames % chunk_size
        dtype, made = self.pipe_dtype, torch.Generator().manual_seed(len(prompt))
        noise = torch.randn(LATENT, frames, 2 * ROWS, 2 * COLUMNS, generator=made).to(dtype)
        context = torch.randn(DIM, generator=made).to(dtype)
        path = torch.from_numpy(poses[:video:4][:frames]).to(dtype)
        local = getattr(self, "local_attn_size", -1)
        capacity = (frames if local == -1 else local) * TOKENS
        guided = getattr(self, "infer_mode", "") == "causal_pretrain"
        rings = [
            self._initialize_self_kv_cache(
                num_layers=LAYERS, shape=[1, capacity, HEADS, HEAD_DIM], dtype=dtype, device="cpu"
            )
            for _ in range(1 + guided)
        ]
        most = capacity if self.shown is None else self.shown * TOKENS
        out = []
        for frame in range(0, frames, chunk_size):
            chunk = slice(frame, frame + chunk_size)

            def forward(x: torch.Tensor, t: float, frame: int = frame) -> torch.Tensor:
                flows = [
                    self.model(
                        x=[x], t=torch.tensor(t), context=sign * context, kv_cache=ring,
                        poses=path[frame : frame + chunk_size], current_start=frame * TOKENS,
                        max_attention_size=most,
                    )[0]
                    for ring, sign in zip(rings, (1, -1), strict=False)
                ]  # fmt: skip
                return flows[-1] + 1.5 * (flows[0] - flows[-1]) if guided else flows[0]

            x = noise[:, chunk]
            for t in (1.0, 0.5):
                x = x - 0.5 * forward(x, t)
            forward(x, 0.0)
            out.append(x)
        return out

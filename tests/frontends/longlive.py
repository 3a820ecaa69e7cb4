"""A small stand-in for LongLive 2: published indices, deferred writes, two kinds of positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.frontends import wan
from tests.frontends.wan import DIM, HEAD_DIM, HEADS, LATENT, LAYERS, STEPS, TABLE, TOKENS, Cache

_published: dict[str, int] = {}
"""Of the first layer, read before the transformer is called."""

CHUNK = 4


class SelfAttention(nn.Module):
    def __init__(self, sink: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, HEAD_DIM
        self.sink_size, self.max_attention_size = sink, 0
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.o = nn.Linear(DIM, DIM)

    def forward(
        self,
        x: torch.Tensor,
        freqs: torch.Tensor,
        kv_cache: dict[str, Any],
        current_start: int,
        relative: bool,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        q, k = (F.rms_norm(y, (HEAD_DIM,)) * 1.2 for y in (q, k))
        if not relative:
            q, k = (wan.rotate(y, freqs, current_start // TOKENS) for y in (q, k))
        written = {
            "k": kv_cache["k"].clone(), "v": kv_cache["v"].clone(),
            "global_end_index": torch.tensor([_published["global"]]),
            "local_end_index": torch.tensor([_published["local"]]),
        }  # fmt: skip
        end = current_start + k.shape[1]
        place = wan.write(written, k, v, end, self.sink_size * TOKENS, rolls=True)
        seen = slice(max(0, place - self.max_attention_size), place)
        keys, values = written["k"][:, seen], written["v"][:, seen]
        if relative:
            q = wan.rotate(q, freqs, (keys.shape[1] - q.shape[1]) // TOKENS)
            keys = wan.rotate(keys, freqs, 0)
        return self.o(wan.attend(q, keys, values).flatten(2)), written


class Block(nn.Module):
    def __init__(self, sink: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(sink)
        self.ffn = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))


class Model(nn.Module):
    def __init__(self, sink: int) -> None:
        super().__init__()
        self.use_relative_rope, self.t_scale = False, 1.0
        self.embed = nn.Linear(LATENT, DIM)
        self.time = nn.Linear(1, DIM)
        self.blocks = nn.ModuleList([Block(sink) for _ in range(LAYERS)])
        self.head = nn.Linear(DIM, LATENT)
        self.freqs = wan.wan_table(TABLE)

    def forward(
        self, x: torch.Tensor, t: float, context: torch.Tensor, kv_cache: Cache, current_start: int
    ) -> torch.Tensor:
        time = self.time(x.new_full((1, 1, 1), t))
        y = self.embed(x.flatten(1, 2)) + context + time
        updates = []
        for block, cache in zip(self.blocks, kv_cache, strict=True):
            seen, update = block.self_attn(
                y, self.freqs, cache, current_start, self.use_relative_rope
            )
            updates.append(update)
            y = y + seen
            y = y + block.ffn(F.layer_norm(y, (DIM,)))
        for cache, update in zip(kv_cache, updates, strict=True):
            for name, value in update.items():
                cache[name].copy_(value)
        return self.head(y).unflatten(1, (x.shape[1], TOKENS))


class Wrapper(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, x: torch.Tensor, t: float, context: torch.Tensor, kv_cache: Cache, current_start: int
    ) -> torch.Tensor:
        _published["global"] = int(kv_cache[0]["global_end_index"])
        _published["local"] = int(kv_cache[0]["local_end_index"])
        return self.model(x, t, context, kv_cache=kv_cache, current_start=current_start)


class Pipeline(nn.Module):
    """Both caches are kept from call to call; the second one is used with guidance only."""

    def __init__(
        self, relative: bool = False, guidance: float = 1.0, local: int = 12, sink: int = 4
    ) -> None:
        super().__init__()
        self.generator = Wrapper(Model(sink))
        self.frame_seq_length, self.num_frame_per_block = TOKENS, CHUNK
        self.local_attn_size, self.sink_size = local, sink
        self.use_relative_rope, self.guidance_scale = relative, guidance
        self.quantize_kv = self.multi_shot_sink = False
        self.inference_t_scale: float | None = None
        self.kv_cache_pos: Cache | None = None
        self.kv_cache_neg: Cache | None = None

    @property
    def _dit_model(self) -> Model:
        return self.generator.model

    def _set_all_modules_max_attention_size(self, local_attn_size: int) -> None:
        for block in self._dit_model.blocks:
            block.self_attn.max_attention_size = local_attn_size * TOKENS

    def inference(self, noise: torch.Tensor, prompts: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.kv_cache_pos is None or self.kv_cache_neg is None:
            capacity = self.local_attn_size * TOKENS
            self.kv_cache_pos = wan.empty_cache(noise.shape[0], capacity, noise.dtype)
            self.kv_cache_neg = wan.empty_cache(noise.shape[0], capacity, noise.dtype)
        for cache in (*self.kv_cache_pos, *self.kv_cache_neg):
            cache["global_end_index"] = torch.zeros(1, dtype=torch.long)
            cache["local_end_index"] = torch.zeros(1, dtype=torch.long)
        before = self._dit_model.blocks[0].self_attn.max_attention_size
        self._set_all_modules_max_attention_size(self.local_attn_size)
        self._dit_model.use_relative_rope = self.use_relative_rope
        out = []
        for chunk, x in enumerate(noise.split(CHUNK, dim=1)):
            args: dict[str, Any] = {"current_start": chunk * CHUNK * TOKENS}

            def flow(x: torch.Tensor, t: float, context: torch.Tensor, args: Any) -> torch.Tensor:
                yes = self.generator(x, t, context, kv_cache=self.kv_cache_pos, **args)
                if self.guidance_scale == 1.0:
                    return yes
                no = self.generator(x, t, -context, kv_cache=self.kv_cache_neg, **args)
                return no + self.guidance_scale * (yes - no)

            for t in STEPS:
                x = x - 0.5 * flow(x, t, prompts[chunk], args)
            flow(x, 0.0, prompts[chunk], args)
            out.append(x)
        self._dit_model.use_relative_rope = False
        for block in self._dit_model.blocks:
            block.self_attn.max_attention_size = before
        return out


def run(pipeline: Pipeline, chunks: int, batch: int = 1) -> list[torch.Tensor]:
    """Another prompt every third chunk."""
    dtype, made = pipeline.generator.model.head.weight.dtype, torch.Generator().manual_seed(1)
    noise = torch.randn(batch, chunks * CHUNK, TOKENS, LATENT, generator=made).to(dtype)
    shots = torch.randn(chunks // 3 + 1, DIM, generator=made).to(dtype)
    return pipeline.inference(noise, [shots[chunk // 3] for chunk in range(chunks)])

"""Small stand-ins for the Wan family's models and loops: the same cache dicts, roll, tables, calls.

Written from what is known of how those frontends behave, and far smaller: two layers, two heads of
64, eight tokens a frame.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

HEADS, HEAD_DIM, LAYERS = 2, 64, 2
DIM = HEADS * HEAD_DIM
ROWS, COLUMNS = 2, 4
TOKENS = ROWS * COLUMNS
CHUNK = 3
LATENT = 4
TABLE = 60
"""Rows of the position table: 20 chunks."""

Cache = list[dict[str, Any]]


def rope_table(rows: int, pairs: int, theta: float = 10000.0) -> torch.Tensor:
    speeds = theta ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * speeds
    return torch.polar(torch.ones_like(angles), angles)


def wan_table(rows: int, head_dim: int = HEAD_DIM) -> torch.Tensor:
    side = head_dim // 6
    widths = (head_dim // 2 - 2 * side, side, side)
    return torch.cat([rope_table(rows, width) for width in widths], dim=1)


def rotate(x: torch.Tensor, table: torch.Tensor, frame: int) -> torch.Tensor:
    """``[batch, frames * tokens, heads, head_dim]`` whose first frame is ``frame``."""
    frames, side = x.shape[1] // TOKENS, x.shape[3] // 6
    time, height, width = table.split([x.shape[3] // 2 - 2 * side, side, side], dim=1)
    turns = torch.cat(
        [
            time[frame : frame + frames].view(frames, 1, 1, -1).expand(frames, ROWS, COLUMNS, -1),
            height[:ROWS].view(1, ROWS, 1, -1).expand(frames, ROWS, COLUMNS, -1),
            width[:COLUMNS].view(1, 1, COLUMNS, -1).expand(frames, ROWS, COLUMNS, -1),
        ],
        dim=-1,
    ).reshape(frames * TOKENS, 1, -1)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def write(
    cache: dict[str, Any], k: torch.Tensor, v: torch.Tensor, end: int, sink: int, rolls: bool
) -> int:
    """Put the current chunk behind what the ring holds, rolling it first where it is full."""
    new, capacity = k.shape[1], cache["k"].shape[1]
    done, held = int(cache["global_end_index"]), int(cache["local_end_index"])
    place = held + end - done
    if rolls and end > done and held + new > capacity:
        out = held + new - capacity
        stay = held - out - sink
        for name in ("k", "v"):
            moved = cache[name][:, sink + out : sink + out + stay].clone()
            cache[name][:, sink : sink + stay] = moved
        place -= out
    cache["k"][:, place - new : place] = k
    cache["v"][:, place - new : place] = v
    cache["global_end_index"].fill_(end)
    cache["local_end_index"].fill_(place)
    return place


def empty_cache(batch: int, capacity: int, dtype: torch.dtype, heads: int = HEADS) -> Cache:
    return [
        {
            "k": torch.zeros(batch, capacity, heads, HEAD_DIM, dtype=dtype),
            "v": torch.zeros(batch, capacity, heads, HEAD_DIM, dtype=dtype),
            "global_end_index": torch.zeros(1, dtype=torch.long),
            "local_end_index": torch.zeros(1, dtype=torch.long),
        }
        for _ in range(LAYERS)
    ]


class SelfAttention(nn.Module):
    def __init__(self, local: int, sink: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, HEAD_DIM
        self.local_attn_size, self.sink_size = local, sink
        self.max_attention_size = (21 if local == -1 else local) * TOKENS
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.o = nn.Linear(DIM, DIM)

    def forward(
        self,
        x: torch.Tensor,
        freqs: torch.Tensor,
        kv_cache: dict[str, Any],
        current_start: int = 0,
        cache_start: int | None = None,
    ) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        q, k = (F.rms_norm(y, (HEAD_DIM,)) * 1.2 for y in (q, k))
        frame = current_start // TOKENS
        q, k = rotate(q, freqs, frame), rotate(k, freqs, frame)
        end = current_start + k.shape[1]
        rolls = self.local_attn_size != -1
        place = write(kv_cache, k, v, end, self.sink_size * TOKENS, rolls)
        seen = slice(max(0, place - self.max_attention_size), place)
        x = attend(q, kv_cache["k"][:, seen], kv_cache["v"][:, seen])
        return self.o(x.flatten(2))


class Block(nn.Module):
    def __init__(self, local: int, sink: int, action: nn.Module | None = None) -> None:
        super().__init__()
        self.self_attn = SelfAttention(local, sink)
        self.ffn = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))

    def forward(self, x: torch.Tensor, freqs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        cache, start = kwargs["kv_cache"], kwargs["current_start"]
        x = x + self.self_attn(x, freqs, cache, start, kwargs["cache_start"])
        return x + self.ffn(F.layer_norm(x, (DIM,)))


class Model(nn.Module):
    """The transformer, called with the whole cache list."""

    def __init__(self, local: int = 6, sink: int = 0, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.local_attn_size, self.num_frame_per_block = local, 1
        self.embed = nn.Linear(LATENT, DIM)
        self.time = nn.Linear(1, DIM)
        self.blocks = nn.ModuleList([block(local, sink) for _ in range(LAYERS)])
        self.head = nn.Linear(DIM, LATENT)
        self.freqs = wan_table(TABLE)

    def forward(
        self,
        x: torch.Tensor,
        t: torch.Tensor,
        context: torch.Tensor,
        kv_cache: Cache,
        current_start: int = 0,
        cache_start: int | None = None,
        **more: Any,
    ) -> torch.Tensor:
        frames = x.shape[1]
        y = self.embed(x.flatten(1, 2)) + context
        y = y + self.time(t[:, None, None].to(y.dtype))
        for index, block in enumerate(self.blocks):
            kwargs = {name: value[index] for name, value in more.items() if name.startswith("kv_")}
            rest = {name: value for name, value in more.items() if name not in kwargs}
            y = block(
                y, self.freqs, kv_cache=kv_cache[index], current_start=current_start,
                cache_start=cache_start, **kwargs, **rest,
            )  # fmt: skip
        return self.head(y).unflatten(1, (frames, TOKENS))


class Wrapper(nn.Module):
    """What the pipeline calls: turns a prediction of flow into one of the clean latents."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, noisy: torch.Tensor, t: float, **kwargs: Any) -> torch.Tensor:
        step = torch.full((noisy.shape[0],), t, dtype=noisy.dtype)
        return noisy - t * self.model(noisy, t=step, **kwargs)


STEPS = (1.0, 0.5)


class Pipeline(nn.Module):
    """A few steps a chunk, then the clean pass."""

    def __init__(self, local: int = 6, sink: int = 0, model: nn.Module | None = None) -> None:
        super().__init__()
        self.generator = Wrapper(model or Model(local, sink))
        self.frame_seq_length = TOKENS
        self.num_frame_per_block = CHUNK
        self.local_attn_size = local
        self.kv_cache1: Cache | None = None
        self.independent_first_frame = False

    def _initialize_kv_cache(self, batch: int, dtype: torch.dtype) -> None:
        frames = 21 if self.local_attn_size == -1 else self.local_attn_size
        self.kv_cache1 = empty_cache(batch, frames * TOKENS, dtype)

    def inference(
        self, noise: torch.Tensor, context: torch.Tensor, first: int = 0
    ) -> list[torch.Tensor]:
        if self.kv_cache1 is None:
            self._initialize_kv_cache(noise.shape[0], noise.dtype)
        else:
            for cache in self.kv_cache1:
                cache["global_end_index"] = torch.zeros(1, dtype=torch.long)
                cache["local_end_index"] = torch.zeros(1, dtype=torch.long)
        out = []
        for frame in range(first * CHUNK, noise.shape[1], CHUNK):
            x = whole_noise = noise[:, frame : frame + CHUNK]
            kwargs = {
                "context": context, "kv_cache": self.kv_cache1, "current_start": frame * TOKENS,
            }  # fmt: skip
            for t in STEPS:
                clean = self.generator(x, t, **kwargs)
                x = (1 - t / 2) * clean + t / 2 * whole_noise
            self.generator(clean, 0.0, **kwargs)
            out.append(clean)
        return out


class GuidedPipeline(nn.Module):
    """With guidance: two caches, two calls a step."""

    def __init__(self, local: int = 6) -> None:
        super().__init__()
        self.generator = Wrapper(Model(local))
        self.frame_seq_length = TOKENS
        self.num_frame_per_block = CHUNK
        self.local_attn_size = local
        self.kv_cache_pos: Cache | None = None
        self.kv_cache_neg: Cache | None = None

    def inference(self, noise: torch.Tensor, context: torch.Tensor) -> list[torch.Tensor]:
        capacity = self.local_attn_size * TOKENS
        self.kv_cache_pos = empty_cache(noise.shape[0], capacity, noise.dtype)
        self.kv_cache_neg = empty_cache(noise.shape[0], capacity, noise.dtype)
        out = []
        for frame in range(0, noise.shape[1], CHUNK):
            x = noise[:, frame : frame + CHUNK]

            def both(x: torch.Tensor, t: float, start: int = frame * TOKENS) -> torch.Tensor:
                args = {"current_start": start, "cache_start": start}
                yes = self.generator(x, t, context=context, kv_cache=self.kv_cache_pos, **args)
                no = self.generator(x, t, context=-context, kv_cache=self.kv_cache_neg, **args)
                return no + 1.5 * (yes - no)

            for t in STEPS:
                x = x + 0.5 * (both(x, t) - x)
            both(x, 0.0)
            out.append(x)
        return out


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return make().to(dtype).eval().requires_grad_(False)


def noise(chunks: int, dtype: torch.dtype, batch: int = 1) -> torch.Tensor:
    made = torch.Generator().manual_seed(1)
    return torch.randn(batch, chunks * CHUNK, TOKENS, LATENT, generator=made).to(dtype)


def run(pipeline: Any, chunks: int) -> list[torch.Tensor]:
    dtype = next(pipeline.parameters()).dtype
    made = torch.Generator().manual_seed(2)
    context = torch.randn(DIM, generator=made).to(dtype)
    return pipeline.inference(noise(chunks, dtype), context)


def attend_everything(pipeline: Any, frames: int) -> None:
    """Full KV, as the frontends have it: a larger ring, and attention that reads all of it."""
    pipeline.local_attn_size = frames
    for block in pipeline.generator.model.blocks:
        block.self_attn.max_attention_size = frames * TOKENS


def lengthen(pipeline: Any) -> None:
    pipeline.generator.model.freqs = wan_table(4 * TABLE)


def horizon() -> int:
    """Chunks that do not fit the table."""
    return math.ceil(TABLE / CHUNK) + 4

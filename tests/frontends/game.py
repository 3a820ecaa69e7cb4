"""A small stand-in for Matrix-Game 2.0: action modules with caches and a table of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.frontends import wan
from tests.frontends.wan import CHUNK, DIM, HEAD_DIM, HEADS, TOKENS

ACTION_TABLE = 75
"""Rows of the action modules' table: 25 chunks."""
SPLIT = (8, 28, 28)
THETA = 256.0
WINDOW = 6
SEEN = 3
"""Latent frames of controls that a latent frame looks back at."""


class Action(nn.Module):
    """Mixes in keys and mouse: attention over frames, in a window of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mouse_qk_dim_list, self.rope_theta, self.local_attn_size = list(SPLIT), THETA, WINDOW
        self.mouse = nn.Linear(DIM + 2 * 4 * SEEN, 3 * DIM)
        self.keys = nn.Linear(4 * 4 * SEEN, 2 * DIM)
        self.query = nn.Linear(DIM, DIM)
        self.make_table(ACTION_TABLE)

    def make_table(self, rows: int) -> None:
        speeds = [THETA ** -(torch.arange(n // 2) * 2 / n) for n in SPLIT]
        still = torch.zeros(rows, (SPLIT[1] + SPLIT[2]) // 2)
        time = torch.arange(rows, dtype=torch.float32)[:, None] * speeds[0]
        angles = torch.cat([time, still], dim=1).repeat_interleave(2, dim=1)
        self.freqs_cos, self.freqs_sin = angles.cos(), angles.sin()

    def rotated(self, x: torch.Tensor, frame: int) -> torch.Tensor:
        cos, sin = (
            t[frame : frame + x.shape[1]][:, None] for t in (self.freqs_cos, self.freqs_sin)
        )
        half = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
        return (x.float() * cos + half.float() * sin).to(x.dtype)

    def attend(self, q: Any, k: Any, v: Any, cache: dict[str, Any], frame: int) -> torch.Tensor:
        q, k = self.rotated(q, frame), self.rotated(k, frame)
        end = wan.write(cache, k[: len(cache["k"])], v[: len(cache["k"])], frame + CHUNK, 0, True)
        seen = slice(max(0, end - self.local_attn_size), end)
        kept = (cache[name][:, seen].expand(len(q), -1, -1, -1) for name in "kv")
        return wan.attend(q, *kept)

    def rows(self, condition: torch.Tensor) -> torch.Tensor:
        """``[batch, CHUNK, rows * columns]``: what each of the last frames looks back at."""
        size = 4 * SEEN
        padded = torch.cat([condition[:, :1].expand(-1, size, -1), condition], dim=1)
        end = padded.shape[1]
        ends = [end - 4 * (CHUNK - 1 - i) for i in range(CHUNK)]
        return torch.stack([padded[:, e - size : e].flatten(1) for e in ends], dim=1)

    def forward(
        self,
        x: torch.Tensor,
        mouse_condition: torch.Tensor,
        keyboard_condition: torch.Tensor,
        kv_cache_mouse: dict[str, Any],
        kv_cache_keyboard: dict[str, Any],
        start_frame: int = 0,
    ) -> torch.Tensor:
        assert (keyboard_condition.shape[1] - 1) // 4 + 1 == start_frame + CHUNK
        frames = x.unflatten(1, (CHUNK, TOKENS)).transpose(1, 2).flatten(0, 1)  # [B * S, F, C]
        held = self.rows(mouse_condition).expand(len(frames), -1, -1)
        q, k, v = self.mouse(torch.cat([frames, held], dim=-1)).unflatten(
            -1, (3, HEADS, HEAD_DIM)
        ).unbind(2)  # fmt: skip
        y = self.attend(q, k, v, kv_cache_mouse, start_frame)
        k, v = (
            self.keys(self.rows(keyboard_condition)).unflatten(-1, (2, HEADS, HEAD_DIM)).unbind(2)
        )
        q = self.query(frames).unflatten(-1, (HEADS, HEAD_DIM))
        y = y + self.attend(q, k, v, kv_cache_keyboard, start_frame)
        y = y.flatten(2).unflatten(0, (len(x), TOKENS)).transpose(1, 2).flatten(1, 2)
        return x + y


class Block(wan.Block):
    def __init__(self, local: int, sink: int) -> None:
        super().__init__(local, sink)
        self.action_model: Action | None = Action()

    def forward(self, x: torch.Tensor, freqs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        start = kwargs["current_start"]
        x = x + self.self_attn(x, freqs, kwargs["kv_cache"], start, kwargs["cache_start"])
        if self.action_model is not None:
            x = self.action_model(
                x, kwargs["mouse_cond"], kwargs["keyboard_cond"], start_frame=start // TOKENS,
                kv_cache_mouse=kwargs["kv_cache_mouse"],
                kv_cache_keyboard=kwargs["kv_cache_keyboard"],
            )  # fmt: skip
        return x + self.ffn(F.layer_norm(x, (DIM,)))


class Model(wan.Model):
    def __init__(self, local: int) -> None:
        super().__init__(local, block=Block)
        self.blocks[-1].action_model = None  # type: ignore[assignment]


class GamePipeline(nn.Module):
    """The offline loop: all controls are an argument."""

    def __init__(self, local: int = 6) -> None:
        super().__init__()
        self.generator = wan.Wrapper(Model(local))
        self.frame_seq_length = TOKENS
        self.num_frame_per_block = CHUNK
        self.local_attn_size = local
        self.kv_cache1: wan.Cache | None = None
        self.kv_cache_mouse: wan.Cache | None = None
        self.kv_cache_keyboard: wan.Cache | None = None

    def inference(
        self, noise: torch.Tensor, conditional_dict: dict[str, torch.Tensor], first: int = 0
    ) -> list[torch.Tensor]:
        return self.loop(noise, conditional_dict, None, first)

    def loop(
        self,
        noise: torch.Tensor,
        conditional_dict: dict[str, torch.Tensor],
        ask: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None,
        first_chunk: int,
    ) -> list[torch.Tensor]:
        dtype = noise.dtype
        self.kv_cache1 = wan.empty_cache(1, self.local_attn_size * TOKENS, dtype)
        self.kv_cache_mouse = wan.empty_cache(TOKENS, WINDOW, dtype)
        self.kv_cache_keyboard = wan.empty_cache(1, WINDOW, dtype)
        out = []
        for frame in range(first_chunk * CHUNK, noise.shape[1], CHUNK):
            end = 1 + 4 * (frame + CHUNK - 1)
            if ask is not None:
                first = end - (4 * CHUNK if frame else end)
                keys, mouse = ask()
                conditional_dict["keyboard_cond"][:, first:end] = keys
                conditional_dict["mouse_cond"][:, first:end] = mouse
            kwargs = {
                "context": torch.zeros(DIM, dtype=dtype),
                "keyboard_cond": conditional_dict["keyboard_cond"][:, :end],
                "mouse_cond": conditional_dict["mouse_cond"][:, :end],
                "kv_cache": self.kv_cache1, "kv_cache_mouse": self.kv_cache_mouse,
                "kv_cache_keyboard": self.kv_cache_keyboard, "current_start": frame * TOKENS,
            }  # fmt: skip
            x = first_noise = noise[:, frame : frame + CHUNK]
            for t in wan.STEPS:
                clean = self.generator(x, t, **kwargs)
                x = (1 - t / 2) * clean + t / 2 * first_noise
            self.generator(clean, 0.0, **kwargs)
            out.append(clean)
        return out


class GameStreamingPipeline(GamePipeline):
    """The live loop: asks for the controls of a chunk when it begins."""

    def __init__(self, ask: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.ask = ask

    def inference(
        self, noise: torch.Tensor, conditional_dict: dict[str, torch.Tensor], first: int = 0
    ) -> list[torch.Tensor]:
        return self.loop(noise, conditional_dict, self.ask, first)


def controls(chunks: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Walk, turn about, walk back, again and again."""
    rows = 1 + 4 * (chunks * CHUNK - 1)
    keys, mouse = torch.zeros(1, rows, 4, dtype=dtype), torch.zeros(1, rows, 2, dtype=dtype)
    phase = torch.arange(rows) // 24 % 2
    keys[0, :, 0] = phase == 0
    mouse[0, :, 1] = 0.1 * (phase == 1)
    return {"keyboard_cond": keys, "mouse_cond": mouse}


def run(pipeline: Any, chunks: int, first: int = 0) -> list[torch.Tensor]:
    dtype = next(pipeline.parameters()).dtype
    return pipeline.inference(wan.noise(chunks, dtype), controls(chunks, dtype), first)


def lengthen(pipeline: Any) -> None:
    """Both tables."""
    wan.lengthen(pipeline)
    for block in pipeline.generator.model.blocks:
        if block.action_model is not None:
            block.action_model.make_table(4 * ACTION_TABLE)

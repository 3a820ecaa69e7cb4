"""The built-in world model: a small causal video diffusion transformer of the Wan form.

It denoises one chunk of frames at a time, conditioned on the camera's pose, and attends to earlier
chunks only through a KV cache with the shape and the rules of Matrix-Game 2.0 and Self-Forcing: a
list, one dict a layer, `{"k", "v": bf16 [B, capacity, heads, head_dim], "global_end_index",
"local_end_index": int64 [1]}`; keys after the key norm and after RoPE; one absolute token offset
`current_start`; a ring that rolls behind a sink; and a position table of 1,024 frames.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from worldpager.errors import PositionError
from worldpager.model_adapter.builtin.config import ModelConfig
from worldpager.model_adapter.builtin.layers import Beside, Block, LayerCache, modulate, rope_angles
from worldpager.model_adapter.builtin.rooms import HALF, camera_rays

__all__ = ["LayerCache", "ModelConfig", "PositionError", "WorldModel", "denoise", "load_model"]

WEIGHTS = Path(__file__).with_name("weights.safetensors")
LEVELS = (1.0, 0.9, 0.75, 0.5)
"""Noise levels of the denoising forwards, from pure noise down; the last one lands on clean."""

PIXEL_CHANNELS = 3
_TIME_CHANNELS = 128


class WorldModel(nn.Module):
    """Predicts the clean frames of a chunk from noisy ones, their poses and the cache."""

    rays: Tensor
    angles: Tensor

    def __init__(self, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or ModelConfig()
        patch_channels = PIXEL_CHANNELS * config.patch**2
        pose_channels = 12 * (1 + 2 * config.pose_octaves)
        self.patch_in = nn.Linear(patch_channels, config.width)
        self.pose_in = nn.Sequential(
            nn.Linear(pose_channels, config.width), nn.SiLU(), nn.Linear(config.width, config.width)
        )
        self.place = nn.Parameter(0.02 * torch.randn(config.tokens_per_frame, config.width))
        self.level_in = nn.Sequential(
            nn.Linear(_TIME_CHANNELS, config.width),
            nn.SiLU(),
            nn.Linear(config.width, config.width),
            nn.SiLU(),
        )
        self.blocks: Sequence[Block] = nn.ModuleList(  # type: ignore[assignment]
            Block(config) for _ in range(config.layers)
        )
        self.norm_out = nn.LayerNorm(config.width, elementwise_affine=False)
        self.modulation_out = nn.Linear(config.width, 2 * config.width)
        self.patch_out = nn.Linear(config.width, patch_channels)
        for layer in (self.modulation_out, self.patch_out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        rays = torch.from_numpy(camera_rays(config.grid))
        self.register_buffer("rays", F.normalize(rays, dim=-1), persistent=False)
        time, side, _ = config.rope_split
        angles = torch.cat(
            [
                rope_angles(config.rope_rows, time, config.rope_theta),
                rope_angles(config.rope_rows, side, config.rope_theta),
            ],
            dim=1,
        )
        # Angles, not cosines, and in float64: row 1,023 of the fastest pair is 1,023 radians.
        self.register_buffer("angles", angles, persistent=False)

    def set_sink(self, tokens: int) -> None:
        """Tokens at the head of every layer's ring that a roll leaves in place."""
        for block in self.blocks:
            block.self_attn.sink_tokens = tokens

    def set_sparse(self, mass: float | None) -> None:
        """Attend to the frames that hold `mass` of a head's attention; `None`: to all of them."""
        for block in self.blocks:
            block.self_attn.sparse = mass

    def new_cache(self, batch: int, capacity_tokens: int) -> list[LayerCache]:
        """An empty cache: one dict a layer, bf16 `[batch, capacity_tokens, heads, head_dim]`."""
        shape = (batch, capacity_tokens, self.config.heads, self.config.head_dim)
        device = self.place.device
        return [
            LayerCache(
                k=torch.zeros(shape, dtype=torch.bfloat16, device=device),
                v=torch.zeros(shape, dtype=torch.bfloat16, device=device),
                global_end_index=torch.zeros(1, dtype=torch.long, device=device),
                local_end_index=torch.zeros(1, dtype=torch.long, device=device),
            )
            for _ in range(self.config.layers)
        ]

    def forward(
        self,
        x_noisy: Tensor,
        t: Tensor,
        poses: Tensor,
        kv_cache: list[LayerCache],
        current_start: int,
    ) -> Tensor:
        """Predict a chunk's clean frames and leave its keys and values in the cache.

        x_noisy: float `[B, frames, 3, H, W]` in [-1, 1] plus noise; t: noise level in [0, 1],
        float `[B]`; poses: camera-to-world `[B, frames, 4, 4]`; current_start: the chunk's first
        token, which sets its position. Returns float `[B, frames, 3, H, W]`.
        """
        frames = x_noisy.shape[1]
        start = current_start // self.config.tokens_per_frame
        if start < 0 or start + frames > self.config.rope_rows:
            raise PositionError(
                f"frames {start} to {start + frames - 1} are outside the RoPE table of "
                f"{self.config.rope_rows} rows: lower current_start and global_end_index by a "
                "base and rotate the cached keys by it, or start a new rollout"
            )
        positions = torch.arange(start, start + frames, device=x_noisy.device)[None]
        cos, sin = self.rotation(positions)
        x, level = self.embed(x_noisy, t[:, None], poses)
        for block, cache in zip(self.blocks, kv_cache, strict=True):
            x = block(x, level, cos, sin, kv_cache=cache, current_start=current_start)
        return self.unembed(x, level)

    def denoise_copies(
        self, x: Tensor, t: Tensor, poses: Tensor, positions: Tensor, beside: Beside
    ) -> Tensor:
        """Training's forward, without a cache: clean and noisy copies of chunks side by side.

        x `[B, frames, 3, H, W]`; t `[B, G]`, one level for each of G equal runs of frames; poses
        `[B, frames, 4, 4]`; positions int64 `[B, frames]`.
        """
        cos, sin = self.rotation(positions)
        tokens, level = self.embed(x, t, poses)
        for block in self.blocks:
            tokens = block(tokens, level, cos, sin, beside=beside)
        return self.unembed(tokens, level)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of frames at `positions` `[B, f]`: float32 `[B, f * tokens, D / 2]`."""
        batch, frames = positions.shape
        grid = self.config.grid
        time, side, _ = self.config.rope_split
        temporal, spatial = self.angles[positions, :time], self.angles[:grid, time:]
        angles = torch.cat(
            [
                temporal[:, :, None, None].expand(batch, frames, grid, grid, time),
                spatial[:, None].expand(batch, frames, grid, grid, side),
                spatial[None, :].expand(batch, frames, grid, grid, side),
            ],
            dim=-1,
        ).flatten(1, 3)
        return angles.cos().float(), angles.sin().float()

    def embed(self, x: Tensor, t: Tensor, poses: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens `[B, frames * tokens_per_frame, width]` and noise embedding `[B, G, width]`."""
        patches = patchify(x, self.config.patch)
        tokens = self.patch_in(patches) + self.pose_in(self.pose_features(poses)) + self.place
        return tokens.flatten(1, 2), self.level_in(_time_features(t))

    def unembed(self, tokens: Tensor, level: Tensor) -> Tensor:
        """Frames `[B, frames, 3, H, W]` from tokens."""
        shift, scale = self.modulation_out(level).chunk(2, dim=-1)
        patches = self.patch_out(modulate(self.norm_out(tokens), shift, scale))
        return unpatchify(patches.float(), self.config.patch, self.config.grid)

    def pose_features(self, poses: Tensor) -> Tensor:
        """What each patch's central ray is: float32 `[B, frames, tokens_per_frame, channels]`.

        Direction, moment and origin of the ray, and where it meets the shell that all rooms
        share, each with octaves of sines and cosines.
        """
        # A product and a sum, not a matrix product: autocast would round the rays to bf16.
        turned = poses[:, :, None, :3, :3].float() * self.rays[:, None, :]
        direction = turned.sum(-1)
        half = torch.tensor(HALF, device=poses.device)
        origin = poses[..., :3, 3].float()[:, :, None].expand_as(direction)
        tiny = torch.where(direction < 0, -1e-6, 1e-6)
        safe = torch.where(direction.abs() < 1e-6, tiny, direction)
        depth = ((torch.copysign(half, safe) - origin) / safe).amin(-1, keepdim=True)
        point = (origin + depth * direction) / half
        origin = origin / half
        moment = torch.linalg.cross(origin, direction)
        values = torch.cat([direction, moment, origin, point], dim=-1)
        octaves = math.pi * 2.0 ** torch.arange(self.config.pose_octaves, device=poses.device)
        waves = values[..., None, :] * octaves[:, None]
        return torch.cat([values, waves.sin().flatten(-2), waves.cos().flatten(-2)], dim=-1)


def _time_features(t: Tensor) -> Tensor:
    """Sines and cosines of noise levels in [0, 1]: `[...]` to `[..., _TIME_CHANNELS]`."""
    half = _TIME_CHANNELS // 2
    frequency = torch.exp(-math.log(1e4) * torch.arange(half, device=t.device) / half)
    phase = 1000.0 * t[..., None].float() * frequency
    return torch.cat([phase.sin(), phase.cos()], dim=-1)


def patchify(x: Tensor, patch: int) -> Tensor:
    """`[B, f, C, H, W]` to `[B, f, (H / p) * (W / p), C * p * p]`."""
    batch, frames, channels, height, width = x.shape
    x = x.view(batch, frames, channels, height // patch, patch, width // patch, patch)
    return x.permute(0, 1, 3, 5, 2, 4, 6).reshape(
        batch, frames, height // patch * (width // patch), channels * patch**2
    )


def unpatchify(tokens: Tensor, patch: int, grid: int) -> Tensor:
    """`[B, f * grid * grid, C * p * p]` to `[B, f, C, H, W]`."""
    batch = tokens.shape[0]
    x = tokens.view(batch, -1, grid, grid, PIXEL_CHANNELS, patch, patch)
    return x.permute(0, 1, 4, 2, 5, 3, 6).reshape(
        batch, -1, PIXEL_CHANNELS, grid * patch, grid * patch
    )


def denoise(
    model: WorldModel,
    noise: Tensor,
    poses: Tensor,
    kv_cache: list[LayerCache],
    current_start: int,
    levels: tuple[float, ...] = LEVELS,
    seen: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Sample a chunk: noise `[B, f, 3, H, W]` to clean frames of that shape, about [-1, 1].

    Each step predicts the clean frames and, keeping the noise that they imply, moves down to the
    next level along the straight path between the two. `seen` is told each step's number and
    prediction.
    """
    x = noise
    for step, (level, lower) in enumerate(zip(levels, (*levels[1:], 0.0), strict=True)):
        t = torch.full((x.shape[0],), level)
        clean = model(x, t, poses, kv_cache=kv_cache, current_start=current_start)
        if seen is not None:
            seen(step, clean)
        implied = (x - (1 - level) * clean) / level
        x = (1 - lower) * clean + lower * implied
    return x


def load_model(path: str | Path | None = None) -> WorldModel:
    """The trained model in float32 on the CPU, in evaluation mode; by default the shipped one."""
    with safe_open(str(path or WEIGHTS), framework="pt") as file:
        metadata = file.metadata() or {}
        model = WorldModel(ModelConfig(**json.loads(metadata["config"])))
        names = file.keys()
        model.load_state_dict({name: file.get_tensor(name) for name in names})
    return model.eval().requires_grad_(False)


def config_text(config: ModelConfig) -> str:
    """The configuration as the string that `load_model` reads from a weights file."""
    return json.dumps(asdict(config), sort_keys=True)

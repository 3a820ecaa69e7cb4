"""A frontend without a model: any geometry, any compute time, KV with realistic statistics.

What a rollout costs depends on sizes, times and the camera's path, not on weights. So the whole
memory can be measured for a model that no one here can run: this frontend keeps the Wan family's
ring caches, calls ``boundary()`` before each chunk, and leaves K and V behind.

Its keys are smooth fields over frames, rows and columns, RMS-normed over all heads, with a few
channels far larger than the rest, and then rotated to their position; its values are smooth too,
but heavier-tailed. A chunk is drawn from a small bank of such fields: ``cos(a) A + sin(a) B`` with
another angle for each chunk, computed once for the whole chunk; the layers are that with its heads
shifted. So a big chunk costs little more than a copy.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import closing

import torch
import torch.nn.functional as F

from worldpager.errors import ConfigError
from worldpager.model_adapter.driving import (
    ChunkMetrics,
    RolloutConfig,
    one_thread,
    path_step,
    run_chunks,
)
from worldpager.model_adapter.frontend import KVSpec
from worldpager.model_adapter.memory import WorldMemory
from worldpager.model_adapter.ring_cache import RingCache

BANK = 2
"""Fields to draw layers from, for K and for V."""
OUTLIERS = 5
OUTLIER_GAINS = (10.0, 50.0)
"""Channels of a head that stand out in keys, and by how much (least, most)."""
NOISE = 0.3
"""Share of a field that is not smooth."""
TAIL = 0.6
"""Width of the lognormal factor on values; 0 leaves them Gaussian."""
_ANGLE = math.pi * (3 - math.sqrt(5))  # golden: no two chunks alike, however many
_COARSE = 4  # tokens a smooth field stays alike, in each direction


class KVFields:
    """Draws the K and V of chunks of ``spec``. The same for the same ``seed``, chunk and layer."""

    def __init__(self, spec: KVSpec, seed: int = 0) -> None:
        if spec.rope is None:
            raise ConfigError("synthetic keys are cached rotated; give KVSpec.rope")
        self._spec, self._rope = spec, spec.rope
        made = torch.Generator().manual_seed(seed)
        grid = _grid(spec.tokens_per_frame)
        gains = torch.ones(spec.heads * spec.head_dim)
        for head in range(spec.heads):
            places = torch.randperm(spec.head_dim, generator=made)[:OUTLIERS]
            least, most = (math.log(gain) for gain in OUTLIER_GAINS)
            drawn = torch.rand(len(places), generator=made) * (most - least) + least
            gains[head * spec.head_dim + places] = drawn.exp()
        self._bank = min(BANK, spec.layers)
        self._keys = [self._key_pair(grid, gains, made) for _ in range(self._bank)]
        self._values = [[self._value(grid, made) for _ in "ab"] for _ in range(self._bank)]
        self._drawn: list[tuple[torch.Tensor, torch.Tensor]] = []

    def draw(self, chunk: int, position: float) -> None:
        """Make ``chunk`` the one that :meth:`write` gives, its keys rotated to ``position``."""
        cos, sin = math.cos(_ANGLE * chunk), math.sin(_ANGLE * chunk)
        dtype, rotation = self._spec.dtype, self._rope.temporal_rotation(position)
        self._drawn = []
        for (a, b, alike), values in zip(self._keys, self._values, strict=True):
            k = a * cos + b * sin
            # both are RMS-normed, so their sum's norm follows from how alike they are
            k *= torch.rsqrt(1 + 2 * cos * sin * alike)[:, None, None]
            if rotation is not None:
                rotation.apply_(k)
            v = values[0] * cos + values[1] * sin
            self._drawn.append((k.to(dtype), v.to(dtype)))

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Fill one layer's ``[batch, tokens, heads, head_dim]`` with the chunk drawn last."""
        drawn = self._drawn[layer % self._bank]
        heads = self._spec.heads
        turn = layer // self._bank % heads
        for item in range(self._spec.batch):
            first = (turn + item) % heads
            for out, made in zip((k[item], v[item]), drawn, strict=True):
                out[:, : heads - first] = made[:, first:]
                out[:, heads - first :] = made[:, :first]

    def _smooth(self, grid: tuple[int, int], made: torch.Generator) -> torch.Tensor:
        """A field ``[tokens, heads * head_dim]`` of unit variance, smooth over frame and place."""
        spec, (rows, columns) = self._spec, grid
        channels, frames = spec.heads * spec.head_dim, spec.frames_per_chunk
        coarse = [max(2, -(-side // _COARSE)) for side in (frames, rows, columns)]
        seeds = torch.randn(1, channels, *coarse, generator=made)
        smooth = F.interpolate(seeds, (frames, rows, columns), mode="trilinear", align_corners=True)
        field = smooth[0].flatten(1).T.contiguous()
        field = field / field.std()
        noise = torch.randn(field.shape, generator=made)
        return field * math.sqrt(1 - NOISE**2) + noise * NOISE

    def _key_pair(
        self, grid: tuple[int, int], gains: torch.Tensor, made: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Two fields of keys as rotated at position 0, and how alike they are, token by token."""
        normed = []
        for _ in "ab":
            field = self._smooth(grid, made)
            normed.append(field * torch.rsqrt(field.square().mean(1, keepdim=True)))
        alike = (normed[0] * normed[1]).mean(1)
        a, b = (self._rotated(field * gains, grid) for field in normed)
        return a, b, alike

    def _value(self, grid: tuple[int, int], made: torch.Generator) -> torch.Tensor:
        field = self._smooth(grid, made)
        field *= (torch.randn(field.shape, generator=made) * TAIL).exp_()
        return field.view(len(field), self._spec.heads, self._spec.head_dim)

    def _rotated(self, keys: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """Keys ``[tokens, heads * head_dim]`` turned by frame, row and column."""
        spec, (rows, columns) = self._spec, grid
        k = keys.view(len(keys), spec.heads, spec.head_dim)
        places = torch.cartesian_prod(
            torch.arange(spec.frames_per_chunk), torch.arange(rows), torch.arange(columns)
        )
        angles = []
        for axis, pairs in enumerate(self._rope.split):
            steps = self._rope.theta ** (-torch.arange(pairs, dtype=torch.float64) / max(pairs, 1))
            unit = self._rope.scale if axis == 0 else 1.0
            angles.append(places[:, axis, None] * steps * unit)
        turns = torch.polar(torch.ones(()).double(), torch.cat(angles, 1))[:, None]
        turned = torch.view_as_complex(k.double().view(*k.shape[:2], -1, 2)) * turns
        return torch.view_as_real(turned).flatten(2).float()


def _grid(tokens: int) -> tuple[int, int]:
    """Rows and columns of a frame: the most square way to write ``tokens`` as a product."""
    rows = next(side for side in range(math.isqrt(tokens), 0, -1) if tokens % side == 0)
    return rows, tokens // rows


class SyntheticFrontend:
    """Ring caches and the loop around them. Holds one window in ``spec.dtype`` and the bank."""

    def __init__(self, spec: KVSpec, seed: int = 0) -> None:
        self.spec = spec
        self.base = 0
        """Frames by which positions are lowered, as the memory asked for."""
        self._fields = KVFields(spec, seed)
        chunks = spec.sink_chunks + spec.retrieve_chunks + spec.recent_chunks + 1
        shape = (spec.batch, chunks * spec.tokens_per_chunk, spec.heads, spec.head_dim)
        self.kv_cache = [
            {
                "k": torch.zeros(shape, dtype=spec.dtype),
                "v": torch.zeros(shape, dtype=spec.dtype),
                "global_end_index": torch.zeros(1, dtype=torch.long),
                "local_end_index": torch.zeros(1, dtype=torch.long),
            }
            for _ in range(spec.layers)
        ]
        self.cache = RingCache(self.kv_cache, spec, self._lower)

    def _lower(self, frames: int) -> None:
        self.base += frames

    def generate(self, chunk: int) -> None:
        """What the model's forwards leave behind: the chunk's K and V after the window."""
        spec, tokens = self.spec, self.spec.tokens_per_chunk
        self._fields.draw(chunk, chunk * spec.frames_per_chunk - self.base)
        for layer, cache in enumerate(self.kv_cache):
            end = int(cache["local_end_index"])
            rows = slice(end, end + tokens)
            self._fields.write(layer, cache["k"][:, rows], cache["v"][:, rows])
            cache["local_end_index"] += tokens
            cache["global_end_index"] += tokens


def run_synthetic(config: RolloutConfig, spec: KVSpec) -> Generator[ChunkMetrics, None, None]:
    """Run ``spec`` with a memory along ``config.path``, yielding after each chunk.

    Drawing the KV counts into ``config.chunk_time``, as a model's forwards would. There are no
    pictures. Closing the iterator early ends the rollout cleanly. Raises as :class:`WorldMemory`.
    """
    frontend = SyntheticFrontend(spec, config.seed)
    with closing(WorldMemory(config.memory(), spec)) as memory, one_thread():

        def generate(chunk: int) -> None:
            memory.boundary(path_step(spec, config.path, chunk, config.known_ahead), frontend.cache)
            frontend.generate(chunk)

        yield from run_chunks(memory, config, generate)

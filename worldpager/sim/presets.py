"""Geometries of the world models that the planner knows by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from worldpager.errors import ConfigError
from worldpager.quant.codec import BlockShape
from worldpager.quant.rope import Wall

POSITION_TABLE = "position table"


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """What decides how much memory a chunk leaves behind, and how long it lasts.

    ``video_frames_per_chunk`` are decoded frames, ``frames_per_chunk`` latent ones.
    ``sink_chunks``: how many first chunks stay in attention for good, and in 16 bits.
    ``position_table_rows``: of the temporal rotation of self-attention; ``other_walls``: tables
    besides it. ``compute_seconds``: a measured time per chunk, None where none was published.
    """

    name: str
    layers: int
    heads: int
    head_dim: int
    tokens_per_frame: int
    frames_per_chunk: int
    video_frames_per_chunk: int
    video_fps: float
    sink_chunks: int = 0
    position_table_rows: int = 1024
    other_walls: tuple[Wall, ...] = ()
    compute_seconds: float | None = None
    note: str = ""

    def scaled(self, scale: Fraction) -> ModelGeometry:
        """About ``scale`` of it, to run it on a smaller machine: fewer layers, then fewer tokens a
        frame. Frames, heads and times stay, so that with ``scale`` times the bytes and bandwidths
        everything happens at the same chunks. Named ``NAME@SCALE``.
        """
        if not 0 < scale <= 1:
            raise ConfigError(f"a model can be scaled by more than 0 and at most 1, not by {scale}")
        layers = math.ceil(self.layers * scale)
        tokens = max(1, round(self.tokens_per_frame * self.layers * scale / layers))
        return replace(
            self,
            name=f"{self.name}@{scale}",
            layers=layers,
            tokens_per_frame=tokens,
            note=f"{layers} of {self.layers} layers, {tokens} of {self.tokens_per_frame} tokens a "
            f"frame; {self.note}",
        )

    @property
    def block_shape(self) -> BlockShape:
        """Shape of one layer's K, and of its V."""
        tokens = self.tokens_per_frame * self.frames_per_chunk
        return BlockShape(tokens, self.heads, self.head_dim)

    @property
    def kv_elements_per_chunk(self) -> int:
        """Values in K and V over all layers."""
        return 2 * self.layers * self.block_shape.elements

    @property
    def walls(self) -> tuple[Wall, ...]:
        """Every table that a rollout can run off, the nearest end first."""
        walls = (Wall(POSITION_TABLE, self.position_table_rows), *self.other_walls)
        return tuple(sorted(walls, key=lambda wall: wall.rows))

    @property
    def video_seconds_per_chunk(self) -> float:
        """How long a chunk is watched, in seconds."""
        return self.video_frames_per_chunk / self.video_fps


_PRESETS = (
    ModelGeometry(
        "matrix-game-2", 30, 12, 128, 880, 3, 12, 16.0,
        other_walls=(Wall("action table", 7500),),
        compute_seconds=1.2105,
        note="352x640; compute time as published for WorldPager on one RTX 4090",
    ),
    ModelGeometry(
        "self-forcing", 30, 12, 128, 1560, 3, 12, 16.0,
        note="Wan 2.1 1.3B, 480x832, without classifier-free guidance",
    ),
    ModelGeometry(
        "lingbot-world", 40, 40, 128, 1560, 4, 16, 16.0,
        sink_chunks=2,
        note="v2 14B, 480x832, sink of 6 latent frames",
    ),
    ModelGeometry(
        "lingbot-world-1.3b", 30, 12, 128, 1508, 4, 16, 16.0,
        compute_seconds=3.491,
        note="1.3B shape inferred from published spill points; compute time as published",
    ),
    ModelGeometry(
        "longlive", 30, 24, 128, 880, 8, 32, 24.0,
        sink_chunks=1,
        note="Wan 2.2 5B, sink of 8 latent frames, one shot",
    ),
    ModelGeometry(
        "builtin", 4, 2, 64, 16, 3, 3, 4.0,
        sink_chunks=1,
        note="the model that ships with this package; 32x32",
    ),
)  # fmt: skip
PRESETS = {preset.name: preset for preset in _PRESETS}


def get_preset(name: str) -> ModelGeometry:
    """The geometry called ``name``, or ``NAME@SCALE`` for a smaller one (``matrix-game-2@1/30``).

    Raises :class:`ConfigError` listing the known names.
    """
    base, _, scale = name.partition("@")
    if base not in PRESETS:
        raise ConfigError(f"no model {base!r}; known are {', '.join(PRESETS)}")
    return PRESETS[base].scaled(parse_scale(scale)) if scale else PRESETS[base]


def parse_scale(text: str) -> Fraction:
    """``"1/30"`` or ``"0.1"``; raises :class:`ConfigError` for anything else."""
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"cannot read {text!r} as a scale; write it like 1/30") from None

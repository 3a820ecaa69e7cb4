"""Geometries of the world models that the planner knows by name."""

from __future__ import annotations

from dataclasses import dataclass

from worldpager.errors import ConfigError
from worldpager.quant.codec import BlockShape


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """What decides how much memory a chunk leaves behind, and how long it lasts.

    ``video_frames_per_chunk`` are decoded frames, ``frames_per_chunk`` latent ones.
    ``sink_chunks``: how many first chunks stay in attention for good, and in 16 bits.
    ``compute_seconds``: a measured time per chunk, None where none was published.
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
    compute_seconds: float | None = None
    note: str = ""

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
    def video_seconds_per_chunk(self) -> float:
        """How long a chunk is watched, in seconds."""
        return self.video_frames_per_chunk / self.video_fps


_PRESETS = (
    ModelGeometry(
        "matrix-game-2", 30, 12, 128, 880, 3, 12, 16.0,
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
    """The geometry called ``name``. Raises :class:`ConfigError` listing the known names."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError(f"no model {name!r}; known are {', '.join(PRESETS)}") from None

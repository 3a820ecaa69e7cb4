"""Shape of the built-in world model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model. Lengths in pixels, tokens, channels or latent frames as named."""

    width: int = 128
    layers: int = 4
    heads: int = 2
    image_size: int = 32
    patch: int = 8
    frames_per_chunk: int = 3
    mlp_ratio: int = 4
    pose_octaves: int = 4
    rope_theta: float = 10000.0
    rope_rows: int = 1024

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def grid(self) -> int:
        """Patches along one side of a frame."""
        return self.image_size // self.patch

    @property
    def tokens_per_frame(self) -> int:
        return self.grid * self.grid

    @property
    def tokens_per_chunk(self) -> int:
        return self.tokens_per_frame * self.frames_per_chunk

    @property
    def rope_split(self) -> tuple[int, int, int]:
        """Complex pairs of a head that carry time, height and width, in this order."""
        pairs = self.head_dim // 2
        side = self.head_dim // 6
        return pairs - 2 * side, side, side

"""Moving keys along the time axis of their rotary embedding (RoPE).

A head of ``head_dim`` values is ``head_dim / 2`` complex pairs, interleaved ``(2i, 2i + 1)``. The
first ``t`` pairs turn with the frame, the rest with height and width. Temporal pair ``j`` of ``t``
turns by ``theta ** (-j / t)`` radians a frame, so a key rotated to frame ``p`` is brought to frame
``q`` by one more rotation of ``q - p`` frames. The angles are computed in float64 from that
difference and never looked up, so they hold at any frame, fractional ones included.

Source of the split and frequencies: the Wan family's ``rope_params`` and ``rope_apply``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worldpager.errors import CodecError, ConfigError, PositionError


@dataclass(frozen=True, slots=True, eq=False)
class TemporalRotation:
    """One rotation of the temporal pairs: ``cos`` and ``sin`` float32 ``[pairs]``."""

    cos: npt.NDArray[np.float32]
    sin: npt.NDArray[np.float32]

    @property
    def pairs(self) -> int:
        """Number of leading pairs that turn; the first ``2 * pairs`` channels of a head."""
        return len(self.cos)

    def apply_(self, k: torch.Tensor) -> torch.Tensor:
        """Rotate ``k`` ``[..., head_dim]`` in place and return it.

        bf16, fp16 or fp32, any strides and device. The arithmetic is fp32, rounded once. Raises
        :class:`CodecError` where ``head_dim`` is smaller than the pairs need.
        """
        if k.shape[-1] < 2 * self.pairs:
            raise CodecError(
                f"keys with head_dim {k.shape[-1]} cannot hold {self.pairs} temporal pairs; "
                "use the rope layout of the model the keys came from"
            )
        cos = torch.from_numpy(self.cos).to(k.device)
        sin = torch.from_numpy(self.sin).to(k.device)
        even, odd = k[..., 0 : 2 * self.pairs : 2], k[..., 1 : 2 * self.pairs : 2]
        re, im = even.float(), odd.float()
        turned = re * cos - im * sin, re * sin + im * cos
        even.copy_(turned[0])
        odd.copy_(turned[1])
        return k


@dataclass(frozen=True, slots=True)
class Wall:
    """A table inside a model that ends: it has ``rows``, and each latent frame takes one."""

    name: str
    rows: int


@dataclass(frozen=True, slots=True)
class RopeLayout:
    """How a model rotates its keys.

    ``split``: pairs turned by time, height and width, temporal ones first. ``theta``: base of the
    temporal frequencies. ``table_len``: rows of the model's own position table, ``None`` where the
    model computes positions; it limits where keys may be placed, not what a rotation can express.
    ``scale``: factor on the frame number before it becomes an angle.
    """

    split: tuple[int, int, int]
    theta: float = 10000.0
    table_len: int | None = None
    pairing: str = "interleaved"
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.pairing != "interleaved":
            raise ConfigError(
                f"rope pairing {self.pairing!r} is unknown; only 'interleaved' is handled"
            )
        if len(tuple(self.split)) != 3 or min(self.split) < 0:
            raise ConfigError(f"rope split must be three pair counts (t, h, w), not {self.split}")
        if not (self.theta > 0 and math.isfinite(self.theta) and math.isfinite(self.scale)):
            raise ConfigError(
                f"rope theta must be positive and scale finite, not {self.theta} and {self.scale}"
            )
        if self.table_len is not None and self.table_len < 1:
            raise ConfigError(f"rope table_len must be at least 1, not {self.table_len}")

    @classmethod
    def wan(cls, head_dim: int, table_len: int | None = 1024) -> RopeLayout:
        """The Wan family's layout: height and width get ``head_dim // 6`` pairs, time the rest."""
        if head_dim < 2 or head_dim % 2:
            raise ConfigError(f"rope needs an even head_dim of at least 2, not {head_dim}")
        side = head_dim // 6
        return cls(split=(head_dim // 2 - 2 * side, side, side), table_len=table_len)

    @property
    def head_dim(self) -> int:
        """Channels of a head: twice the pairs."""
        return 2 * sum(self.split)

    @property
    def frequencies(self) -> npt.NDArray[np.float64]:
        """Radians per frame of each temporal pair, float64 ``[t]``."""
        pairs = self.split[0]
        return self.scale * self.theta ** (-np.arange(pairs, dtype=np.float64) / max(pairs, 1))

    def temporal_rotation(
        self, delta_frames: float, pairs: int | None = None
    ) -> TemporalRotation | None:
        """The rotation that moves keys by ``delta_frames`` (new minus old, may be fractional).

        ``pairs``: turn only that many of the fastest pairs. ``None`` when nothing moves, so that
        unmoved keys stay bit for bit as they are. Raises :class:`PositionError` for a difference
        that is not finite.
        """
        if not math.isfinite(delta_frames):
            raise PositionError(f"keys cannot be moved by {delta_frames} frames; give a finite one")
        if delta_frames == 0 or self.split[0] == 0:
            return None
        angles = float(delta_frames) * self.frequencies[:pairs]
        return TemporalRotation(
            cos=np.cos(angles).astype(np.float32), sin=np.sin(angles).astype(np.float32)
        )

    def check_position(self, position: float, frames: int = 1) -> None:
        """Raise :class:`PositionError` unless ``frames`` frames from ``position`` fit the table."""
        if not math.isfinite(position):
            raise PositionError(f"temporal position {position} is not finite")
        if self.table_len is not None and not 0 <= position <= self.table_len - frames:
            raise PositionError(
                f"{frames} frames from temporal position {position} leave the model's table of "
                f"{self.table_len}; move the window's base so that positions stay inside it"
            )

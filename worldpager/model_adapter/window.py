"""Where retrieved chunks stand in time: the temporal positions of a window.

The window is ``[sink | retrieved | recent | current]``. A model's position table is short (1,024
rows in the Wan family) and a rollout is not, so something has to give. Two ways:

``absolute``: every chunk keeps the position it was made at. Exact and never rotated, but the
rollout ends at the table's end, which is told before it happens.

``moving``: all positions are relative to a base that jumps forward whenever the current chunk would
leave the table; retrieved chunks stand right before the recent ones, in time order (WorldKV's
correction, in chronological order). The sink keeps its place at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from worldpager.errors import ConfigError, PositionError
from worldpager.model_adapter.frontend import KVSpec


class Positions(Protocol):
    """Chooses temporal positions, in latent frames of the model's table."""

    name: str

    def rebase(self, start_frame: int, base: int) -> int:
        """Frames by which to raise ``base`` before the chunk at true frame ``start_frame``.

        Raises :class:`PositionError` where the chunk has no place.
        """

    def place(self, start_frame: int, base: int, stored: Sequence[float]) -> list[float]:
        """Positions for retrieved chunks, given in time order by the ``stored`` positions that
        their keys are rotated to.
        """


class Absolute:
    """Every chunk where it was made."""

    name = "absolute"

    def __init__(self, spec: KVSpec) -> None:
        self._spec = spec

    def rebase(self, start_frame: int, base: int) -> int:
        table = self._spec.rope.table_len if self._spec.rope else None
        last = start_frame + self._spec.frames_per_chunk
        if table is not None and last > table:
            raise PositionError(
                f"the chunk at frame {start_frame} needs positions up to {last - 1}, but the "
                f"model's table has {table} rows ({table // self._spec.frames_per_chunk} chunks); "
                "use positions='moving' to go on"
            )
        return 0

    def place(self, start_frame: int, base: int, stored: Sequence[float]) -> list[float]:
        return list(stored)


class Moving:
    """Retrieved chunks right before the recent ones, all relative to a base that jumps."""

    name = "moving"

    def __init__(self, spec: KVSpec) -> None:
        self._spec = spec
        self._floor = spec.sink_frames + spec.retrieve_frames + spec.recent_frames
        table = spec.rope.table_len if spec.rope else None
        if table is not None and self._floor + spec.frames_per_chunk > table:
            raise PositionError(
                f"a window of {self._floor + spec.frames_per_chunk} frames does not fit the "
                f"model's table of {table} rows; retrieve fewer chunks"
            )

    def rebase(self, start_frame: int, base: int) -> int:
        table = self._spec.rope.table_len if self._spec.rope else None
        if table is None or start_frame - base + self._spec.frames_per_chunk <= table:
            return 0
        return start_frame - base - self._floor

    def place(self, start_frame: int, base: int, stored: Sequence[float]) -> list[float]:
        frames = self._spec.frames_per_chunk
        end = start_frame - base - self._spec.recent_frames
        return [float(end - (len(stored) - i) * frames) for i in range(len(stored))]


def positions(name: str, spec: KVSpec) -> Positions:
    """The scheme called ``name``. Raises :class:`ConfigError` for another name."""
    if name == "absolute":
        return Absolute(spec)
    if name == "moving":
        return Moving(spec)
    raise ConfigError(f"no position scheme {name!r}; known are absolute, moving")

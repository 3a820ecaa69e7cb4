"""Where retrieved chunks stand in time: the temporal positions of a window.

The window is ``[sink | retrieved | recent | current]``. A model's position table is short (1,024
rows in the Wan family) and a rollout is not, so something has to give. The schemes, by name:

``absolute``: every chunk keeps the position it was made at. Exact and never rotated, but the
rollout ends at the table's end, which is told before it happens.

``moving``: all positions are relative to a base that jumps forward whenever the current chunk would
leave the table; retrieved chunks stand right before the recent ones, in time order (WorldKV's
correction, in chronological order).

``moving-best-first``: the same in the order of WorldKV's code: the best match is furthest away.

``fractional``: old frames keep their order and draw near, by DeCoPrune's rule
(:func:`drawn_near`), applied to each window anew from what was stored; with a moving base.

``fractional-fast``: the same on the faster half of the temporal pairs; the slower half keeps its
absolute position, so that the rollout ends at the table's end.

The sink keeps its place at the start under each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from worldpager.errors import ConfigError, PositionError
from worldpager.model_adapter.frontend import KVSpec
from worldpager.quant.shard import ChunkRecord

NEAR, SPAN = 8, 17.0
"""DeCoPrune's defaults, in frames: the nearest ``NEAR`` stay, the oldest is drawn to ``SPAN``."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of frames that a window brings back.

    ``frame``: true index of the first; ``position``: what its keys are rotated to in the store;
    ``rank``: 0 for the best match of the window.
    """

    frame: int
    frames: int
    position: float
    rank: int = 0


def piece_of(record: ChunkRecord, best: Sequence[int]) -> Piece:
    """What a window brings back with ``record``; one that stands in for a missed one ranks last."""
    rank = best.index(record.chunk) if record.chunk in best else len(best)
    return Piece(record.start_frame, record.frames, record.position, rank)


Moves = tuple[float, ...]
"""Frames by which a piece's keys move: one number for all of it, or one for each of its frames."""


class Positions(Protocol):
    """Chooses temporal positions, in latent frames of the model's table."""

    name: str
    pairs: int | None
    """Leading temporal pairs that turn with a move; ``None`` for all."""
    ends: bool
    """Whether a rollout ends with the model's position table."""

    def rebase(self, start_frame: int, base: int) -> int:
        """Frames by which to raise ``base`` before the chunk at true frame ``start_frame``.

        Raises :class:`PositionError` where the chunk has no place.
        """

    def place(self, start_frame: int, base: int, pieces: Sequence[Piece]) -> list[Moves]:
        """How far each of the retrieved pieces, given in time order, moves."""


class Absolute:
    """Every chunk where it was made."""

    name = "absolute"
    pairs: int | None = None
    ends = True

    def __init__(self, spec: KVSpec) -> None:
        self._spec = spec

    def rebase(self, start_frame: int, base: int) -> int:
        table = self._spec.rope.table_len if self._spec.rope else None
        last = start_frame + self._spec.frames_per_chunk
        if table is not None and last > table:
            raise PositionError(
                f"the chunk at frame {start_frame} needs positions up to {last - 1}, but the "
                f"model's position table has {table} rows "
                f"({table // self._spec.frames_per_chunk} chunks); use positions='moving' to go on"
            )
        return 0

    def place(self, start_frame: int, base: int, pieces: Sequence[Piece]) -> list[Moves]:
        return [(0.0,) for _ in pieces]


class Moving:
    """Retrieved chunks right before the recent ones, all relative to a base that jumps."""

    name = "moving"
    pairs: int | None = None
    ends = False

    def __init__(self, spec: KVSpec) -> None:
        self._spec = spec
        self._floor = spec.sink_frames + self._between(spec)
        table = spec.rope.table_len if spec.rope else None
        if table is not None and self._floor + spec.frames_per_chunk > table:
            raise PositionError(
                f"a window of {self._floor + spec.frames_per_chunk} frames does not fit the "
                f"model's table of {table} rows; retrieve fewer chunks"
            )

    def _between(self, spec: KVSpec) -> int:
        """Frames from the end of the sink to the current chunk, just after the base has jumped."""
        return spec.retrieve_frames + spec.recent_frames

    def rebase(self, start_frame: int, base: int) -> int:
        table = self._spec.rope.table_len if self._spec.rope else None
        if table is None or start_frame - base + self._spec.frames_per_chunk <= table:
            return 0
        return start_frame - base - self._floor

    def place(self, start_frame: int, base: int, pieces: Sequence[Piece]) -> list[Moves]:
        begin = start_frame - base - self._spec.recent_frames - sum(p.frames for p in pieces)
        moves: list[Moves] = [()] * len(pieces)
        for index in self._order(pieces):
            moves[index] = (begin - pieces[index].position,)
            begin += pieces[index].frames
        return moves

    def _order(self, pieces: Sequence[Piece]) -> Sequence[int]:
        """Which piece comes first, second and so on."""
        return range(len(pieces))


class BestFirst(Moving):
    """As WorldKV's code has it: the best match first, and so the furthest from the recent ones."""

    name = "moving-best-first"

    def _order(self, pieces: Sequence[Piece]) -> Sequence[int]:
        return sorted(range(len(pieces)), key=lambda index: pieces[index].rank)


class Fractional(Moving):
    """Old frames drawn near by a fraction of a frame each, all relative to a base that jumps."""

    name = "fractional"

    def __init__(self, spec: KVSpec) -> None:
        _check_near(self.name, spec)
        super().__init__(spec)

    def _between(self, spec: KVSpec) -> int:
        return max(super()._between(spec), int(SPAN))

    def place(self, start_frame: int, base: int, pieces: Sequence[Piece]) -> list[Moves]:
        return [_drawn(piece, start_frame, base) for piece in pieces]


class FractionalFast(Absolute):
    """Old frames drawn near on the faster half of the temporal pairs alone."""

    name = "fractional-fast"

    def __init__(self, spec: KVSpec) -> None:
        _check_near(self.name, spec)
        super().__init__(spec)
        self.pairs = spec.rope.split[0] // 2 if spec.rope else None
        if self.pairs is None:
            raise ConfigError(
                f"positions={self.name!r} turns some pairs of a head and needs KVSpec.rope to say "
                "which; use positions='fractional'"
            )

    def place(self, start_frame: int, base: int, pieces: Sequence[Piece]) -> list[Moves]:
        return [_drawn(piece, start_frame, base) for piece in pieces]


def drawn_near(frame: float, context: int) -> float:
    """Where DeCoPrune puts ``frame`` of ``context`` frames: its RoPE re-index.

    A frame ``o = context - frame`` before the end stays where ``o <= NEAR`` and else stands
    ``NEAR + (o - NEAR) (SPAN - NEAR) / (context - NEAR)`` before it. A context of up to ``SPAN``
    frames is left alone: the published code would stretch it, down to negative positions.
    """
    offset = context - frame
    if context <= SPAN or offset <= NEAR:
        return float(frame)
    return context - NEAR - (offset - NEAR) * (SPAN - NEAR) / (context - NEAR)


def _drawn(piece: Piece, start_frame: int, base: int) -> Moves:
    frames = range(piece.frame, piece.frame + piece.frames)
    moves = tuple(
        drawn_near(frame, start_frame) - base - (piece.position + index)
        for index, frame in enumerate(frames)
    )
    return moves[:1] if len(set(moves)) == 1 else moves


def _check_near(name: str, spec: KVSpec) -> None:
    if spec.recent_frames > NEAR:
        raise ConfigError(
            f"positions={name!r} leaves the last {NEAR} frames where they are, but the window's "
            f"recent part has {spec.recent_frames}; show fewer recent frames or use 'moving'"
        )


_SCHEMES = (Absolute, Moving, BestFirst, Fractional, FractionalFast)


def position_names() -> list[str]:
    """Names of all position schemes."""
    return [scheme.name for scheme in _SCHEMES]


def positions(name: str, spec: KVSpec) -> Positions:
    """The scheme called ``name``. Raises :class:`ConfigError` for another name."""
    for scheme in _SCHEMES:
        if scheme.name == name:
            return scheme(spec)
    raise ConfigError(f"no position scheme {name!r}; known are {', '.join(position_names())}")


def horizon(spec: KVSpec, scheme: Positions) -> tuple[str, int] | None:
    """Where a rollout ends: the table that ends first and the chunks until then, or ``None``."""
    walls = [(wall.name, wall.rows // spec.frames_per_chunk) for wall in spec.walls]
    if scheme.ends and spec.rope is not None and spec.rope.table_len is not None:
        walls.append(("position table", spec.rope.table_len // spec.frames_per_chunk))
    return min(walls, key=lambda wall: wall[1], default=None)


def check_walls(spec: KVSpec, start_frame: int) -> None:
    """Raise :class:`PositionError` where the chunk at ``start_frame`` leaves a declared table."""
    last = start_frame + spec.frames_per_chunk - 1
    for wall in spec.walls:
        if last >= wall.rows:
            raise PositionError(
                f"the chunk at frame {start_frame} needs row {last} of the model's {wall.name}, "
                f"which has {wall.rows} rows ({wall.rows // spec.frames_per_chunk} chunks); begin "
                "a new rollout, or let the frontend lower the frames that it looks up there and "
                "leave this table out of KVSpec.walls"
            )

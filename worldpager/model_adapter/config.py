"""How a memory is kept, and what one boundary reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from worldpager.pager.policies import Pressure, WriteBack

SINK_CODEC = "bf16"
"""Chunks of the sink stay in 16 bits: their keys are unlike all others, every window has them."""


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """How a world's memory is kept. Sizes in bytes, rates in bytes per second.

    ``dram``: the pool, or ``None`` for the default budget; the quota where a pool is shared.
    ``disk``: most the store may take.
    ``retrieval``, ``eviction``, ``on_miss``, ``positions``, ``pruning``: policies by name.
    ``pressure``: what a commit does when writes cannot keep up, ``block`` or ``drop``.
    ``write_back``: when dirty chunks are written. ``prefetch``: without it nothing is loaded ahead,
    to compare with. ``retrieval`` may carry options, ``fov:horizontal=75``. ``page_frames``:
    retrieve by pages of so many frames, ``None`` for whole chunks; ids are then of pages, ``chunk *
    pages + page``, and tokens cannot be pruned.
    """

    store: Path
    dram: int | None = None
    disk: int | None = None
    codec: str = "int4"
    retrieval: str = "camera"
    eviction: str = "redundant"
    on_miss: str = "nearest"
    positions: str = "moving"
    pruning: str = "none"
    page_frames: int | None = None
    pressure: Pressure = "block"
    write_back: WriteBack = field(default_factory=WriteBack)
    prefetch: bool = True
    read_limit: int | None = None
    write_limit: int | None = None
    session: str = "session"
    """Name of the session, part of its blocks' identity."""


@dataclass(slots=True)
class BoundaryReport:
    """What one boundary did: chunk ids in time order, times in milliseconds on the model thread.

    ``stall_ms``: waited for data or for room; ``encode_ms`` and ``decode_ms``: codec work;
    ``boundary_ms``: all of it. ``wanted``: what retrieval chose, ``preferred``: what it preferred
    for being in the DRAM pool, ``epoch``: of the prompt; a choice depends on these and the step.
    ``stored_bytes``, ``stored_tokens``: of the finished chunk as it was committed, 0 where none
    was; ``active_tokens``, ``dense_tokens``: of the past in this window, and what they would be
    unpruned.
    """

    chunk: int
    retrieved: tuple[int, ...] = ()
    wanted: tuple[int, ...] = ()
    preferred: tuple[int, ...] = ()
    epoch: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    stale: bool = False
    stale_reason: str = ""
    encode_ms: float = 0.0
    decode_ms: float = 0.0
    stall_ms: float = 0.0
    boundary_ms: float = 0.0
    stored_bytes: int = 0
    stored_tokens: int = 0
    active_tokens: int = 0
    dense_tokens: int = 0

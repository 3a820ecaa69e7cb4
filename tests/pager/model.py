"""The parts of the modelled machine: setup, files, transfers, faults, model threads, the oracle."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache

from worldpager.pager import events as ev
from worldpager.pager.core import Core
from worldpager.pager.events import ChunkKey, Event
from worldpager.pager.eviction import EvictionPolicy
from worldpager.pager.policies import FallbackPolicy, Pressure, WriteBack
from worldpager.tiers.extents import PAGE, page_ceil

Tokens = tuple[tuple[object, ...], ...]


class Violation(AssertionError):  # noqa: N818  # it is a finding
    """The core broke a promise; the message begins with the promise's name and a colon."""


@cache
def tokens(key: ChunkKey, generation: int, nbytes: int, kind: str = "data") -> Tokens:
    """The content of a chunk's extent, one token a page; ``kind`` other than data is scribble."""
    return tuple((kind, *key, generation, i) for i in range(page_ceil(nbytes) // PAGE))


@dataclass(frozen=True)
class Setup:
    """One world: pool and largest chunk in pages, chunk ids a stream, chunks a window, policies."""

    pool: int
    streams: int
    chunks: int
    largest: int
    window: int
    eviction: EvictionPolicy
    fallback: FallbackPolicy
    pressure: Pressure
    write_back: WriteBack
    read_slots: int
    write_slots: int

    def core(self) -> Core:
        return Core(
            self.pool * PAGE, eviction=self.eviction, fallback=self.fallback,
            pressure=self.pressure, write_back=self.write_back, read_slots=self.read_slots,
            write_slots=self.write_slots,
        )  # fmt: skip


@dataclass
class File:
    generation: int
    nbytes: int
    content: Tokens
    damaged: bool = False
    doubtful: bool = False  # renamed, but its folder was not synced
    before: File | None = None  # of a doubtful one: what a power cut may bring back


@dataclass(eq=False)
class Transfer:
    """An action under way; ``answer`` is set once its effect has happened but is not reported."""

    action: ev.Read | ev.Write | ev.Delete
    answer: Event | None = None


@dataclass
class Faults:
    """Probabilities of failure, and whether the disk is full."""

    read: float = 0.0
    write: float = 0.0
    delete: float = 0.0
    full: bool = False


@dataclass
class Thread:
    """The model thread of one stream: at most one thing it is about to finish or waits for."""

    stream: int
    step: int = 0
    granted: ev.Granted | None = None
    waiting: ev.Reserve | ev.Boundary | None = None
    may_resume: bool = False  # there was progress, or time passed
    told: bool = False  # there was progress
    served: tuple[ev.Served, ...] = ()

    @property
    def busy(self) -> bool:
        return self.granted is not None or self.waiting is not None


@dataclass
class Oracle:
    """What must be true, in plain dictionaries."""

    newest: dict[ChunkKey, int] = field(default_factory=dict)  # chunks that may be asked for
    committed: dict[ChunkKey, int] = field(default_factory=dict)  # the same, and lost ones
    durable: dict[ChunkKey, int] = field(default_factory=dict)  # acknowledged, and not lost since
    flushing: dict[ChunkKey, int] | None = None
    failures: Counter[ChunkKey] = field(default_factory=Counter)  # reads, in a row
    failed_at: dict[ChunkKey, int] = field(default_factory=dict)  # tick of the last failed read
    write_failures: int = 0
    wanted: int = 0

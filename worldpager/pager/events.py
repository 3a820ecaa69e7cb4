"""The core's language: what can happen (events) and what is to be done (actions).

All are frozen values without threads, clocks, files or tensors, so a history of events is a
complete and replayable record of a run. Offsets and sizes are bytes inside the DRAM pool.
``generation`` counts the times a chunk was committed; it ties every answer to the bytes it is
about, so that a late answer about an older generation is recognised and ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Source = Literal["staged", "dram", "nvme", "stale"]
"""Where a served chunk was: near the device ahead of time, in DRAM, waited for; or not wanted at
all but served in place of something that was."""


class ChunkKey(NamedTuple):
    """Names a chunk: the stream (one cache list of one rollout) and the chunk's number in it."""

    stream: int
    chunk: int


# ---- events: what happened, or what the caller wants ------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserve:
    """The model thread wants room for a finished chunk of ``nbytes``.

    Answered by :class:`Granted`, or by :class:`Backpressure` where nothing clean can leave and the
    pager was told to ``block``. With ``insist``, and while writing fails again and again, the
    coldest dirty chunk is dropped instead. A stream reserves one chunk at a time.
    """

    key: ChunkKey
    nbytes: int
    insist: bool = False


@dataclass(frozen=True, slots=True)
class Commit:
    """The granted extent now holds the chunk's complete bytes."""

    key: ChunkKey
    generation: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """The granted extent will not be filled (encoding failed); it may be reused."""

    key: ChunkKey
    generation: int


@dataclass(frozen=True, slots=True)
class Forgo:
    """The caller no longer waits for room: the chunk it wanted to reserve is not stored, and lost.

    An older generation, where there is one, stays.
    """

    key: ChunkKey


@dataclass(frozen=True, slots=True)
class Adopt:
    """Recovery found a whole chunk on NVMe; sent once, before anything else about that chunk."""

    key: ChunkKey
    generation: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """Chunk ``step`` begins and wants the chunks ``wanted``, distinct and in time order.

    ``ranking``: all candidates, nearest first, for a fallback that looks for the nearest resident.
    Answered by :class:`Serve`, or by :class:`AwaitReads` where the fallback says to wait; the
    same event is then sent again once :class:`Progress` was seen or time has passed.
    """

    stream: int
    step: int
    wanted: tuple[int, ...]
    ranking: Sequence[int]


@dataclass(frozen=True, slots=True)
class Spoiled:
    """Chunks just served whose bytes were found changed in memory: the window counts as not served
    and is asked for again. Those on NVMe are read again when they are wanted; others are lost.
    """

    stream: int
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ahead:
    """The chunks to have resident soon, most urgent first. Replaces the stream's earlier list:
    what was only queued is forgotten, what is being read is finished.
    """

    stream: int
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadDone:
    """The chunk's bytes are in its extent and passed every check."""

    key: ChunkKey
    generation: int


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """The read gave no usable bytes. ``damaged``: reading again cannot help."""

    key: ChunkKey
    generation: int
    reason: str
    damaged: bool


@dataclass(frozen=True, slots=True)
class WriteDone:
    """The chunk is durable on NVMe under its name."""

    key: ChunkKey
    generation: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """This generation is not durable: the file is the older one, if there was one, or of this one
    but may not outlast a power cut. The bytes in DRAM are untouched.
    """

    key: ChunkKey
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class DeleteDone:
    """The file is gone."""

    key: ChunkKey
    generation: int


@dataclass(frozen=True, slots=True)
class DeleteFailed:
    """The file is still there; the core asks again later."""

    key: ChunkKey
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Flush:
    """Make everything committed so far durable; :class:`Flushed` says when that is decided."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes (once per chunk, or from a timer): retries that were put off may go ahead."""


Event = (
    Reserve | Commit | Abandon | Forgo | Adopt | Boundary | Spoiled | Ahead | ReadDone
    | ReadFailed | WriteDone | WriteFailed | DeleteDone | DeleteFailed | Flush | Tick
)  # fmt: skip


# ---- actions: what the driver has to do --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Granted:
    """Fill ``[offset, offset + nbytes)`` and send :class:`Commit`; nobody else touches it."""

    key: ChunkKey
    generation: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Backpressure:
    """No room yet. Wait for :class:`Progress`, then send the :class:`Reserve` again."""

    key: ChunkKey


@dataclass(frozen=True, slots=True)
class Served:
    """One chunk of a window, pinned in the pool until the stream's next :class:`Serve`."""

    chunk: int
    generation: int
    offset: int
    nbytes: int
    source: Source


@dataclass(frozen=True, slots=True)
class Serve:
    """The window's retrieved chunks, in time order. ``reason`` says why a window is stale."""

    stream: int
    step: int
    chunks: tuple[Served, ...]
    stale: bool
    reason: str


@dataclass(frozen=True, slots=True)
class AwaitReads:
    """The window waits for these chunks (only in ``wait`` mode)."""

    stream: int
    keys: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """Read the stored chunk into the extent, check it, report; the extent is pinned meanwhile."""

    key: ChunkKey
    generation: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Write:
    """Publish the extent's bytes on NVMe, report; the extent is pinned meanwhile."""

    key: ChunkKey
    generation: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove the file of this generation, or of an older one, if there is any; report."""

    key: ChunkKey
    generation: int


@dataclass(frozen=True, slots=True)
class Stage:
    """Bring the resident bytes near the compute device: the next window will probably want them."""

    key: ChunkKey
    generation: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Unstage:
    """The staged copy is no longer needed."""

    key: ChunkKey
    generation: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The chunk is in no tier any more; it must not be asked for again."""

    key: ChunkKey
    reason: str


@dataclass(frozen=True, slots=True)
class Flushed:
    """Every chunk that :class:`Flush` covered is durable, except ``failed``."""

    failed: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class Health:
    """Writing to NVMe began to fail (``reason``) or works again (empty ``reason``)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Something that a waiter may be waiting for has changed."""


Action = (
    Granted | Backpressure | Serve | AwaitReads | Read | Write | Delete | Stage | Unstage | Lost
    | Flushed | Health | Progress
)  # fmt: skip

"""The states of a chunk in the page table, and every way from one to another.

``TRANSITIONS`` is the whole truth: the core moves a page only by :meth:`Page.move`, which looks the
step up here and refuses any other. ``docs/architecture.md`` shows the table as a diagram, drawn by
:func:`diagram`; a test holds the two together.

==========  =============  =============  ==================================================
state       bytes in DRAM  bytes on NVMe  meaning
==========  =============  =============  ==================================================
RESERVED    incomplete     no             a slot was handed out, the model thread is filling it
DIRTY       yes            no             resident, not yet on NVMe
WRITING     yes            not yet        resident, write-back under way
CLEAN       yes            yes            resident, may be evicted without writing
STORED      no             yes            on NVMe only
LOADING     incomplete     yes            a slot is being filled from NVMe
ABSENT      no             no             not in the table
==========  =============  =============  ==================================================
"""

from __future__ import annotations

from enum import Enum

from worldpager.pager.events import ChunkKey


class State(Enum):
    """Where a chunk's bytes are."""

    ABSENT = "absent"
    RESERVED = "reserved"
    DIRTY = "dirty"
    WRITING = "writing"
    CLEAN = "clean"
    STORED = "stored"
    LOADING = "loading"


TRANSITIONS: dict[tuple[State, str], State] = {
    (State.ABSENT, "reserve"): State.RESERVED,
    (State.ABSENT, "adopt"): State.STORED,
    (State.RESERVED, "commit"): State.DIRTY,
    (State.RESERVED, "abandon"): State.ABSENT,
    (State.DIRTY, "write"): State.WRITING,
    (State.DIRTY, "drop"): State.ABSENT,
    (State.WRITING, "written"): State.CLEAN,
    (State.WRITING, "write failed"): State.DIRTY,
    (State.CLEAN, "evict"): State.STORED,
    (State.STORED, "load"): State.LOADING,
    (State.STORED, "lose"): State.ABSENT,
    (State.LOADING, "loaded"): State.CLEAN,
    (State.LOADING, "load failed"): State.STORED,
}

RESIDENT = (State.DIRTY, State.WRITING, State.CLEAN)
"""States whose bytes in DRAM are complete and may be served."""


class Page:
    """One generation of one chunk: where it is and who needs it there."""

    __slots__ = (
        "key", "generation", "nbytes", "offset", "state", "pins", "rank", "last_used", "staged",
        "fetched", "since", "attempts", "retry_at", "flushing", "obsolete",
    )  # fmt: skip

    def __init__(self, key: ChunkKey, generation: int, nbytes: int) -> None:
        self.key = key
        self.generation = generation
        self.nbytes = nbytes
        self.offset: int | None = None  # extent in the pool; None exactly when none is held
        self.state = State.ABSENT
        self.pins = 0  # windows that hold it
        self.rank: int | None = None  # place on the stream's ahead list
        self.last_used = 0  # logical time of the last commit, load or use
        self.staged = False
        self.fetched = False  # came from NVMe since it was last served
        self.since = 0  # windows served when its write began
        self.attempts = 0  # failed reads or writes in a row
        self.retry_at = 0  # tick before which no new attempt is made
        self.flushing = False  # a flush waits for it
        self.obsolete = False  # superseded: leaves as soon as nobody needs its extent

    def move(self, step: str) -> None:
        """Take ``step`` from the present state. Raises :class:`KeyError` where there is none."""
        self.state = TRANSITIONS[self.state, step]

    @property
    def resident(self) -> bool:
        return self.state in RESIDENT

    def __repr__(self) -> str:
        return f"<Page {self.key.stream}/{self.key.chunk} g{self.generation} {self.state.value}>"


def diagram() -> str:
    """The transition table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2"]
    for (before, step), after in TRANSITIONS.items():
        ends = ["[*]" if s is State.ABSENT else s.value for s in (before, after)]
        lines.append(f"    {ends[0]} --> {ends[1]}: {step}")
    return "\n".join(lines)

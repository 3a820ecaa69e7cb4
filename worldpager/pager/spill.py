"""The core's half that changes the disk: write-back, flush, and the removal of outdated files.

As pure as the core it belongs to. At most one write or delete of a name is under way, so a file is
never removed that was written after its removal was decided. Of the dirty chunks those are written
first that a flush waits for, then those whose writes failed least, then the coldest.

The file of an older generation stays until the write of the current one replaces it, so that a kill
in between finds what was durable before. It is removed where the current one leaves unwritten.
"""

from __future__ import annotations

from collections.abc import Callable

from worldpager.pager import events as ev
from worldpager.pager.events import ChunkKey
from worldpager.pager.eviction import EvictionPolicy
from worldpager.pager.policies import WriteBack
from worldpager.pager.states import Page, State
from worldpager.pager.stats import Stats
from worldpager.pager.table import PageTable

WRITE_ATTEMPTS = 3
"""Writes that fail in a row before the disk counts as broken: a flush then gives up, and a commit
into a full pool no longer waits."""
LONGEST_BACKOFF = 8
"""Ticks, at most, between two attempts at something that failed."""


def backoff(attempts: int) -> int:
    """Ticks until the next attempt after so many failed in a row."""
    return min(1 << min(attempts, LONGEST_BACKOFF), LONGEST_BACKOFF)


class Spill:
    """Moves dirty chunks to NVMe and keeps outdated files from staying there."""

    def __init__(
        self,
        table: PageTable,
        stats: Stats,
        emit: Callable[..., None],
        eviction: EvictionPolicy,
        marks: WriteBack,
        slots: int,
    ) -> None:
        """``emit`` takes actions; ``slots``: writes under way at a time."""
        self.trouble = ""  # why writing fails at present
        self.writing = 0  # writes under way
        self._table = table
        self._stats = stats
        self._emit = emit
        self._eviction = eviction
        self._marks = marks
        self._slots = slots
        self._tick = 0
        self._failed = 0  # writes, in a row
        self._write_after = 0  # tick before which no write is tried
        self._clear_after = 0  # the same for files that resisted their removal
        self._flushing = False
        self._flush_failed: list[ChunkKey] = []
        self._busy: set[ChunkKey] = set()  # a write or delete of this name is under way
        self._outdated: dict[ChunkKey, int] = {}
        """Names that may have a file which no page counts: newest generation it can be of."""

    @property
    def busy(self) -> bool:
        """Whether a write or delete is under way."""
        return bool(self._busy)

    @property
    def broken(self) -> bool:
        """Whether writing fails again and again."""
        return self._failed >= WRITE_ATTEMPTS

    def tick(self) -> None:
        """Time passes: what resisted its removal is tried again."""
        self._tick += 1
        if self._tick >= self._clear_after:
            for key in list(self._outdated):
                self.clear(key)

    # ---- writing -------------------------------------------------------------------------------

    def start(self, urgent: bool, scarce: Callable[[], bool], wanted: bool, reading: bool) -> None:
        """Start as many writes as there are slots and reasons.

        ``urgent``: somebody waits for room. ``scarce``: soon somebody would. ``wanted``: a read
        ahead does. ``reading``: a read is under way, to which writing for its own sake yields.
        """
        while self.writing < self._slots and self._tick >= self._write_after:
            share = self._table.dirty_bytes / self._table.extents.capacity
            due = urgent or self._flushing or share > self._marks.urgent
            due = due or (not reading and (wanted or share > self._marks.start))
            if not due and not (self._table.dirty_bytes and scarce()):
                return
            page = self._coldest()
            if page is None:
                return
            self._write(page)

    def _coldest(self) -> Page | None:
        dirty = [p for p in self._table.current(State.DIRTY) if p.key not in self._busy]
        dirty = [p for p in dirty if p.flushing] or dirty
        if not dirty:
            return None
        fewest = min(p.attempts for p in dirty)  # one that cannot be written stops no other
        return self._eviction.victim([p for p in dirty if p.attempts == fewest])

    def _write(self, page: Page) -> None:
        assert page.offset is not None
        self._table.move(page, "write")
        page.since = self._stats.windows
        self.writing += 1
        self._busy.add(page.key)
        if self._stats.first_write_chunk is None:
            self._stats.first_write_chunk = self._stats.commits
        self._emit(ev.Write(page.key, page.generation, page.offset, page.nbytes))

    def write_done(self, event: ev.WriteDone) -> None:
        page = self._end(event.key, event.generation, "written")
        self._stats.writes += 1
        self._stats.bytes_written += page.nbytes
        self._failed = 0
        if self.trouble:
            self.trouble = ""
            self._emit(ev.Health(""))
        if page.obsolete:
            self.outdated(page.key, page.generation)
        else:
            self._outdated.pop(page.key, None)  # the new file replaced it
            page.attempts = 0
            self.flush_is_done_with(page)

    def write_failed(self, event: ev.WriteFailed) -> None:
        page = self._end(event.key, event.generation, "write failed")
        self._stats.write_failures[event.reason] += 1
        self._failed += 1
        self._write_after = self._tick + backoff(self._failed)
        if not self.trouble:
            self.trouble = event.reason
            self._emit(ev.Health(event.reason))
        page.attempts += 1
        self.outdated(page.key, page.generation)
        if self.broken:
            for unwritten in list(self._table.resident()):
                self.flush_is_done_with(unwritten, failed=True)

    def _end(self, key: ChunkKey, generation: int, step: str) -> Page:
        page = self._table.held(key, generation)
        assert page is not None and page.state is State.WRITING
        self.writing -= 1
        self._busy.discard(key)
        self._table.arrive(page, step)
        self._emit(ev.Progress())
        return page

    # ---- deleting ------------------------------------------------------------------------------

    def outdated(self, key: ChunkKey, generation: int) -> None:
        """The file under this name, if there is one, is of ``generation`` or older and not what is
        to stay there.
        """
        self._outdated[key] = generation
        self.clear(key)

    def clear(self, key: ChunkKey) -> None:
        """Remove an outdated file, unless a current page is there to replace it."""
        if key in self._outdated and key not in self._busy and key not in self._table.pages:
            self._busy.add(key)
            self._stats.deletes += 1
            self._emit(ev.Delete(key, self._outdated.pop(key)))

    def delete_done(self, event: ev.DeleteDone) -> None:
        self._busy.discard(event.key)

    def delete_failed(self, event: ev.DeleteFailed) -> None:
        self._busy.discard(event.key)
        self._stats.write_failures[event.reason] += 1
        self._outdated[event.key] = event.generation
        self._clear_after = self._tick + LONGEST_BACKOFF

    # ---- flush ---------------------------------------------------------------------------------

    def flush(self, event: ev.Flush) -> None:
        if not self._flushing:
            self._flush_failed = []
        self._flushing = True
        self._failed = 0
        self._write_after = self._tick
        for page in self._table.resident():
            if page.state in (State.DIRTY, State.WRITING):
                page.flushing = True
                page.attempts = 0
        self._check_flush()

    def flush_is_done_with(self, page: Page, failed: bool = False) -> None:
        """The flush under way, if any, need not wait for ``page`` any longer."""
        if page.flushing:
            page.flushing = False
            if failed:
                self._flush_failed.append(page.key)
            self._check_flush()

    def _check_flush(self) -> None:
        if self._flushing and not any(p.flushing for p in self._table.resident()):
            self._flushing = False
            self._emit(ev.Flushed(tuple(self._flush_failed)), ev.Progress())

"""The core's half that makes room in DRAM: what leaves it, and in which order.

As pure as the core it belongs to. Clean chunks on no ahead list leave first, as the eviction policy
says, then listed ones from the end of the lists; dirty chunks only where the caller may drop. Never
what a window holds or waits for, and nothing at all where it would not make the room asked for.
"""

from __future__ import annotations

from collections.abc import Callable

from worldpager.pager import events as ev
from worldpager.pager.events import ChunkKey
from worldpager.pager.eviction import EvictionPolicy
from worldpager.pager.spill import Spill
from worldpager.pager.states import Page, State
from worldpager.pager.stats import Stats
from worldpager.pager.table import PageTable
from worldpager.tiers.extents import page_ceil

WINDOW_RANK = -1
"""The rank of what a commit or a waiting window needs: before all that is only ahead."""

PRESSURE = "pressure"
"""Why a chunk was dropped from a pool that was full while writing worked."""


SPOILED = "changed in memory"
"""Why a chunk is lost whose bytes changed in DRAM before they were on disk."""


class Room:
    """Finds extents, evicting and dropping where it must."""

    def __init__(
        self,
        table: PageTable,
        stats: Stats,
        emit: Callable[..., None],
        eviction: EvictionPolicy,
        spill: Spill,
        gathering: Callable[[], set[ChunkKey]],
    ) -> None:
        """``emit`` takes actions; ``gathering``: what waiting windows have asked for."""
        self._table = table
        self._stats = stats
        self._emit = emit
        self._eviction = eviction
        self._spill = spill
        self._gathering = gathering

    def find(self, nbytes: int, rank: int, leave: int = 0) -> int | None:
        """An extent for something of ``rank`` on an ahead list, made by evicting clean chunks that
        are on no list or further down; none where so few of these are left that not ``leave``
        more of ``nbytes`` could be had.
        """
        free = self._table.extents.largest_free // page_ceil(nbytes)
        if free > leave:
            return self._table.extents.allocate(nbytes)
        clean = self._spare(State.CLEAN)
        if rank != WINDOW_RANK:
            clean += [p for p in self._spare(State.WRITING) if p.since >= self._stats.windows - 1]
        spare = [p for p in clean if p.rank is None]
        ranked = [p for p in clean if p.rank is not None and p.rank > rank]
        if free + len(spare) + len(ranked) <= leave:
            return None
        offset = self._table.extents.allocate(nbytes)
        if offset is not None:
            return offset
        if not self._table.fits_without(spare + ranked, nbytes):
            return None
        ranked.sort(key=lambda p: p.rank or 0)
        while offset is None:
            if spare:
                victim = self._eviction.victim(spare)
                spare.remove(victim)
            else:
                victim = ranked.pop()
            if victim.state is State.WRITING:
                return None
            self._evict(victim)
            offset = self._table.extents.allocate(nbytes)
        return offset

    def scarce(self, nbytes: int, places: int, kept: set[ChunkKey]) -> bool:
        """Whether fewer than ``places`` of ``nbytes`` could be had without a write or ``kept``."""
        free = self._table.extents.largest_free // page_ceil(nbytes)
        if free >= places:
            return False
        return free + sum(p.key not in kept for p in self._spare(State.CLEAN)) < places

    def find_by_dropping(self, nbytes: int) -> int | None:
        """An extent made by dropping the coldest dirty chunks, where :meth:`find` found none."""
        clean, dirty = self._spare(State.CLEAN), self._spare(State.DIRTY)
        if not self._table.fits_without(clean + dirty, nbytes):
            return None
        offset = None
        while offset is None:
            victim = self._eviction.victim(dirty)
            dirty.remove(victim)
            self._drop(victim)
            offset = self.find(nbytes, WINDOW_RANK)
        return offset

    def _spare(self, state: State) -> list[Page]:
        """Pages in ``state`` that no window holds and none waits for."""
        gathering = self._gathering()
        return [p for p in self._table.current(state) if p.pins == 0 and p.key not in gathering]

    def _evict(self, page: Page) -> None:
        self.unstage(page)
        self._table.move(page, "evict")
        self._table.let_go(page)
        page.fetched = False
        self._stats.evictions += 1

    def _drop(self, page: Page) -> None:
        self.unstage(page)
        self._spill.flush_is_done_with(page, failed=True)
        self._table.move(page, "drop")
        self._table.let_go(page)
        del self._table.pages[page.key]
        self._spill.clear(page.key)
        self.lose(page.key, self._spill.trouble or PRESSURE)

    def spoil(self, page: Page) -> None:
        """The bytes of a page that was resident and pinned changed: it is as good as not there."""
        self._stats.spoiled += 1
        if page.obsolete:
            self._table.settle(page)
        elif page.state is State.CLEAN:
            self._evict(page)
        else:
            self.unstage(page)
            self._spill.flush_is_done_with(page, failed=True)
            self._table.forget(page)
            self._spill.clear(page.key)
            self.lose(page.key, SPOILED)

    def unstage(self, page: Page) -> None:
        """The copy near the compute device, if there is one, is no longer needed."""
        if page.staged:
            page.staged = False
            self._emit(ev.Unstage(page.key, page.generation))

    def lose(self, key: ChunkKey, reason: str) -> None:
        """Count and tell that a chunk left every tier."""
        self._stats.dropped[reason] += 1
        self._emit(ev.Lost(key, reason), ev.Progress())

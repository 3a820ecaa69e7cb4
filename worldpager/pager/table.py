"""The page table: which chunk is where, and which bytes of the pool are whose.

The table keeps the books (extents, pins, byte counts) and moves pages along the transition table.
It decides nothing; :mod:`worldpager.pager.core` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from worldpager.pager.events import ChunkKey
from worldpager.pager.states import Page, State
from worldpager.tiers.extents import ExtentAllocator, page_ceil

_ON_NVME = (State.CLEAN, State.STORED, State.LOADING)
_IN_FLIGHT = (State.RESERVED, State.WRITING, State.LOADING)


class PageTable:
    """Pages by key, the extents they hold, and the byte counts that follow from their states."""

    def __init__(self, capacity: int) -> None:
        self.extents = ExtentAllocator(capacity)
        self.pages: dict[ChunkKey, Page] = {}
        self.holders: dict[tuple[ChunkKey, int], Page] = {}
        """Every page that holds an extent, current or on its way out, by key and generation."""
        self.dirty_bytes = 0
        self.stored_bytes = 0
        self.stored_chunks = 0

    def resident(self) -> Iterator[Page]:
        """Current pages whose bytes in DRAM are complete."""
        return (p for p in self.holders.values() if p.resident and not p.obsolete)

    def current(self, state: State) -> list[Page]:
        """Current pages in ``state``, one in which they hold an extent."""
        return [p for p in self.holders.values() if p.state is state and not p.obsolete]

    def move(self, page: Page, step: str) -> None:
        """Take ``step`` of the transition table and keep the byte counts true."""
        before = page.state
        page.move(step)
        self.dirty_bytes += page.nbytes * ((page.state is State.DIRTY) - (before is State.DIRTY))
        stored = (page.state in _ON_NVME) - (before in _ON_NVME)
        self.stored_bytes += page.nbytes * stored
        self.stored_chunks += stored

    def arrive(self, page: Page, step: str) -> None:
        """A transfer of ``page`` ends with ``step``; an obsolete page may leave now."""
        if page.obsolete:
            page.move(step)  # its bytes are no longer counted
            self.settle(page)
        else:
            self.move(page, step)

    def hold(self, page: Page, offset: int) -> None:
        """Give ``page`` the extent at ``offset``."""
        page.offset = offset
        self.holders[page.key, page.generation] = page

    def let_go(self, page: Page) -> None:
        """Take the page's extent back."""
        if page.offset is not None:
            self.extents.free(page.offset)
            page.offset = None
            del self.holders[page.key, page.generation]

    def held(self, key: ChunkKey, generation: int) -> Page | None:
        """The page of exactly this generation, if it still holds an extent."""
        return self.holders.get((key, generation))

    def fits_without(self, leaving: Sequence[Page], nbytes: int) -> bool:
        """Whether an extent of ``nbytes`` could be had if all of ``leaving`` let go of theirs."""
        if any(page_ceil(page.nbytes) >= nbytes for page in leaving):
            return True  # chunks are nearly all of one size
        gone = {page.offset for page in leaving}
        end = 0
        for offset, size in sorted((p.offset or 0, p.nbytes) for p in self.holders.values()):
            if offset not in gone:
                if offset - end >= nbytes:
                    return True
                end = offset + page_ceil(size)
        return self.extents.capacity - end >= nbytes

    def forget(self, page: Page) -> None:
        """The page leaves the table; its extent is free as soon as nobody needs it."""
        if self.pages.get(page.key) is page:
            del self.pages[page.key]
        page.obsolete = True
        if page.state in _ON_NVME:
            self.stored_bytes -= page.nbytes
            self.stored_chunks -= 1
        if page.state is State.DIRTY:
            self.dirty_bytes -= page.nbytes
        self.settle(page)

    def settle(self, page: Page) -> None:
        """Free the extent of an obsolete page once no window and no transfer needs it."""
        if page.obsolete and page.pins == 0 and page.state not in _IN_FLIGHT:
            page.state = State.ABSENT
            self.let_go(page)

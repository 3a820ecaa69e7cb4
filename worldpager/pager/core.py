"""The core: every decision of the pager, and nothing else.

Two rules. Everything that decides what to admit, evict, write back, load, drop or serve stale lives
here, in :mod:`worldpager.pager.room` (what leaves DRAM), in :mod:`worldpager.pager.spill` (what
changes the disk), or in a policy object asked from here. And nothing here knows a thread, a clock,
a file or a tensor: events go into :meth:`Core.handle`, actions come out. The runtime carries them
out with real threads and disks, the simulator with modelled ones, the tests in any order a seed
dictates.

How it works. A chunk is committed in two steps, so that nothing enters the table before its bytes
are complete: ``Reserve`` finds room (evicting clean chunks), ``Commit`` makes it current. Dirty
chunks are written back in the background, coldest first, early enough that eviction finds clean
victims. ``Boundary`` pins what a window is served until the stream's next window, which is also
why the previous set can always be served again. ``Ahead`` names what to load next. After every
event the core starts as many reads and writes as their slots allow, reads first.

Invariants, checked by the simulation tests: the extents never exceed the pool; a pinned page and a
page in transfer keep their extents; only a chunk that is on NVMe leaves DRAM, except where it is
dropped and counted; what is served is resident and current.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from worldpager.errors import BudgetError
from worldpager.pager import events as ev
from worldpager.pager.events import Action, ChunkKey, Event
from worldpager.pager.eviction import EvictionPolicy
from worldpager.pager.policies import Choice, FallbackPolicy, Pressure, WriteBack
from worldpager.pager.room import WINDOW_RANK, Room
from worldpager.pager.spill import Spill, backoff
from worldpager.pager.states import Page, State
from worldpager.pager.stats import Counted, Stats
from worldpager.pager.stream import Stream
from worldpager.pager.table import PageTable
from worldpager.tiers.extents import page_ceil

NO_ROOM = "no room"
"""Why a chunk is lost that waited for room in vain."""
READ_ATTEMPTS = 5
"""A chunk whose reads fail this often in a row, without proof of damage, is given up."""


class Core:
    """The pager's state machine over a pool of ``capacity`` bytes."""

    def __init__(
        self,
        capacity: int,
        *,
        eviction: EvictionPolicy,
        fallback: FallbackPolicy,
        pressure: Pressure = "block",
        write_back: WriteBack | None = None,
        read_slots: int = 2,
        write_slots: int = 1,
    ) -> None:
        self.table = PageTable(capacity)
        self.stats = Stats()
        self.capacity = capacity
        self._fallback = fallback
        self._pressure = pressure
        self._read_slots = read_slots
        self._streams: dict[int, Stream] = {}
        self._generation = 0
        self._clock = 0  # logical: one step per use of a page
        self._tick = 0
        self._reads = 0
        self._blocked = False  # a commit waits for room
        self._usual = 0  # bytes of the chunk reserved last: the next one is about as large
        self._starved: int | None = None  # rank of the most urgent read that found no room
        self._given_up: dict[ChunkKey, int] = {}  # files of lost chunks, by generation
        self._out: list[Action] = []
        self._write_back = write_back or WriteBack()
        self._spill = Spill(
            self.table, self.stats, self._emit, eviction, self._write_back, write_slots
        )
        self._room = Room(
            self.table, self.stats, self._emit, eviction, self._spill, self._gathering
        )
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.Reserve: self._reserve,
            ev.Commit: self._commit,
            ev.Abandon: self._abandon,
            ev.Forgo: self._forgo,
            ev.Adopt: self._adopt,
            ev.Boundary: self._boundary,
            ev.Spoiled: self._spoiled,
            ev.Ahead: self._ahead,
            ev.ReadDone: self._read_done,
            ev.ReadFailed: self._read_failed,
            ev.WriteDone: self._spill.write_done,
            ev.WriteFailed: self._spill.write_failed,
            ev.DeleteDone: self._spill.delete_done,
            ev.DeleteFailed: self._spill.delete_failed,
            ev.Flush: self._spill.flush,
            ev.Tick: self._ticked,
        }

    def handle(self, event: Event) -> list[Action]:
        """What to do now that ``event`` happened, in order."""
        self._out = []
        self._handlers[type(event)](event)
        self._start_reads()
        self._spill.start(
            urgent=self._blocked or self._starved == WINDOW_RANK,
            scarce=self._scarce,
            wanted=self._starved is not None,
            reading=self._reads > 0,
        )
        return self._out

    def _scarce(self) -> bool:
        """Whether the next commits would find room only at the cost of the next windows."""
        if self._usual == 0:
            return False
        streams = self._streams.values()
        kept = {key for stream in streams for key in stream.ahead[: stream.width]}
        return self._room.scarce(self._usual, self._write_back.spare, kept)

    def _emit(self, *actions: Action) -> None:
        self._out += actions

    def _gathering(self) -> set[ChunkKey]:
        return {key for stream in self._streams.values() for key in stream.gathering}

    @property
    def trouble(self) -> str:
        """Why writing fails at present; empty where it does not."""
        return self._spill.trouble

    @property
    def idle(self) -> bool:
        """No transfer is under way; what could have been started would have been."""
        return self._reads == 0 and not self._spill.busy

    # ---- commit --------------------------------------------------------------------------------

    def _reserve(self, event: ev.Reserve) -> None:
        if page_ceil(event.nbytes) > self.table.extents.capacity:
            raise BudgetError(
                f"a chunk of {event.nbytes} bytes does not fit a pool of "
                f"{self.table.extents.capacity}; give the pager more DRAM"
            )
        if self.stats.spill_chunk is None and self.table.extents.largest_free < event.nbytes:
            self.stats.spill_chunk = self.stats.commits + 1
        self._usual = event.nbytes
        self._end_step(self._streams.setdefault(event.key.stream, Stream()))
        offset = self._room.find(event.nbytes, WINDOW_RANK)
        may_drop = self._pressure == "drop" or event.insist or self._spill.broken
        if offset is None and may_drop:
            offset = self._room.find_by_dropping(event.nbytes)
        self._blocked = offset is None
        if offset is None:
            self.stats.backpressure += 1
            self._out.append(ev.Backpressure(event.key))
            return
        self._generation += 1
        page = Page(event.key, self._generation, event.nbytes)
        self.table.move(page, "reserve")
        self.table.hold(page, offset)
        self._out.append(ev.Granted(page.key, page.generation, offset, page.nbytes))

    def _commit(self, event: ev.Commit) -> None:
        page = self.table.held(event.key, event.generation)
        assert page is not None and page.state is State.RESERVED
        old = self.table.pages.get(event.key)
        self.table.move(page, "commit")
        self.table.pages[event.key] = page
        if old is not None:
            self._supersede(old, page)
        elif event.key in self._given_up:
            self._spill.outdated(event.key, self._given_up.pop(event.key))
        self._touch(page)
        if page.rank is not None:
            self._stage(page)
        self.stats.commits += 1

    def _abandon(self, event: ev.Abandon) -> None:
        page = self.table.held(event.key, event.generation)
        assert page is not None and page.state is State.RESERVED
        self.table.move(page, "abandon")
        self.table.let_go(page)
        self._out.append(ev.Progress())

    def _forgo(self, event: ev.Forgo) -> None:
        self._blocked = False
        self._room.lose(event.key, NO_ROOM)

    def _adopt(self, event: ev.Adopt) -> None:
        page = Page(event.key, event.generation, event.nbytes)
        self._generation = max(self._generation, event.generation)
        self.table.move(page, "adopt")
        self.table.pages[event.key] = page

    def _supersede(self, old: Page, page: Page) -> None:
        """``page`` is current in the place of ``old``, also for a flush that waits for it."""
        page.rank, page.flushing = old.rank, old.flushing
        if old.state in (State.CLEAN, State.STORED, State.LOADING):
            self._spill.outdated(old.key, old.generation)
        self._room.unstage(old)
        self.table.forget(old)
        self._out.append(ev.Progress())

    # ---- windows -------------------------------------------------------------------------------

    def _boundary(self, event: ev.Boundary) -> None:
        stream = self._streams.setdefault(event.stream, Stream())
        pages = self.table.pages

        def page_of(chunk: int) -> Page | None:
            return pages.get(ChunkKey(event.stream, chunk))

        def resident(chunk: int) -> bool:
            page = page_of(chunk)
            return page is not None and page.resident

        if not stream.awaited:
            self._end_step(stream)
            ahead = self._pages(stream.ahead)
            late = any(p.key.chunk in event.wanted and not p.resident for p in ahead)
            stream.pace.window(late)
            stream.width = len(event.wanted) or stream.width
        known = tuple(c for c in event.wanted if page_of(c) is not None)
        missing = [c for c in known if not resident(c)]
        chunks, reason = known, "" if len(known) == len(event.wanted) else "absent"
        if missing:
            previous = tuple(p.key.chunk for p in stream.pinned if resident(p.key.chunk))
            choice = self._fallback.choose(known, event.ranking, resident, previous)
            if choice.wait and self._cannot_load(stream):
                choice = Choice(tuple(c for c in known if resident(c)), "no room")
            if choice.wait:
                stream.awaited.update(ChunkKey(event.stream, c) for c in missing)
                stream.gathering = {ChunkKey(event.stream, c) for c in known}
                self._out.append(ev.AwaitReads(event.stream, tuple(sorted(stream.awaited))))
                return
            chunks, reason = choice.chunks, choice.reason
        self._serve(stream, event, [pages[ChunkKey(event.stream, c)] for c in chunks], reason)

    def _end_step(self, stream: Stream) -> None:
        """A chunk is finished: what was admitted should be there, and no more of it begins."""
        left = sum(not page.resident for page in self._pages(stream.further))
        stream.pace.end(len(stream.further) - left, left)
        stream.urgent = stream.further = ()

    def _cannot_load(self, stream: Stream) -> bool:
        """Whether the window waits in vain: no room for its reads, and none is being made."""
        if not stream.awaited or self._starved != WINDOW_RANK or self._reads:
            return False
        making_room = self._spill.writing or self.table.dirty_bytes
        return not making_room or self._spill.broken

    def _serve(self, stream: Stream, event: ev.Boundary, window: list[Page], reason: str) -> None:
        served, hits, lacking = [], Counter[str](), len(event.wanted)
        for page in window:
            assert page.resident and page.offset is not None
            source: ev.Source = "staged" if page.staged else "dram"
            if page.key in stream.awaited:
                source = "nvme"
            if page.key.chunk not in event.wanted:
                source = "stale"
            else:
                hits[source] += 1
                lacking -= 1
            self.stats.fetched += page.fetched
            page.fetched = False
            page.pins += 1
            self._touch(page)
            served.append(
                ev.Served(page.key.chunk, page.generation, page.offset, page.nbytes, source)
            )
        replaced = min(lacking, sum(s.source == "stale" for s in served))
        hits["stale"] += replaced
        hits["empty"] += lacking - replaced
        stream.counted = Counted(hits, bool(reason))
        self.stats.count(stream.counted)
        released, stream.pinned = stream.pinned, window
        stream.before = released
        stream.awaited.clear()
        stream.gathering.clear()
        for page in released:
            page.pins -= 1
            self.table.settle(page)
        serve = ev.Serve(event.stream, event.step, tuple(served), bool(reason), reason)
        self._out += [serve, ev.Progress()]  # what was released may be room for another stream

    def _spoiled(self, event: ev.Spoiled) -> None:
        stream = self._streams[event.stream]
        self.stats.take_back(stream.counted)
        window, stream.pinned = stream.pinned, [p for p in stream.before if p.resident]
        for page in stream.pinned:
            page.pins += 1
        for page in window:
            page.pins -= 1
            if page.key.chunk not in event.chunks:
                self.table.settle(page)
                continue
            stream.pinned = [p for p in stream.pinned if p is not page]
            page.pins = sum(s.pinned.count(page) for s in self._streams.values())
            self._room.spoil(page)

    def _ahead(self, event: ev.Ahead) -> None:
        stream = self._streams.setdefault(event.stream, Stream())
        for page in self._pages(stream.ahead):
            page.rank = None
        stream.ahead = tuple(
            key for c in event.chunks if (key := ChunkKey(event.stream, c)) in self.table.pages
        )
        self._admit(stream, event.stream)
        before = {page.key for page in self.table.resident() if page.staged}
        for rank, page in enumerate(self._pages(stream.ahead)):
            page.rank = rank
            self._stage(page)
        for key in before:
            page = self.table.pages[key]
            if page.rank is None:
                self._room.unstage(page)

    def _admit(self, stream: Stream, number: int) -> None:
        """What of a new list may be loaded before the next window comes."""
        urgent, further = stream.ahead[: stream.width], stream.ahead[stream.width :]
        further = tuple(p.key for p in self._pages(further) if p.state is State.STORED)
        reading = sum(p.key.stream == number for p in self.table.current(State.LOADING))
        now, later = stream.pace.admit(len(urgent), len(further), reading)
        stream.urgent, stream.further = urgent[:now], further[:later]

    def _stage(self, page: Page) -> None:
        if page.resident and not page.staged and page.offset is not None:
            page.staged = True
            self._out.append(ev.Stage(page.key, page.generation, page.offset, page.nbytes))

    # ---- reading -------------------------------------------------------------------------------

    def _start_reads(self) -> None:
        self._starved = None
        for page, rank in self._load_order():
            if self._reads >= self._read_slots:
                return
            if page.state is not State.STORED:
                continue  # listed twice, and just begun
            if self._starved is not None and rank != WINDOW_RANK:
                return  # nothing less urgent may take the room that becomes free
            further = page.key in self._streams[page.key.stream].further
            offset = self._room.find(page.nbytes, rank, leave=int(further and rank != WINDOW_RANK))
            if offset is None:
                self._starved = rank if self._starved is None else self._starved
                continue
            self.table.move(page, "load")
            self.table.hold(page, offset)
            self._reads += 1
            self.stats.reads += 1
            if self.stats.first_read_chunk is None:
                self.stats.first_read_chunk = self.stats.commits + 1
            self._out.append(ev.Read(page.key, page.generation, offset, page.nbytes))

    def _load_order(self) -> list[tuple[Page, int]]:
        """Stored chunks to load, with their ranks: first what a window waits for."""
        streams = self._streams.values()
        order = [(p, WINDOW_RANK) for s in streams for p in self._pages(sorted(s.awaited))]
        steady = [s for s in streams if not s.awaited]
        pages = [p for s in steady for p in self._pages(s.urgent + s.further)]
        ranked = [(p, p.rank) for p in pages if p.rank is not None]
        order += sorted(ranked, key=lambda pair: (pair[1], pair[0].key))
        return [(p, r) for p, r in order if p.state is State.STORED and p.retry_at <= self._tick]

    def _read_done(self, event: ev.ReadDone) -> None:
        page = self._end_read(event.key, event.generation, "loaded")
        self.stats.bytes_read += page.nbytes
        page.attempts = 0
        page.fetched = True
        if not page.obsolete:
            self._touch(page)
            if page.rank is not None:
                self._stage(page)

    def _read_failed(self, event: ev.ReadFailed) -> None:
        page = self._end_read(event.key, event.generation, "load failed")
        self.stats.read_failures[event.reason] += 1
        if page.obsolete:
            return
        self.table.let_go(page)
        page.attempts += 1
        page.retry_at = self._tick + backoff(page.attempts)
        if event.damaged or page.attempts >= READ_ATTEMPTS:
            self.table.move(page, "lose")
            del self.table.pages[page.key]
            self._given_up[page.key] = page.generation
            self._room.lose(page.key, event.reason)

    def _end_read(self, key: ChunkKey, generation: int, step: str) -> Page:
        page = self.table.held(key, generation)
        assert page is not None and page.state is State.LOADING
        self._reads -= 1
        self.table.arrive(page, step)
        self._out.append(ev.Progress())
        return page

    # ---- small things --------------------------------------------------------------------------

    def _ticked(self, event: ev.Tick) -> None:
        self._tick += 1
        self._spill.tick()

    def _touch(self, page: Page) -> None:
        self._clock += 1
        page.last_used = self._clock

    def _pages(self, keys: Iterable[ChunkKey]) -> list[Page]:
        return [page for key in keys if (page := self.table.pages.get(key)) is not None]

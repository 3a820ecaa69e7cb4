"""A modelled machine around the pure core: DRAM, a disk that misbehaves, model threads, an oracle.

Bytes are tokens ``(stream, chunk, generation, page)`` which the driver really copies between the
modelled DRAM and the modelled disk, so an extent that overlaps, moves or is freed too early shows
as a wrong token. The oracle is two plain dictionaries: the newest generation of every chunk that
may be asked for, and what a flush acknowledged.

The driver's contract, kept here and to be kept by every driver:

* Every ``Read``, ``Write`` and ``Delete`` is answered exactly once, in any order, however late.
* Every ``Granted`` is followed by one ``Commit`` or ``Abandon``; a stream reserves one chunk at a
  time, so commits of one chunk come in the order of their reservations.
* A read is checked against key and generation before ``ReadDone``; a failed delete has left the
  file as it was, and a failed write too, or has replaced it.
* Whoever was answered ``Backpressure`` or ``AwaitReads`` asks again after ``Progress`` or ``Tick``.
* Ticks keep coming as long as anybody waits.
* ``Adopt`` is sent once for a file found at the start, before anything else about its chunk.
"""

from __future__ import annotations

from random import Random

from tests.pager.model import (
    Faults,
    File,
    Oracle,
    Setup,
    Thread,
    Tokens,
    Transfer,
    Violation,
    tokens,
)
from worldpager.pager import events as ev
from worldpager.pager.core import READ_ATTEMPTS
from worldpager.pager.events import Action, ChunkKey, Event
from worldpager.tiers.extents import PAGE, page_ceil


class World:
    """Runs one core against modelled devices and checks every promise after every event."""

    def __init__(self, setup: Setup, stored: dict[ChunkKey, File]) -> None:
        self.setup = setup
        self.disk = stored
        self.faults = Faults()
        self.history: list[str] = []
        self.tick = 0
        self._boot()

    def _boot(self) -> None:
        """A new process: nothing in DRAM, adopt what the disk holds."""
        self.core = self.setup.core()
        self.memory: list[tuple[object, ...] | None] = [None] * self.setup.pool
        self.transfers: list[Transfer] = []
        self.threads = [Thread(stream) for stream in range(self.setup.streams)]
        self.staged: dict[tuple[ChunkKey, int], ev.Stage] = {}
        self.trouble = False
        self.oracle = Oracle()
        for key, file in sorted(self.disk.items()):
            self.send(ev.Adopt(key, file.generation, file.nbytes))
            for known in (self.oracle.newest, self.oracle.committed, self.oracle.durable):
                known[key] = file.generation
        self.check()

    # ---- events ----------------------------------------------------------------------------------

    def send(self, event: Event) -> list[Action]:
        """Let the core decide, do what it says, look whether it was right."""
        self.history.append(f"> {event}")
        actions = self.core.handle(event)
        for action in actions:
            self.history.append(f"    {action}")
            self._carry_out(action, event)
        return actions

    def _carry_out(self, action: Action, event: Event) -> None:
        match action:
            case ev.Granted() | ev.Read():
                self._put(action.offset, tokens(action.key, action.generation, action.nbytes, "?"))
                if isinstance(action, ev.Read):
                    self._issue_read(action)
            case ev.Write():
                self._expect(action, "write of wrong bytes")
                self._issue_disk(action)
            case ev.Delete():
                self._issue_disk(action)
            case ev.Stage(key, generation):
                self._must((key, generation) not in self.staged, "staged twice", action)
                self._expect(action, "staged wrong bytes")
                self.staged[key, generation] = action
            case ev.Unstage(key, generation):
                self._must((key, generation) in self.staged, "unstaged unstaged", action)
                del self.staged[key, generation]
            case ev.Lost():
                self._lost(action, event)
            case ev.Flushed(failed):
                self._flushed(failed)
            case ev.Health(reason):
                self._must(bool(reason) != self.trouble, "health without change", action)
                self.trouble = bool(reason)
            case ev.Progress():
                for thread in self.threads:
                    thread.may_resume = thread.told = True

    def _issue_read(self, action: ev.Read) -> None:
        self.transfers.append(Transfer(action))
        key = action.key
        self._must(self.oracle.newest.get(key) == action.generation, "read of old", action)
        self._must(self.oracle.failures[key] < READ_ATTEMPTS, "read storm", action)
        self._must(self.oracle.failed_at.get(key) != self.tick, "read storm", action)

    def _issue_disk(self, action: ev.Write | ev.Delete) -> None:
        busy = any(t.action.key == action.key and not isinstance(t.action, ev.Read)
                   for t in self.transfers)  # fmt: skip
        self._must(not busy, "two disk operations on one name", action)
        self.transfers.append(Transfer(action))

    def _lost(self, action: ev.Lost, event: Event) -> None:
        key = action.key
        self._must(key in self.oracle.newest, "lost without being there", action)
        file = self.disk.get(key)
        if isinstance(event, ev.Reserve):
            allowed = self.setup.pressure == "drop" or event.insist or self.oracle.write_failures
            self._must(bool(allowed), "dropped without need", action)
            stored = file is not None and file.generation == self.oracle.newest[key]
            self._must(not stored or file.doubtful, "dropped a stored chunk", action)
        else:
            hopeless = file is None or file.damaged or self.oracle.failures[key] >= READ_ATTEMPTS
            self._must(hopeless, "gave up a good chunk", action)
        del self.oracle.newest[key]
        for known in (self.oracle.durable, self.oracle.flushing or {}):
            known.pop(key, None)

    def _flushed(self, failed: tuple[ChunkKey, ...]) -> None:
        covered = self.oracle.flushing
        self._must(covered is not None, "flushed unasked", failed)
        for key, generation in (covered or {}).items():
            if self.oracle.newest.get(key, 0) >= generation and key not in failed:
                self.oracle.durable[key] = generation
                self._is_durable(key, "flushed but not durable")
        self.oracle.flushing = None

    def _is_durable(self, key: ChunkKey, promise: str) -> None:
        """What was acknowledged, or a newer generation, is on the disk for good."""
        file = self.disk.get(key)
        while file is not None and file.doubtful:
            file = file.before
        self._must(file is not None and file.generation >= self.oracle.durable[key], promise, key)

    # ---- what the model threads do ---------------------------------------------------------------

    def reserve(self, event: ev.Reserve) -> None:
        thread = self.threads[event.key.stream]
        lost = dict(self.oracle.newest)
        actions = self.send(event)
        grants = [a for a in actions if isinstance(a, ev.Granted)]
        refusals = [a for a in actions if isinstance(a, ev.Backpressure)]
        self._must(len(grants) + len(refusals) == 1, "reserve answered once", event)
        self._must(bool(grants) or lost == self.oracle.newest, "dropped in vain", event)
        thread.granted, thread.waiting = (grants[0], None) if grants else (None, event)
        thread.may_resume = thread.told = False

    def commit(self, thread: Thread) -> None:
        grant, thread.granted = thread.granted, None
        assert grant is not None
        self._put(grant.offset, tokens(grant.key, grant.generation, grant.nbytes))
        for known in (self.oracle.newest, self.oracle.committed):
            known[grant.key] = grant.generation
        self.oracle.failures.pop(grant.key, None)
        self.oracle.failed_at.pop(grant.key, None)
        self.send(ev.Commit(grant.key, grant.generation))

    def abandon(self, thread: Thread) -> None:
        grant, thread.granted = thread.granted, None
        assert grant is not None
        self.send(ev.Abandon(grant.key, grant.generation))

    def boundary(self, event: ev.Boundary) -> None:
        thread = self.threads[event.stream]
        actions = self.send(event)
        served = [a for a in actions if isinstance(a, ev.Serve)]
        waits = [a for a in actions if isinstance(a, ev.AwaitReads)]
        self._must(len(served) + len(waits) == 1, "boundary answered once", event)
        if waits:
            self._must(self.setup.fallback.name == "wait", "never waits", event)
            thread.waiting, thread.may_resume, thread.told = event, False, False
            return
        self._window(thread, event, served[0])

    def _window(self, thread: Thread, event: ev.Boundary, serve: ev.Serve) -> None:
        chosen = [s.chunk for s in serve.chunks]
        self._must(chosen == sorted(set(chosen)), "time order", serve)
        self._must(serve.stale == bool(serve.reason), "stale says why", serve)
        self._must(serve.stale or chosen == list(event.wanted), "unflagged stale window", serve)
        for chunk in serve.chunks:
            key = ChunkKey(event.stream, chunk.chunk)
            self._must(self.oracle.newest.get(key) == chunk.generation, "served old or lost", chunk)
            content = self._get(chunk.offset, chunk.nbytes)
            right = tokens(key, chunk.generation, chunk.nbytes)
            self._must(content == right, "served wrong bytes", chunk)
        if serve.stale and self.setup.fallback.name == "stale" and chosen:
            known = {*event.wanted, *(s.chunk for s in thread.served)}
            self._must(set(chosen) <= known, "stale serves the previous set", serve)
        thread.waiting, thread.served = None, serve.chunks
        thread.step += 1
        self.oracle.wanted += len(event.wanted)
        hits = self.core.stats.hits
        self._must(sum(hits.values()) == self.oracle.wanted, "hits add up", hits)

    def flush(self) -> None:
        self.oracle.flushing = {**(self.oracle.flushing or {}), **self.oracle.newest}
        self.send(ev.Flush())

    def time_passes(self) -> None:
        self.tick += 1
        for thread in self.threads:
            thread.may_resume = True
        self.send(ev.Tick())

    # ---- what the disk does ----------------------------------------------------------------------

    def take_effect(self, transfer: Transfer, luck: float) -> None:
        """The transfer happens on the device; the core has not heard of it yet."""
        action = transfer.action
        match action:
            case ev.Read():
                transfer.answer = self._do_read(action, luck)
            case ev.Write():
                transfer.answer = self._do_write(action, luck)
            case ev.Delete():
                transfer.answer = self._do_delete(action, luck)

    def _do_read(self, action: ev.Read, luck: float) -> Event:
        key, generation = action.key, action.generation
        file = self.disk.get(key)
        if luck < self.faults.read:
            return ev.ReadFailed(key, generation, "I/O error", damaged=False)
        current = self.oracle.newest.get(key) == generation
        if file is None or file.generation != generation:
            self._must(not current, "current file missing", action)
            return ev.ReadFailed(key, generation, "missing", damaged=True)
        if file.damaged:
            return ev.ReadFailed(key, generation, "checksum", damaged=True)
        self._must(file.nbytes == action.nbytes, "read of wrong size", action)
        self._put(action.offset, file.content)
        return ev.ReadDone(key, generation)

    def _do_write(self, action: ev.Write, luck: float) -> Event:
        key, generation = action.key, action.generation
        content = self._get(action.offset, action.nbytes)
        self._must(content == tokens(key, generation, action.nbytes), "wrote wrong bytes", action)
        before = self.disk.get(key)
        newer = before is not None and before.generation > generation
        self._must(not newer, "wrote over a newer file", action)
        if self.faults.full or luck < self.faults.write:
            self.oracle.write_failures += 1
            if not self.faults.full and luck < self.faults.write / 3:  # at the very last step
                self.disk[key] = File(generation, action.nbytes, content, False, True, before)
            return ev.WriteFailed(key, generation, "no space" if self.faults.full else "I/O error")
        self.disk[key] = File(generation, action.nbytes, content)
        return ev.WriteDone(key, generation)

    def _do_delete(self, action: ev.Delete, luck: float) -> Event:
        if luck < self.faults.delete:
            return ev.DeleteFailed(action.key, action.generation, "I/O error")
        file = self.disk.pop(action.key, None)
        newer = file is not None and file.generation > action.generation
        self._must(not newer, "deleted a newer file", action)
        live = file is not None and self.oracle.newest.get(action.key) == file.generation
        self._must(not live, "deleted a current file", action)
        acknowledged = action.key in self.oracle.durable
        self._must(not acknowledged, "deleted what a flush acknowledged", action)
        return ev.DeleteDone(action.key, action.generation)

    def report(self, transfer: Transfer) -> None:
        """The core hears of it."""
        self.transfers.remove(transfer)
        answer = transfer.answer
        assert answer is not None
        if isinstance(answer, ev.ReadFailed) and self._is_current(answer):
            self.oracle.failures[answer.key] += 1
            self.oracle.failed_at[answer.key] = self.tick
        elif isinstance(answer, ev.ReadDone) and self._is_current(answer):
            self.oracle.failures.pop(answer.key, None)
        self.send(answer)
        healed = not (isinstance(answer, ev.WriteDone) and self.trouble)
        self._must(healed, "health after a success", answer)

    def _is_current(self, answer: ev.ReadDone | ev.ReadFailed) -> bool:
        return self.oracle.newest.get(answer.key) == answer.generation

    def crash(self, random: Random) -> None:
        """Power off: some transfers have reached the disk, the core is gone; then a new start."""
        self.history.append("> crash")
        for transfer in self.transfers:
            if transfer.answer is None and random.random() < 0.5:
                self.take_effect(transfer, random.random())
        for key in self.oracle.durable:
            self._is_durable(key, "flushed chunk gone after a crash")
        self._power_cut(random)
        self._boot()

    def _power_cut(self, random: Random) -> None:
        """Of each rename that was not made durable, it is anybody's guess whether it happened."""
        for key, file in list(self.disk.items()):
            while file is not None and file.doubtful and random.random() < 0.5:
                file = file.before
            if file is None:
                del self.disk[key]
            else:
                file.doubtful = False  # what the new process finds, it finds again
                self.disk[key] = file

    # ---- checks ----------------------------------------------------------------------------------

    def _must(self, truth: bool, promise: str, what: object) -> None:
        if not truth:
            raise Violation(f"{promise}: {what}")

    def _put(self, offset: int, content: Tokens) -> None:
        first = offset // PAGE
        self._must(first + len(content) <= self.setup.pool, "outside the pool", offset)
        self.memory[first : first + len(content)] = content

    def _get(self, offset: int, nbytes: int) -> Tokens:
        first = offset // PAGE
        return tuple(self.memory[first : first + page_ceil(nbytes) // PAGE])  # type: ignore[arg-type]

    def _expect(self, holder: ev.Write | ev.Stage, promise: str) -> None:
        right = tokens(holder.key, holder.generation, holder.nbytes)
        self._must(self._get(holder.offset, holder.nbytes) == right, promise, holder)

    def check(self) -> None:
        """Every promise that can be looked up at any time."""
        self._check_bytes()
        self._check_books()
        for thread in self.threads:
            if thread.waiting is not None and not thread.told:
                self._must(not self._could_go_on(thread.waiting), "waiter not told", thread)

    def _could_go_on(self, waiting: ev.Reserve | ev.Boundary) -> bool:
        pages = self.core.table.pages
        if isinstance(waiting, ev.Boundary):
            keys = [ChunkKey(waiting.stream, chunk) for chunk in waiting.wanted]
            return all(pages[key].resident for key in keys if key in pages)
        gathering = {
            ChunkKey(t.stream, chunk)
            for t in self.threads
            if isinstance(t.waiting, ev.Boundary)
            for chunk in t.waiting.wanted
        }
        end = 0
        for page in sorted(self.core.table.holders.values(), key=lambda p: p.offset or 0):
            if page.state.value != "clean" or page.pins or page.obsolete or page.key in gathering:
                if (page.offset or 0) - end >= waiting.nbytes:
                    return True
                end = (page.offset or 0) + page_ceil(page.nbytes)
        return self.setup.pool * PAGE - end >= waiting.nbytes

    def _check_bytes(self) -> None:
        """Nobody's bytes were touched: windows, transfers, staged copies, unfinished grants."""
        for thread in self.threads:
            for s in thread.served:
                right = tokens(ChunkKey(thread.stream, s.chunk), s.generation, s.nbytes)
                self._must(self._get(s.offset, s.nbytes) == right, "pinned bytes overwritten", s)
            if (grant := thread.granted) is not None:
                right = tokens(grant.key, grant.generation, grant.nbytes, "?")
                self._must(self._get(grant.offset, grant.nbytes) == right, "grant shared", grant)
        for stage in self.staged.values():
            self._expect(stage, "staged bytes overwritten")
        for transfer in self.transfers:
            action = transfer.action
            if isinstance(action, ev.Write):
                self._expect(action, "bytes being written overwritten")
            elif isinstance(action, ev.Read):
                kind = "data" if isinstance(transfer.answer, ev.ReadDone) else "?"
                right = tokens(action.key, action.generation, action.nbytes, kind)
                self._must(self._get(action.offset, action.nbytes) == right, "read shared", action)

    def _check_books(self) -> None:
        """The page table says what the oracle says, and its sums are right."""
        table = self.core.table
        current = {key: page.generation for key, page in table.pages.items()}
        self._must(current == self.oracle.newest, "vanished, or not forgotten", current)
        end = 0
        for page in sorted(table.holders.values(), key=lambda p: p.offset or 0):
            self._must(page.offset is not None and page.offset >= end, "extents overlap", page)
            end = (page.offset or 0) + page_ceil(page.nbytes)
            if page.resident:
                content = self._get(page.offset or 0, page.nbytes)
                right = tokens(page.key, page.generation, page.nbytes)
                self._must(content == right, "resident bytes", page)
        self._must(end <= self.setup.pool * PAGE, "budget", end)
        held = sum(page_ceil(p.nbytes) for p in table.holders.values())
        self._must(held == table.extents.used, "extents leak", held)
        pages = table.pages.values()
        dirty = sum(p.nbytes for p in pages if p.state.value == "dirty")
        self._must(dirty == table.dirty_bytes, "dirty bytes", table.dirty_bytes)
        stored = [p.nbytes for p in pages if p.state.value in ("clean", "stored", "loading")]
        books = (table.stored_bytes, table.stored_chunks)
        self._must(books == (sum(stored), len(stored)), "stored bytes", books)
        pins = sum(len(thread.served) for thread in self.threads)
        self._must(sum(p.pins for p in table.holders.values()) == pins, "pins leak", pins)
        reads = sum(isinstance(t.action, ev.Read) for t in self.transfers)
        writes = sum(isinstance(t.action, ev.Write) for t in self.transfers)
        fits = reads <= self.setup.read_slots and writes <= self.setup.write_slots
        self._must(fits, "slots", (reads, writes))
        self._must(self.core.idle == (not self.transfers), "idle", self.transfers)

"""The runtime: drives the core with real threads, a lease of a DRAM pool and real stores.

One lock guards the core; it is held for decisions only, never during I/O, encoding or decoding.
The pool's threads carry the core's actions out, by way of :mod:`worldpager.pager.workers`. The
model thread is whoever holds :meth:`Pager.turn`; it calls :meth:`Pager.commit` and
:meth:`Pager.acquire`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from worldpager.errors import BackgroundError, ClosedError, ConcurrencyError
from worldpager.pager import events as ev
from worldpager.pager.core import Core
from worldpager.pager.events import Action, ChunkKey, Event
from worldpager.pager.pool import Lease
from worldpager.pager.room import PRESSURE
from worldpager.pager.workers import READERS as READERS
from worldpager.pager.workers import ChunkFiles, Workers
from worldpager.quant.codec import Bytes
from worldpager.tiers.staging import HostStaging, Staging

log = logging.getLogger("worldpager")

TICK_SECONDS = 0.05
"""How often a waiter reminds the core that time passes."""


@dataclass(frozen=True, slots=True)
class WindowChunk:
    """A retrieved chunk: its image in the pool, valid until the stream's next ``acquire``."""

    chunk: int
    image: Bytes
    source: ev.Source


@dataclass(frozen=True, slots=True)
class Window:
    """What a boundary got: chunks in time order, whether stale and why, and the seconds waited."""

    chunks: tuple[WindowChunk, ...]
    stale: bool
    reason: str
    waited: float


class Pager:
    """A core and its lease of a DRAM pool. Close it; it is also a context manager."""

    def __init__(
        self,
        core: Core,
        lease: Lease,
        *,
        read_limit: int | None = None,
        write_limit: int | None = None,
        patience: float = 2.0,
    ) -> None:
        """``lease``: as large as the core's capacity; given back on closing.
        ``read_limit``, ``write_limit``: bytes per second, ``None`` for the disk's own speed.
        ``patience``: seconds a commit waits for a write before it drops the coldest dirty chunk.
        """
        self._core = core
        self._arena = lease
        self._staging: Staging = HostStaging()
        self._patience = patience
        self._lock = threading.Lock()
        self._progress = threading.Condition(self._lock)
        self._lost: dict[int, list[tuple[int, str]]] = defaultdict(list)
        self._untold: Counter[str] = Counter()  # lost to failing writes since the last flush
        self._flushed: ev.Flushed | None = None
        self.failure = ""
        """What the last flush could not make durable; empty once one could."""
        self._turn: int | None = None  # the thread within turn()
        self._closed = False
        self._process = os.getpid()
        self._workers = Workers(lease, self._report, read_limit=read_limit, write_limit=write_limit)
        _open.add(self)

    # ---- for the model thread ------------------------------------------------------------------

    def add_stream(self, files: ChunkFiles, stored: list[tuple[int, int, int]]) -> int:
        """Register a stream with the chunks already on NVMe, as ``(chunk, generation, nbytes)``.
        Returns its number.
        """
        with self._lock:
            self._check_open()
            stream = len(self._workers.files)
            self._workers.files.append(files)
            for chunk, generation, nbytes in stored:
                self._handle(ev.Adopt(ChunkKey(stream, chunk), generation, nbytes))
            return stream

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Be the model thread for one boundary: what is acquired within stays readable to its end,
        even where another thread closes the pager meanwhile.

        Raises :class:`ConcurrencyError` while another turn is under way.
        """
        with self._lock:
            self._check_open()
            if self._turn is not None:
                raise ConcurrencyError(
                    f"boundary() was called while another call of it is under way on thread "
                    f"{self._turn}; call it from one thread, or guard it with a lock of your own"
                )
            self._turn = threading.get_ident()
        try:
            with self._arena.held():
                yield
        finally:
            self._turn = None

    def commit(
        self, stream: int, chunk: int, nbytes: int, fill: Callable[[Bytes, int], None]
    ) -> float:
        """Store a chunk of ``nbytes``: ``fill(extent, generation)`` writes its image.

        Returns the seconds waited for room (the commit stall), at most twice the patience: then no
        room can be made, transfers that hang hold it, and the chunk is lost and counted. Whatever
        ``fill`` raises is passed on; nothing was stored then, and an older generation stays.
        """
        key = ChunkKey(stream, chunk)
        grant, waited = self._reserve(key, nbytes)
        if grant is None:
            return waited
        try:
            with self._arena.held():
                fill(self._arena.view(grant.offset, nbytes), grant.generation)
        except BaseException:
            with self._lock:
                self._handle(ev.Abandon(key, grant.generation))
            raise
        with self._lock:
            self._check_open()
            self._handle(ev.Commit(key, grant.generation))
        return waited

    def _reserve(self, key: ChunkKey, nbytes: int) -> tuple[ev.Granted | None, float]:
        began, waited = time.perf_counter(), 0.0
        with self._lock:
            while True:
                self._check_open()
                event = ev.Reserve(key, nbytes, insist=waited > self._patience)
                for action in self._handle(event):
                    if isinstance(action, ev.Granted):
                        return action, waited
                if waited > 2 * self._patience:
                    self._handle(ev.Forgo(key))
                    return None, waited
                self._wait()
                waited = time.perf_counter() - began

    def acquire(
        self, stream: int, step: int, wanted: tuple[int, ...], ranking: Sequence[int]
    ) -> Window:
        """Pin what the window of chunk ``step`` is served; arguments as :class:`events.Boundary`.

        Blocks only where the fallback is ``wait``; ``Window.waited`` says for how long.
        """
        began, waited = time.perf_counter(), 0.0
        with self._lock:
            while True:
                self._check_open()
                for action in self._handle(ev.Boundary(stream, step, wanted, ranking)):
                    if isinstance(action, ev.Serve):
                        return self._window(action, waited)
                self._wait()
                waited = time.perf_counter() - began

    def _window(self, serve: ev.Serve, waited: float) -> Window:
        chunks = tuple(
            WindowChunk(s.chunk, self._arena.view(s.offset, s.nbytes), s.source)
            for s in serve.chunks
        )
        return Window(chunks, serve.stale, serve.reason, waited)

    def spoiled(self, stream: int, chunks: tuple[int, ...]) -> None:
        """Tell that the bytes of ``chunks``, of the window just acquired, changed in memory. The
        window has to be acquired again.
        """
        with self._lock:
            self._check_open()
            self._handle(ev.Spoiled(stream, chunks))

    def ahead(self, stream: int, chunks: tuple[int, ...]) -> None:
        """Load these chunks soon, most urgent first. Returns at once; callable from any thread."""
        with self._lock:
            if not self._closed:
                self._handle(ev.Ahead(stream, chunks))

    def resident(self, stream: int) -> tuple[int, ...]:
        """The stream's chunks in the DRAM pool. Callable from any thread."""
        with self._lock:
            pages = self._core.table.resident()
            return tuple(page.key.chunk for page in pages if page.key.stream == stream)

    def tick(self) -> None:
        """Tell the core that another chunk's time has passed."""
        with self._lock:
            self._check_open()
            self._handle(ev.Tick())
        self._workers.relieve()

    def take_lost(self, stream: int) -> list[tuple[int, str]]:
        """Chunks that left every tier since the last call, with the reason."""
        with self._lock:
            return self._lost.pop(stream, [])

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything committed before is durable on NVMe.

        Raises :class:`BackgroundError` naming the chunks that could not be written, or saying that
        ``timeout`` seconds were not enough.
        """
        with self._lock:
            self._check_open()
            with self._noted():
                self._flush(timeout)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Around a flush: note how it ended."""
        try:
            yield
        except BackgroundError as error:
            self.failure = str(error)
            raise
        self.failure = ""

    def _flush(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._flushed = None
        self._handle(ev.Flush())
        while self._flushed is None:
            if deadline is not None and time.monotonic() > deadline:
                raise BackgroundError(
                    f"{self._core.table.dirty_bytes} bytes were still not on disk after "
                    f"{timeout:g} s; the disk is too slow or stuck"
                )
            self._wait()
            self._check_open()
        failed = self._flushed.failed  # type: ignore[unreachable]  # set by another thread
        lost, self._untold = self._untold, Counter()
        if failed:
            chunks = ", ".join(str(key.chunk) for key in failed[:8])
            raise BackgroundError(
                f"{len(failed)} chunks could not be written ({self._core.trouble or 'dropped'}), "
                f"among them {chunks}; they are lost when the pager closes"
            )
        if lost:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in lost.items())
            raise BackgroundError(
                f"{lost.total()} chunks were lost since the last flush, since they could not be "
                f"written ({reasons}); all others are on disk"
            )

    def settle(self, timeout: float = 30.0) -> None:
        """Wait until no read or write is queued or under way (for tests and orderly measuring)."""
        deadline = time.monotonic() + timeout
        with self._lock:
            while not self._core.idle:
                if time.monotonic() > deadline:
                    raise BackgroundError(f"transfers still under way after {timeout:g} s")
                self._wait()

    def close(self, timeout: float = 5.0) -> None:
        """Flush, end all transfers and give the lease back, within about ``timeout`` seconds.

        May be called twice and from any thread. Raises :class:`BackgroundError` where something
        committed could not be made durable; everything is closed all the same, but for a transfer
        that hangs: the lease that it works in ends with it.
        """
        try:
            with self._lock:
                if self._closed:
                    return
                try:
                    with suppress(ClosedError), self._noted():  # another thread was quicker
                        self._flush(timeout)
                finally:
                    self._closed = True
                    self._progress.notify_all()
        finally:
            if self.owned:
                self._workers.close(max(0.5, timeout / 5))
                self._staging.close()
                self._arena.close()

    def disown(self) -> None:
        """In a forked child, where no worker lives: closed from the start."""
        self._lock = threading.Lock()
        self._progress = threading.Condition(self._lock)
        self._closed = True

    def __enter__(self) -> Pager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def core(self) -> Core:
        """The core, to look at: its counters and byte counts. Never send it events from outside."""
        return self._core

    @property
    def arena(self) -> Lease:
        """The part of the pool that it works in, to look at."""
        return self._arena

    @property
    def owned(self) -> bool:
        """Whether this process made it; a forked one may look only."""
        return self._process == os.getpid()

    @property
    def closed(self) -> bool:
        """Whether the pager was closed, or belongs to the process that forked this one."""
        return self._closed

    # ---- carrying out ----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(
                "the pager is closed, or belongs to the process that forked this one; open the "
                "session again to go on"
            )

    def _wait(self) -> None:
        """Wait for progress; time that passes without any is a tick, so that retries come due."""
        if not self._progress.wait(TICK_SECONDS):
            self._handle(ev.Tick())
            self._workers.relieve()

    def _handle(self, event: Event) -> list[Action]:
        """Let the core decide and start what it asks for. The lock is held."""
        actions = self._core.handle(event)
        for action in actions:
            match action:
                case ev.Read() | ev.Write() | ev.Delete():
                    self._workers.submit(action)
                case ev.Stage(key, generation, offset, nbytes):
                    self._staging.stage((key, generation), self._arena.view(offset, nbytes))
                case ev.Unstage(key, generation):
                    self._staging.release((key, generation))
                case ev.Lost(key, reason):
                    self._lost[key.stream].append((key.chunk, reason))
                    if isinstance(event, ev.Reserve) and reason != PRESSURE:
                        self._untold[reason] += 1
                case ev.Health(reason):
                    self._report_health(reason)
                case ev.Flushed():
                    self._flushed = action
                case ev.Progress():
                    self._progress.notify_all()
        return actions

    @staticmethod
    def _report_health(reason: str) -> None:
        if reason:
            log.warning(
                "writing to disk fails (%s); chunks stay in memory while it has room", reason
            )
        else:
            log.warning("writing to disk works again")

    def _report(self, event: Event) -> None:
        with self._lock:
            self._handle(event)


_open: weakref.WeakSet[Pager] = weakref.WeakSet()


def _disown_in_child() -> None:
    for pager in _open:
        pager.disown()


os.register_at_fork(after_in_child=_disown_in_child)

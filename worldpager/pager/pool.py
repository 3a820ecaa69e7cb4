"""One DRAM pool and its threads, shared by any number of sessions with a quota of bytes each.

A session leases its quota as one region when it opens and gives it back when it ends. Its core and
policies work inside that region alone, so nothing another session does can take bytes from it.
Fairness comes from the queue: each session has at most two reads and one write under way, and they
are done in the order they came. Reads and writes have threads of their own, so that a read never
waits behind write-back.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from worldpager.errors import BudgetError, ClosedError, ConfigError
from worldpager.pager.crew import Crew
from worldpager.quant.codec import Bytes
from worldpager.tiers.arena import Arena
from worldpager.tiers.extents import PAGE, ExtentAllocator
from worldpager.units import format_size

if TYPE_CHECKING:
    import torch

POOL_READERS = 4
POOL_WRITERS = 2
PLANNERS = 1
"""Threads of a pool, however many sessions lease from it; one more for each transfer that hangs or
is held back by a session's bandwidth limit while others wait."""


class MemoryPool:
    """``nbytes`` of DRAM for the sessions of a process. A context manager; thread-safe.

    One page-aligned mapping, checked against the machine's limits and populated at once. Give it to
    each :class:`WorldMemory` as ``pool``; ``MemoryConfig.dram`` is then the session's quota.
    """

    def __init__(
        self, nbytes: int, *, readers: int = POOL_READERS, writers: int = POOL_WRITERS
    ) -> None:
        """``nbytes``: rounded down to whole pages. ``readers``, ``writers``: transfers at a time,
        all sessions together. Raises :class:`BudgetError` where the memory is not there, before
        touching any of it, and :class:`ConfigError` for less than a page.
        """
        self._arena = Arena(nbytes)
        self._extents = ExtentAllocator(self._arena.nbytes)
        self._lock = threading.Lock()
        self._closed = False
        self._crews: list[Crew] = []
        try:
            for name, width in (("read", readers), ("write", writers), ("prefetch", PLANNERS)):
                self._crews.append(Crew(name, width))
        except BaseException:
            self._end()
            raise
        self.readers, self.writers, self.planners = self._crews
        weakref.finalize(self, _close_crews, self._crews, 0.0).atexit = False
        _pools.add(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return self._arena.nbytes

    @property
    def free(self) -> int:
        """Bytes that are not leased, in however many pieces."""
        return self._extents.free_bytes

    @property
    def largest_free(self) -> int:
        """The largest quota that could be leased now."""
        return self._extents.largest_free

    @property
    def leases(self) -> int:
        """Sessions that hold a part of the pool."""
        return len(self._extents)

    @property
    def arena(self) -> Arena:
        """The pool's memory."""
        return self._arena

    def pin(self, device: torch.device) -> bool:
        """Page-lock the whole pool for copies to a CUDA device; as :meth:`Arena.pin`."""
        return self._arena.pin(device)

    def lease(self, nbytes: int) -> Lease:
        """A region of ``nbytes``, rounded down to whole pages, until the lease is closed.

        Raises :class:`BudgetError` where it does not fit, with the bytes requested, free, free in
        one piece and in all; :class:`ConfigError` for less than a page; :class:`ClosedError` after
        :meth:`close` and in a forked child.
        """
        if nbytes < PAGE:
            raise ConfigError(f"a quota of {nbytes} bytes holds no page; give at least {PAGE}")
        with self._lock:
            if self._closed:
                raise ClosedError(
                    "the memory pool is closed, or belongs to the process that forked this one; "
                    "make another"
                )
            offset = self._extents.allocate(nbytes // PAGE * PAGE)
            if offset is None:
                raise BudgetError(self._refusal(nbytes))
            try:
                return Lease(self, offset, nbytes // PAGE * PAGE)
            except BaseException:
                self._extents.free(offset)
                raise

    def _refusal(self, nbytes: int) -> str:
        free, run = self._extents.free_bytes, self._extents.largest_free
        pieces = "" if run == free else f", the largest piece {format_size(run)} ({run} bytes)"
        return (
            f"a quota of {format_size(nbytes)} ({nbytes} bytes) was requested, but of the pool's "
            f"{format_size(self.nbytes)} ({self.nbytes} bytes) {format_size(free)} ({free} bytes) "
            f"are free{pieces}, the rest is leased to {len(self._extents)} sessions; ask for at "
            f"most {run} bytes, close a session, or make a larger pool"
        )

    def take_back(self, offset: int) -> None:
        """The lease of the region at ``offset`` ended: its bytes are free."""
        with self._lock:
            self._extents.free(offset)
            last = self._closed and not len(self._extents)
        if last:
            self._end()

    def close(self) -> None:
        """Lease no more. Idempotent, never disturbs a session.

        The memory and the threads go at once where nothing is leased, and otherwise with the last
        session that ends. Does nothing in a forked child.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            leased = len(self._extents)
        if not leased:
            self._end()

    def _end(self) -> None:
        _close_crews(self._crews, 1.0)
        self._arena.close()

    def disown(self) -> None:
        """In a forked child, where none of the threads lives: closed from the start."""
        self._lock = threading.Lock()
        self._crews.clear()
        self._closed = True

    def __enter__(self) -> MemoryPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Lease:
    """One session's region of a pool; offsets count from its start."""

    def __init__(self, pool: MemoryPool, offset: int, nbytes: int) -> None:
        """Not for callers: use :meth:`MemoryPool.lease`."""
        self.pool = pool
        self.nbytes = nbytes
        """Usable bytes."""
        self._offset = offset
        self._lock = threading.Lock()
        self._holders = 1  # itself while it is open, and who is within held()
        self._closed = False

    @property
    def pinned_bytes(self) -> int:
        """Bytes page-locked for CUDA: all or none."""
        return self.nbytes if self.pool.arena.pinned_bytes else 0

    @property
    def pin_reason(self) -> str:
        """Why :attr:`pinned_bytes` is 0; empty where it is not."""
        return self.pool.arena.pin_reason

    @property
    def pin_failed(self) -> bool:
        """Whether page-locking was asked for and is not there."""
        return self.pool.arena.pin_failed

    def view(self, offset: int, nbytes: int) -> Bytes:
        """As :meth:`Arena.view`, inside the region. To be used within :meth:`held`: afterwards the
        bytes may be another session's.
        """
        if self._closed:
            raise ClosedError("the session's part of the pool was given back; open it again")
        if offset % PAGE or offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ConfigError(
                f"bytes {offset} to {offset + nbytes} are no page-aligned range of a pool of "
                f"{self.nbytes} bytes"
            )
        return self.pool.arena.view(self._offset + offset, nbytes)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The region stays the session's until the end of this, even where it is closed meanwhile.

        Raises :class:`ClosedError` where it was closed before.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the session's part of the pool was given back; open it again")
            self._holders += 1
        try:
            yield
        finally:
            self._release()

    def close(self) -> None:
        """Give the region back, now or as soon as nobody is within :meth:`held`; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._release()

    def _release(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        self.pool.take_back(self._offset)


def _close_crews(crews: list[Crew], timeout: float) -> None:
    for crew in crews:
        crew.close(timeout)


_pools: weakref.WeakSet[MemoryPool] = weakref.WeakSet()


def _disown_in_child() -> None:
    for pool in _pools:
        pool.disown()


os.register_at_fork(after_in_child=_disown_in_child)

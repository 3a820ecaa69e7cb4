"""A session's work on its pool's threads: reads, writes and deletes, and reports how they ended.

Reads and writes have threads of their own, so a read never waits behind write-back. Whatever a
transfer raises becomes a report, or its slot would be lost for good.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

from worldpager.errors import ClosedError, DamagedBlockError, StoreError, StoreFullError
from worldpager.pager import events as ev
from worldpager.pager.events import Event
from worldpager.pager.pool import Lease
from worldpager.quant.codec import Bytes
from worldpager.tiers.bandwidth import TokenBucket

log = logging.getLogger("worldpager")

READERS = 2
"""Reads of a session under way: one may be stuck in a slow read without stopping the other."""
WRITERS = 1
"""Writes of a session under way."""
RELIEF_SECONDS = 0.1
"""How often a session that ends looks whether its last transfers wait behind stuck ones."""


class ChunkFiles(Protocol):
    """Where one stream's chunks are read and written; called from the worker threads."""

    def write(self, chunk: int, image: Bytes) -> None:
        """Publish ``image`` durably in the place of an older one, or raise :class:`StoreError`:
        then the older one is there, or this one, whole.
        """

    def read(self, chunk: int, generation: int, out: Bytes) -> None:
        """Fill ``out`` with the image of that generation of ``chunk``, checked whole.

        Raises :class:`StoreError` where another try may work, :class:`DamagedBlockError` where the
        stored bytes are not what was written.
        """

    def delete(self, chunk: int) -> None:
        """Remove the chunk's file; a missing one is no error."""


class Workers:
    """Carries one session's transfers out, between files and its lease of the pool."""

    def __init__(
        self,
        lease: Lease,
        report: Callable[[Event], None],
        *,
        read_limit: int | None,
        write_limit: int | None,
    ) -> None:
        """``report`` takes each outcome, on the thread of the transfer; limits in bytes/second."""
        self.files: list[ChunkFiles] = []
        """By stream; may grow at any time."""
        self._lease = lease
        self._report = report
        self._limits = (TokenBucket(read_limit), TokenBucket(write_limit))
        self._crews = (lease.pool.readers, lease.pool.writers)
        self._warned: set[str] = set()  # kinds of trouble that were told
        self._changed = threading.Condition()
        self._under_way = 0
        self._closed = False

    def submit(self, job: ev.Read | ev.Write | ev.Delete) -> None:
        """Carry ``job`` out in its turn; not after :meth:`close`. Never blocks."""
        with self._changed:
            if self._closed:
                return
            self._under_way += 1
        match job:
            case ev.Read():
                # reserved here, in the core's order, which the threads may not keep
                deadline = self._limits[0].reserve(job.nbytes)
                self._crews[0].submit(partial(self._do, partial(self._read, job, deadline)))
            case ev.Write():
                self._crews[1].submit(partial(self._do, partial(self._write, job)))
            case ev.Delete():
                self._crews[1].submit(partial(self._do, partial(self._delete, job)))

    def relieve(self) -> None:
        """Time passes: transfers that wait behind stuck ones go ahead."""
        for crew in self._crews:
            crew.relieve()

    def close(self, timeout: float) -> bool:
        """Take no more; whether all that was queued or under way ended within ``timeout`` seconds.

        What hangs for longer ends on its own, and touches no memory but what it was given.
        """
        for limit in self._limits:
            limit.close()
        deadline = time.monotonic() + timeout
        with self._changed:
            self._closed = True
            while self._under_way and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, RELIEF_SECONDS))
                self.relieve()
            return not self._under_way

    def _do(self, transfer: Callable[[], Event]) -> None:
        try:
            self._report(transfer())
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def _read(self, job: ev.Read, deadline: float) -> Event:
        key, generation = job.key, job.generation
        try:
            with self._lease.held():
                view = self._lease.view(job.offset, job.nbytes)
                self.files[key.stream].read(key.chunk, generation, view)
        except DamagedBlockError as error:
            if error.reason not in self._warned:  # each further one is counted
                self._warned.add(error.reason)
                log.warning("chunk %d is damaged on disk: %s", key.chunk, error)
            return ev.ReadFailed(key, generation, error.reason, damaged=True)
        except Exception as error:
            return ev.ReadFailed(key, generation, _reason("read", error), damaged=False)
        self._pace(0, deadline)
        return ev.ReadDone(key, generation)

    def _write(self, job: ev.Write) -> Event:
        key, generation = job.key, job.generation
        try:
            deadline = self._limits[1].reserve(job.nbytes)
            with self._lease.held():
                view = self._lease.view(job.offset, job.nbytes)
                self.files[key.stream].write(key.chunk, view)
        except Exception as error:
            return ev.WriteFailed(key, generation, _reason("write", error))
        self._pace(1, deadline)
        return ev.WriteDone(key, generation)

    def _delete(self, job: ev.Delete) -> Event:
        try:
            self.files[job.key.stream].delete(job.key.chunk)
        except Exception as error:
            if "delete" not in self._warned:
                self._warned.add("delete")
                log.warning("an outdated file cannot be removed: %s; trying again later", error)
            return ev.DeleteFailed(job.key, job.generation, _reason("delete", error))
        return ev.DeleteDone(job.key, job.generation)

    def _pace(self, direction: int, deadline: float) -> None:
        """Hold a finished transfer back until its bandwidth limit would have let it through."""
        if deadline > time.monotonic():
            with suppress(ClosedError), self._crews[direction].aside():
                self._limits[direction].wait(deadline)


def _reason(action: str, error: Exception) -> str:
    """A short word for counters; what the system did not say is shown where it was raised."""
    match error:
        case StoreFullError():
            return "no space"
        case StoreError() | OSError():
            return "I/O error"
        case ClosedError():
            return "closed"
    log.error("a %s failed in an unexpected way", action, exc_info=error)
    return type(error).__name__

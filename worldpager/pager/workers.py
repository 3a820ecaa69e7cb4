"""The pager's worker threads: they carry reads, writes and deletes out and report how they ended.

Reads and writes have queues of their own, so a read never waits behind write-back. Whatever a
transfer raises becomes a report; a worker never dies of it, or its slot would be lost for good.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol

from worldpager.errors import ClosedError, DamagedBlockError, StoreError, StoreFullError
from worldpager.pager import events as ev
from worldpager.pager.events import Event
from worldpager.quant.codec import Bytes
from worldpager.tiers.arena import Arena
from worldpager.tiers.bandwidth import TokenBucket

log = logging.getLogger("worldpager")

READERS = 2
"""Reader threads: one may be stuck in a slow read without stopping the other."""


class ChunkFiles(Protocol):
    """Where one stream's chunks are read and written; called from the worker threads."""

    def write(self, chunk: int, image: Bytes) -> None:
        """Publish ``image`` durably, or raise :class:`StoreError` with nothing published."""

    def read(self, chunk: int, generation: int, out: Bytes) -> None:
        """Fill ``out`` with the image of that generation of ``chunk``, checked whole.

        Raises :class:`StoreError` where another try may work, :class:`DamagedBlockError` where the
        stored bytes are not what was written.
        """

    def delete(self, chunk: int) -> None:
        """Remove the chunk's file; a missing one is no error."""


class Workers:
    """Reader threads and one writer thread over ``arena``."""

    def __init__(
        self,
        arena: Arena,
        report: Callable[[Event], None],
        *,
        read_limit: int | None,
        write_limit: int | None,
    ) -> None:
        """``report`` takes each outcome, on the thread of the transfer; limits in bytes/second."""
        self.files: list[ChunkFiles] = []
        """By stream; may grow at any time."""
        self._arena = arena
        self._report = report
        self._limits = (TokenBucket(read_limit), TokenBucket(write_limit))
        self._reads: SimpleQueue[tuple[ev.Read, float] | None] = SimpleQueue()
        self._writes: SimpleQueue[ev.Write | ev.Delete | None] = SimpleQueue()
        self._warned: set[str] = set()  # kinds of trouble that were told
        self._threads = [
            threading.Thread(target=self._read_loop, name=f"worldpager-read-{i}", daemon=True)
            for i in range(READERS)
        ]
        self._threads.append(
            threading.Thread(target=self._write_loop, name="worldpager-write", daemon=True)
        )
        for thread in self._threads:
            thread.start()

    def submit(self, job: ev.Read | ev.Write | ev.Delete) -> None:
        """Carry ``job`` out in its turn. Never blocks."""
        if isinstance(job, ev.Read):
            # in the core's order, which the threads may not keep
            self._reads.put((job, self._limits[0].reserve(job.nbytes)))
        else:
            self._writes.put(job)

    def close(self, timeout: float) -> bool:
        """End the threads once they have done what is queued; whether all ended in time."""
        for _ in range(READERS):
            self._reads.put(None)
        self._writes.put(None)
        for limit in self._limits:
            limit.close()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _read_loop(self) -> None:
        while (job := self._reads.get()) is not None:
            self._report(self._read(*job))

    def _read(self, job: ev.Read, deadline: float) -> Event:
        key, generation = job.key, job.generation
        try:
            view = self._arena.view(job.offset, job.nbytes)
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

    def _write_loop(self) -> None:
        while (job := self._writes.get()) is not None:
            self._report(self._write(job) if isinstance(job, ev.Write) else self._delete(job))

    def _write(self, job: ev.Write) -> Event:
        key, generation = job.key, job.generation
        try:
            deadline = self._limits[1].reserve(job.nbytes)
            self.files[key.stream].write(key.chunk, self._arena.view(job.offset, job.nbytes))
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
                log.warning("a replaced file cannot be removed: %s; trying again later", error)
            return ev.DeleteFailed(job.key, job.generation, _reason("delete", error))
        return ev.DeleteDone(job.key, job.generation)

    def _pace(self, direction: int, deadline: float) -> None:
        """Hold a finished transfer back until its bandwidth limit would have let it through."""
        with suppress(ClosedError):
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

"""Sessions: a directory on disk, the pager in front of it, and the rollouts stored there.

A session brings a pool of its own, or leases its quota from one that many sessions share.

Opening a directory that was used before brings back everything that was durable: recovery is
listing the folder and checking the chunks' tails, after a clean close and after a kill alike.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from worldpager.errors import BackgroundError, ClosedError
from worldpager.pager.core import Core
from worldpager.pager.pool import MemoryPool
from worldpager.pager.runtime import Pager
from worldpager.pager.workers import READERS, WRITERS
from worldpager.quant.codec import Bytes
from worldpager.quant.shard import ChunkRecord, verify_image
from worldpager.tiers.budget import check_budget
from worldpager.tiers.io_backend import IOBackend
from worldpager.tiers.space import DiskCap
from worldpager.tiers.spec import StoreSpec
from worldpager.tiers.store import ChunkStore

log = logging.getLogger("worldpager")

LAST_WORDS_SECONDS = 0.5
"""How long closing waits for what is to be said last."""


class StreamFiles:
    """One stream of a rollout's store, for the pager's threads: what is read is checked whole."""

    def __init__(self, store: ChunkStore, stream: int) -> None:
        self._store = store
        self._stream = stream
        self._identity = store.spec.identity(stream)

    def write(self, chunk: int, image: Bytes) -> None:
        self._store.write(chunk, image, self._stream)

    def read(self, chunk: int, generation: int, out: Bytes) -> None:
        self._store.read(chunk, out, self._stream)
        verify_image(
            out,
            self._store.spec.layers,
            identity=self._identity,
            chunk=chunk,
            generation=generation,
        )

    def delete(self, chunk: int) -> None:
        self._store.delete(chunk, self._stream)


class Rollout:
    """One rollout's place in the pager and on disk.

    ``stream``: its number in the pager. ``identity``: what its blocks carry. ``found``: records of
    the chunks that were on disk when it was opened. ``damaged``: those that were there but not as
    they were written, counted by reason; they are absent.
    """

    def __init__(self, pager: Pager, store: ChunkStore) -> None:
        self.store = store
        self.identity = store.spec.identity()
        stored = store.contents()
        self.damaged = Counter(chunk.reason for chunk in store.damaged)
        if self.damaged:
            reasons = ", ".join(f"{reason}: {n}" for reason, n in self.damaged.items())
            log.warning(
                "%d stored chunks are damaged and count as absent (%s); 'worldpager verify' lists "
                "them", self.damaged.total(), reasons,
            )  # fmt: skip
        self.found: list[ChunkRecord] = [chunk.record for chunk in stored]
        self.stream = pager.add_stream(
            StreamFiles(store, 0),
            [(chunk.chunk, chunk.record.generation, chunk.nbytes) for chunk in stored],
        )


class Session:
    """An open session directory: one pager, and its rollouts, the last one current."""

    pager: Pager
    pool: MemoryPool
    rollout: Rollout

    def __init__(
        self,
        directory: str | Path,
        spec: StoreSpec,
        core: Core,
        *,
        pool: MemoryPool | None = None,
        disk_cap: int | None = None,
        read_limit: int | None = None,
        write_limit: int | None = None,
        io: IOBackend | None = None,
    ) -> None:
        """Open or create ``spec``'s rollout in ``directory`` and start the pager on ``core``.

        ``pool``: where to lease the core's capacity; ``None`` for a pool of its own. ``io``: the
        system calls on files; ``None`` for the system's own. Raises :class:`BudgetError` and as
        :meth:`MemoryPool.lease` before a file is touched, and as :meth:`ChunkStore.open` before a
        pool is allocated. Whatever is raised, nothing stays open or leased.
        """
        self._directory = Path(directory).resolve()
        self.on_close: Callable[[], None] | None = None
        """Called on closing, when nothing changes any more and the directory is still ours."""
        self._io = io
        self._disk_cap = DiskCap(disk_cap)
        self._closing = threading.Lock()
        self._stores: list[ChunkStore] = []
        self._damaged: Counter[str] = Counter()
        self._owns_pool = pool is None
        with ExitStack() as undo:
            if pool is None:
                check_budget(core.capacity)
                store = self._open_store(spec, undo)
                pool = MemoryPool(core.capacity, readers=READERS, writers=WRITERS)
                undo.callback(pool.close)
                lease = pool.lease(core.capacity)
            else:
                lease = pool.lease(core.capacity)
                undo.callback(lease.close)
                store = self._open_store(spec, undo)
            self.pool = pool
            self.pager = Pager(core, lease, read_limit=read_limit, write_limit=write_limit)
            undo.callback(self.pager.close)
            self.rollout = self._begin(store)
            undo.pop_all()

    def _begin(self, store: ChunkStore) -> Rollout:
        rollout = Rollout(self.pager, store)
        self._damaged += rollout.damaged
        return rollout

    def _open_store(self, spec: StoreSpec, undo: ExitStack | None = None) -> ChunkStore:
        known = ChunkStore.exists(self._directory, spec.rollout, io=self._io)
        opened = (ChunkStore.open if known else ChunkStore.create)(
            self._directory, spec, disk_cap=self._disk_cap, io=self._io
        )
        if undo is not None:
            undo.callback(opened.close)
        self._stores.append(opened)
        return opened

    def begin_rollout(self, name: str) -> Rollout:
        """Start a further rollout under ``name``; earlier ones keep being written back."""
        spec, ended = replace(self.rollout.store.spec, rollout=name), self.rollout.stream
        self.pager.ahead(ended, ())
        self.pager.acquire(ended, 0, (), ())  # an empty window: nothing stays pinned
        self.rollout = self._begin(self._open_store(spec))
        return self.rollout

    @property
    def folder(self) -> Path:
        """The folder of the current rollout in which its chunks and its lock lie."""
        spec = self.rollout.store.spec
        return self._directory / spec.rollout / spec.streams[0]

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files of the rollouts in the directory, opened here or not."""
        return self._disk_cap.taken

    @property
    def disk_limit(self) -> int | None:
        """The cap on :attr:`disk_bytes`."""
        return self._disk_cap.limit

    @property
    def method(self) -> str:
        """The I/O method in use for the current rollout and why, if not the preferred one."""
        return self.rollout.store.method

    @property
    def damaged(self) -> Counter[str]:
        """Chunks found damaged on opening, by reason."""
        return self._damaged

    def flush(self, timeout: float | None = None) -> None:
        """As :meth:`Pager.flush`."""
        self.pager.flush(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Flush, publish the metadata arrays, stop the pager, give the pool back, unlock.

        Takes about ``timeout`` seconds at most. May be called twice and from any thread. Raises
        what flushing or publishing raised; all is closed all the same.
        """
        deadline = time.monotonic() + timeout
        with self._closing:
            try:
                with suppress(ClosedError):
                    self.pager.close(timeout)
                    self._publish(max(0.5, deadline - time.monotonic()))
            finally:
                if self._owns_pool:
                    self.pool.close()
                words, self.on_close = self.on_close, None
                if words is not None and self.pager.owned:
                    _in_time(words, LAST_WORDS_SECONDS)
                for store in self._stores:
                    store.close()

    def _publish(self, timeout: float) -> None:
        """Publish all rollouts' metadata."""

        def publish() -> None:
            for store in self._stores:
                publish_chunks(store)

        if not _in_time(publish, timeout):
            raise BackgroundError(
                f"the metadata arrays were not written within {timeout:.1f} s: the disk is too "
                "slow or stuck; all chunks are on disk"
            )


def _in_time(work: Callable[[], None], timeout: float) -> bool:
    """Do ``work`` on a thread that may be left behind where disks hang; whether it ended in time.

    Raises what it raised.
    """
    failures: list[Exception] = []

    def do() -> None:
        try:
            work()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=do, name="worldpager-publish", daemon=True)
    thread.start()
    thread.join(timeout)
    for failure in failures:
        raise failure
    return not thread.is_alive()


def publish_chunks(store: ChunkStore) -> None:
    """Write what the chunks' records say as small ordinary arrays, one row a chunk, for readers
    that know Zarr but not us: ``chunk``, ``start_frame``, ``position`` and ``place`` ``[n, 12]``.
    """
    records = [chunk.record for chunk in store.contents()]
    store.publish_metadata(
        {
            "chunk": np.array([r.chunk for r in records], dtype=np.int64),
            "start_frame": np.array([r.start_frame for r in records], dtype=np.int64),
            "position": np.array([r.position for r in records], dtype=np.float64),
            "place": np.array([r.place for r in records], dtype=np.float64).reshape(-1, 12),
        }
    )

"""The disk tier: one rollout's chunks as shards of a Zarr v3 array, published one rename each.

A chunk's file is its shard image, byte for byte, so writing and reading are one direct transfer
from and to its extent in the pool. Publishing: temporary name, write, sync, rename, sync of the
folder; a reader or a crash sees the old chunk or the new one. Deleting: one unlink. Recovery:
listing the folder and checking the tails. Files are never mapped: one that is cut under us is an
error, not a signal.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from worldpager.errors import (
    ClosedError,
    ConfigError,
    DamagedBlockError,
    StoreError,
    StoreFullError,
)
from worldpager.quant.shard import ChunkRecord
from worldpager.tiers import documents, layout
from worldpager.tiers.directio import DirectIO
from worldpager.tiers.io_backend import Bytes, IOBackend, SystemIO
from worldpager.tiers.lock import DirectoryLock
from worldpager.tiers.metadata import Metadata, rollout_files
from worldpager.tiers.recovery import (
    MAX_CHUNKS,
    DamagedChunk,
    Examiner,
    StoredChunk,
    shard_name,
    shard_sizes,
)
from worldpager.tiers.space import DiskCap, DiskSpace, store_errors
from worldpager.tiers.spec import StoreSpec

_Key = tuple[int, int]  # stream, chunk


class ChunkStore:
    """One rollout's store, held by one writer from :meth:`create` or :meth:`open` to :meth:`close`.

    Calls block on the disk, so they belong on I/O threads; they may come from several at once, but
    for one chunk only one at a time. Images are page-aligned, whole pages and used in place. After
    ``fork`` only the parent may use it.
    """

    def __init__(
        self,
        io: IOBackend,
        path: Path,
        spec: StoreSpec,
        space: DiskSpace,
        *,
        readonly: bool,
    ) -> None:
        """Not for callers: use :meth:`create`, :meth:`open` or :meth:`inspect`."""
        self.spec = spec
        self._io = io
        self._files = DirectIO(io)
        self._root = path / spec.rollout
        self._folders = [self._root / stream for stream in spec.streams]
        self._examiner = Examiner(self._files, spec, self._folders)
        self._metadata = Metadata(io, self._root, spec)
        self._space = space
        self._lock = threading.Lock()  # guards sizes, writing and room
        self._sizes: dict[_Key, int] = {}
        self._writing: set[_Key] = set()
        self._metadata_bytes = 0
        self._damaged: tuple[DamagedChunk, ...] = ()
        self._closed = False
        self._owned = None if readonly else DirectoryLock(self._folders[0])
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(
        cls,
        path: str | Path,
        spec: StoreSpec,
        *,
        disk_cap: int | DiskCap | None = None,
        free_floor: int = 0,
        io: IOBackend | None = None,
    ) -> Self:
        """Make the rollout of ``spec`` at ``path``, with the session and folders it needs.

        ``disk_cap``: bytes that all rollouts at ``path`` may take; stores that are open together
        share one :class:`DiskCap`. ``free_floor``: bytes to leave free on the file system.

        Raises :class:`StoreError` where the rollout exists, :class:`IdentityError` where the
        directory holds another session or format, :class:`ForeignDirectoryError` where it holds
        other things; nothing was touched then. :class:`StoreLockedError` while another makes it.
        """
        io, path = io or SystemIO(), Path(path).resolve()
        with store_errors(f"create a store at {path}"):
            space = DiskSpace(io, path / spec.rollout, disk_cap, free_floor)
            _refuse_existing(io, path, spec)
            layout.make_folders(io, path, spec)
            store = cls(io, path, spec, space, readonly=False)
            try:
                _refuse_existing(io, path, spec)  # another may have been quicker to the lock
                space.cap.require()
                store._metadata.write_group({})
                store._count_metadata()
            except StoreFullError:
                store.destroy()
                raise
            except BaseException:
                store.close()
                raise
            return store

    @classmethod
    def open(
        cls,
        path: str | Path,
        spec: StoreSpec,
        *,
        disk_cap: int | DiskCap | None = None,
        free_floor: int = 0,
        io: IOBackend | None = None,
    ) -> Self:
        """Open the rollout of ``spec`` at ``path``, removing what a crash left half-written.

        Arguments as :meth:`create`. Raises :class:`StoreError` where there is none,
        :class:`IdentityError` naming the first field that differs, :class:`ForeignDirectoryError`;
        nothing was touched then, not even a time stamp. :class:`StoreLockedError` while another
        process or store object writes to it.
        """
        io, path = io or SystemIO(), Path(path).resolve()
        with store_errors(f"open the store at {path}"):
            space = DiskSpace(io, path / spec.rollout, disk_cap, free_floor)
            if not layout.check_identity(io, path, spec):
                raise _no_rollout(path, spec.rollout)
            layout.make_streams(io, path, spec)
            return cls(io, path, spec, space, readonly=False)

    @classmethod
    def inspect(cls, path: str | Path, rollout: str, *, io: IOBackend | None = None) -> Self:
        """Open a rollout to look only, under the identity it has: no lock, nothing is changed.

        May be used beside a writer; then it shows a moment of it. Raises as :meth:`open`.
        """
        io, path = io or SystemIO(), Path(path).resolve()
        with store_errors(f"open the store at {path}"):
            spec = layout.load_rollout(io, path, rollout)
            if spec is None:
                raise _no_rollout(path, rollout)
            layout.check_identity(io, path, spec)
            space = DiskSpace(io, path / rollout, None, 0)
            return cls(io, path, spec, space, readonly=True)

    @staticmethod
    def exists(path: str | Path, rollout: str, *, io: IOBackend | None = None) -> bool:
        """Whether a rollout of this name is stored at ``path``, under whatever identity.

        Raises :class:`ForeignDirectoryError` or :class:`IdentityError` (format version).
        """
        with store_errors(f"look for a store at {path}"):
            path = Path(os.path.realpath(path))  # which leaves a loop of links to be found below
            return layout.load_rollout(io or SystemIO(), path, rollout) is not None

    @property
    def bytes_used(self) -> int:
        """Bytes of all files of the rollout: chunks, damaged ones included, and metadata."""
        return self._space.used

    @property
    def method(self) -> str:
        """The I/O method in use (before the first transfer: the one to be tried) and why."""
        return self._files.method

    @property
    def damaged(self) -> tuple[DamagedChunk, ...]:
        """The damaged chunks that the last :meth:`contents` found."""
        return self._damaged

    def write(self, chunk: int, image: Bytes, stream: int = 0) -> None:
        """Publish ``image`` as ``chunk``, in the place of an earlier one; durable on return.

        Raises :class:`StoreFullError` for the cap, the floor or the system's own limit,
        :class:`StoreError` for anything else that failed. The chunk on disk is then the old one (if
        only the last sync failed: the new one, of unknown durability), no temporary file is left,
        and nothing is counted that is not there.
        """
        self.require_writable()
        if not 0 <= chunk < MAX_CHUNKS:
            raise ConfigError(f"a chunk id must be between 0 and {MAX_CHUNKS - 1}, not {chunk}")
        target = self._path(chunk, stream)
        with store_errors(f"write chunk {chunk} to {target}"), self._claimed(stream, chunk):
            new = (stream, chunk) not in self._sizes
            beside = self._metadata.beside(len(self._sizes), new)
            with self._space.reserved(image.nbytes, beside=beside):
                self._metadata.cover(self.spec.streams[stream], chunk + 1)
                temp = documents.temporary(target)
                try:
                    self._files.write_new(temp, image)
                    self.require_writable()  # a write that hung may wake up after close()
                    self._io.rename(temp, target)
                except BaseException:
                    self._discard(temp)
                    raise
                with self._lock:
                    self._space.add(image.nbytes - self._sizes.get((stream, chunk), 0))
                    self._sizes[stream, chunk] = image.nbytes
                    self._promise()
            self._io.sync_folder(target.parent)

    def read(self, chunk: int, out: Bytes, stream: int = 0) -> None:
        """Fill ``out`` with the whole image of ``chunk``; its blocks are the caller's to verify.

        ``out`` is as long as :meth:`size` says. Raises :class:`DamagedBlockError` (``missing``,
        ``size``) where the file is not what was written, :class:`StoreError` where the system
        failed (trying again may succeed); what is in ``out`` is then undefined.
        """
        self._require_open()
        nbytes, path = self.size(chunk, stream), self._path(chunk, stream)
        if nbytes is None:
            raise DamagedBlockError("missing", f"chunk {chunk} is not in {path.parent}")
        if out.nbytes != nbytes:
            raise DamagedBlockError("size", f"{path} has {nbytes} bytes instead of {out.nbytes}")
        with store_errors(f"read chunk {chunk} from {path}"):
            self._files.read_into(path, out)

    def size(self, chunk: int, stream: int = 0) -> int | None:
        """Bytes of the file of ``chunk`` as written, or as found on opening; None where absent."""
        with self._lock:
            return self._sizes.get((stream, chunk))

    def delete(self, chunk: int, stream: int = 0) -> None:
        """Remove ``chunk``; does nothing where it is absent. After a power cut it may be back.

        Raises :class:`StoreError` where the system refused; the chunk is then still there.
        """
        self.require_writable()
        path = self._path(chunk, stream)
        with store_errors(f"delete chunk {chunk} at {path}"), self._claimed(stream, chunk):
            with suppress(FileNotFoundError):
                self._io.unlink(path)
            with self._lock:
                self._space.add(-self._sizes.pop((stream, chunk), 0))

    def contents(self) -> list[StoredChunk]:
        """All chunks that are whole, by stream and id, read from their tails: one small read each.

        The rest is in :attr:`damaged` afterwards: of the wrong size, kind, identity or chunk, with
        a bad record or index, or unreadable. Raises nothing for those. Not beside writes and
        deletes: a file that changes looks damaged.
        """
        self._require_open()
        whole, self._damaged = self._examiner.by_tail(self._keys())
        return whole

    def annex(self, record: ChunkRecord, stream: int = 0) -> bytes:
        """The annex of a chunk that :meth:`contents` found, in one small read. Raises
        :class:`DamagedBlockError` and :class:`StoreError`.
        """
        nbytes = self.size(record.chunk, stream) or 0
        with store_errors(f"read the annex of chunk {record.chunk}"):
            return self._examiner.annex(record, nbytes, stream) if record.annex_bytes else b""

    def verify(self) -> tuple[DamagedChunk, ...]:
        """The chunks of which any byte is not what was written: reads and checks everything. Not
        beside writes and deletes, as :meth:`contents`. Takes memory for one chunk.
        """
        self._require_open()
        return self._examiner.in_full(self._keys())

    def publish_metadata(
        self,
        arrays: Mapping[str, npt.NDArray[np.generic]],
        attributes: Mapping[str, JsonValue] | None = None,
    ) -> None:
        """Write small arrays beside the KV, and make each KV array end at its last chunk.

        ``arrays``: by name, numbers or bools, rows first (e.g. ``poses``, ``[chunks, frames, 4,
        4]``); each replaces the earlier one of its name, and only what changed is written.
        ``attributes`` replace those of the rollout's group, but for our own. Durable on return.
        Raises :class:`ConfigError` for a name or type that cannot be used, :class:`StoreFullError`
        and :class:`StoreError`; each file is then the old or the new one.
        """
        self.require_writable()
        with store_errors(f"write metadata to {self._root}"):
            beyond = self._metadata.growth(arrays) - self._space.promised
            if beyond > 0:
                self._space.cap.require(beyond)
            for name, values in arrays.items():
                self._metadata.write_array(name, values)
            with self._lock:  # so that no higher chunk is published meanwhile
                for stream, name in enumerate(self.spec.streams):
                    chunks = [c for s, c in (*self._sizes, *self._writing) if s == stream]
                    self._metadata.end_at(name, max(chunks, default=-1) + 1)
            self._metadata.write_group(attributes or {})
            self._count_metadata()

    def destroy(self) -> None:
        """Delete the rollout with all its files, and close.

        Raises :class:`StoreError` where something could not be removed or is not of a store; the
        rest is gone then.
        """
        self.require_writable()
        with store_errors(f"delete the rollout at {self._root}"):
            try:
                layout.remove_files(self._io, self._root)
            finally:
                self.close()
            for folder in (self._folders[0], self._root):
                self._io.remove_folder(folder)
            self._space.add(-self._space.used)
            self._io.sync_folder(self._root.parent)

    def close(self) -> None:
        """Give up the lock; idempotent, from any thread. Calls under way should have ended."""
        self._closed = True
        self._space.promise(0)
        if self._owned is not None:
            self._owned.release()

    def _recover(self) -> None:
        """Take stock of the folders: sweep temporary files, note sizes, complete the documents."""
        if self._owned is not None:
            layout.sweep(self._io, self._root)
        for stream, folder in enumerate(self._folders):
            sizes = shard_sizes(self._io, folder)
            self._sizes |= {(stream, chunk): nbytes for chunk, nbytes in sizes.items()}
            self._space.add(sum(sizes.values()))
            if self._owned is not None:
                self._metadata.cover(self.spec.streams[stream], max(sizes, default=0) + 1)
        self._count_metadata()
        with suppress(OSError):
            session = self._root.parent / documents.DOCUMENT
            self._space.cap.set(session, self._io.stat(session).st_size)
        for folder in layout.rollout_folders(self._io, self._root.parent):
            if not self._space.cap.knows(folder):
                if self._owned is not None:
                    layout.tidy(self._io, folder)
                self._space.cap.set(folder, sum(n for _, n in rollout_files(self._io, folder)))

    def _count_metadata(self) -> None:
        before, self._metadata_bytes = self._metadata_bytes, self._metadata.nbytes()
        self._space.add(self._metadata_bytes - before)
        self._promise()

    def _promise(self) -> None:
        """Keep room under the cap for the metadata of the chunks there are."""
        if self._owned is not None:
            bound = self._metadata.bound(len(self._sizes))
            self._space.promise(max(0, bound - self._metadata_bytes))

    def _path(self, chunk: int, stream: int) -> Path:
        return self._folders[stream] / shard_name(chunk)

    def _keys(self) -> list[_Key]:
        with self._lock:
            return sorted(self._sizes)

    @contextmanager
    def _claimed(self, stream: int, chunk: int) -> Iterator[None]:
        """Keep a second writer of the same chunk out: which of two came last must be known."""
        with self._lock:
            if (stream, chunk) in self._writing:
                raise StoreError(errno.EBUSY, f"chunk {chunk} is being written; wait for that")
            self._writing.add((stream, chunk))
        try:
            yield
        finally:
            with self._lock:
                self._writing.discard((stream, chunk))

    def _discard(self, temp: Path) -> None:
        """Remove a temporary file; where that fails, count it until it is swept on opening."""
        try:
            with suppress(FileNotFoundError):
                self._io.unlink(temp)
        except OSError:
            with suppress(OSError):
                self._space.add(self._io.stat(temp).st_size)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the store of {self._root} was closed; open it again")

    def require_writable(self) -> None:
        """Raise :class:`ClosedError` or :class:`StoreError` where nothing may be written here."""
        self._require_open()
        if self._owned is None or not self._owned.held:
            raise ClosedError(
                f"the store of {self._root} was opened to look only, or in the process that forked "
                "this one; open it here to change it"
            )
        self._owned.check_place()


def _refuse_existing(io: IOBackend, path: Path, spec: StoreSpec) -> None:
    if layout.check_identity(io, path, spec):
        raise StoreError(
            errno.EEXIST,
            f"rollout {spec.rollout!r} exists in {path}; open it or choose another name",
        )


def _no_rollout(path: Path, rollout: str) -> StoreError:
    return StoreError(errno.ENOENT, f"there is no rollout {rollout!r} in {path}; create it")

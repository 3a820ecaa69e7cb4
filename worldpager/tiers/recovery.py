"""What is on disk and what of it is whole: files examined one by one, by tail or in full."""

from __future__ import annotations

import errno
import re
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from worldpager.errors import DamagedBlockError
from worldpager.quant.shard import (
    ChunkRecord,
    annex_pages,
    read_annex,
    read_tail,
    tail_bytes,
    verify_image,
)
from worldpager.tiers.budget import HEADROOM, memory_limit
from worldpager.tiers.directio import DirectIO, aligned_bytes
from worldpager.tiers.extents import PAGE
from worldpager.tiers.io_backend import Bytes, IOBackend
from worldpager.tiers.spec import StoreSpec

MAX_CHUNKS = 2**32
"""Chunk ids are below this, as in block headers."""

_SHARD = re.compile(r"(0|[1-9][0-9]{0,9})\.0\.0\.0\.0\.0", re.ASCII)


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk that is on disk whole: its size, record and index were checked, its blocks not."""

    chunk: int
    nbytes: int
    record: ChunkRecord
    stream: int = 0


@dataclass(frozen=True, slots=True)
class DamagedChunk:
    """A chunk's file that does not hold the chunk. It stays until it is rewritten or deleted."""

    chunk: int
    nbytes: int
    """Bytes that the file takes; 0 where it is no regular file."""
    reason: str
    """A reason of :class:`DamagedBlockError`, or ``unreadable`` where the system failed."""
    message: str
    stream: int = 0


def shard_name(chunk: int) -> str:
    """Name of a chunk's file in its array's folder: its key in the Zarr array."""
    return f"{chunk}.0.0.0.0.0"


def chunk_of(name: str) -> int | None:
    """The chunk whose file has this name; None for the name of anything else."""
    match = _SHARD.fullmatch(name)
    return int(match[1]) if match and int(match[1]) < MAX_CHUNKS else None


def shard_sizes(io: IOBackend, folder: Path) -> dict[int, int]:
    """Bytes of the file of each chunk in an array's folder; 0 for what is no regular file."""
    sizes = {}
    for name in io.list_folder(folder):
        if (chunk := chunk_of(name)) is not None:
            with suppress(FileNotFoundError):  # deleted by the writer while we look
                status = io.stat(folder / name)
                sizes[chunk] = status.st_size if stat.S_ISREG(status.st_mode) else 0
    return sizes


class Examiner:
    """Reads chunks' files and tells whole from damaged ones. Threads take turns."""

    def __init__(self, files: DirectIO, spec: StoreSpec, folders: list[Path]) -> None:
        self._files, self._spec, self._folders = files, spec, folders
        self._identities = [spec.identity(stream) for stream in range(len(folders))]
        self._lock = threading.Lock()  # guards the buffer
        self._buffer = aligned_bytes(0)

    def by_tail(
        self, keys: list[tuple[int, int]]
    ) -> tuple[list[StoredChunk], tuple[DamagedChunk, ...]]:
        """Whole and damaged ones of ``keys`` (stream, chunk), judged by record and index."""
        return self._examine(keys, self._read_tail)

    def in_full(self, keys: list[tuple[int, int]]) -> tuple[DamagedChunk, ...]:
        """Damaged ones of ``keys`` (stream, chunk), with every byte that matters checked."""
        try:
            return self._examine(keys, self._read_image)[1]
        finally:
            with self._lock:
                self._buffer = self._buffer[:0]  # as large as a chunk: not to be kept

    def annex(self, record: ChunkRecord, nbytes: int, stream: int) -> bytes:
        """The annex of a whole chunk of ``nbytes``, as read by :meth:`by_tail`. Raises
        :class:`DamagedBlockError` where the file has changed since, and :class:`OSError`.
        """
        length = annex_pages(record.layers, record.annex_bytes) + tail_bytes(record.layers)
        path = self._folders[stream] / shard_name(record.chunk)
        with self._lock:
            end = self._room(length)
            self._files.read_into(path, end, nbytes - length)
            return read_annex(end, record)

    def _examine(
        self, keys: list[tuple[int, int]], read: Callable[[Path, int], ChunkRecord]
    ) -> tuple[list[StoredChunk], tuple[DamagedChunk, ...]]:
        whole, damaged = [], []
        for stream, chunk in keys:
            path, nbytes = self._folders[stream] / shard_name(chunk), 0
            try:
                nbytes = self._size(path)
                self._check_size(path, nbytes)
                with self._lock:
                    record = read(path, nbytes)
                self._check_is(record, stream, chunk)
            except DamagedBlockError as error:
                damaged.append(DamagedChunk(chunk, nbytes, error.reason, str(error), stream))
            except OSError as error:
                damaged.append(DamagedChunk(chunk, nbytes, "unreadable", str(error), stream))
            else:
                whole.append(StoredChunk(chunk, nbytes, record, stream))
        return whole, tuple(damaged)

    def _size(self, path: Path) -> int:
        """Size of a chunk's file, which must be a regular one."""
        try:
            status = self._files.io.stat(path)
        except FileNotFoundError:
            raise DamagedBlockError("missing", f"{path} is not there") from None
        if not stat.S_ISREG(status.st_mode):
            raise DamagedBlockError("missing", f"{path} is not a regular file; remove it")
        return status.st_size

    def _check_size(self, path: Path, nbytes: int) -> None:
        """Refuse sizes that no chunk of this spec has, before anything is read or allocated."""
        least, most = tail_bytes(self._spec.layers), self._spec.most_bytes
        if nbytes % PAGE or not least < nbytes <= most:
            raise DamagedBlockError(
                "size",
                f"{path} has {nbytes} bytes; a chunk has whole pages of {PAGE} bytes, more than "
                f"{least} and at most {most}",
            )

    def _read_tail(self, path: Path, nbytes: int) -> ChunkRecord:
        tail = self._room(tail_bytes(self._spec.layers))
        self._files.read_into(path, tail, nbytes - tail.nbytes)
        return read_tail(tail, nbytes, self._spec.layers)[0]

    def _read_image(self, path: Path, nbytes: int) -> ChunkRecord:
        self._read_tail(path, nbytes)  # so that nothing is allocated for a file that is no chunk's
        image = self._room(nbytes)
        self._files.read_into(path, image)
        return verify_image(image, self._spec.layers)[0]

    def _room(self, nbytes: int) -> Bytes:
        if self._buffer.nbytes < nbytes:
            if nbytes > HEADROOM and nbytes > (available := memory_limit().available):
                raise OSError(
                    errno.ENOMEM, f"checking takes {nbytes} bytes of memory; {available} are left"
                )
            self._buffer = aligned_bytes(nbytes)
        return self._buffer[:nbytes]

    def _check_is(self, record: ChunkRecord, stream: int, chunk: int) -> None:
        if record.identity != self._identities[stream]:
            raise DamagedBlockError("identity", "the file is of another rollout or stream")
        if record.chunk != chunk:
            raise DamagedBlockError(
                "identity", f"the file is of chunk {record.chunk}, under the name of {chunk}"
            )

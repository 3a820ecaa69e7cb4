"""Keeping a rollout's Zarr documents and small arrays current, writing only what changed."""

from __future__ import annotations

import stat
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import JsonValue
from pydantic_core import from_json

from worldpager.errors import ConfigError
from worldpager.tiers import documents
from worldpager.tiers.io_backend import IOBackend
from worldpager.tiers.recovery import MAX_CHUNKS, chunk_of
from worldpager.tiers.spec import StoreSpec, check_name

_FIRST_ROOM = 1024  # chunk ids that a new array covers; doubled when one lies beyond


ROW_BYTES = 120
"""What a chunk takes in the arrays that a session publishes: three numbers, a place of twelve."""
_DOCUMENTS = 8192  # the documents of small arrays and of KV arrays, and the lock: generous


class Metadata:
    """The documents and small arrays in a rollout's folder. Thread-safe; blocks on the disk.

    All methods raise :class:`OSError` as the system does; each file is then the old or the new one.
    """

    def __init__(self, io: IOBackend, root: Path, spec: StoreSpec) -> None:
        self._io, self._root, self._spec = io, root, spec
        self._base = _DOCUMENTS + len(documents.group_bytes(spec.document(), {}))
        self._base += 2 * documents.STATUS_BYTES  # a new one lies beside the old one for a moment
        self._base += len(spec.streams) * len(documents.kv_array_bytes(spec, MAX_CHUNKS))
        self._lock = threading.Lock()
        self._rooms: dict[str, int] = {}  # by stream: chunk ids that its array's document covers
        self._hashes: dict[Path, int] = {}  # of the files known to be current

    def cover(self, stream: str, chunks: int) -> None:
        """Make a KV array cover ids below ``chunks`` (and generously more) unless it does already.

        To be called before one of them is published, so that no chunk is ever outside its array. A
        document that is missing or not as we write it is written anew: it follows from the spec.
        """
        with self._lock:
            if stream not in self._rooms:
                self._rooms[stream] = self._stored_room(stream)
            if chunks > self._rooms[stream]:
                self._write_room(stream, max(_FIRST_ROOM, 1 << (chunks - 1).bit_length()))

    def end_at(self, stream: str, chunks: int) -> None:
        """Make a KV array cover exactly the ids below ``chunks``."""
        with self._lock:
            self._write_room(stream, chunks)

    def write_group(self, attributes: Mapping[str, JsonValue]) -> None:
        """Write the rollout's own document: its identity, beside ``attributes``."""
        content = documents.group_bytes(self._spec.document(), attributes)
        with self._lock:
            self._write(self._root / documents.DOCUMENT, content)

    def write_array(self, name: str, values: npt.NDArray[np.generic]) -> None:
        """Write a small array, rows first, in the place of an earlier one of this name.

        Raises :class:`ConfigError` for a name or data type that cannot be used.
        """
        if check_name("array", name) in self._spec.streams:
            raise ConfigError(f"array name {name!r} is that of a stream; choose another")
        folder = self._root / name
        files = documents.small_array_files(values)
        with self._lock:
            if not documents.real_folder(self._io, folder):
                self._io.make_folder(folder)
                self._io.sync_folder(self._root)
            for file, content in files.items():
                self._write(folder / file, content)
            present = filter(documents.is_data, self._io.list_folder(folder))
            for file in set(present).difference(files):  # rows of a longer earlier version
                self._io.unlink(folder / file)
                self._hashes.pop(folder / file, None)

    def bound(self, chunks: int) -> int:
        """Bytes that documents and a session's arrays take at most for so many chunks."""
        return self._base + ROW_BYTES * documents.ROWS * -(-chunks // documents.ROWS)

    def beside(self, chunks: int, new: bool) -> int:
        """Bytes to have room for with a chunk beside ``chunks`` others: its own metadata if it is
        ``new``, and that of one more rollout, so that a full directory still takes a new one.
        """
        return self.bound(chunks + new) - self.bound(chunks) + self.bound(0)

    def growth(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> int:
        """Bytes that writing ``arrays`` adds to what is there. Raises as :meth:`write_array`."""
        total = 0
        for name, values in arrays.items():
            for file, content in documents.small_array_files(values).items():
                total += len(content)
                with suppress(FileNotFoundError, NotADirectoryError):
                    total -= self._io.stat(self._root / name / file).st_size
        return total

    def nbytes(self) -> int:
        """Bytes of all files in the rollout's folders but chunks and temporary ones."""
        return sum(
            size
            for path, size in rollout_files(self._io, self._root)
            if chunk_of(path.name) is None and not documents.is_temporary(path.name)
        )

    def _write_room(self, stream: str, chunks: int) -> None:
        path = self._root / stream / documents.DOCUMENT
        self._write(path, documents.kv_array_bytes(self._spec, chunks))
        self._rooms[stream] = chunks

    def _stored_room(self, stream: str) -> int:
        """Ids that the array's document on disk covers; 0 where it is not as we would write it."""
        path = self._root / stream / documents.DOCUMENT
        content = documents.read_document(self._io, path)
        with suppress(ValueError, LookupError, TypeError):
            room = from_json(content or b"")["shape"][0]
            if type(room) is int and 0 <= room <= MAX_CHUNKS:
                expected = documents.kv_array_bytes(self._spec, room)
                if content == expected:
                    self._hashes[path] = xxhash.xxh3_64_intdigest(expected)
                    return room
        return 0

    def _write(self, path: Path, content: bytes) -> None:
        digest = xxhash.xxh3_64_intdigest(content)
        if self._hashes.get(path) != digest:
            self._hashes.pop(path, None)
            documents.write_document(self._io, path, content)
            self._hashes[path] = digest


def rollout_files(io: IOBackend, root: Path) -> list[tuple[Path, int]]:
    """Regular files of a rollout, in its folder and those inside it, with their sizes in bytes."""
    found: list[tuple[Path, int]] = []
    folders = [root]
    while folders:
        folder = folders.pop()
        for name in io.list_folder(folder):
            with suppress(FileNotFoundError):
                status = io.stat(folder / name)
                if stat.S_ISREG(status.st_mode):
                    found.append((folder / name, status.st_size))
                elif stat.S_ISDIR(status.st_mode) and folder == root:
                    folders.append(folder / name)
    return found

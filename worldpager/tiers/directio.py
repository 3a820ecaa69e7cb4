"""Whole files to and from the pool: direct I/O where the file system takes it, buffered elsewhere.

One call moves a whole chunk. With direct I/O and huge pages a single thread then saturates the
disk, leaves no page cache behind (which a container is charged for) and holds up when the
interpreter lock is contended. File systems refuse direct I/O in two ways, at open or at the first
transfer, both with ``EINVAL``; either is met by buffered I/O, synced and dropped from the cache
file by file, so that at most the chunks under way are cached.
"""

from __future__ import annotations

import errno
import mmap
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from worldpager.errors import ConfigError, DamagedBlockError
from worldpager.tiers.extents import PAGE, page_ceil
from worldpager.tiers.io_backend import Bytes, IOBackend, SystemIO


def aligned_bytes(nbytes: int) -> Bytes:
    """A zeroed, page-aligned uint8 array outside the pool, for what is read beside it."""
    return np.frombuffer(mmap.mmap(-1, max(page_ceil(nbytes), PAGE)), dtype=np.uint8)[:nbytes]


_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)
_NOT_A_FILE = (errno.ELOOP, errno.ENXIO)  # a symbolic link; a socket


@dataclass(slots=True)
class _File:
    fd: int
    direct: bool


class DirectIO:
    """Reads and writes whole files. Thread-safe; a call blocks its thread until the disk is done.

    Arrays must be page-aligned, contiguous and whole pages long, as pool extents are; anything else
    raises :class:`ConfigError`, for it would be slow everywhere and fail on some disks only.
    """

    def __init__(self, io: IOBackend | None = None) -> None:
        self.io: IOBackend = io or SystemIO()
        self._refused = ""  # why direct I/O is not used; only ever set, so no lock is needed

    @property
    def method(self) -> str:
        """What is in use, and why if it is not the preferred one."""
        return f"buffered I/O: {self._refused}" if self._refused else "direct I/O"

    def write_new(self, path: Path, data: Bytes) -> None:
        """Make the file ``path`` (mode 0600) of exactly ``data``; they are durable on return, its
        name is not.

        Raises :class:`OSError` as the system does; a part of the file may then exist, and is the
        caller's to remove.
        """
        _check_aligned(data)
        with self._closing(self._open_new(path)) as file:
            done = 0
            while done < data.nbytes:
                moved = self._transfer(self.io.pwrite, file, data[done:], done)
                if moved == 0:
                    raise OSError(errno.ENOSPC, "the file system took no more bytes")
                done += moved
            self.io.sync(file.fd)

    def read_into(self, path: Path, out: Bytes, offset: int = 0) -> None:
        """Fill ``out`` with the regular file ``path`` from the page-aligned ``offset`` to its end.

        The length is checked before anything is read. Raises :class:`DamagedBlockError`
        (``missing``, ``size``) for an absent, irregular, shorter or longer file, :class:`OSError`
        where reading fails; what is in ``out`` is then undefined.
        """
        _check_aligned(out)
        with self._closing(self._open_read(path)) as file:
            expected, size = offset + out.nbytes, self.io.stat(file.fd).st_size
            if size != expected:
                raise DamagedBlockError("size", f"{path} has {size} bytes instead of {expected}")
            done = 0
            while done < out.nbytes:
                moved = self._transfer(self.io.pread, file, out[done:], offset + done)
                if moved == 0:
                    raise DamagedBlockError(
                        "size", f"{path} was cut to {offset + done} bytes in use"
                    )
                done += moved

    @contextmanager
    def _closing(self, file: _File) -> Iterator[_File]:
        try:
            yield file
            if not file.direct:
                self.io.drop_cache(file.fd)
        finally:
            self.io.close(file.fd)

    def _open_new(self, path: Path) -> _File:
        if not self._refused:
            try:
                return _File(self.io.open_new(path, direct=True), direct=True)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                with suppress(FileNotFoundError):
                    self.io.unlink(path)  # some kernels make the file before they refuse the flag
                self._refuse("open")
        return _File(self.io.open_new(path, direct=False), direct=False)

    def _open_read(self, path: Path) -> _File:
        direct = not self._refused
        try:
            try:
                file = _File(self.io.open_read(path, direct=direct), direct)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                file = _File(self.io.open_read(path, direct=False), direct=False)
        except OSError as error:
            if error.errno in _NOT_THERE:
                raise DamagedBlockError("missing", f"{path} is not there") from error
            if error.errno in _NOT_A_FILE:
                raise _not_regular(path) from error
            raise
        if not stat.S_ISREG(self.io.stat(file.fd).st_mode):
            self.io.close(file.fd)
            raise _not_regular(path)
        if direct and not file.direct:
            self._refuse("open")
        return file

    def _refuse(self, moment: str) -> None:
        self._refused = f"the file system refused O_DIRECT at {moment} (EINVAL)"

    def _transfer(
        self, call: Callable[[int, Bytes, int], int], file: _File, part: Bytes, offset: int
    ) -> int:
        """One system call; the bytes moved that may be built upon, 0 where none are left.

        A direct transfer that stops inside a page is repeated from that page's start, as the next
        must be aligned; one that stops inside its first page goes on buffered. A refusal counts
        as the file system's only where buffered I/O then moves what direct I/O would not: close to
        a limit on the file's size the system says the same of one transfer.
        """
        refused = False
        while True:
            try:
                moved = call(file.fd, part, offset)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno != errno.EINVAL or not file.direct:
                    raise
                refused = True
                self._make_buffered(file)
                continue
            if refused and moved == part.nbytes:
                self._refuse("the first transfer")
            if not file.direct or moved % PAGE == 0:
                return moved
            if moved > PAGE:
                return moved // PAGE * PAGE
            self._make_buffered(file)
            return moved

    def _make_buffered(self, file: _File) -> None:
        self.io.set_buffered(file.fd)
        file.direct = False


def _check_aligned(array: Bytes) -> None:
    if array.ctypes.data % PAGE or array.nbytes % PAGE or not array.flags.c_contiguous:
        raise ConfigError(
            f"direct I/O needs page-aligned memory in whole pages of {PAGE} bytes, not "
            f"{array.nbytes} bytes at address {array.ctypes.data:#x}"
        )


def _not_regular(path: Path) -> DamagedBlockError:
    return DamagedBlockError("missing", f"{path} is not a regular file; remove it")

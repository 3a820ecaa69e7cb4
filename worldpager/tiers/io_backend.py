"""The seam to the operating system: the handful of calls that the disk tier makes.

Everything clever (whole files, fall backs, short transfers, durable publishing) stands above this
protocol, in :mod:`worldpager.tiers.directio` and :mod:`worldpager.tiers.store`. A fault injector
implements it by deriving from :class:`SystemIO` and overriding the call that is to fail, wait or
do half of its work; whatever it does, the layers above must stay truthful.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_ALWAYS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # non-blocking: opening a FIFO must not hang


class IOBackend(Protocol):
    """System calls on files and folders. Thread-safe, blocking, failing with :class:`OSError` only.

    Arrays are contiguous uint8 and are used in place for the duration of the call, never kept.
    Transfers may be short, as ``pread`` and ``pwrite`` may; the caller goes on.
    """

    def open_read(self, path: Path, *, direct: bool) -> int:
        """Descriptor for reading. Refuses a symbolic link (``ELOOP``); the caller must look with
        :meth:`stat` whether it is a regular file.
        """

    def open_new(self, path: Path, *, direct: bool) -> int:
        """Descriptor for writing a file made by this call, mode 0600 from its first moment."""

    def set_buffered(self, fd: int) -> None:
        """Take direct I/O off an open descriptor."""

    def pread(self, fd: int, out: Bytes, offset: int) -> int:
        """Read into ``out`` from ``offset``; the number of bytes read, 0 at the end of the file."""

    def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
        """Write ``data`` at ``offset``; the number of bytes written."""

    def sync(self, fd: int) -> None:
        """Return when the file's bytes and size are durable."""

    def drop_cache(self, fd: int) -> None:
        """Ask the kernel to forget the file's cached pages (they count against a container)."""

    def close(self, fd: int) -> None:
        """Close the descriptor."""

    def stat(self, target: int | Path) -> os.stat_result:
        """Status of a descriptor, or of a path without following a symbolic link."""

    def rename(self, source: Path, target: Path) -> None:
        """Put ``source`` in the place of ``target`` in one step."""

    def unlink(self, path: Path) -> None:
        """Remove a file."""

    def make_folder(self, path: Path) -> None:
        """Make a folder, mode 0700 from its first moment; its parent exists."""

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""

    def list_folder(self, path: Path) -> list[str]:
        """Names in a folder, in no order."""

    def sync_folder(self, path: Path) -> None:
        """Return when the folder's entries are durable."""

    def free_bytes(self, path: Path) -> int:
        """Bytes that an unprivileged process can still write to the file system of ``path``."""


class SystemIO:
    """:class:`IOBackend` by the system calls themselves. Python repeats those that a signal
    interrupts, and releases the interpreter lock during each.
    """

    def open_read(self, path: Path, *, direct: bool) -> int:
        return os.open(path, os.O_RDONLY | _ALWAYS | (os.O_DIRECT if direct else 0))

    def open_new(self, path: Path, *, direct: bool) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _ALWAYS
        return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)

    def set_buffered(self, fd: int) -> None:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def pread(self, fd: int, out: Bytes, offset: int) -> int:
        return os.preadv(fd, [out.data], offset)

    def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
        return os.pwritev(fd, [data.data], offset)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def drop_cache(self, fd: int) -> None:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, fd: int) -> None:
        os.close(fd)

    def stat(self, target: int | Path) -> os.stat_result:
        return os.fstat(target) if isinstance(target, int) else os.lstat(target)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path, 0o700)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)

    def list_folder(self, path: Path) -> list[str]:
        return os.listdir(path)

    def sync_folder(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # file systems that cannot sync a folder say so thus
                raise
        finally:
            os.close(fd)

    def free_bytes(self, path: Path) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

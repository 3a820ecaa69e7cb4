"""Backends that fail on demand; they show how little one takes: override a call and raise."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from worldpager.tiers.io_backend import Bytes, SystemIO


class FaultyIO(SystemIO):
    """Before each call, asks ``plan(name, nth)`` for an error number; 0 lets the call through.

    ``share``: the part of a transfer that is done in one call, in whole units of ``unit`` bytes.
    """

    def __init__(
        self,
        plan: Callable[[str, int], int] = lambda name, nth: 0,
        *,
        share: float = 1.0,
        unit: int = 1,
    ) -> None:
        self.plan, self.share, self.unit = plan, share, unit
        self.calls: Counter[str] = Counter()

    def _meet(self, name: str) -> None:
        self.calls[name] += 1
        if number := self.plan(name, self.calls[name]):
            raise OSError(number, os.strerror(number))

    def _part(self, data: Bytes) -> Bytes:
        return data[: max(1, int(len(data) * self.share) // self.unit * self.unit)]

    def open_read(self, path: Path, *, direct: bool) -> int:
        self._meet("open_read_direct" if direct else "open_read")
        return super().open_read(path, direct=direct)

    def open_new(self, path: Path, *, direct: bool) -> int:
        self._meet("open_new_direct" if direct else "open_new")
        return super().open_new(path, direct=direct)

    def pread(self, fd: int, out: Bytes, offset: int) -> int:
        self._meet("pread")
        return super().pread(fd, self._part(out), offset)

    def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
        self._meet("pwrite")
        return super().pwrite(fd, self._part(data), offset)

    def sync(self, fd: int) -> None:
        self._meet("sync")
        super().sync(fd)

    def rename(self, source: Path, target: Path) -> None:
        self._meet("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._meet("unlink")
        super().unlink(path)

    def sync_folder(self, path: Path) -> None:
        self._meet("sync_folder")
        super().sync_folder(path)

    def list_folder(self, path: Path) -> list[str]:
        self._meet("list_folder")
        return super().list_folder(path)


class NoDirectTransferIO(SystemIO):
    """A file system that takes ``O_DIRECT`` at open and refuses it at the first transfer."""

    def __init__(self) -> None:
        self._direct: set[int] = set()

    def open_read(self, path: Path, *, direct: bool) -> int:
        return self._note(super().open_read(path, direct=direct), direct)

    def open_new(self, path: Path, *, direct: bool) -> int:
        return self._note(super().open_new(path, direct=direct), direct)

    def set_buffered(self, fd: int) -> None:
        super().set_buffered(fd)
        self._direct.discard(fd)

    def close(self, fd: int) -> None:
        self._direct.discard(fd)
        super().close(fd)

    def pread(self, fd: int, out: Bytes, offset: int) -> int:
        self._refuse(fd)
        return super().pread(fd, out, offset)

    def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
        self._refuse(fd)
        return super().pwrite(fd, data, offset)

    def _note(self, fd: int, direct: bool) -> int:
        if direct:
            self._direct.add(fd)
        return fd

    def _refuse(self, fd: int) -> None:
        if fd in self._direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def fail(name: str, number: int, *, nth: int | None = None) -> Callable[[str, int], int]:
    """A plan: the call ``name`` fails with ``number``, always or the ``nth`` time only."""
    return lambda called, count: number if called == name and nth in (None, count) else 0

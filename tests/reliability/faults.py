"""Backends that do what bad disks do. They wait for events, never for time."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from worldpager.tiers.io_backend import Bytes, SystemIO


class YieldingIO(SystemIO):
    """Gives the processor away before each call, a random number of times."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def _yield(self) -> None:
        for _ in range(self._random.choice([0, 0, 0, 1, 3])):
            os.sched_yield()

    def pread(self, fd: int, out: Bytes, offset: int) -> int:
        self._yield()
        return super().pread(fd, out, offset)

    def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
        self._yield()
        return super().pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._yield()  # and no sync: what is in the page cache is as good here

    def sync_folder(self, path: Path) -> None:
        self._yield()

    def rename(self, source: Path, target: Path) -> None:
        self._yield()
        super().rename(source, target)


class FailingIO(SystemIO):
    """Asks ``plan(call, nth)`` before each call for an error number; 0 lets it through.

    ``share`` of each transfer is done per call, in units of ``unit`` bytes.
    """

    def __init__(
        self,
        plan: Callable[[str, int], int] = lambda call, nth: 0,
        *,
        share: float = 1.0,
        unit: int = 1,
    ) -> None:
        self.plan, self.share, self.unit = plan, share, unit
        self.calls: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def _meet(self, call: str) -> None:
        self.calls[call] += 1
        if number := self.plan(call, self.calls[call]):
            self.failed[call] += 1
            raise OSError(number, os.strerror(number))

    def _part(self, data: Bytes) -> Bytes:
        return data[: max(self.unit, int(len(data) * self.share) // self.unit * self.unit)]

    def open_read(self, path: Path, *, direct: bool) -> int:
        self._meet("open_read")
        return super().open_read(path, direct=direct)

    def open_new(self, path: Path, *, direct: bool) -> int:
        self._meet("open_new")
        return super().open_new(path, direct=direct)

    def pread(self, fd: int, out: Bytes, offset: int) -> int:
        self._meet("pread")
        return super().pread(fd, self._part(out), offset)

    def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
        self._meet("pwrite")
        return super().pwrite(fd, self._part(data), offset)

    def sync(self, fd: int) -> None:
        self._meet("sync")

    def rename(self, source: Path, target: Path) -> None:
        self._meet("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._meet("unlink")
        super().unlink(path)

    def sync_folder(self, path: Path) -> None:
        self._meet("sync_folder")

    def free_bytes(self, path: Path) -> int:
        self._meet("free_bytes")
        return super().free_bytes(path)


class HangingIO(SystemIO):
    """``hang(call)`` makes the calls of that name wait until ``release()``.

    ``reached`` is set once one waits. ``times``: how many hang, the others pass.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hanging: dict[str, int] = {}
        self._go_on = threading.Event()
        self.reached = threading.Event()

    def hang(self, call: str, times: int = 1 << 30) -> None:
        with self._lock:
            self._go_on.clear()
            self.reached.clear()
            self._hanging[call] = times

    def release(self) -> None:
        with self._lock:
            self._hanging.clear()
            self._go_on.set()

    @property
    def released(self) -> bool:
        """Whether nothing hangs any more."""
        return self._go_on.is_set()

    def _meet(self, call: str) -> None:
        with self._lock:
            left = self._hanging.get(call, 0)
            if left == 0:
                return
            self._hanging[call] = left - 1
            go_on = self._go_on
        self.reached.set()
        assert go_on.wait(120), "the test never released its hung disk"

    def pread(self, fd: int, out: Bytes, offset: int) -> int:
        self._meet("pread")
        return super().pread(fd, out, offset)

    def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
        self._meet("pwrite")
        return super().pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._meet("sync")

    def sync_folder(self, path: Path) -> None:
        self._meet("sync_folder")


class SlowIO(SystemIO):
    """Reads and writes take ``read`` and ``write`` seconds longer; changing that to 0 lets those
    under way go at once.
    """

    def __init__(self, *, read: float = 0.0, write: float = 0.0) -> None:
        self._changed = threading.Condition()
        self._delays = {"pread": read, "pwrite": write}

    def set(self, *, read: float = 0.0, write: float = 0.0) -> None:
        with self._changed:
            self._delays = {"pread": read, "pwrite": write}
            self._changed.notify_all()

    def _meet(self, call: str) -> None:
        with self._changed:
            delay = self._delays[call]
            self._changed.wait_for(lambda: self._delays[call] != delay, timeout=delay or 0.0)

    def pread(self, fd: int, out: Bytes, offset: int) -> int:
        self._meet("pread")
        return super().pread(fd, out, offset)

    def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
        self._meet("pwrite")
        return super().pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        pass


def fail(
    call: str, number: int = errno.EIO, *, nth: int | None = None
) -> Callable[[str, int], int]:
    """A plan: ``call`` fails with ``number``, always or the ``nth`` time only."""
    return lambda called, count: number if called == call and nth in (None, count) else 0

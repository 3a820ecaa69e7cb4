"""How much of the disk stores have, may have, and leave to others."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worldpager.errors import ConfigError, StoreFullError
from worldpager.tiers.io_backend import IOBackend
from worldpager.units import format_size

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where there is no room: disk, quota, or limit on a file's size."""


class DiskCap:
    """Bytes that all rollouts of a session may take together: share one among their stores.

    Counts what is on disk, by rollout folder, whether its store is open or not, and what is being
    written: a temporary file lies beside the file it will replace, so both count until it has.
    Thread-safe.
    """

    def __init__(self, limit: int | None) -> None:
        """Raises :class:`ConfigError` unless ``limit`` is positive, or None for no cap."""
        if limit is not None and limit <= 0:
            raise ConfigError(f"a disk cap must be positive, not {limit}; omit it for no cap")
        self.limit = limit
        self._lock = threading.Lock()
        self._taken: dict[Path, int] = {}
        self._pending = 0

    @property
    def taken(self) -> int:
        """Bytes on disk, in all rollouts counted."""
        with self._lock:
            return sum(self._taken.values())

    def knows(self, folder: Path) -> bool:
        """Whether the rollout in ``folder`` is counted."""
        with self._lock:
            return folder in self._taken

    def set(self, folder: Path, nbytes: int) -> None:
        """Count ``nbytes`` for a rollout, in the place of what was counted before."""
        with self._lock:
            self._taken[folder] = nbytes

    @contextmanager
    def reserved(self, nbytes: int, free: int, free_floor: int) -> Iterator[None]:
        """Hold ``nbytes`` for a write under way on a disk with ``free`` bytes left.

        Raises :class:`StoreFullError` where the cap, or the bytes to leave free, would be broken.
        """
        with self._lock:
            total = sum(self._taken.values()) + self._pending + nbytes
            if self.limit is not None and total > self.limit:
                raise StoreFullError(
                    errno.ENOSPC,
                    f"the disk cap of {format_size(self.limit)} is reached: {format_size(total)} "
                    "would be needed; delete chunks or raise the cap",
                )
            if free - self._pending - nbytes < free_floor:
                raise StoreFullError(
                    errno.ENOSPC,
                    f"the disk has {format_size(free)} free, too little for "
                    f"{format_size(self._pending + nbytes)} more above the floor of "
                    f"{format_size(free_floor)}; free some or lower the floor",
                )
            self._pending += nbytes
        try:
            yield
        finally:
            with self._lock:
                self._pending -= nbytes


class DiskSpace:
    """One store's share of a cap, and the floor of free space that it keeps. Thread-safe."""

    def __init__(
        self, io: IOBackend, folder: Path, cap: int | DiskCap | None, free_floor: int
    ) -> None:
        """Raises :class:`ConfigError` where cap or floor cannot be."""
        if free_floor < 0:
            raise ConfigError(f"a free-space floor must be positive or 0, not {free_floor}")
        self._io, self._folder, self._free_floor = io, folder, free_floor
        self._cap = cap if isinstance(cap, DiskCap) else DiskCap(cap)
        self._lock = threading.Lock()
        self._used = 0

    @property
    def cap(self) -> DiskCap:
        """The cap that the store's bytes count against."""
        return self._cap

    @property
    def used(self) -> int:
        """Bytes of the store's files, those under way not counted."""
        return self._used

    def add(self, nbytes: int) -> None:
        """Count ``nbytes`` more (or, negative, fewer) in the store's files."""
        with self._lock:
            self._used += nbytes
            self._cap.set(self._folder, self._used)

    @contextmanager
    def reserved(self, nbytes: int) -> Iterator[None]:
        """Hold ``nbytes`` for a write under way.

        Raises as :meth:`DiskCap.reserved`, :class:`OSError` where the disk cannot be asked.
        """
        free = self._io.free_bytes(self._folder)
        with self._cap.reserved(nbytes, free, self._free_floor):
            yield

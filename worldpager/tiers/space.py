"""How much of the disk stores have, may have, and leave to others."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worldpager.errors import ConfigError, StoreError, StoreFullError
from worldpager.tiers.io_backend import IOBackend
from worldpager.units import format_size

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where there is no room: disk, quota, or limit on a file's size."""


class DiskCap:
    """Bytes that all rollouts of a session may take together: share one among their stores.

    Counts what is on disk, by rollout folder, whether its store is open or not, what is being
    written (a temporary file lies beside the file it will replace, so both count until it has), and
    what is promised: the metadata that open rollouts have yet to write. Thread-safe.
    """

    def __init__(self, limit: int | None) -> None:
        """Raises :class:`ConfigError` unless ``limit`` is positive, or None for no cap."""
        if limit is not None and limit <= 0:
            raise ConfigError(f"a disk cap must be positive, not {limit}; omit it for no cap")
        self.limit = limit
        self._lock = threading.Lock()
        self._taken: dict[Path, int] = {}
        self._promised: dict[Path, int] = {}
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

    def promise(self, folder: Path, nbytes: int) -> None:
        """Keep ``nbytes`` for what the rollout in ``folder`` will write beside its chunks."""
        with self._lock:
            self._promised[folder] = nbytes

    def promised(self, folder: Path) -> int:
        """Bytes kept for the rollout in ``folder``."""
        with self._lock:
            return self._promised.get(folder, 0)

    def require(self, nbytes: int = 0) -> None:
        """Raise :class:`StoreFullError` unless there is room for ``nbytes`` more."""
        with self._lock:
            self._require(nbytes)

    def _require(self, nbytes: int) -> None:
        total = sum((*self._taken.values(), *self._promised.values(), self._pending, nbytes))
        if self.limit is not None and total > self.limit:
            raise StoreFullError(
                errno.ENOSPC,
                f"the disk cap of {format_size(self.limit)} is reached: {format_size(total)} "
                "would be needed; delete chunks or raise the cap",
            )

    @contextmanager
    def reserved(
        self, nbytes: int, free: int, free_floor: int, *, beside: int = 0
    ) -> Iterator[None]:
        """Hold ``nbytes`` for a write under way on a disk with ``free`` bytes left, where the cap
        has room for ``beside`` as well.

        Raises :class:`StoreFullError` where the cap, or the bytes to leave free, would be broken.
        """
        with self._lock:
            self._require(nbytes + beside)
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

    def promise(self, nbytes: int) -> None:
        """Keep ``nbytes`` of the cap for what the store will write beside its chunks."""
        self._cap.promise(self._folder, nbytes)

    @property
    def promised(self) -> int:
        """Bytes that :meth:`promise` keeps."""
        return self._cap.promised(self._folder)

    @contextmanager
    def reserved(self, nbytes: int, *, beside: int) -> Iterator[None]:
        """Hold ``nbytes`` for a write under way, where there is room for ``beside`` as well.

        Raises as :meth:`DiskCap.reserved`, :class:`OSError` where the disk cannot be asked.
        """
        free = self._io.free_bytes(self._folder)
        with self._cap.reserved(nbytes, free, self._free_floor, beside=beside):
            yield


@contextmanager
def store_errors(action: str) -> Iterator[None]:
    """Turn what the system says into our own errors, saying what was being done."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        kind = StoreFullError if error.errno in FULL else StoreError
        raise kind(error.errno, f"could not {action}: {error.strerror or error}") from error

"""One writer for a folder: a lock that survives crashes, is not inherited, and names its owner.

``flock`` decides where the file system has it: the kernel frees it with its process. Elsewhere the
lock file itself is the lock, made in one step, and a living owner is told from a dead one by its
process id, start time and boot. Either way the file says who holds the lock, and goes on release.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import weakref
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from worldpager.errors import ForeignDirectoryError, StoreLockedError

NAME = ".worldpager.lock"
"""Name of the lock file in the folder that it locks."""

_NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)


class Owner(BaseModel):
    """Who holds a lock: enough to tell whether it still lives, and to tell a person."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    pid: int
    start: int
    """Start of the process in clock ticks since boot: process ids are used again."""
    boot: str
    host: str

    @classmethod
    def current(cls) -> Owner:
        """This process."""
        pid = os.getpid()
        return cls(pid=pid, start=_start_time(pid) or 0, boot=_boot(), host=socket.gethostname())

    def may_live(self) -> bool:
        """Whether the owner still runs; True where that cannot be known: on another machine, or
        without ``/proc``.
        """
        if self.host != socket.gethostname() or not self.start:
            return True
        return self.boot == _boot() and _start_time(self.pid) == self.start


class DirectoryLock:
    """Holds the lock of one folder from construction to :meth:`release`.

    Never waits. A process forked meanwhile does not hold it, and cannot release it.
    """

    def __init__(self, folder: Path) -> None:
        """Lock ``folder``. Raises :class:`StoreLockedError` naming the owner where another process
        or another object in this one holds it, :class:`ForeignDirectoryError` where the lock's name
        is taken by something else, :class:`OSError` where the folder cannot be written.
        """
        self._path = folder / NAME
        self._fd = self._acquire()
        _held.add(self)

    @property
    def held(self) -> bool:
        """Whether this process holds the lock."""
        return self._fd is not None

    def release(self) -> None:
        """Remove the lock file and unlock; idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                if _names(self._path, fd):
                    os.unlink(self._path)
            os.close(fd)

    def check_place(self) -> None:
        """Raise :class:`ForeignDirectoryError` where the folder is no longer the one that was
        locked: moved, removed, or another's in its place.
        """
        if self._fd is None or not _names(self._path, self._fd):
            raise ForeignDirectoryError(
                errno.ESTALE,
                f"{self._path.parent} was moved, removed or replaced while it was open; close this "
                "store and open the folder where it is now",
            )

    def forget(self) -> None:
        """In a forked child: drop the descriptor; the lock stays with the parent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _acquire(self) -> int | None:
        while True:
            fd, new = self._open()
            try:
                if self._own(fd, new):
                    try:
                        _write_owner(fd)
                    except BaseException:
                        os.unlink(self._path)
                        raise
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # its last owner removed the file meanwhile, or we did: look again

    def _open(self) -> tuple[int, bool]:
        """The lock file, and whether this call made it."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        while True:
            with suppress(FileExistsError):
                return os.open(self._path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
            try:
                fd = os.open(self._path, flags)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                    raise self._foreign(error.errno) from error
                raise
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return fd, False
            os.close(fd)
            raise self._foreign(errno.EINVAL)

    def _own(self, fd: int, new: bool) -> bool:
        """Whether the open lock file is now ours; False where the name must be tried again."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise self._locked(_read_owner(fd)) from error
            if error.errno not in _NO_FLOCK:
                raise
            if not new:
                self._remove_stale(fd)
            return new
        return _names(self._path, fd)

    def _remove_stale(self, fd: int) -> None:
        """Without ``flock``: move a dead owner's file away, so that the name is free again."""
        owner = _read_owner(fd)
        if owner is None or owner.may_live():
            raise self._locked(owner)
        aside = self._path.with_name(f"{NAME}.{os.getpid()}.{id(self)}.tmp")
        with suppress(FileNotFoundError):
            os.rename(self._path, aside)
            if not _names(aside, fd):  # another process was quicker: this is its lock, not the dead
                os.rename(aside, self._path)
                raise self._locked(None)
            os.unlink(aside)

    def _locked(self, owner: Owner | None) -> StoreLockedError:
        who = "another process"
        if owner is not None:
            who = f"process {owner.pid} on {owner.host}"
        return StoreLockedError(
            errno.EWOULDBLOCK,
            f"{self._path.parent} is in use by {who}; close it there, or remove {self._path} if "
            "that process no longer exists",
        )

    def _foreign(self, number: int) -> ForeignDirectoryError:
        return ForeignDirectoryError(number, f"{self._path} is not a lock file; remove it")


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    for lock in _held:
        lock.forget()


os.register_at_fork(after_in_child=_forget_in_child)


def _names(path: Path, fd: int) -> bool:
    """Whether ``path`` still is the open file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _write_owner(fd: int) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, Owner.current().model_dump_json().encode(), 0)


def _read_owner(fd: int) -> Owner | None:
    """The owner written in a lock file; None while it is being made, or where it is not one."""
    try:
        return Owner.model_validate_json(os.pread(fd, 4096, 0))
    except ValidationError:
        return None


def owner_of(folder: Path) -> Owner | None:
    """Who holds the lock of ``folder``, or held it when it died; None where nobody does.

    Only looks, and takes no lock, so it stands in nobody's way.
    """
    try:
        fd = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return _read_owner(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    finally:
        os.close(fd)


def _start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot (field 22 of its stat); None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])  # the command may hold spaces and brackets


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""

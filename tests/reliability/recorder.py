"""Every file operation in order, and the directories that a crash could leave behind.

What counts as durable is the least that POSIX promises: a file's bytes after ``sync`` of it, a name
after ``sync_folder`` of its folder. Of all else any part may be lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from worldpager.tiers.io_backend import Bytes, SystemIO


@dataclass(frozen=True)
class Op:
    """``kind``: write, sync, create, rename, unlink, mkdir, rmdir or sync_folder."""

    kind: str
    path: Path
    inode: int = -1
    offset: int = 0
    data: bytes = b""


class RecordingIO(SystemIO):
    """Carries out and notes. The order noted is one in which the calls may have ended."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._lock = threading.Lock()
        self._inodes: dict[Path, int] = {}
        self._open: dict[int, tuple[Path, int]] = {}
        self._next = 0

    def open_new(self, path: Path, *, direct: bool) -> int:
        with self._lock:
            fd = super().open_new(path, direct=direct)
            self._next += 1
            self._inodes[path] = self._next
            self._open[fd] = path, self._next
            self.ops.append(Op("create", path, self._next))
            return fd

    def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
        moved = super().pwrite(fd, data, offset)
        with self._lock:
            path, inode = self._open[fd]
            self.ops.append(Op("write", path, inode, offset, data[:moved].tobytes()))
        return moved

    def sync(self, fd: int) -> None:
        super().sync(fd)
        with self._lock:
            path, inode = self._open[fd]
            self.ops.append(Op("sync", path, inode))

    def close(self, fd: int) -> None:
        with self._lock:
            self._open.pop(fd, None)
            super().close(fd)

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            super().rename(source, target)
            inode = self._inodes.pop(source)
            self._inodes[target] = inode
            self.ops.append(Op("rename", target, inode))
            self.ops.append(Op("unlink", source))

    def unlink(self, path: Path) -> None:
        with self._lock:
            super().unlink(path)
            self._inodes.pop(path, None)
            self.ops.append(Op("unlink", path))

    def make_folder(self, path: Path) -> None:
        with self._lock:
            super().make_folder(path)
            self.ops.append(Op("mkdir", path))

    def remove_folder(self, path: Path) -> None:
        with self._lock:
            super().remove_folder(path)
            self.ops.append(Op("rmdir", path))

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        with self._lock:
            self.ops.append(Op("sync_folder", path))

    @property
    def now(self) -> int:
        """Operations so far."""
        with self._lock:
            return len(self.ops)


@dataclass
class Disk:
    """Folders, names and bytes after a crash."""

    folders: set[Path] = field(default_factory=set)
    names: dict[Path, int] = field(default_factory=dict)
    data: dict[int, bytearray] = field(default_factory=dict)

    def lay_out(self, source: Path, target: Path) -> None:
        """Make it real, what was below ``source`` below ``target``."""
        for folder in sorted(self.folders):
            if folder.is_relative_to(source):
                (target / folder.relative_to(source)).mkdir(parents=True, exist_ok=True)
        for path, inode in self.names.items():
            there = target / path.relative_to(source)
            if there.parent.is_dir():
                there.write_bytes(self.data.get(inode, b""))


def volatile(ops: list[Op], upto: int) -> list[int]:
    """Indices of the operations before ``upto`` that no sync has made durable by then."""
    found = []
    for i in range(upto):
        op, later = ops[i], ops[i + 1 : upto]
        if op.kind == "write":
            durable = any(o.kind == "sync" and o.inode == op.inode for o in later)
        elif op.kind in ("sync", "sync_folder"):
            continue
        else:
            durable = any(o.kind == "sync_folder" and o.path == op.path.parent for o in later)
        if not durable:
            found.append(i)
    return found


def after_crash(ops: list[Op], upto: int, lost: set[int], *, zeros: bool) -> Disk:
    """The disk where the first ``upto`` operations happened, but for ``lost``. A lost write leaves
    ``zeros`` in its place, or nothing.
    """
    disk = Disk()
    for i, op in enumerate(ops[:upto]):
        if op.kind == "write":
            data = disk.data.setdefault(op.inode, bytearray())
            if i in lost and not zeros:
                continue
            data.extend(bytes(max(0, op.offset + len(op.data) - len(data))))
            content = bytes(len(op.data)) if i in lost else op.data
            data[op.offset : op.offset + len(op.data)] = content
        elif i in lost:
            continue
        elif op.kind in ("create", "rename"):
            disk.names[op.path] = op.inode
        elif op.kind == "unlink":
            disk.names.pop(op.path, None)
        elif op.kind == "mkdir":
            disk.folders.add(op.path)
        elif op.kind == "rmdir":
            disk.folders.discard(op.path)
    return disk


def crashes(ops: list[Op], start: int, step: int = 1) -> Iterator[tuple[int, str, Disk]]:
    """Every prefix from ``start`` on: whole, with all lost that was not durable, with each one such
    operation lost, and with each one kept alone.
    """
    for upto in range(start, len(ops) + 1, step):
        open_ops = set(volatile(ops, upto))
        yield upto, "all kept", after_crash(ops, upto, set(), zeros=False)
        yield upto, "all lost", after_crash(ops, upto, open_ops, zeros=False)
        for one in open_ops if len(open_ops) > 1 else ():
            for zeros in (False, True):
                yield upto, f"{one} lost", after_crash(ops, upto, {one}, zeros=zeros)
            yield upto, f"only {one} kept", after_crash(ops, upto, open_ops - {one}, zeros=True)

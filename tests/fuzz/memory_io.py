"""A file system in a dictionary, with as much of it as metadata documents need."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from worldpager.tiers.io_backend import Bytes, SystemIO

ROOT = Path("/store")


class MemoryIO(SystemIO):
    """Files by their paths below ``/store``; folders are there where a file is in them."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = dict(files)
        self._open: dict[int, str] = {}

    def _name(self, path: Path) -> str:
        return str(path.relative_to(ROOT))

    def open_read(self, path: Path, *, direct: bool) -> int:
        if self._name(path) not in self.files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return self._number(path)

    def open_new(self, path: Path, *, direct: bool) -> int:
        self.files[self._name(path)] = b""
        return self._number(path)

    def _number(self, path: Path) -> int:
        number = len(self._open) + 1000
        self._open[number] = self._name(path)
        return number

    def pread(self, fd: int, out: Bytes, offset: int) -> int:
        part = self.files[self._open[fd]][offset : offset + len(out)]
        out.data[: len(part)] = part
        return len(part)

    def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
        assert offset == len(self.files[self._open[fd]])
        self.files[self._open[fd]] += data.tobytes()
        return len(data)

    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass

    def close(self, fd: int) -> None:
        del self._open[fd]

    def rename(self, source: Path, target: Path) -> None:
        self.files[self._name(target)] = self.files.pop(self._name(source))

    def unlink(self, path: Path) -> None:
        del self.files[self._name(path)]

    def stat(self, target: int | Path) -> os.stat_result:
        name = self._open[target] if isinstance(target, int) else self._name(target)
        if name in self.files:
            mode, size = stat.S_IFREG, len(self.files[name])
        elif name == "." or any(other.startswith(name + "/") for other in self.files):
            mode, size = stat.S_IFDIR, 0
        else:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return os.stat_result((mode, 0, 0, 1, 0, 0, size, 0, 0, 0))

    def list_folder(self, path: Path) -> list[str]:
        below = (Path(n).relative_to(self._name(path)) for n in self.files
                 if path == ROOT or n.startswith(self._name(path) + "/"))  # fmt: skip
        return sorted({name.parts[0] for name in below})

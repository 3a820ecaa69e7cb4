"""How much host memory there is to use, seen from inside a container as well as outside.

The budget is bounded by the machine (``MemAvailable``: what can be had without swapping) and by
every memory control group from our own up to the root, version 1 or 2. A group's headroom is its
limit less what it uses, where page cache (``active_file + inactive_file``) does not count as used:
the kernel gives that up before it kills. Inside a container ``MemTotal`` still shows the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from worldpager.errors import BudgetError
from worldpager.units import format_size

HEADROOM = 64 << 20
"""Bytes left to the rest of the process beside a pool: index, staging of metadata, interpreter."""

_UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as the largest page count; nothing real comes near."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The tightest bound on host memory."""

    available: int
    """Bytes that can still be taken."""
    limit: int
    """Bytes that the bound allows in all: the group's limit, or the machine's memory."""
    source: str
    """Where the bound comes from: a control group's limit file, or ``"free memory"``."""


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The tightest of the machine's free memory and all control groups that hold this process.

    Reads ``proc`` and the control group mounts under ``root``; does not block. A group whose files
    cannot be read does not count. Raises :class:`BudgetError` where ``/proc/meminfo`` is not
    readable, since then nothing is known.
    """
    meminfo = _table(root / "proc/meminfo")
    if "MemAvailable" not in meminfo:
        raise BudgetError(f"cannot read free memory from {root / 'proc/meminfo'}; mount /proc")
    bounds = [
        MemoryLimit(meminfo["MemAvailable"] * 1024, meminfo["MemTotal"] * 1024, "free memory")
    ]
    for folder in _group_folders(root):
        bounds += _group_bounds(folder, root)
    return min(bounds, key=lambda bound: bound.available)


def default_dram_budget(root: Path = Path("/")) -> int:
    """Half of what is available, in whole pages: the pool's size where none is asked for.

    The other half stays for the model's own host memory. Raises :class:`BudgetError` where that
    half would not fit beside :data:`HEADROOM`.
    """
    budget = memory_limit(root).available // 2 // 4096 * 4096
    check_budget(budget, root)
    return budget


def check_budget(requested: int, root: Path = Path("/")) -> None:
    """Refuse a pool of ``requested`` bytes that does not fit, before anything is allocated.

    Raises :class:`BudgetError` with the bytes requested, those available, the limit and where it
    comes from.
    """
    bound = memory_limit(root)
    if requested + HEADROOM > bound.available:
        raise BudgetError(
            f"a DRAM budget of {format_size(requested)} ({requested} bytes) was requested, but "
            f"{format_size(bound.available)} ({bound.available} bytes) are available under the "
            f"limit of {format_size(bound.limit)} ({bound.source}), and {format_size(HEADROOM)} of "
            f"them are kept for the process; ask for at most "
            f"{max(0, bound.available - HEADROOM)} bytes or raise the limit"
        )


def _group_folders(root: Path) -> list[Path]:
    """Folders of this process's memory control groups, from our own up to each mount's root."""
    folders: list[Path] = []
    mounts = _group_mounts(root)
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        kind = "cgroup2" if controllers == "" else "cgroup"
        if kind == "cgroup" and "memory" not in controllers.split(","):
            continue
        if kind in mounts:
            mount_root, mount_point = mounts[kind]
            inside = _relative(PurePosixPath(group), mount_root)
            folders += [mount_point / level for level in (inside, *inside.parents)]
    return folders


def _relative(group: PurePosixPath, mount_root: PurePosixPath) -> PurePosixPath:
    """``group`` as a path below the mount; its root where the group lies outside what is mounted.

    The latter is the rule in containers without their own group namespace: the path names the
    host's tree, and the mount shows only our part of it.
    """
    if ".." in group.parts or not group.is_relative_to(mount_root):
        return PurePosixPath(".")
    return group.relative_to(mount_root)


def _group_mounts(root: Path) -> dict[str, tuple[PurePosixPath, Path]]:
    """``{"cgroup" | "cgroup2": (root inside the hierarchy, mount point)}`` from mountinfo."""
    mounts: dict[str, tuple[PurePosixPath, Path]] = {}
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) < 5 or len(kinds) < 3 or kinds[0] not in ("cgroup", "cgroup2"):
            continue
        if kinds[0] == "cgroup" and "memory" not in kinds[2].split(","):
            continue
        mounts.setdefault(kinds[0], (PurePosixPath(fields[3]), root / fields[4].lstrip("/")))
    return mounts


def _group_bounds(folder: Path, root: Path) -> list[MemoryLimit]:
    """The bounds that one group sets, by either version's file names."""
    stat = _table(folder / "memory.stat")
    cache = sum(
        stat.get(f"total_{key}", stat.get(key, 0)) for key in ("active_file", "inactive_file")
    )
    bounds = []
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory.high", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is None or usage is None or limit >= _UNLIMITED:
            continue
        used = max(0, usage - cache)
        source = "/" + str((folder / limit_file).relative_to(root))
        bounds.append(MemoryLimit(max(0, limit - used), limit, source))
    return bounds


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _table(path: Path) -> dict[str, int]:
    """``{key: number}`` of files with lines like ``MemTotal: 123 kB`` or ``active_file 4096``."""
    table = {}
    for line in _lines(path):
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdecimal():
            table[words[0]] = int(words[1])
    return table


def _number(path: Path) -> int | None:
    """The number in a control file; None where the file is absent or says ``max``."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdecimal() else None

"""A second session that begins with all that one holds, without a copy of its chunks.

A chunk's file is never changed, only replaced by another under its name or removed. So both
sessions can have it under their own names (hard links): each then goes its way, and what only one
of them has goes with that one.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from worldpager.errors import ForeignDirectoryError
from worldpager.tiers import documents, layout
from worldpager.tiers.io_backend import IOBackend, SystemIO
from worldpager.tiers.recovery import chunk_of


def fork(source: str | Path, target: str | Path, *, io: IOBackend | None = None) -> None:
    """Make ``target`` a session with every chunk that is durable in ``source`` at this moment.

    ``source`` may be in use; flush it first. On another file system than ``source``'s the chunks
    are copied. Raises :class:`ForeignDirectoryError` where ``source`` is no session or ``target``
    exists, :class:`OSError` where making it fails; what was made is removed then.
    """
    io = io or SystemIO()
    source, target = Path(source).resolve(), Path(target).resolve()
    names = layout.rollout_names(io, source)
    if not names:
        raise ForeignDirectoryError(errno.ENOENT, f"{source} holds no rollout to fork")
    if target.exists():
        raise ForeignDirectoryError(errno.EEXIST, f"{target} is there already; choose another")
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        for rollout in names:
            for stream in _streams(io, source / rollout):
                _link(io, stream, unfinished / rollout / stream.name)
            _copy(source / rollout / documents.DOCUMENT, unfinished / rollout)
        _copy(source / documents.DOCUMENT, unfinished)
        io.sync_folder(unfinished)
        unfinished.rename(target)
        io.sync_folder(target.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _streams(io: IOBackend, rollout: Path) -> list[Path]:
    """The folders of a rollout in which chunks lie, not those of its metadata arrays."""
    spec = layout.load_rollout(io, rollout.parent, rollout.name)
    assert spec is not None  # it was listed
    return [rollout / name for name in spec.streams]


def _link(io: IOBackend, stream: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for name in io.list_folder(stream):
        if chunk_of(name) is None:
            continue
        try:
            os.link(stream / name, target / name, follow_symlinks=False)
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
                raise
            shutil.copy2(stream / name, target / name, follow_symlinks=False)
    _copy(stream / documents.DOCUMENT, target)
    io.sync_folder(target)


def _copy(file: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    copied = Path(shutil.copy2(file, folder))
    with copied.open("rb") as opened:
        os.fsync(opened.fileno())

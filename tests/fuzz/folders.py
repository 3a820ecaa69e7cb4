"""Targets: the documents of a store, and a whole directory from a stranger.

A directory is a small valid store that the input's bytes change, step by step: a file patched,
replaced, cut, made huge without taking room, removed, linked, made a pipe, copied to another name,
its checks made right again. Beside it lies a folder that nobody may touch.
"""

from __future__ import annotations

import functools
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from tests.fuzz.blocks import RECORD_BYTES, array, seal_image
from tests.fuzz.memory_io import MemoryIO
from tests.reliability.world import World, reference_spec
from worldpager.errors import WorldPagerError
from worldpager.quant.shard import tail_bytes
from worldpager.tiers import layout
from worldpager.tiers.directio import aligned_bytes
from worldpager.tiers.io_backend import SystemIO
from worldpager.tiers.lock import Owner
from worldpager.tiers.metadata import Metadata
from worldpager.tiers.spec import StoreSpec
from worldpager.tiers.store import ChunkStore

KV = reference_spec(retrieve=1, layers=2, heads=1, head_dim=16, tokens_per_frame=2)
CHUNKS = 6
SECRET = b"a stranger's"
MOST_FILE = 1 << 16


def _world(directory: Path, io: SystemIO | None = None) -> World:
    return World(directory, spec=KV, dram=8, codec="bf16", chunks=CHUNKS + 4, io=io)


@functools.cache
def valid_store() -> dict[str, bytes]:
    """The files of a valid store, by their paths in it."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "s"
        world = _world(root)
        with world.memory:
            world.run(range(CHUNKS), check=False)
        files = sorted(path for path in root.rglob("*") if path.is_file())
        return {str(path.relative_to(root)): path.read_bytes() for path in files}


@functools.cache
def valid_spec() -> StoreSpec:
    """The identity of that store."""
    found = layout.load_rollout(MemoryIO(valid_store()), Path("/store"), "rollout-0")
    assert found is not None
    return found


# ---- documents -----------------------------------------------------------------------------------

DOCUMENTS = ("zarr.json", "rollout-0/zarr.json", "rollout-0/kv/zarr.json")


def document(data: bytes) -> None:
    """Which document, then its bytes."""
    which = data[0] % (len(DOCUMENTS) + 1) if data else 0
    if which == len(DOCUMENTS):
        try:
            Owner.model_validate_json(data[1:]).may_live()
        except ValueError:
            return
        return
    files = {**valid_store(), DOCUMENTS[which]: data[1:]}
    io, path, spec = MemoryIO(files), Path("/store"), valid_spec()
    names = layout.rollout_names(io, path)
    assert set(names) <= {"rollout-0"}
    if layout.check_identity(io, path, spec):
        assert layout.load_rollout(io, path, "rollout-0") == spec
    metadata = Metadata(io, path / "rollout-0", spec)
    metadata.cover("kv", 1)
    metadata.end_at("kv", 3)
    assert io.files.keys() == files.keys()
    stored = layout.load_rollout(io, path, "rollout-0")
    if stored is not None:
        assert len(str(stored.most_bytes)) < 40 and 0 <= stored.identity() < 2**64


# ---- a whole directory ---------------------------------------------------------------------------


class Reader:
    """Takes an input apart; zeros come after its end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def bytes(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def number(self, count: int) -> int:
        return int.from_bytes(self.bytes(count), "little")


def _start_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MOST_FILE)


def _seal(path: Path, identity: int | None) -> None:
    """Make a chunk's checks right, and where wanted its identity."""
    image, layers = array(_start_of(path)), valid_spec().layers
    if identity is not None and len(image) >= tail_bytes(layers):
        record = image[len(image) - tail_bytes(layers) :][:RECORD_BYTES]
        record[48:56] = array(identity.to_bytes(8, "little"))
    seal_image(image, layers)
    path.write_bytes(image.tobytes())


def _change(root: Path, outside: Path, step: Reader) -> None:
    """One change to the directory, as the input says."""
    names = list(valid_store())
    kind, name, at = step.number(1), names[step.number(1) % len(names)], step.number(3)
    payload = step.bytes(step.number(1))
    path = root / name
    if not stat.S_ISREG(path.lstat().st_mode):
        return  # what was put there before stays
    match kind % 13:
        case 0:
            content = bytearray(_start_of(path))
            at %= len(content) + 1
            content[at : at + len(payload)] = payload
            path.write_bytes(content)
        case 1:
            path.write_bytes(payload)
        case 2:
            os.truncate(path, at % (path.stat().st_size + 1))
        case 3:
            os.truncate(path, at)
        case 4:
            os.truncate(path, at << 20)  # huge, but it takes no room
        case 5:
            path.unlink()
        case 6:
            path.unlink()
            path.symlink_to(outside / "file")
        case 7:
            path.unlink()
            os.mkfifo(path)
        case 8:
            path.unlink()
            path.mkdir()
        case 9:
            other = path.with_name(os.fsdecode(payload.replace(b"/", b"").replace(b"\0", b"")))
            other.write_bytes(_start_of(path))
        case 10:
            _seal(path, None)
        case 11:
            _seal(path, valid_spec().identity())
        case 12:
            folder = path.parent
            if folder == root:
                return  # a link to the store is the caller's own
            folder.rename(outside / "folder")
            folder.symlink_to(outside / "folder")


def _look(folder: Path) -> list[tuple[str, int, int, bytes]]:
    """All there is below a folder, with contents and times of change."""
    found = []
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        small = stat.S_ISREG(status.st_mode) and status.st_size <= MOST_FILE
        content = path.read_bytes() if small else b""
        found.append((str(path), status.st_mode, status.st_mtime_ns, content))
    return found


class InsideIO(SystemIO):
    """Nothing is opened, made, renamed or removed outside the folder, by a link or otherwise."""

    def __init__(self, root: Path) -> None:
        self._root = os.path.realpath(root)

    def _inside(self, path: Path) -> None:
        parent = os.path.realpath(path.parent)
        assert (
            parent == self._root or parent.startswith(self._root + "/") or path == Path(self._root)
        ), f"{path} leads out of the store"

    def open_read(self, path: Path, *, direct: bool) -> int:
        fd = super().open_read(path, direct=direct)
        self._inside(Path(os.readlink(f"/proc/self/fd/{fd}")))
        return fd

    def open_new(self, path: Path, *, direct: bool) -> int:
        self._inside(path)
        return super().open_new(path, direct=direct)

    def rename(self, source: Path, target: Path) -> None:
        self._inside(target)
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._inside(path)
        super().unlink(path)

    def make_folder(self, path: Path) -> None:
        self._inside(path)
        super().make_folder(path)

    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


@contextmanager
def strange_directory(data: bytes) -> Iterator[tuple[Path, InsideIO]]:
    """The changed store and the I/O to open it with; afterwards nothing beside it was touched."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base) as folder:
        root, outside = Path(folder) / "s", Path(folder) / "outside"
        outside.mkdir()
        (outside / "file").write_bytes(SECRET)
        for name, content in valid_store().items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        step = Reader(data)
        while step:
            with suppress(OSError, ValueError):
                _change(root, outside, step)
        before = _look(outside)
        yield root, InsideIO(root)
        assert _look(outside) == before
        assert {path.name for path in Path(folder).iterdir()} == {"s", "outside"}


def store(data: bytes) -> None:
    """A directory looked at, checked, opened, written to and closed."""
    with strange_directory(data) as (root, io):
        for name in layout.rollout_names(io, root):
            with suppress(WorldPagerError):
                looked = ChunkStore.inspect(root, name, io=io)
                looked.contents()
                looked.verify()
        opened = ChunkStore.open(root, valid_spec(), disk_cap=1 << 30, io=io)
        try:
            whole = {chunk.chunk: chunk.nbytes for chunk in opened.contents()}
            for chunk, nbytes in whole.items():
                with suppress(WorldPagerError):
                    opened.read(chunk, aligned_bytes(nbytes))
            opened.publish_metadata({"chunk": np.array(sorted(whole))})
            opened.write(2, aligned_bytes(8192))
            assert opened.bytes_used >= 8192
        finally:
            opened.close()


def memory(data: bytes) -> None:
    """A directory that a world's memory is opened on: every chunk asked for, and a rollout begun.

    What is said to be there fresh decodes without an error.
    """
    with strange_directory(data) as (root, io):
        world = _world(root, io)
        world.memory._session.pager._patience = 0.05
        with world.memory as opened:
            pager, stream = opened._session.pager, opened._session.rollout.stream
            for chunk in sorted(world.present()):
                for _ in range(2):
                    window = pager.acquire(stream, 0, (chunk,), (chunk,))
                    if not window.stale:
                        break
                    pager.settle()
            pager.acquire(stream, 0, (), ())
            for chunk in (CHUNKS, CHUNKS + 1):
                world.write(chunk - 1)
                world.retrieve(chunk)
            world.run(range(3), check=False)

"""Power cuts: from a recorded run, every state that a crash could leave opens, exact or absent."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.reliability.faults import FailingIO
from tests.reliability.recorder import Disk, RecordingIO, crashes
from tests.reliability.world import World, reference_spec
from worldpager.errors import StoreError
from worldpager.pager.session import StreamFiles
from worldpager.tiers.directio import aligned_bytes
from worldpager.tiers.io_backend import Bytes, SystemIO
from worldpager.tiers.layout import rollout_names
from worldpager.tiers.recovery import chunk_of
from worldpager.tiers.store import ChunkStore

TINY = reference_spec(
    layers=1, heads=1, tokens_per_frame=1, frames_per_chunk=1, sink_frames=1, recent_frames=1,
    retrieve_frames=1,
)  # fmt: skip

Key = tuple[str, int]  # rollout, chunk


class Record:
    """A run's operations, what was acknowledged when, and every image ever complete."""

    def __init__(self, root: Path, chunks: int, flush_every: int) -> None:
        """Two rollouts; the second goes back once to write its middle again."""
        self.root, self.io = root, RecordingIO()
        self.acknowledged: list[tuple[int, dict[Key, int]]] = []
        world = World(root, spec=TINY, dram=8, io=self.io, chunks=400)
        known: dict[Key, int] = {}
        with world.memory:
            for rollout, back in (("rollout-0", 0), ("rollout-1", chunks // 2)):
                for cache in world.layers:
                    cache["local_end_index"].zero_()
                ids = [*range(chunks), *range(max(1, chunks - back), chunks)]
                for count, chunk in enumerate(ids):
                    world.step(chunk, check=False, version=int(count >= chunks))
                    if count and count % flush_every == 0:
                        world.memory.flush()
                        pages = world.memory._session.pager.core.table.pages.values()
                        stream = world.memory._session.rollout.stream
                        known |= {(rollout, page.key.chunk): page.generation
                                  for page in pages if page.key.stream == stream}  # fmt: skip
                        self.acknowledged.append((self.io.now, dict(known)))
        self.images: dict[Key, set[bytes]] = {}
        data: dict[int, bytes] = {}
        for op in self.io.ops:
            if op.kind == "write":
                data[op.inode] = data.get(op.inode, b"") + op.data
            elif op.kind == "rename" and (number := chunk_of(op.path.name)) is not None:
                key = op.path.parent.parent.name, number
                self.images.setdefault(key, set()).add(data[op.inode])

    def begun(self) -> int:
        """Operations after which the store existed."""
        return next(i for i, op in enumerate(self.io.ops)
                    if op.kind == "sync_folder" and op.path.name == "rollout-0") + 1  # fmt: skip


def look(record: Record, disk: Disk, upto: int, where: Path) -> int:
    """Open what the crash left: exact or absent, and what was acknowledged is there, or newer."""
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir()
    disk.lay_out(record.root, where)
    found: dict[Key, int] = {}
    for rollout in rollout_names(SystemIO(), where):
        spec = ChunkStore.inspect(where, rollout)
        store = ChunkStore.open(where, spec.spec, io=FailingIO())  # which needs no sync here
        spec.close()
        damaged = {d.chunk for d in store.verify()}
        for chunk in store.contents():
            if chunk.chunk in damaged:
                continue  # what a read would find out: absent
            out = aligned_bytes(chunk.nbytes)
            store.read(chunk.chunk, out)
            assert out.tobytes() in record.images[rollout, chunk.chunk]
            found[rollout, chunk.chunk] = chunk.record.generation
        store.close()
        assert not list(where.joinpath(rollout).rglob("*.tmp"))
    for at, chunks in record.acknowledged:
        if at <= upto:
            gone = [key for key, generation in chunks.items() if found.get(key, 0) < generation]
            assert not gone, f"acknowledged, but gone: {gone}"
    return len(found)


def check(tmp_path: Path, chunks: int, flush_every: int, step: int) -> tuple[int, int]:
    record = Record(tmp_path / "run", chunks, flush_every)
    states, most = 0, 0
    for upto, what, disk in crashes(record.io.ops, record.begun(), step):
        try:
            most = max(most, look(record, disk, upto, tmp_path / "crash"))
        except AssertionError as error:
            raise AssertionError(f"crash after operation {upto}, {what}: {error}") from error
        states += 1
    return states, most


def test_every_prefix_and_every_lost_operation(tmp_path: Path) -> None:
    states, most = check(tmp_path, chunks=7, flush_every=3, step=4)
    assert states > 80 and most >= 12, (states, most)


@pytest.mark.slow
def test_of_a_longer_run_too(tmp_path: Path) -> None:
    states, most = check(tmp_path, chunks=25, flush_every=7, step=1)
    assert states > 1000 and most >= 45, (states, most)


def test_a_crash_while_the_store_is_made_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    record = Record(tmp_path / "run", 2, 1)
    for upto, what, disk in crashes(record.io.ops[: record.begun()], 0):
        where = tmp_path / "crash"
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir()
        disk.lay_out(record.root, where)
        world = World(where, spec=TINY, dram=8, io=FailingIO())
        with world.memory:
            world.run(range(3))
        assert world.memory.status().ok, (upto, what)


def _no_sync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecordingIO, "sync", lambda self, target: None)


def _no_sync_of_the_folder(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecordingIO, "sync_folder", lambda self, target: None)


def _older_file_removed_first(patch: pytest.MonkeyPatch) -> None:
    def write(files: StreamFiles, chunk: int, image: Bytes) -> None:
        files.delete(chunk)
        files._store.write(chunk, image)

    patch.setattr(StreamFiles, "write", write)


@pytest.mark.parametrize("defect", [_no_sync, _no_sync_of_the_folder, _older_file_removed_first])
def test_the_check_can_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """With this defect, a crash is found that breaks the promise."""
    defect(monkeypatch)
    record = Record(tmp_path / "run", 8, 3)
    with pytest.raises((AssertionError, StoreError)):
        for upto, _, disk in crashes(record.io.ops, 1, 5):
            look(record, disk, upto, tmp_path / "crash")

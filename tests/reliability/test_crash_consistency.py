"""Power cuts: from a recorded run, every state that a crash could leave opens, exact or absent."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.reliability.recorder import Disk, RecordingIO, crashes
from tests.reliability.world import World, reference_spec
from worldpager.errors import StoreError
from worldpager.tiers.directio import aligned_bytes
from worldpager.tiers.io_backend import SystemIO
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
        self.root, self.io = root, RecordingIO()
        self.acknowledged: list[tuple[int, set[Key]]] = []
        world = World(root, spec=TINY, dram=8, io=self.io, chunks=400)
        known: set[Key] = set()
        with world.memory:
            for rollout in ("rollout-0", "rollout-1"):
                for cache in world.layers:
                    cache["local_end_index"].zero_()
                for chunk in range(chunks):
                    world.step(chunk, check=False)
                    if chunk and chunk % flush_every == 0:
                        world.memory.flush()
                        known |= {(rollout, c) for c in range(chunk)}
                        self.acknowledged.append((self.io.now, set(known)))
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
    """Open what the crash left: exact or absent, and what was acknowledged is there."""
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir()
    disk.lay_out(record.root, where)
    found: set[Key] = set()
    for rollout in rollout_names(SystemIO(), where):
        spec = ChunkStore.inspect(where, rollout)
        store = ChunkStore.open(where, spec.spec)
        spec.close()
        damaged = {d.chunk for d in store.verify()}
        for chunk in store.contents():
            if chunk.chunk in damaged:
                continue  # what a read would find out: absent
            out = aligned_bytes(chunk.nbytes)
            store.read(chunk.chunk, out)
            assert out.tobytes() in record.images[rollout, chunk.chunk]
            found.add((rollout, chunk.chunk))
        store.close()
        assert not list(where.joinpath(rollout).rglob("*.tmp"))
    for at, chunks in record.acknowledged:
        if at <= upto:
            assert chunks <= found, f"acknowledged, but gone: {sorted(chunks - found)}"
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
        world = World(where, spec=TINY, dram=8)
        with world.memory:
            world.run(range(3))
        assert world.memory.status().ok, (upto, what)


@pytest.mark.parametrize("call", ["sync", "sync_folder"])
def test_the_check_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Without this sync, a crash is found that breaks the promise."""
    monkeypatch.setattr(RecordingIO, call, lambda self, target: None)
    record = Record(tmp_path / "run", 8, 3)
    with pytest.raises((AssertionError, StoreError)):
        for upto, _, disk in crashes(record.io.ops, 1, 5):
            look(record, disk, upto, tmp_path / "crash")

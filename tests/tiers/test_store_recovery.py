"""What crashes, torn writes and tampering leave: found, named, and never taken for a chunk."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.tiers.chunks import SPEC, image
from tests.tiers.faults import FaultyIO
from worldpager.errors import StoreError
from worldpager.quant.shard import read_tail
from worldpager.tiers.directio import aligned_bytes
from worldpager.tiers.store import ChunkStore

NBYTES = image().nbytes
BLOCK = (NBYTES - 4096) // SPEC.layers


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A store of chunks 0 to 2, closed."""
    store = ChunkStore.create(tmp_path, SPEC)
    for chunk in range(3):
        store.write(chunk, image(chunk=chunk))
    store.close()
    return tmp_path


def shard(root: Path, chunk: int) -> Path:
    return root / f"first/kv/{chunk}.0.0.0.0.0"


def found(root: Path) -> tuple[list[int], list[tuple[int, str]], list[tuple[int, str]]]:
    """Whole chunks by tail, damaged ones by tail, damaged ones in full; and the sound are exact."""
    store = ChunkStore.open(root, SPEC)
    whole = [chunk.chunk for chunk in store.contents()]
    by_tail = [(chunk.chunk, chunk.reason) for chunk in store.damaged]
    in_full = [(chunk.chunk, chunk.reason) for chunk in store.verify()]
    for chunk in {0, 2} & set(whole):
        out = aligned_bytes(NBYTES)
        store.read(chunk, out)
        assert out.tobytes() == image(chunk=chunk).tobytes()
    store.close()
    return whole, by_tail, in_full


def test_files_cut_anywhere(used: Path) -> None:
    for size in range(0, NBYTES, 512):
        os.truncate(shard(used, 1), size)
        store = ChunkStore.open(used, SPEC)
        assert [chunk.chunk for chunk in store.contents()] == [0, 2]
        (damaged,) = store.damaged
        assert (damaged.chunk, damaged.nbytes) == (1, size)
        assert damaged.reason in ("size", "index")
        assert len(store.verify()) == 1
        store.write(1, image(chunk=1))
        assert len(store.contents()) == 3
        assert store.damaged == ()
        store.close()


@pytest.mark.parametrize(
    ("size", "reason"),
    [(NBYTES - 1, "size"), (NBYTES + 4096, "index"), (1 << 40, "size"), (NBYTES + 1, "size")],
)
def test_files_of_another_length(used: Path, size: int, reason: str) -> None:
    os.truncate(shard(used, 1), size)
    assert found(used) == ([0, 2], [(1, reason)], [(1, reason)])


# Everything that carries something, by where it lies: (offset, reason in full, reason by tail).
FLIPS = {
    "magic": (0, "magic", None),
    "version": (4, "version", None),
    "codec": (6, "header", None),
    "tokens": (8, "header", None),
    "layer": (16, "checksum", None),
    "generation": (20, "checksum", None),
    "chunk": (24, "checksum", None),
    "position": (32, "checksum", None),
    "identity": (48, "checksum", None),
    "checksum": (56, "checksum", None),
    "first payload byte": (64, "checksum", None),
    "last payload byte": (64 + 2 * 2 * 24 * 2 * 16 - 1, "checksum", None),
    "second block": (BLOCK + 70, "checksum", None),
    "record": (NBYTES - 4096, "record", "record"),
    "record's end": (NBYTES - 4096 + 255, "record", "record"),
    "index": (NBYTES - 36, "index", "index"),
    "index checksum": (NBYTES - 1, "index", "index"),
}


@pytest.mark.parametrize("what", FLIPS)
@pytest.mark.parametrize("bit", [0, 7])
def test_flipped_bits(used: Path, what: str, bit: int) -> None:
    offset, in_full, by_tail = FLIPS[what]
    content = bytearray(shard(used, 1).read_bytes())
    content[offset] ^= 1 << bit
    shard(used, 1).write_bytes(content)
    whole, tail, full = found(used)
    assert whole == ([0, 2] if by_tail else [0, 1, 2])
    assert tail == ([(1, by_tail)] if by_tail else [])
    assert [chunk for chunk, _ in full] == [1]
    assert full[0][1] in (in_full, "header", "size"), full


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_names_of_chunks_on_other_things(used: Path, kind: str) -> None:
    path = shard(used, 1)
    path.rename(used / "moved")
    if kind == "link":
        path.symlink_to(used / "moved")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert found(used) == ([0, 2], [(1, "missing")], [(1, "missing")])
    store = ChunkStore.open(used, SPEC)
    if kind == "folder":
        with pytest.raises(StoreError, match="could not write chunk 1"):
            store.write(1, image(chunk=1))
        path.rmdir()
    store.write(1, image(chunk=1))
    store.close()
    assert found(used) == ([0, 1, 2], [], [])
    assert (used / "moved").read_bytes() == image(chunk=1).tobytes()


def test_chunks_under_another_name_or_from_elsewhere(
    used: Path, tmp_path_factory, spec_with
) -> None:
    shard(used, 1).rename(shard(used, 9))
    other = spec_with(session="elsewhere")
    elsewhere = ChunkStore.create(tmp_path_factory.mktemp("other"), other)
    elsewhere.write(1, image(other, 1))
    os.replace(elsewhere._path(1, 0), shard(used, 1))
    elsewhere.close()
    damage = [(1, "identity"), (9, "identity")]
    assert found(used) == ([0, 2], damage, damage)


def test_damaged_chunks_count_and_can_be_replaced_or_deleted(used: Path, real_bytes) -> None:
    os.truncate(shard(used, 0), NBYTES - 100)
    os.truncate(shard(used, 1), 7)
    store = ChunkStore.open(used, SPEC)
    assert real_bytes(used / "first") == store.bytes_used
    store.delete(0)
    store.write(1, image(chunk=1))
    assert real_bytes(used / "first") == store.bytes_used
    assert [chunk.chunk for chunk in store.contents()] == [1, 2]
    assert store.damaged == ()
    store.close()


def test_unknown_files_are_let_be_and_counted(used: Path, real_bytes) -> None:
    names = ["01.0.0.0.0.0", "1.0.0.0.0", "4294967296.0.0.0.0.0", "-1.0.0.0.0.0", "notes", ".x.tmp"]
    names += ["٣.0.0.0.0.0", "1.0.0.0.0.0\n"]
    for name in names:
        (used / "first/kv" / name).write_bytes(b"not ours")
    assert found(used) == ([0, 1, 2], [], [])
    store = ChunkStore.open(used, SPEC)
    assert real_bytes(used / "first") == store.bytes_used
    store.close()
    assert all((used / "first/kv" / name).exists() for name in names)


def test_leftovers_are_swept(used: Path) -> None:
    for folder in ("first", "first/kv", "first/poses"):
        (used / folder).mkdir(exist_ok=True)
        (used / folder / ".zarr.json.77.3.tmp").write_bytes(b"{")
    (used / "first/kv/.1.0.0.0.0.0.77.4.tmp").write_bytes(bytes(4096))
    assert found(used) == ([0, 1, 2], [], [])
    assert not list(used.rglob("*.tmp"))


@pytest.mark.parametrize("what", ["missing", "damaged", "too small", "folder gone"])
def test_what_follows_from_the_identity_is_made_again(used: Path, what: str) -> None:
    document = used / "first/kv/zarr.json"
    good = document.read_bytes()
    if what == "missing":
        document.unlink()
    elif what == "damaged":
        document.write_bytes(good[:100])
    elif what == "too small":
        document.write_bytes(good.replace(b"1024", b"2"))
    else:
        for path in document.parent.iterdir():
            path.unlink()
        document.parent.rmdir()
    assert found(used)[0] == ([] if what == "folder gone" else [0, 1, 2])
    assert document.read_bytes() == good


def test_making_a_store_survives_failure_at_every_call(tmp_path: Path) -> None:
    calls = FaultyIO()
    ChunkStore.create(tmp_path / "0", SPEC, io=calls).close()
    for nth in range(1, sum(calls.calls.values()) + 1):
        path = tmp_path / str(nth)
        io = FaultyIO()
        io.plan = lambda name, count, io=io, nth=nth: 5 if sum(io.calls.values()) == nth else 0
        try:
            ChunkStore.create(path, SPEC, io=io).close()
        except StoreError:
            if ChunkStore.exists(path, "first"):
                store = ChunkStore.open(path, SPEC)
            else:
                store = ChunkStore.create(path, SPEC)
            store.write(0, image())
            store.close()
            assert not list(path.rglob("*.tmp")), nth


def kill_in_the_middle(root: Path, writes: list[tuple[int, bytes]], after: int) -> int:
    """Kill a child while it writes ``writes`` (chunk, image) in order; how many it acknowledged."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            store = ChunkStore.open(root, SPEC, disk_cap=40 * NBYTES)
            buffer = aligned_bytes(NBYTES)
            for chunk, content in writes:
                buffer[:] = memoryview(content)
                store.write(chunk, buffer)
                os.write(write, b".")
        finally:
            os._exit(1)
    os.close(write)
    acknowledged = 0
    while acknowledged < after and os.read(read, 1):
        acknowledged += 1
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while os.read(read, 1):
        acknowledged += 1
    os.close(read)
    return acknowledged


def run_kills(root: Path, times: int, real_bytes: Callable[[Path], int]) -> None:
    rng = random.Random(times)
    images = {(c, g): image(chunk=c, generation=g).tobytes() for c in range(12) for g in range(3)}
    on_disk: dict[int, int] = {}
    ChunkStore.create(root, SPEC).close()
    for _ in range(times):
        plan = [(rng.randrange(12), rng.randrange(3)) for _ in range(200)]
        after = rng.randrange(1, 25)
        done = kill_in_the_middle(root, [(c, images[c, g]) for c, g in plan], after)
        assert done >= after
        on_disk |= dict(plan[:done])
        store = ChunkStore.open(root, SPEC, disk_cap=40 * NBYTES)
        got = {chunk.chunk: chunk.record.generation for chunk in store.contents()}
        under_way = dict(plan[done : done + 1])
        assert got in (on_disk, on_disk | under_way)
        on_disk = got
        assert store.damaged == ()
        assert store.verify() == ()
        assert not list(root.rglob("*.tmp"))
        assert real_bytes(root / "first") == pytest.approx(store.bytes_used, abs=100)
        for chunk, generation in got.items():
            out = aligned_bytes(NBYTES)
            store.read(chunk, out)
            assert out.tobytes() == images[chunk, generation]
        store.close()
        assert not list(root.rglob(".worldpager*"))


def test_killed_ten_times(tmp_path: Path, real_bytes) -> None:
    run_kills(tmp_path, 10, real_bytes)


@pytest.mark.slow
def test_killed_two_hundred_times(tmp_path: Path, real_bytes) -> None:
    run_kills(tmp_path, 200, real_bytes)


class Quick(FaultyIO):
    """Without waiting for the disk; one call of a kind can be made to fail."""

    def sync(self, fd: int) -> None:
        self._meet("sync")

    def sync_folder(self, path: Path) -> None:
        self._meet("sync_folder")


IMAGES = {(c, g): image(chunk=c, generation=g, tokens=24 - 8 * g) for c in range(4) for g in (0, 1)}
CALLS = ("open_new_direct", "pwrite", "sync", "rename", "unlink")


class AgainstDictionary(RuleBasedStateMachine):
    """Writes, deletes, failures, crashes and reopening against a dictionary of generations."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name) / "store"
        self.io = Quick()
        self.store = ChunkStore.create(self.root, SPEC, io=self.io)
        self.model: dict[int, int] = {}

    @rule(
        chunk=st.integers(0, 3), generation=st.integers(0, 1), fault=st.sampled_from((None, *CALLS))
    )
    def write(self, chunk: int, generation: int, fault: str | None) -> None:
        self.io.plan = lambda name, nth: 28 if name == fault else 0
        try:
            self.store.write(chunk, IMAGES[chunk, generation])
            self.model[chunk] = generation
        except StoreError:
            assert fault is not None
        self.io.plan = lambda name, nth: 0

    @rule(chunk=st.integers(0, 3))
    def delete(self, chunk: int) -> None:
        self.store.delete(chunk)
        self.model.pop(chunk, None)

    @rule(crash=st.booleans())
    def reopen(self, crash: bool) -> None:
        if crash:
            (self.root / "first/kv/.2.0.0.0.0.0.1.1.tmp").write_bytes(b"torn")
        self.store.close()
        self.store = ChunkStore.open(self.root, SPEC, io=self.io)

    @rule()
    def publish(self) -> None:
        self.store.publish_metadata({})

    @invariant()
    def agrees(self) -> None:
        found = {chunk.chunk: chunk.record.generation for chunk in self.store.contents()}
        assert found == self.model
        assert self.store.damaged == ()
        real = sum(
            path.lstat().st_size for path in (self.root / "first").rglob("*") if path.is_file()
        )
        assert abs(real - self.store.bytes_used) < 200

    def teardown(self) -> None:
        assert self.store.verify() == ()
        self.store.close()
        self.folder.cleanup()


AgainstDictionary.TestCase.settings = settings(max_examples=30, stateful_step_count=25)
TestAgainstDictionary = AgainstDictionary.TestCase


def test_a_record_can_be_read_without_the_store(used: Path) -> None:
    content = aligned_bytes(NBYTES)
    content[:] = memoryview(shard(used, 2).read_bytes())
    record, layout = read_tail(content, NBYTES, SPEC.layers)
    assert (record.chunk, record.start_frame) == (2, 6)
    assert layout.nbytes == NBYTES

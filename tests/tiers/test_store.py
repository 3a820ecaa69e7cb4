"""The disk tier as its callers see it: what is written comes back, or is refused and counted."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tiers.chunks import SPEC, image
from tests.tiers.faults import FaultyIO, NoDirectTransferIO
from worldpager.errors import (
    ClosedError,
    ConfigError,
    DamagedBlockError,
    StoreError,
    StoreLockedError,
)
from worldpager.tiers.directio import aligned_bytes
from worldpager.tiers.io_backend import Bytes, SystemIO
from worldpager.tiers.store import ChunkStore

NBYTES = image().nbytes
RealBytes = Callable[[Path], int]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    store = ChunkStore.create(tmp_path, SPEC)
    yield store
    store.close()


def stored(store: ChunkStore, chunk: int, stream: int = 0) -> bytes:
    out = aligned_bytes(store.size(chunk, stream) or 0)
    store.read(chunk, out, stream)
    return out.tobytes()


def ids(store: ChunkStore) -> list[int]:
    return [found.chunk for found in store.contents()]


def temporaries(root: Path) -> list[Path]:
    return [path for path in root.rglob(".*") if path.name.endswith(".tmp")]


def test_chunks_come_back_whole_now_and_after_reopening(
    tmp_path: Path, store: ChunkStore, real_bytes: RealBytes
) -> None:
    for chunk in (0, 7, 3, 2**32 - 1):
        store.write(chunk, image(chunk=chunk))
    store.write(3, image(chunk=3, generation=1, tokens=5))
    store.delete(7)
    store.delete(7)
    for _ in range(2):
        found = {chunk.chunk: chunk for chunk in store.contents()}
        assert list(found) == [0, 3, 2**32 - 1]
        assert store.damaged == ()
        assert found[3].record.generation == 1
        assert found[3].nbytes == store.size(3) == image(chunk=3, tokens=5).nbytes
        assert store.size(7) is None
        assert stored(store, 0) == image(chunk=0).tobytes()
        assert stored(store, 3) == image(chunk=3, generation=1, tokens=5).tobytes()
        assert store.verify() == ()
        assert real_bytes(tmp_path / "first") == pytest.approx(store.bytes_used, abs=100)
        store.close()
        store = ChunkStore.open(tmp_path, SPEC)
    store.close()


def test_absent_chunks_and_wrong_lengths_are_told_apart(store: ChunkStore) -> None:
    store.write(1, image(chunk=1))
    with pytest.raises(DamagedBlockError) as caught:
        store.read(2, aligned_bytes(NBYTES))
    assert caught.value.reason == "missing"
    with pytest.raises(DamagedBlockError) as caught:
        store.read(1, aligned_bytes(NBYTES + 4096))
    assert caught.value.reason == "size"
    for chunk in (-1, 2**32):
        with pytest.raises(ConfigError, match=f"not {chunk}"):
            store.write(chunk, image())


def test_streams_do_not_see_each_other(tmp_path: Path, spec_with) -> None:
    spec = spec_with(streams=("cond", "uncond"))
    store = ChunkStore.create(tmp_path, spec)
    for stream in (0, 1):
        store.write(4, image(spec, 4, stream=stream), stream)
    store.write(5, image(spec, 5, stream=1), 1)
    assert [(c.stream, c.chunk) for c in store.contents()] == [(0, 4), (1, 4), (1, 5)]
    assert stored(store, 4, 0) == image(spec, 4, stream=0).tobytes()
    assert stored(store, 4, 1) == image(spec, 4, stream=1).tobytes()
    store.delete(4, 0)
    assert [(c.stream, c.chunk) for c in store.contents()] == [(1, 4), (1, 5)]
    os.replace(tmp_path / "first/uncond/5.0.0.0.0.0", tmp_path / "first/cond/5.0.0.0.0.0")
    store.close()
    store = ChunkStore.open(tmp_path, spec)
    assert [(c.stream, c.chunk) for c in store.contents()] == [(1, 4)]
    assert [(c.stream, c.chunk, c.reason) for c in store.damaged] == [(0, 5, "identity")]
    store.close()


def test_everything_is_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = ChunkStore.create(tmp_path / "a" / "b", SPEC)
        store.write(0, image())
    finally:
        os.umask(old)
    for path in tmp_path.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    store.close()


@pytest.mark.parametrize("refusal", ["open", "first transfer"])
def test_without_direct_io_all_works(tmp_path: Path, refusal: str) -> None:
    io = NoDirectTransferIO() if refusal == "first transfer" else FaultyIO(_no_direct_open)
    store = ChunkStore.create(tmp_path / "größer und weiter", SPEC, io=io)
    for chunk in range(3):
        store.write(chunk, image(chunk=chunk))
    assert store.method.startswith("buffered I/O: the file system refused O_DIRECT at ")
    assert refusal in store.method
    assert stored(store, 1) == image(chunk=1).tobytes()
    assert ids(store) == [0, 1, 2]
    store.close()


def _no_direct_open(name: str, nth: int) -> int:
    return errno.EINVAL if name in ("open_new_direct", "open_read_direct") else 0


def test_closed_stores_refuse(store: ChunkStore) -> None:
    store.close()
    store.close()
    for call in (
        lambda: store.write(0, image()),
        lambda: store.read(0, image()),
        lambda: store.delete(0),
        store.contents,
        store.verify,
        store.destroy,
        lambda: store.publish_metadata({}),
    ):
        with pytest.raises(ClosedError, match="was closed"):
            call()


def test_a_forked_child_may_not_write(tmp_path: Path, store: ChunkStore, in_child) -> None:
    def child() -> None:
        with pytest.raises(ClosedError, match="forked"):
            store.write(0, image())
        store.close()

    in_child(child)
    store.write(0, image())
    assert ids(store) == [0]


def test_threads_share_a_store(tmp_path: Path, store: ChunkStore, real_bytes: RealBytes) -> None:
    images = [image(chunk=chunk) for chunk in range(40)]
    troubles: list[BaseException] = []

    def work(part: int) -> None:
        try:
            for chunk in range(part, 40, 4):
                store.write(chunk, images[chunk])
                assert stored(store, chunk) == images[chunk].tobytes()
                store.write(chunk, images[chunk])
                if chunk % 3 == 0:
                    store.delete(chunk)
                store.publish_metadata({})
        except BaseException as trouble:
            troubles.append(trouble)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert troubles == []
    assert ids(store) == [chunk for chunk in range(40) if chunk % 3]
    assert real_bytes(tmp_path / "first") == pytest.approx(store.bytes_used, abs=200)


def test_one_writer_of_a_chunk_at_a_time(tmp_path: Path) -> None:
    class Slow(SystemIO):
        reached, go = threading.Event(), threading.Event()

        def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
            if len(data) == NBYTES:
                self.reached.set()
                self.go.wait(60)
            return super().pwrite(fd, data, offset)

    io = Slow()
    store = ChunkStore.create(tmp_path, SPEC, io=io)
    thread = threading.Thread(target=store.write, args=(1500, image(chunk=1500)))
    thread.start()
    assert io.reached.wait(60)
    for call in (lambda: store.write(1500, image(chunk=1500)), lambda: store.delete(1500)):
        with pytest.raises(StoreError) as caught:
            call()
        assert caught.value.errno == errno.EBUSY
    store.publish_metadata({})  # must not shrink the array below the chunk under way
    io.go.set()
    thread.join()
    assert '"shape": [\n  1501,' in (tmp_path / "first/kv/zarr.json").read_text()
    assert ids(store) == [1500]
    store.close()


def test_opening_and_closing_leaves_no_trace(tmp_path: Path) -> None:
    ChunkStore.create(tmp_path, SPEC).close()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    files = sorted(tmp_path.rglob("*"))
    for _ in range(30):
        ChunkStore.open(tmp_path, SPEC).close()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert sorted(tmp_path.rglob("*")) == files


def test_destroy_frees_the_name_and_nothing_else(tmp_path: Path, spec_with) -> None:
    other = ChunkStore.create(tmp_path, spec_with(rollout="second"))
    other.write(1, image(other.spec, 1))
    store = ChunkStore.create(tmp_path, SPEC)
    store.write(1, image(chunk=1))
    store.destroy()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["second", "zarr.json"]
    assert not ChunkStore.exists(tmp_path, "first")
    again = ChunkStore.create(tmp_path, SPEC)
    assert again.contents() == []
    (tmp_path / "first/2026-notes.txt").write_text("mine")
    with pytest.raises(StoreError, match="could not delete the rollout"):
        again.destroy()
    assert (tmp_path / "first/2026-notes.txt").read_text() == "mine"
    assert ids(other) == [1]
    other.close()


def test_of_many_makers_one_wins(tmp_path: Path) -> None:
    told, tell = os.pipe()
    wait, go = os.pipe()
    children = []
    for _ in range(6):
        if (pid := os.fork()) == 0:
            os.close(go)
            outcome = b"?"
            try:
                _store = ChunkStore.create(tmp_path / "new" / "store", SPEC)
                outcome = b"won"
            except StoreLockedError:
                outcome = b"refused"
            except StoreError as error:
                outcome = b"refused" if error.errno == errno.EEXIST else b"failed"
            finally:
                os.write(tell, outcome + b" ")
                os.read(wait, 1)  # hold it until all have tried
                os._exit(0)
        children.append(pid)
    outcomes = b""
    while outcomes.count(b" ") < len(children):
        outcomes += os.read(told, 1000)
    for fd in (go, wait, told, tell):
        os.close(fd)
    for pid in children:
        os.waitpid(pid, 0)
    assert sorted(outcomes.split()) == [b"refused"] * 5 + [b"won"]
    ChunkStore.open(tmp_path / "new" / "store", SPEC).close()

"""Disks that fail or are full: nothing is lost that was there, nothing counted that is not."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tiers.chunks import SPEC, image
from tests.tiers.faults import FaultyIO, fail
from worldpager.errors import (
    ConfigError,
    StoreError,
    StoreFullError,
)
from worldpager.tiers.directio import aligned_bytes
from worldpager.tiers.io_backend import SystemIO
from worldpager.tiers.space import DiskCap
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


FAILURES = [
    ("open_new_direct", errno.EACCES, StoreError),
    ("open_new_direct", errno.EMFILE, StoreError),
    ("pwrite", errno.EIO, StoreError),
    ("pwrite", errno.ENOSPC, StoreFullError),
    ("pwrite", errno.EDQUOT, StoreFullError),
    ("pwrite", errno.EFBIG, StoreFullError),
    ("sync", errno.EIO, StoreError),
    ("sync", errno.ENOSPC, StoreFullError),
    ("rename", errno.ENOSPC, StoreFullError),
    ("rename", errno.EIO, StoreError),
]


@pytest.mark.parametrize(("call", "number", "kind"), FAILURES)
@pytest.mark.parametrize("replaces", [False, True])
def test_a_failed_write_changes_nothing(
    tmp_path: Path, real_bytes: RealBytes, call: str, number: int, kind: type, replaces: bool
) -> None:
    io = FaultyIO(share=0.5)
    store = ChunkStore.create(tmp_path, SPEC, io=io)
    store.write(0, image(chunk=0))
    used, chunk = store.bytes_used, 0 if replaces else 1
    io.plan = fail(call, number)
    with pytest.raises(kind) as caught:
        store.write(chunk, image(chunk=chunk, generation=9))
    assert caught.value.errno == number
    assert type(caught.value) is kind
    io.plan = lambda name, nth: 0
    assert temporaries(tmp_path) == []
    assert store.bytes_used == used
    assert real_bytes(tmp_path / "first") == pytest.approx(used, abs=100)
    assert stored(store, 0) == image(chunk=0).tobytes()
    assert ids(store) == [0]
    store.write(chunk, image(chunk=chunk, generation=9))
    assert stored(store, chunk) == image(chunk=chunk, generation=9).tobytes()
    store.close()


def test_a_failed_last_sync_is_told_and_counted_truthfully(
    tmp_path: Path, real_bytes: RealBytes
) -> None:
    io = FaultyIO()
    store = ChunkStore.create(tmp_path, SPEC, io=io)
    io.plan = fail("sync_folder", errno.EIO)
    with pytest.raises(StoreError, match="could not write chunk 2"):
        store.write(2, image(chunk=2))
    assert stored(store, 2) == image(chunk=2).tobytes()
    assert real_bytes(tmp_path / "first") == pytest.approx(store.bytes_used, abs=100)
    store.close()


def test_a_temporary_file_that_stays_is_counted_and_swept_later(
    tmp_path: Path, real_bytes: RealBytes
) -> None:
    io = FaultyIO()
    store = ChunkStore.create(tmp_path, SPEC, io=io)
    used = store.bytes_used
    io.plan = lambda name, nth: errno.EIO if name in ("sync", "unlink") else 0
    with pytest.raises(StoreError):
        store.write(2, image(chunk=2))
    assert len(temporaries(tmp_path)) == 1
    assert store.bytes_used == used + NBYTES
    assert real_bytes(tmp_path / "first") == pytest.approx(store.bytes_used, abs=100)
    store.close()
    store = ChunkStore.open(tmp_path, SPEC)
    assert temporaries(tmp_path) == []
    assert store.bytes_used == pytest.approx(used, abs=100)
    store.close()


def test_a_failed_delete_or_read_leaves_the_chunk(tmp_path: Path) -> None:
    io = FaultyIO()
    store = ChunkStore.create(tmp_path, SPEC, io=io)
    store.write(2, image(chunk=2))
    used = store.bytes_used
    io.plan = fail("unlink", errno.EIO)
    with pytest.raises(StoreError, match="could not delete chunk 2"):
        store.delete(2)
    io.plan = fail("pread", errno.EIO)
    with pytest.raises(StoreError, match="could not read chunk 2"):
        store.read(2, aligned_bytes(NBYTES))
    assert ids(store) == []
    assert [(c.chunk, c.reason) for c in store.damaged] == [(2, "unreadable")]
    io.plan = lambda name, nth: 0
    assert ids(store) == [2]
    assert store.bytes_used == used
    assert stored(store, 2) == image(chunk=2).tobytes()
    store.close()


def session_document(path: Path) -> int:
    return (path / "zarr.json").stat().st_size


def promised(store: ChunkStore) -> int:
    """Bytes that the cap keeps for a rollout's metadata, of up to 64 chunks."""
    return store._metadata.bound(1)


def begun(store: ChunkStore) -> int:
    """Bytes that the cap keeps for a further rollout to begin."""
    return store._metadata.bound(0)


def test_the_cap_counts_the_replaced_file_too(tmp_path: Path) -> None:
    store = ChunkStore.create(tmp_path, SPEC, disk_cap=2**40)
    overhead = session_document(tmp_path) + promised(store) + begun(store)
    store.close()
    store = ChunkStore.open(tmp_path, SPEC, disk_cap=overhead + 2 * NBYTES)
    store.write(0, image(chunk=0))
    store.write(0, image(chunk=0, generation=1))
    store.write(1, image(chunk=1))
    for chunk in (0, 2):
        with pytest.raises(StoreFullError, match=r"disk cap of .* is reached"):
            store.write(chunk, image(chunk=chunk, generation=2))
    store.delete(1)
    store.write(2, image(chunk=2))
    store.close()
    store = ChunkStore.open(tmp_path, SPEC, disk_cap=overhead + NBYTES)
    with pytest.raises(StoreFullError, match=r"disk cap of .* is reached"):
        store.write(3, image(chunk=3))
    assert ids(store) == [0, 2], "what is there stays, though it is more than the new cap"
    store.close()


def test_the_floor_is_left_free(tmp_path: Path) -> None:
    class Disk(SystemIO):
        free = 100_000 + NBYTES

        def free_bytes(self, path: Path) -> int:
            return self.free

    io = Disk()
    store = ChunkStore.create(tmp_path, SPEC, free_floor=100_000, io=io)
    store.write(0, image())
    io.free -= 1
    with pytest.raises(StoreFullError, match="above the floor"):
        store.write(1, image(chunk=1))
    store.close()


def test_rollouts_share_the_cap_open_or_not(tmp_path: Path, spec_with) -> None:
    specs = [spec_with(rollout=name) for name in ("first", "second", "third")]
    closed = ChunkStore.create(tmp_path, specs[0])
    documents = closed.bytes_used
    closed.write(0, image(specs[0]))
    closed.close()
    overhead = session_document(tmp_path) + documents + 2 * promised(closed) + begun(closed)
    cap = DiskCap(overhead + 4 * NBYTES + 100)
    stores = [ChunkStore.create(tmp_path, spec, disk_cap=cap) for spec in specs[1:]]
    stores[0].write(0, image(specs[1]))
    stores[1].write(0, image(specs[2]))
    stores[1].write(1, image(specs[2], 1))
    for _ in range(2):
        with pytest.raises(StoreFullError, match=r"disk cap of .* is reached"):
            stores[0].write(1, image(specs[1], 1))
        stores[0].close()
        stores[0] = ChunkStore.open(tmp_path, specs[1], disk_cap=cap)
    stores[1].destroy()
    stores[0].write(1, image(specs[1], 1))
    assert cap.taken == pytest.approx(2 * documents + 3 * NBYTES, abs=400)
    stores[0].close()


@pytest.mark.parametrize(("cap", "floor"), [(0, 0), (-5, 0), (None, -1)])
def test_senseless_caps_are_refused(tmp_path: Path, cap: int | None, floor: int) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        ChunkStore.create(tmp_path, SPEC, disk_cap=cap, free_floor=floor)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True) if os.getuid() == 0 else None
    if done is None or done.returncode:
        why = done.stderr.strip() if done else "only root may mount one"
        pytest.skip(f"needs a small file system: {why}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_and_room_again(small_disk: Path, real_bytes: RealBytes) -> None:
    store = ChunkStore.create(small_disk / "world", SPEC)
    written = 0
    with pytest.raises(StoreFullError):
        for chunk in range(200):
            store.write(chunk, image(chunk=chunk))
            written += 1
    assert 50 < written < 90
    assert temporaries(small_disk) == []
    assert ids(store) == list(range(written))
    assert store.verify() == ()
    assert real_bytes(small_disk / "world/first") == pytest.approx(store.bytes_used, abs=100)
    for chunk in range(10):
        store.delete(chunk)
    store.write(500, image(chunk=500))
    store.close()
    store = ChunkStore.open(small_disk / "world", SPEC)
    assert ids(store) == [*range(10, written), 500]
    store.close()


def test_full_in_the_middle_of_a_file(small_disk: Path) -> None:
    class Optimist(SystemIO):
        def free_bytes(self, path: Path) -> int:
            return 2**40

    store = ChunkStore.create(small_disk / "world", SPEC, io=Optimist())
    with pytest.raises(StoreFullError) as caught:
        for chunk in range(200):
            store.write(chunk, image(chunk=chunk))
    assert caught.value.errno == errno.ENOSPC
    assert temporaries(small_disk) == []
    whole = ids(store)
    assert store.damaged == ()
    assert store.verify() == ()
    store.delete(whole[0])
    store.write(whole[0], image(chunk=whole[0]))
    store.close()


def test_a_limit_on_file_size_is_no_space(tmp_path: Path, in_child) -> None:
    def limited() -> None:
        store = ChunkStore.create(tmp_path, SPEC)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        with pytest.raises(StoreFullError) as caught:
            store.write(0, image())
        assert caught.value.errno == errno.EFBIG
        assert temporaries(tmp_path) == []
        assert store.contents() == []
        store.close()

    in_child(limited)

"""O14: poor storage abilities. A short O1 runs on each."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.reliability.children import script
from tests.reliability.world import World, chunk_bytes, image_bytes, reference_spec
from tests.tiers.faults import FaultyIO, NoDirectTransferIO, fail
from worldpager.model_adapter.frontend import KVSpec
from worldpager.tiers.io_backend import IOBackend, SystemIO


def exercise(
    directory: Path, *, io: IOBackend | None = None, spec: KVSpec | None = None, chunks: int = 60
) -> str:
    """A rollout through all tiers, a restart, every chunk back; the I/O method in use."""
    world = World(directory, dram=16, io=io, spec=spec, chunks=chunks + 1)
    with world.memory:
        world.run(range(chunks), check=True)
        world.retrieve(chunks)
        world.memory.flush()
        assert world.memory.stats.evictions > 0
        method = world.memory.status().io_method
    again = World(directory, dram=16, io=io, spec=spec, chunks=chunks + 1)
    with again.memory:
        assert all(again.load_patiently(chunk) for chunk in range(chunks))
        assert again.memory.status().ok
    sizes = image_bytes(directory)
    assert {n for c, n in sizes.items() if c} == {chunk_bytes(world.spec)}
    assert cached_bytes(directory) <= 0.05 * sum(sizes.values())
    return method


def cached_bytes(directory: Path) -> int:
    """Bytes of the chunk files that lie in the page cache."""
    libc, cached = ctypes.CDLL(None, use_errno=True), 0
    for path in directory.rglob("*.0.0.0.0.0"):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            with mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
                pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
                libc.mmap.restype = ctypes.c_void_p
                address = libc.mmap(None, ctypes.c_size_t(size), 1, 1, file.fileno(), 0)
                assert not libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages)
                libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
                cached += mmap.PAGESIZE * sum(page & 1 for page in pages)
                assert len(mapping) == size
    return cached


def test_direct_io(tmp_path: Path) -> None:
    assert exercise(tmp_path / "s") == "direct I/O"


@pytest.mark.parametrize("call", ["open_new_direct", "open_read_direct"])
def test_direct_io_refused_at_open(tmp_path: Path, call: str) -> None:
    method = exercise(tmp_path / "s", io=FaultyIO(fail(call, errno.EINVAL)))
    assert method.startswith("buffered I/O") and "at open" in method


def test_direct_io_refused_at_the_first_transfer(tmp_path: Path) -> None:
    method = exercise(tmp_path / "s", io=NoDirectTransferIO())
    assert method.startswith("buffered I/O") and "at the first transfer" in method


@pytest.mark.parametrize(
    ("share", "unit"),
    [
        (0.3, 512),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0.5, 1), (0.4, 4096))),
    ],
)
def test_short_transfers(tmp_path: Path, share: float, unit: int) -> None:
    exercise(tmp_path / "s", io=FaultyIO(share=share, unit=unit), chunks=50)


def test_a_memory_file_system(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(64 << 20)
    world = World(disk / "s", dram=16)
    with world.memory:
        world.run(range(100))
        world.memory.flush()
        assert all(world.load_patiently(chunk) for chunk in range(99))
        assert world.memory.status().io_method


def test_an_overlay(tmp_path: Path, small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(64 << 20)
    for name in ("lower", "upper", "work", "merged"):
        (disk / name).mkdir()
    options = f"lowerdir={disk}/lower,upperdir={disk}/upper,workdir={disk}/work"
    command = ["mount", "-t", "overlay", "overlay", "-o", options, str(disk / "merged")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs an overlay file system: {done.stderr.strip()}")
    try:
        world = World(disk / "merged" / "s", dram=16)
        with world.memory:
            world.run(range(100))
            world.memory.flush()
            assert all(world.load_patiently(chunk) for chunk in range(99))
    finally:
        subprocess.run(["umount", str(disk / "merged")], check=True)


def test_a_path_with_spaces_and_other_letters(tmp_path: Path) -> None:
    exercise(tmp_path / 'Ein Ordner für 世界 \'s "x"' / "s", chunks=50)


@pytest.mark.parametrize(
    "odd", [{"head_dim": 40}, {"tokens_per_frame": 880, "layers": 2}, {"tokens_per_frame": 7}]
)
def test_blocks_that_are_no_whole_pages(tmp_path: Path, odd: dict[str, int]) -> None:
    exercise(tmp_path / "s", spec=reference_spec(**odd), chunks=40)


OUTSIDE = """
import sys
from pathlib import Path
from tests.reliability.test_o14_poor_storage import exercise
import logging
logging.basicConfig(level=logging.WARNING)
print(exercise(Path(sys.argv[1]), chunks=60))
"""


@pytest.mark.parametrize(
    ("what", "method"),
    [("no-direct,short,no-flock", "buffered I/O"), ("no-space", "direct I/O"),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (
         ("no-direct", "buffered I/O"), ("short", "direct I/O"), ("no-flock", "direct I/O")))],
)  # fmt: skip
def test_seen_from_outside(tmp_path: Path, shim: Path, what: str, method: str) -> None:
    """The same without our seam: the C library's calls behave badly."""
    env = {"LD_PRELOAD": str(shim), "SHIM": what, "SHIM_AFTER": "25"}
    child = script(OUTSIDE, tmp_path / "s", env=env)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    assert out.startswith(method), out
    if what == "no-space":
        assert "writing to disk works again" in err


def test_where_locks_are_not_implemented_two_writers_are_kept_apart(
    tmp_path: Path, shim: Path
) -> None:
    code = """
import sys
from pathlib import Path
from tests.reliability.world import World
from worldpager.errors import StoreLockedError
first = World(Path(sys.argv[1]), dram=12)
try:
    World(Path(sys.argv[1]), dram=12)
except StoreLockedError as error:
    print("refused")
first.memory.close()
World(Path(sys.argv[1]), dram=12).memory.close()
print("opened")
"""
    child = script(code, tmp_path / "s", env={"LD_PRELOAD": str(shim), "SHIM": "no-flock"})
    out, err = child.communicate(timeout=120)
    assert out.split() == ["refused", "opened"], err


def test_a_read_only_directory_is_refused_at_open(tmp_path: Path) -> None:
    class ReadOnly(SystemIO):
        def make_folder(self, path: Path) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.raises(OSError, match="Read-only"):
        World(tmp_path / "s", dram=12, io=ReadOnly())

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.faults import FaultyIO, NoDirectTransferIO, fail
from worldpager.errors import ConfigError, DamagedBlockError
from worldpager.tiers.directio import DirectIO, aligned_bytes
from worldpager.tiers.extents import PAGE
from worldpager.tiers.io_backend import Bytes, SystemIO

NBYTES = 5 * PAGE


def some_bytes(nbytes: int = NBYTES) -> Bytes:
    data = aligned_bytes(nbytes)
    data[:] = np.random.default_rng(7).integers(0, 256, nbytes)
    return data


def round_trip(files: DirectIO, path: Path) -> None:
    data, out = some_bytes(), aligned_bytes(NBYTES)
    files.write_new(path, data)
    assert path.read_bytes() == data.tobytes()
    files.read_into(path, out)
    assert (out == data).all()
    tail = aligned_bytes(PAGE)
    files.read_into(path, tail, NBYTES - PAGE)
    assert (tail == data[-PAGE:]).all()


def test_round_trip(tmp_path: Path) -> None:
    files = DirectIO()
    round_trip(files, tmp_path / "file")
    assert files.method.startswith(("direct I/O", "buffered I/O: the file system refused"))


@pytest.mark.parametrize(
    ("share", "unit"), [(0.9, 1), (0.5, 1), (0.3, 512), (0.5, PAGE), (0, 1000)]
)
@pytest.mark.parametrize("direct", [True, False])
def test_short_transfers_go_on_where_they_stopped(
    tmp_path: Path, share: float, unit: int, direct: bool
) -> None:
    plan = fail("open_new_direct", errno.EINVAL) if not direct else lambda name, nth: 0
    round_trip(DirectIO(FaultyIO(plan, share=share, unit=unit)), tmp_path / "file")


@pytest.mark.parametrize("call", ["pread", "pwrite"])
def test_interrupted_calls_are_repeated(tmp_path: Path, call: str) -> None:
    round_trip(DirectIO(FaultyIO(fail(call, errno.EINTR, nth=1))), tmp_path / "file")


@pytest.mark.parametrize("call", ["open_new_direct", "open_read_direct"])
def test_direct_io_refused_at_open(tmp_path: Path, call: str) -> None:
    io = FaultyIO(fail(call, errno.EINVAL))
    files = DirectIO(io)
    round_trip(files, tmp_path / "file")
    assert files.method == "buffered I/O: the file system refused O_DIRECT at open (EINVAL)"
    round_trip(files, tmp_path / "again")
    assert io.calls[call] == 1, "it must not be asked again"


def test_a_file_made_by_the_refused_open_is_not_in_the_way(tmp_path: Path) -> None:
    class MakesItFirst(SystemIO):
        def open_new(self, path: Path, *, direct: bool) -> int:
            fd = super().open_new(path, direct=False)
            if direct:
                os.close(fd)
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return fd

    round_trip(DirectIO(MakesItFirst()), tmp_path / "file")


def test_direct_io_refused_at_the_first_transfer(tmp_path: Path) -> None:
    files = DirectIO(NoDirectTransferIO())
    round_trip(files, tmp_path / "file")
    assert files.method.endswith("refused O_DIRECT at the first transfer (EINVAL)")


def test_buffered_files_leave_no_page_cache(tmp_path: Path) -> None:
    class Counting(NoDirectTransferIO):
        dropped = 0

        def drop_cache(self, fd: int) -> None:
            super().drop_cache(fd)
            self.dropped += 1

    io = Counting()
    files = DirectIO(io)
    round_trip(files, tmp_path / "file")
    assert io.dropped == 3  # one write, two reads


@pytest.mark.parametrize("call", ["pwrite", "sync", "open_new_direct"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_other_failures_are_the_callers(tmp_path: Path, call: str, number: int) -> None:
    with pytest.raises(OSError) as caught:
        DirectIO(FaultyIO(fail(call, number))).write_new(tmp_path / "file", some_bytes())
    assert caught.value.errno == number


def test_a_disk_that_takes_nothing_is_full(tmp_path: Path) -> None:
    class Taking0(SystemIO):
        def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
            return 0

    with pytest.raises(OSError) as caught:
        DirectIO(Taking0()).write_new(tmp_path / "file", some_bytes())
    assert caught.value.errno == errno.ENOSPC


def test_memory_must_be_aligned_whole_pages(tmp_path: Path) -> None:
    data = some_bytes()
    for wrong in (data[1 : PAGE + 1], data[:100], data[::2]):
        with pytest.raises(ConfigError, match="page-aligned memory"):
            DirectIO().write_new(tmp_path / "file", wrong)
        with pytest.raises(ConfigError, match="page-aligned memory"):
            DirectIO().read_into(tmp_path / "file", wrong)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "kind", ["nothing", "link", "fifo", "folder", "socket", "device", "parent"]
)
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    path, files = tmp_path / "file", DirectIO()
    files.write_new(tmp_path / "real", some_bytes())
    method = files.method
    if kind == "link":
        path.symlink_to(tmp_path / "real")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "parent":
        path = tmp_path / "real" / "file"
    with pytest.raises(DamagedBlockError) as caught:
        files.read_into(path, aligned_bytes(NBYTES))
    assert caught.value.reason == "missing"
    assert files.method == method


@pytest.mark.parametrize("size", [0, 1, NBYTES - 1, NBYTES + 1, NBYTES + PAGE])
def test_another_length_is_damage(tmp_path: Path, size: int) -> None:
    (tmp_path / "file").write_bytes(bytes(size))
    out = aligned_bytes(NBYTES)
    with pytest.raises(DamagedBlockError) as caught:
        DirectIO().read_into(tmp_path / "file", out)
    assert caught.value.reason == "size"
    assert f"has {size} bytes instead of {NBYTES}" in str(caught.value)


def test_a_file_cut_while_it_is_read_is_damage(tmp_path: Path) -> None:
    class Cutting(FaultyIO):
        def pread(self, fd: int, out: Bytes, offset: int) -> int:
            moved = super().pread(fd, out, offset)
            os.truncate(tmp_path / "file", PAGE)
            return moved

    DirectIO().write_new(tmp_path / "file", some_bytes())
    with pytest.raises(DamagedBlockError) as caught:
        DirectIO(Cutting(share=0.5, unit=PAGE)).read_into(tmp_path / "file", aligned_bytes(NBYTES))
    assert caught.value.reason == "size"


def test_files_are_private_and_never_replaced(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        DirectIO().write_new(tmp_path / "file", some_bytes())
        SystemIO().make_folder(tmp_path / "folder")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700
    with pytest.raises(FileExistsError):
        DirectIO().write_new(tmp_path / "file", some_bytes())
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        DirectIO().write_new(tmp_path / "link", some_bytes())
    assert not (tmp_path / "elsewhere").exists()


def test_close_to_a_size_limit_the_method_stays(tmp_path: Path, in_child) -> None:
    def limited() -> None:
        import resource

        files = DirectIO()
        files.write_new(tmp_path / "before", some_bytes())
        method = files.method
        resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE + 1000, resource.RLIM_INFINITY))
        with pytest.raises(OSError) as caught:
            files.write_new(tmp_path / "file", some_bytes())
        assert caught.value.errno == errno.EFBIG
        assert files.method == method

    in_child(limited)

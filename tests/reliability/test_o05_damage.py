"""O5: damage at rest and under way."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest

from tests.reliability.faults import FailingIO, HangingIO, fail
from tests.reliability.world import World, chunk_bytes, chunk_file, reference_spec, verify
from worldpager.quant.shard import tail_bytes

CHUNKS = 62  # 61 of them stored
SPEC = reference_spec()
BYTES = chunk_bytes(SPEC)
TAIL = BYTES - tail_bytes(SPEC.layers)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world whose store is closed, and copied for each test."""
    world = World(tmp_path_factory.mktemp("pristine") / "s", dram=20)
    with world.memory:
        world.run(range(CHUNKS), check=False)
    return world


def copied(pristine: World, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine.memory.config.store, tmp_path / "s"))


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def punch(path: Path, offset: int, length: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes(length))


DAMAGE = {
    3: ("emptied", "magic", lambda p: punch(p, 0, 20_000)),
    5: ("emptied wholly", "record index", lambda p: punch(p, 0, BYTES)),
    8: ("cut by a byte", "size", lambda p: os.truncate(p, BYTES - 1)),
    11: ("cut by a page", "size index record", lambda p: os.truncate(p, BYTES - 4096)),
    14: ("cut to nothing", "size", lambda p: os.truncate(p, 0)),
    17: ("extended", "index record", lambda p: os.truncate(p, BYTES + 4096)),
    20: ("payload", "checksum", lambda p: flip(p, 64 + 5000, 3)),
    23: ("scales", "checksum", lambda p: flip(p, 64, 7)),
    26: ("header", "checksum", lambda p: flip(p, 16, 1)),
    29: ("second layer", "checksum", lambda p: flip(p, BYTES // 4 + 9000, 5)),
    32: ("index", "index", lambda p: flip(p, BYTES - 20, 2)),
    35: ("record", "record", lambda p: flip(p, TAIL + 16, 2)),
    38: ("removed", "missing", os.unlink),
    41: ("another's", "identity", lambda p: shutil.copy(p.with_name("50.0.0.0.0.0"), p)),
    44: ("a link", "missing", lambda p: (os.unlink(p), os.symlink("/etc/passwd", p))),
}


def test_damaged_chunks_are_absent_with_their_reasons_and_all_others_exact(
    pristine: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = copied(pristine, tmp_path)
    for chunk, (_, _, damage) in DAMAGE.items():
        damage(chunk_file(directory, chunk))
    world = World(directory, dram=12)
    world.positions = pristine.positions
    with world.memory:
        came = {chunk for chunk in range(CHUNKS - 1) if world.load_patiently(chunk)}
        assert came == set(range(CHUNKS - 1)) - set(DAMAGE)
        status = world.memory.status()
        reads = world.memory.stats.reads
        assert not any(world.load_patiently(chunk) for chunk in DAMAGE)
        assert world.memory.stats.reads == reads, "what is damaged is not tried again"
        found = dict(status.damaged)
        for reason, count in status.lost.items():
            found[reason] = found.get(reason, 0) + count
        assert sum(found.values()) == len(DAMAGE) - 1, "one was simply gone"
        assert not status.ok
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) <= 1 + 2 * len(found), "once per reason, not per block"

    code, damaged = verify(directory)
    assert code == 1
    expected = {
        f"rollout-0/kv/{chunk}": reasons.split()
        for chunk, (_, reasons, _) in DAMAGE.items() if chunk != 38
    }  # fmt: skip
    assert set(damaged) == set(expected)
    assert all(reason in expected[chunk] for chunk, reason in damaged.items()), damaged


def test_a_rollout_goes_on_over_damage(pristine: World, tmp_path: Path) -> None:
    """No byte of a rejected block reaches a window, now or later."""
    world = World(tmp_path / "s", dram=12)
    with world.memory:
        world.run(range(40))
        world.memory.flush()
        for chunk in range(1, 39, 2):
            flip(chunk_file(tmp_path / "s", chunk), 64 + 100 * chunk)
        world.run(range(40, 200))  # each window is checked bit for bit
        lost = world.memory.status().lost
        assert set(lost) == {"checksum"} and 5 <= lost["checksum"] <= 19


@pytest.mark.parametrize("cut", [0, 1, 4096, BYTES // 2, BYTES - 512])
def test_a_file_cut_while_the_store_is_open(pristine: World, tmp_path: Path, cut: int) -> None:
    world = World(copied(pristine, tmp_path), dram=12)
    with world.memory:
        os.truncate(chunk_file(tmp_path / "s", 9), cut)
        assert not world.load_patiently(9)
        assert world.memory.status().lost == {"size": 1}
        assert all(world.load_patiently(chunk) for chunk in range(CHUNKS - 1) if chunk != 9)


def test_a_file_cut_while_it_is_read(pristine: World, tmp_path: Path) -> None:
    io = HangingIO()
    world = World(copied(pristine, tmp_path), dram=12, io=io)
    with world.memory:
        io.hang("pread", 1)
        assert not world.load(9)
        assert io.reached.wait(30)
        os.truncate(chunk_file(tmp_path / "s", 9), 8192)
        io.release()
        world.memory._session.pager.settle()
        assert world.memory.status().lost == {"size": 1}
        assert world.load_patiently(10)


@pytest.mark.parametrize("call", ["open_read", "pread"])
def test_one_transient_error_and_the_chunk_comes_back(
    pristine: World, tmp_path: Path, call: str
) -> None:
    io = FailingIO()
    world = World(copied(pristine, tmp_path), dram=12, io=io)
    with world.memory:
        io.plan = fail(call, nth=io.calls[call] + 1)
        assert not world.load(9)
        world.memory._session.pager.settle()
        assert world.memory.status().read_failures == {"I/O error": 1}
        for _ in range(9):  # the pause between two attempts
            world.memory._session.pager.tick()
        assert world.load_patiently(9)
        assert not world.memory.status().lost


def test_an_unreadable_file_is_given_up_after_some_attempts(
    pristine: World, tmp_path: Path
) -> None:
    io = FailingIO()
    world = World(copied(pristine, tmp_path), dram=12, io=io)
    with world.memory:
        io.plan = fail("open_read", errno.EACCES)
        for _ in range(200):
            world.load(9)
            world.memory._session.pager.tick()
            world.memory._session.pager.settle()
        assert world.memory.status().lost == {"I/O error": 1}
        assert io.failed["open_read"] <= 10, "not tried again without end"
        io.plan = lambda call, nth: 0
        assert world.load_patiently(10)
    again = World(tmp_path / "s", dram=12)
    with again.memory:
        assert again.load_patiently(9), "nothing was deleted"

"""A chunk written again: the newest is served, and a kill finds the older one or the newer one."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.reliability.children import Forked, Say, moment
from tests.reliability.faults import FailingIO, HangingIO, fail
from tests.reliability.world import World, chunk_file, folder_bytes, leftovers
from worldpager.errors import BackgroundError

AGAIN = range(12, 18)


def all_come(directory: Path, like: World, version: int) -> None:
    """Everything is there and exact, :data:`AGAIN` in that version."""
    world = World(directory, dram=40)
    world.positions = like.positions
    world.versions = dict.fromkeys(AGAIN, version)
    with world.memory:
        assert world.memory.status().ok
        assert all(world.load_patiently(chunk) for chunk in range(30))


@pytest.mark.parametrize("call", ["pwrite", "sync"])
def test_what_was_flushed_outlives_a_kill_until_its_successor_is_written(
    tmp_path: Path, call: str
) -> None:
    """A copy of the folder is what a kill at that moment leaves."""
    io = HangingIO()
    world = World(tmp_path / "s", dram=40, io=io)
    with world.memory:
        world.run(range(31), check=False)
        world.memory.flush()
        io.hang(call)
        world.run(range(AGAIN.start, AGAIN.stop + 1), version=1)
        with pytest.raises(BackgroundError, match="still not on disk"):
            world.memory.flush(0.1)
        assert io.reached.wait(30)
        shutil.copytree(tmp_path / "s", tmp_path / "killed")
        assert all(world.load(chunk) for chunk in AGAIN), "and never an old one is served"
        io.release()
        world.memory.flush()
        shutil.copytree(tmp_path / "s", tmp_path / "flushed")
        assert world.memory.stats.deletes == 0
    all_come(tmp_path / "killed", world, version=0)
    all_come(tmp_path / "flushed", world, version=1)


@pytest.mark.parametrize("call", ["open_new", "pwrite", "sync", "rename", "sync_folder"])
def test_a_write_that_fails_leaves_the_older_file_or_the_newer_one(
    tmp_path: Path, call: str
) -> None:
    io = FailingIO()
    world = World(tmp_path / "s", dram=40, io=io)
    with pytest.raises(BackgroundError, match="no space"), world.memory:
        world.run(range(31), check=False)
        world.memory.flush()
        io.plan = fail(call, errno.ENOSPC)
        world.run(range(AGAIN.start, AGAIN.stop + 1), version=1)
        with pytest.raises(BackgroundError, match="no space"):
            world.memory.flush()
        assert all(world.load(chunk) for chunk in AGAIN)
        disk = world.memory.status().occupancy.disk
        assert abs(disk - folder_bytes(tmp_path / "s")) <= 4096
    newer = call == "sync_folder"  # those that were tried are there, the others as they were
    again = World(tmp_path / "s", dram=40)
    again.remember(world)
    with again.memory:
        for chunk in AGAIN:
            generation = again.memory._session.pager.core.table.pages[0, chunk].generation
            again.versions[chunk] = int(generation > 31)
            assert again.load_patiently(chunk)
        assert any(again.versions[chunk] for chunk in AGAIN) == newer


def test_a_newer_version_that_is_dropped_takes_the_older_file_with_it(tmp_path: Path) -> None:
    """Otherwise a chunk that was told lost would be back, and old, after a restart."""
    io = FailingIO()
    world = World(tmp_path / "s", dram=11, io=io, pressure="drop")
    with pytest.raises(BackgroundError, match="no space"), world.memory:
        world.run(range(31), check=False)
        world.memory.flush()
        io.plan = fail("pwrite", errno.ENOSPC)
        world.run(range(AGAIN.start, AGAIN.start + 40), version=1)
        gone = set(AGAIN) - world.present()
        assert gone
        world.memory.settle()
        assert not any(chunk_file(tmp_path / "s", chunk).exists() for chunk in gone)
    again = World(tmp_path / "s", dram=11)
    with again.memory:
        assert not gone & again.present()


def rewinding(directory: Path, seed: int) -> Callable[[Say], None]:
    """A world that is rewound again and again; says what its flushes covered."""

    def job(say: Say) -> None:
        rng = random.Random(seed)
        world = World(directory, dram=14)
        world.run(range(25), check=False)
        for version in range(1, 1000):
            world.memory.flush()
            flushed = {c: v for c, v in world.versions.items() if c != world.begun}
            say("flushed " + " ".join(f"{c}:{v}" for c, v in flushed.items()))
            say(f"version {version}")
            start = rng.randrange(1, 20)
            world.run(range(start, start + 6), check=False, version=version)
            say(f"flushing {version}")

    return job


def kill_and_look(directory: Path, seed: int) -> None:
    """Kill a world while it is rewound, or flushes that."""
    rng = random.Random(seed)
    child = Forked(rewinding(directory, seed))
    child.wait_for(f"{rng.choice(['version', 'flushing'])} {rng.randrange(1, 4)}")
    moment(rng.uniform(0, 0.02))
    said = child.kill()
    latest = max(int(line.split()[1]) for line in said if line.startswith("version"))
    last = [line for line in said if line.startswith("flushed")][-1]
    flushed = {int(c): int(v) for c, _, v in (pair.partition(":") for pair in last.split()[1:])}
    world = World(directory, dram=40)
    with world.memory:
        assert set(flushed) <= world.present() <= set(range(25))
        for chunk, version in flushed.items():
            exact_in_some(world, chunk, range(version, latest + 1))
        assert world.memory.status().ok
        assert abs(world.memory.status().occupancy.disk - folder_bytes(directory)) <= 4096
    assert leftovers(directory) == []


def exact_in_some(world: World, chunk: int, versions: range) -> None:
    """The chunk is exactly what one of ``versions`` was."""
    for version in versions:
        world.versions[chunk] = version
        with suppress(AssertionError):
            assert world.load_patiently(chunk)
            return
    raise AssertionError(f"chunk {chunk} is of no version in {versions}")


def test_killed_while_chunks_are_written_again(tmp_path: Path) -> None:
    for seed in range(6):
        kill_and_look(tmp_path / str(seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 300, 50))
def test_killed_many_times_while_chunks_are_written_again(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 50):
        kill_and_look(tmp_path / str(seed), seed)
        shutil.rmtree(tmp_path / str(seed))

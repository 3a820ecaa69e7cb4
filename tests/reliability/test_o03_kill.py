"""O3: killed at any moment."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.reliability.children import Forked, Say, moment
from tests.reliability.world import (
    World,
    chunk_bytes,
    folder_bytes,
    leftovers,
    made,
    reference_spec,
)
from worldpager.tiers.store import ChunkStore

CAP = 1500 * chunk_bytes(reference_spec())
OPEN_SECONDS, WARM = 2.0, 120
BLOCK = 4096


def writer(directory: Path, seed: int) -> Callable[[Say], None]:
    """300 chunks into a pool of 20, each told when it was taken; flushed now and then."""

    def job(say: Say) -> None:
        rng = random.Random(seed)
        world = World(directory, dram=20, disk=CAP)
        say(f"rollout {world.memory._session.rollout.store.spec.rollout}")
        for chunk in range(300):
            world.step(chunk, check=False)
            if chunk == 0:
                say(f"rollout {world.memory._session.rollout.store.spec.rollout}")
            say(str(chunk - 1))
            if rng.random() < 0.05:
                say("flushing")
                world.memory.flush()
                say(f"flushed {chunk - 1}")

    return job


def kill_and_look(directory: Path, seed: int) -> int:
    """Kill a writer after a random moment and check the directory; the chunks found."""
    rng = random.Random(seed)
    child = Forked(writer(directory, seed))
    in_flush = seed % 3 == 0
    child.wait_for("flushing" if in_flush else "-1")
    moment(rng.uniform(0, 0.01) if in_flush else rng.uniform(0.005, 0.25))
    said = child.kill()
    rollout = [line.split()[1] for line in said if line.startswith("rollout")][-1]
    begun = max(int(line) for line in said if line.lstrip("-").isdigit())
    flushed = max((int(line.split()[1]) for line in said if line.startswith("flushed")), default=-1)

    began = time.perf_counter()
    world = World(directory, dram=400, disk=CAP, io=None)
    assert time.perf_counter() - began < OPEN_SECONDS
    with world.memory as memory:
        assert memory._session.rollout.store.spec.rollout == rollout
        assert not [path for path in leftovers(directory) if path.suffix == ".tmp"]
        present = world.present()
        assert present <= set(range(begun + 2))
        assert set(range(flushed + 1)) <= present, "what flush acknowledged is there"
        for chunk in present:
            assert world.load_patiently(chunk), chunk
        status = memory.status()
        assert status.ok, status.problems
        assert abs(status.occupancy.disk - folder_bytes(directory)) <= BLOCK
        assert max(status.occupancy.disk, folder_bytes(directory)) <= CAP
    assert leftovers(directory) == []
    return len(present)


def run_kills(directory: Path, seeds: range) -> None:
    for chunk, layer in itertools.product(range(WARM), range(reference_spec().layers)):
        made(reference_spec(), "session", chunk, layer)  # once for all children
    found = [kill_and_look(directory, seed) for seed in seeds]
    assert sum(found) > len(found), "the kills must have come in the middle"
    assert folder_bytes(directory) <= CAP
    for rollout in sorted(p.name for p in directory.iterdir() if p.is_dir()):
        store = ChunkStore.inspect(directory, rollout)
        assert store.verify() == ()
        store.close()


def test_killed_fifty_times_in_one_directory(tmp_path: Path) -> None:
    """A third of them in the middle of a flush, the others while write-back is busy."""
    run_kills(tmp_path / "s", range(50))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2000, 50))
def test_killed_a_thousand_times(tmp_path: Path, first: int) -> None:
    run_kills(tmp_path / "s", range(first, first + 50))


def test_killed_while_it_reopens(tmp_path: Path) -> None:
    with World(tmp_path / "s", dram=20).memory:
        pass
    world = World(tmp_path / "s", dram=20)
    with world.memory:
        world.run(range(60), check=False)

    def reopen(say: Say) -> None:
        say("begun")
        while True:
            World(tmp_path / "s", dram=20).memory.close()

    rng = random.Random(3)
    for _ in range(8):
        child = Forked(reopen)
        child.wait_for("begun")
        moment(rng.uniform(0, 0.15))
        child.kill()
        again = World(tmp_path / "s", dram=100)
        again.remember(world)
        with again.memory:
            assert again.present() == set(range(59))
            assert all(again.load_patiently(chunk) for chunk in (0, 17, 58))
        assert leftovers(tmp_path / "s") == []

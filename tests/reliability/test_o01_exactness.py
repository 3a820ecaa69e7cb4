"""O1: exactness through all tiers."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reliability.faults import YieldingIO
from tests.reliability.world import World


@pytest.fixture(autouse=True)
def _switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def run(directory: Path, seed: int, chunks: int = 400) -> World:
    rng = random.Random(seed)
    sys.setswitchinterval(rng.choice([1e-6, 1e-5, 1e-4, 5e-3]))
    world = World(directory, dram=40, chunks=chunks + 1, io=YieldingIO(seed))
    with world.memory:
        fresh = 0
        for chunk in range(chunks):
            fresh += not world.step(chunk, rng.choice([0, 0, 8])).stale
        world.retrieve(chunks)  # takes the last chunk
        world.memory.flush()
        assert fresh > chunks // 10
        assert all(world.load_patiently(chunk) for chunk in range(chunks))
        status = world.memory.status()
        assert status.ok, status
        assert status.occupancy.dirty == 0
    return world


@pytest.mark.parametrize("seed", range(1))
def test_fresh_is_exact_stale_is_the_previous_set_and_every_chunk_comes_back(
    tmp_path: Path, seed: int
) -> None:
    world = run(tmp_path / "s", seed)
    assert world.memory.stats.evictions > 400, "the tiers must have been used"
    assert world.memory.stats.fetched > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 20))
def test_for_all_seeds(tmp_path: Path, seed: int) -> None:
    run(tmp_path / "s", seed)


@pytest.mark.parametrize("dram", [10.7, 12])
def test_with_room_for_hardly_more_than_the_windows(tmp_path: Path, dram: float) -> None:
    world = World(tmp_path / "s", dram=dram, io=YieldingIO(1))
    with world.memory:
        world.run(range(150))
        world.retrieve(150)
        world.memory.flush()
        assert all(world.load_patiently(chunk) for chunk in range(150))
        assert not world.memory.status().lost

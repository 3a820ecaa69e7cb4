"""O12: sessions, guidance branches, batch."""

from __future__ import annotations

import gc
import os
import random
import shutil
import threading
from pathlib import Path

import psutil
import pytest

from tests.reliability.conftest import our_threads
from tests.reliability.world import World, chunk_bytes, folder_bytes, forget_oracle, reference_spec
from worldpager.errors import StoreLockedError

BATCH = reference_spec(batch=2)


def streams(root: Path) -> dict[str, World]:
    """Sessions A and B, each with a conditional and an unconditional cache, batch 2."""
    return {
        name: World(root / name, spec=BATCH, dram=12, session=name)
        for name in ("A-cond", "A-uncond", "B-cond", "B-uncond")
    }


def test_interleaved_streams_equal_their_own_oracles(tmp_path: Path) -> None:
    """Each window is compared bit for bit with what that stream alone would hold."""
    worlds = streams(tmp_path)
    rng = random.Random(0)
    at = dict.fromkeys(worlds, 0)
    for turn in range(300):
        name = rng.choice([n for n in worlds if at[n] < 75])
        worlds[name].step(at[name])
        at[name] += 1
        if turn == 150:
            files = folder_bytes(tmp_path / "B-cond")
            for ended in ("A-cond", "A-uncond"):
                worlds.pop(ended).memory.close()
                shutil.rmtree(tmp_path / ended)
            assert not (tmp_path / "A-cond").exists()
            assert folder_bytes(tmp_path / "B-cond") >= files
            assert {t.name for t in our_threads()}, "B's threads go on"
        if all(at[n] == 75 for n in worlds):
            break
    for name, world in worlds.items():
        world.retrieve(at[name])
        world.memory.flush()
        assert all(world.load_patiently(chunk) for chunk in range(at[name]))
        world.memory.close()


@pytest.mark.parametrize("sessions", [16, pytest.param(50, marks=pytest.mark.slow)])
def test_sessions_that_end_in_any_way_give_everything_back(tmp_path: Path, sessions: int) -> None:
    process = psutil.Process()

    def session(number: int) -> World:
        world = World(tmp_path / str(number), dram=12, session=f"s{number}")
        world.run(range(10))
        forget_oracle()
        return world

    def level() -> tuple[int, int]:
        for thread in our_threads():
            thread.join(30)
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    session(0).memory.close()
    before, resident = level(), process.memory_info().rss
    for number in range(1, sessions + 1):
        world = session(number)
        if number % 2:
            world.memory.close()
        del world  # with no other owner it ends here
    assert level() == before
    assert process.memory_info().rss - resident < sessions * 12 * chunk_bytes(reference_spec()) / 4
    for number in range(1, sessions + 1):  # each is unlocked, and what was dropped is there as well
        again = World(tmp_path / str(number), dram=12, session=f"s{number}")
        with again.memory:
            assert again.present() == set(range(9))


def test_a_dropped_memory_in_a_cycle_is_closed_by_the_collector(tmp_path: Path) -> None:
    world = World(tmp_path / "s", dram=12)
    world.run(range(20))
    world.layers.append({"k": world})  # type: ignore[dict-item]  # a cycle
    del world
    gc.collect()
    for thread in our_threads():
        thread.join(30)
    again = World(tmp_path / "s", dram=12)
    with again.memory:
        assert again.present() == set(range(19))


def test_an_id_used_again_sees_nothing_of_its_predecessor(tmp_path: Path) -> None:
    first = World(tmp_path / "s", dram=12)
    with first.memory:
        first.run(range(40))
    shutil.rmtree(tmp_path / "s")
    second = World(tmp_path / "s", dram=12)
    second.session = "session"
    with second.memory:
        assert second.present() == set()
        second.session = "other data"
        second.run(range(40))
        assert second.memory.status().ok


def test_one_directory_has_one_writer(tmp_path: Path) -> None:
    first = World(tmp_path / "s", dram=12)
    with first.memory:
        with pytest.raises(StoreLockedError, match=str(os.getpid())):
            World(tmp_path / "s", dram=12)
        first.run(range(5))
    with World(tmp_path / "s", dram=12).memory as memory:
        assert memory.status().ok


def test_a_forked_child_is_told_that_the_memory_is_not_its(tmp_path: Path) -> None:
    from tests.reliability.children import Forked, Say
    from worldpager.errors import ClosedError

    world = World(tmp_path / "s", dram=12)
    with world.memory:
        world.run(range(20))

        def job(say: Say) -> None:
            try:
                world.retrieve(20)
            except ClosedError:
                say("refused")
            world.memory.close()
            world.memory.status()
            say("closed")

        assert Forked(job).end() == ["refused", "closed"]
        world.run(range(20, 60))
        world.memory.flush()
        assert all(world.load_patiently(chunk) for chunk in range(59))


def test_the_bytes_of_a_pool_are_the_sessions_own(tmp_path: Path) -> None:
    """A session that needs more than its pool evicts of its own, whatever others hold."""
    small = World(tmp_path / "a", dram=11, session="a")
    large = World(tmp_path / "b", dram=60, session="b")
    with small.memory, large.memory:
        large.run(range(40))
        held = large.memory.occupancy.resident
        small.run(range(80))
        assert small.memory.occupancy.resident <= small.memory.status().pool
        assert large.memory.occupancy.resident == held
        assert large.memory.stats.evictions == 0

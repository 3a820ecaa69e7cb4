"""O12: sessions, guidance branches, batch; one pool for all of them."""

from __future__ import annotations

import gc
import os
import random
import shutil
import threading
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.reliability import world as world_module
from tests.reliability.conftest import our_threads
from tests.reliability.faults import HangingIO
from tests.reliability.world import (
    World,
    chunk_bytes,
    folder_bytes,
    forget_oracle,
    reference_spec,
)
from worldpager.errors import (
    BackgroundError,
    BudgetError,
    ConcurrencyError,
    ConfigError,
    IdentityError,
    StoreLockedError,
)
from worldpager.model_adapter.branches import BranchedCache
from worldpager.model_adapter.config import MemoryConfig
from worldpager.model_adapter.frontend import ChunkStep
from worldpager.model_adapter.memory import WorldMemory
from worldpager.model_adapter.ring_cache import RingCache
from worldpager.pager import crew
from worldpager.pager.pool import PLANNERS, POOL_READERS, POOL_WRITERS, MemoryPool

ONE = reference_spec(batch=2, table=96)
BOTH = ONE.branched(2)
POOL_THREADS = POOL_READERS + POOL_WRITERS + PLANNERS


class Branched(World):
    """A world with a conditional and an unconditional cache, each drawn from its own seeds."""

    def cache(self) -> BranchedCache:  # type: ignore[override]
        conditional, unconditional = self.layers[: ONE.layers], self.layers[ONE.layers :]
        return BranchedCache(
            [
                RingCache(conditional, ONE, self._lower),
                RingCache(unconditional, ONE, lambda frames: None),
            ]
        )


def shared(kind: type[World], pool: MemoryPool, directory: Path, **options: object) -> World:
    """A world whose memory leases from ``pool``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world_module, "WorldMemory", partial(WorldMemory, pool=pool))
        return kind(directory, **options)  # type: ignore[arg-type]


def quota(spec_chunks: float = 12) -> int:
    return int(spec_chunks * chunk_bytes(reference_spec())) // 4096 * 4096


@pytest.mark.parametrize("chunks", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_interleaved_sessions_equal_their_own_oracles(tmp_path: Path, chunks: int) -> None:
    """Each window is compared bit for bit with what that session alone would hold: A and B, each
    with both branches and batch 2 and across the end of the model's position table; A ends in the
    middle, and C is given its bytes.
    """
    rng = random.Random(0)
    room = int(12 * chunk_bytes(BOTH)) // 4096 * 4096
    with MemoryPool(2 * room) as pool:

        def begin(name: str) -> World:
            return shared(Branched, pool, tmp_path / name, spec=BOTH, dram=12, session=name)

        worlds = {name: begin(name) for name in "AB"}
        assert pool.free == 0
        at = dict.fromkeys("ABC", 0)
        while names := [name for name in worlds if at[name] < chunks]:
            name = rng.choice(names)
            worlds[name].step(at[name])
            at[name] += 1
            if name == "A" and at["A"] == chunks // 2:
                worlds["B"].memory.settle()
                before = worlds["B"].memory.stats.as_dict(), worlds["B"].memory.occupancy
                files = folder_bytes(tmp_path / "B")
                worlds.pop("A").memory.close()
                shutil.rmtree(tmp_path / "A")
                assert pool.free == room and not (tmp_path / "A").exists()
                assert folder_bytes(tmp_path / "B") >= files
                worlds["C"] = begin("C")
                assert (worlds["B"].memory.stats.as_dict(), worlds["B"].memory.occupancy) == before
        for name, world in worlds.items():
            world.retrieve(at[name])
            world.memory.flush()
            assert all(world.load_patiently(chunk) for chunk in range(at[name]))
            assert world.memory.stats.reads > 0 and world.memory.stats.evictions > 0
            world.memory.close()
        assert pool.free == pool.largest_free == pool.nbytes


def test_the_branches_of_a_store_are_part_of_what_it_is(tmp_path: Path) -> None:
    with Branched(tmp_path / "s", spec=BOTH, dram=12).memory:
        pass
    for other in (ONE, ONE.branched(3)):
        with pytest.raises(IdentityError, match="branches=2") as refused:
            World(tmp_path / "s", spec=other, dram=20)
        assert refused.value.field == "branches"
    other = World(tmp_path / "other", spec=ONE, dram=12)
    with other.memory:
        world = Branched(tmp_path / "s", spec=BOTH, dram=12)
        with world.memory, pytest.raises(ConfigError, match=r"KVSpec\.layers is 8 for the memory"):
            world.memory.boundary(ChunkStep(0, 0, None, world.path[0]), other.cache())


@pytest.mark.parametrize("sessions", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_sessions_that_end_in_any_way_give_everything_back(tmp_path: Path, sessions: int) -> None:
    """On a pool that holds two of them, so that each needs what an earlier one gave back."""
    process = psutil.Process()

    def session(pool: MemoryPool, number: int) -> World:
        world = shared(World, pool, tmp_path / str(number), dram=12, session=f"s{number}")
        world.run(range(10))
        forget_oracle()
        return world

    def level() -> tuple[int, int]:
        for thread in our_threads():
            if thread.name == "worldpager-close":
                thread.join(30)
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with MemoryPool(2 * quota() + 4096) as pool:
        free = pool.free, pool.largest_free
        session(pool, 0).memory.close()
        before, resident = level(), process.memory_info().rss
        assert len(our_threads()) == POOL_THREADS
        for number in range(1, sessions + 1):
            world = session(pool, number)
            if number % 2:
                world.memory.close()
            del world  # with no other owner it ends here
            assert level() == before
            assert (pool.free, pool.largest_free) == free
        assert process.memory_info().rss - resident < sessions * quota() / 4
    for number in range(1, sessions + 1):  # each is unlocked, and what was dropped is there as well
        again = World(tmp_path / str(number), dram=12, session=f"s{number}")
        with again.memory:
            assert again.present() == set(range(9))


@pytest.mark.parametrize("sessions", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_many_sessions_at_once_take_no_more_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sessions: int
) -> None:
    monkeypatch.setattr(crew, "STUCK_SECONDS", 1e9)  # a slow machine is no stuck disk
    with MemoryPool(sessions * quota()) as pool:
        worlds = [
            shared(World, pool, tmp_path / str(n), dram=12, session=f"s{n}")
            for n in range(sessions)
        ]
        rng, order = random.Random(1), [n for n in range(sessions) for _ in range(30)]
        rng.shuffle(order)
        at = [0] * sessions
        for n in order:
            worlds[n].step(at[n])
            at[n] += 1
            assert len(our_threads()) == POOL_THREADS
        for world in worlds:
            world.memory.close()
        assert pool.free == pool.nbytes


def test_a_quota_that_does_not_fit_is_refused_by_bytes(tmp_path: Path) -> None:
    with MemoryPool(3 * quota()) as pool:
        large = shared(World, pool, tmp_path / "large", dram=24)
        large.run(range(30))
        with pytest.raises(BudgetError, match=rf"\({quota()} bytes\) are free"):
            shared(World, pool, tmp_path / "other", dram=13)
        assert not (tmp_path / "other").exists(), "refused before a file was touched"
        small = shared(World, pool, tmp_path / "small", dram=12)
        large.run(range(30, 60))
        small.run(range(30))
        held = small.memory.occupancy.resident
        large.memory.close()
        assert pool.free == 2 * quota()
        assert small.memory.occupancy.resident == held
        small.run(range(30, 60))
        small.memory.close()
        with pytest.raises(ConfigError, match=r"MemoryConfig\.dram"):
            WorldMemory(MemoryConfig(store=tmp_path / "no quota"), reference_spec(), pool=pool)


def test_sessions_whose_disk_hangs_stop_no_other(tmp_path: Path) -> None:
    """More stuck transfers than the pool has threads; then the disks wake up, nothing is lost."""
    io = HangingIO()
    with MemoryPool(5 * quota()) as pool:
        stuck = [
            shared(World, pool, tmp_path / f"stuck{n}", dram=12, session=f"stuck{n}", io=io)
            for n in range(4)
        ]
        other = shared(World, pool, tmp_path / "other", dram=12, session="other")
        for world in (*stuck, other):
            world.run(range(40))
            world.memory.flush()
        for call in ("pread", "pwrite"):
            io.hang(call)
        for world in stuck:
            world.run(range(40, 43))
            for chunk in (3, 5, 7):
                world.load(chunk)
        assert io.reached.wait(30)
        other.run(range(40, 80))
        other.memory.flush(timeout=60)
        assert all(other.load_patiently(chunk, attempts=40) for chunk in range(79))
        assert other.memory.status().ok
        ended = stuck.pop()
        with pytest.raises(BackgroundError, match="slow or stuck"):
            ended.memory.close(0.5)
        assert pool.free == 0, "the stuck transfer may still write there"
        io.release()
        for world in stuck:
            world.run(range(43, 60))
            world.memory.flush()
            assert all(world.load_patiently(chunk) for chunk in range(59))
            world.memory.close()
        other.memory.close()
    for thread in our_threads():
        thread.join(30)
    assert pool.free == pool.nbytes


def test_a_boundary_beside_another_one_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path / "s", dram=12)
    begun, go_on = threading.Event(), threading.Event()

    class Slow(RingCache):
        def open(self, tokens: object) -> None:
            begun.set()
            assert go_on.wait(30)
            super().open(tokens)  # type: ignore[arg-type]

    with world.memory:
        world.run(range(20))
        step = ChunkStep(20, 60, 19, world.path[20])
        slow = Slow(world.layers, world.spec, world._lower)
        thread = threading.Thread(target=world.memory.boundary, args=(step, slow))
        thread.start()
        assert begun.wait(30)
        with pytest.raises(ConcurrencyError, match="call it from one thread"):
            world.memory.boundary(step, world.cache())
        world.memory.status()
        world.memory.flush()
        go_on.set()
        thread.join(30)
        world.begun = 20
        world.last = world.last.__class__(world.memory.last.retrieved, False, "")
        world.check(20)
        world.write(20)
        world.run(range(21, 40))


def test_a_window_stays_what_it_is_while_its_session_is_closed(tmp_path: Path) -> None:
    """Closed by another thread in mid-boundary: its bytes go to nobody before the boundary ends."""
    with MemoryPool(quota()) as pool:
        world = shared(World, pool, tmp_path / "s", dram=12)
        world.run(range(20))

        class Closing(RingCache):
            def open(self, tokens: object) -> None:
                closer = threading.Thread(target=world.memory.close)
                closer.start()
                closer.join(30)
                with pytest.raises(BudgetError):
                    pool.lease(4096)
                super().open(tokens)  # type: ignore[arg-type]

        cache = Closing(world.layers, world.spec, world._lower)
        retrieved = world.memory.boundary(ChunkStep(20, 60, 19, world.path[20]), cache)
        world.last = world.last.__class__(retrieved, world.memory.last.stale, "absent")
        world.check(20)
        assert pool.free == pool.nbytes


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
    """Neither on disk nor in the very bytes of the pool."""
    with MemoryPool(quota()) as pool:
        first = shared(World, pool, tmp_path / "s", dram=12)
        with first.memory:
            first.run(range(40))
        shutil.rmtree(tmp_path / "s")
        second = shared(World, pool, tmp_path / "s", dram=12)
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
    """A session that needs more than its quota evicts of its own, whatever others hold."""
    with MemoryPool(quota(11) + quota(60)) as pool:
        small = shared(World, pool, tmp_path / "a", dram=11, session="a")
        large = shared(World, pool, tmp_path / "b", dram=60, session="b")
        with small.memory, large.memory:
            large.run(range(40))
            held = large.memory.occupancy.resident
            small.run(range(80))
            assert small.memory.occupancy.resident <= small.memory.status().pool
            assert large.memory.occupancy.resident == held
            assert large.memory.stats.evictions == 0

"""Bits that flip in DRAM: between encoding and writing, and while a chunk lies in the pool."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.faults import HangingIO
from tests.reliability.world import World, chunk_bytes, reference_spec, verify
from worldpager.pager.room import SPOILED
from worldpager.pager.states import State

SPEC = reference_spec()
PLACES = {
    "header": 16,
    "payload": 64 + 5000,
    "last layer": chunk_bytes(SPEC) // 4 * 3 + 900,
    "record": chunk_bytes(SPEC) - 4096 + 20,
    "index": chunk_bytes(SPEC) - 20,
}


def flip(world: World, chunk: int, offset: int) -> State:
    """Flip a bit of a chunk in the pool; the state that the chunk is in."""
    pager = world.memory._session.pager
    with pager._lock:
        (page,) = (p for p in pager.core.table.resident() if p.key.chunk == chunk)
        assert page.offset is not None
        pager.arena.view(page.offset, page.nbytes)[offset] ^= 4
        return page.state


def check_counts(world: World) -> None:
    """Each window was counted once."""
    stats = world.memory.stats
    assert stats.windows == 51
    assert stats.stale_windows == sum(world.memory.status().stale.values())
    assert min(stats.hits.values()) >= 0


@pytest.mark.parametrize("place", PLACES)
def test_before_it_is_written_it_is_found_when_read(tmp_path: Path, place: str) -> None:
    """Writing makes no new check, which would call the flipped bytes right."""
    io = HangingIO()
    world = World(tmp_path / "s", dram=12, io=io)
    with world.memory:
        io.hang("pwrite")
        world.run(range(6))
        assert flip(world, 3, PLACES[place]) in (State.DIRTY, State.WRITING)
        io.release()
        world.memory.flush()
        world.run(range(6, 30))
    code, damaged = verify(tmp_path / "s")
    assert code == 1 and set(damaged) == {"rollout-0/kv/3"}
    again = World(tmp_path / "s", dram=12)
    again.remember(world)
    with again.memory:
        assert not again.load_patiently(3)
        assert all(again.load_patiently(chunk) for chunk in (1, 2, 4, 5))
        status = again.memory.status()
        assert not status.ok
        assert sum(status.damaged.values()) + sum(status.lost.values()) == 1


@pytest.mark.parametrize("place", PLACES)
def test_in_a_clean_chunk_it_is_a_miss_and_the_disk_has_it_still(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    world = World(tmp_path / "s", dram=40)
    with world.memory:
        world.run(range(50))
        world.memory.flush()
        wanted = world.memory._recollection.retriever.choose(50, world.path[50])[0]
        world.memory._session.pager.ahead(world.memory._session.rollout.stream, wanted)
        world.memory.settle()
        before = world.last
        chunk = next(c for c in wanted if c not in before.chunks)
        assert flip(world, chunk, PLACES[place]) is State.CLEAN
        got = world.retrieve(50)
        assert got.stale and got.reason == SPOILED and got.chunks == before.chunks
        world.check(50)
        assert world.memory.status().damaged == {SPOILED: 1}
        assert not world.memory.status().ok and not world.memory.status().lost
        check_counts(world)
        assert world.load_patiently(chunk), "read again, and whole"
    assert sum("in memory" in r.getMessage() for r in caplog.records) == 1


def test_in_a_chunk_that_is_on_no_disk_it_is_lost_and_counted(tmp_path: Path) -> None:
    io = HangingIO()
    world = World(tmp_path / "s", dram=60, io=io)
    with world.memory:
        io.hang("pwrite")
        world.run(range(50))
        wanted = world.memory._recollection.retriever.choose(50, world.path[50])[0]
        states = {flip(world, chunk, PLACES["payload"]) for chunk in wanted}
        assert states <= {State.DIRTY, State.WRITING}
        got = world.retrieve(50)
        assert got.stale and got.chunks == ()
        world.write(50)
        assert world.memory.status().lost == {SPOILED: len(wanted)}
        check_counts(world)
        world.run(range(51, 56))
        io.release()
        world.memory.flush()
        assert not set(wanted) & world.present()
    assert not set(wanted) & set(stored(tmp_path / "s")), "no file of them is left"


def stored(directory: Path) -> list[int]:
    return [int(p.name.split(".")[0]) for p in (directory / "rollout-0/kv").glob("*.0.0.0.0.0")]

"""The core's rules for commits, rewrites, write-back and flush, one by one."""

from __future__ import annotations

import pytest

from tests.pager.bench import Bench, chunks, key, spilled
from worldpager.errors import BudgetError, ConfigError
from worldpager.pager import events as ev
from worldpager.pager.core import Core
from worldpager.pager.eviction import Lru
from worldpager.pager.policies import Pressure, WriteBack
from worldpager.pager.spill import LONGEST_BACKOFF, WRITE_ATTEMPTS
from worldpager.pager.states import State
from worldpager.prefetch.fallback import get_fallback
from worldpager.tiers.extents import PAGE

# ---- commit --------------------------------------------------------------------------------------


def test_a_chunk_is_known_only_after_its_commit() -> None:
    bench = Bench(4)
    granted = bench.reserve(0)
    assert granted is not None
    assert bench.state(0) is State.ABSENT
    assert bench.boundary(0) == ev.Serve(0, 0, (), stale=True, reason="absent")
    bench.send(ev.Commit(granted.key, granted.generation))
    assert bench.state(0) is State.DIRTY
    assert chunks(bench.boundary(0)) == [0]


def test_an_abandoned_grant_leaves_the_older_generation_as_it_was() -> None:
    bench = Bench(2)
    bench.commit(0)
    granted = bench.reserve(0)
    assert granted is not None
    bench.send(ev.Abandon(granted.key, granted.generation))
    assert bench.got(ev.Progress)
    assert bench.core.table.extents.used == PAGE
    assert [s.generation for s in bench.boundary(0).chunks] == [1]  # type: ignore[union-attr]


def test_spill_chunk_is_the_commit_that_first_finds_no_free_room() -> None:
    bench = Bench(3)
    bench.commit(0, 1, 2)
    assert bench.core.stats.spill_chunk is None
    bench.flush()
    bench.commit(3)
    assert bench.core.stats.spill_chunk == 4
    bench.flush()
    bench.commit(4)
    assert bench.core.stats.spill_chunk == 4


@pytest.mark.parametrize("capacity", [3 * PAGE - 1, 2 * PAGE])
def test_a_chunk_larger_than_the_pool_is_refused_with_both_numbers(capacity: int) -> None:
    core = Core(capacity, eviction=Lru(), fallback=get_fallback("stale"))
    with pytest.raises(BudgetError, match=f"{2 * PAGE + 1}.*{2 * PAGE}"):
        core.handle(ev.Reserve(key(0), 2 * PAGE + 1))


def test_eviction_takes_clean_chunks_without_writing() -> None:
    bench = Bench(2)
    bench.commit(0, 1)
    bench.flush()
    bench.commit(2)
    assert bench.state(0) is State.STORED
    assert bench.state(1) is State.CLEAN
    assert bench.core.stats.evictions == 1
    assert not bench.under_way


def test_a_commit_never_evicts_what_a_window_holds() -> None:
    bench = Bench(2)
    bench.commit(0, 1)
    bench.flush()
    bench.boundary(0)
    bench.commit(2)
    assert bench.state(0) is State.CLEAN
    assert bench.state(1) is State.STORED
    bench.boundary(0, 2)
    assert bench.reserve(3) is None
    bench.boundary()
    assert bench.reserve(3) is not None


def test_nothing_is_evicted_or_dropped_that_makes_no_room() -> None:
    bench = Bench(4)
    bench.commit(0, 1, 2, 3)
    bench.flush()
    bench.boundary(1, 2)  # what is left are two single pages apart from each other
    assert bench.reserve(4, pages=2, insist=True) is None
    assert bench.core.stats.evictions == 0
    assert bench.core.stats.dropped.total() == 0


def test_block_waits_for_a_write_and_drops_nothing() -> None:
    bench = Bench(2)
    bench.commit(0, 1)
    assert not bench.under_way
    assert bench.reserve(2) is None
    assert bench.got(ev.Backpressure) == [ev.Backpressure(key(2))]
    assert bench.writing == [0]
    bench.done()
    assert bench.got(ev.Progress)
    assert bench.reserve(2) is not None
    assert bench.core.stats.backpressure == 1
    assert bench.core.stats.dropped.total() == 0


@pytest.mark.parametrize(("pressure", "insist"), [("drop", False), ("block", True)])
def test_drop_gives_up_the_coldest_dirty_chunk_and_says_so(
    pressure: Pressure, insist: bool
) -> None:
    bench = Bench(2, pressure=pressure)
    bench.commit(0, 1)
    assert bench.reserve(2, insist=insist) is not None
    assert bench.got(ev.Lost) == [ev.Lost(key(0), "pressure")]
    assert bench.state(0) is State.ABSENT
    assert bench.core.stats.dropped == {"pressure": 1}


def test_block_drops_only_once_writing_has_failed_repeatedly() -> None:
    bench = Bench(2)
    bench.commit(0, 1)
    for failures in range(WRITE_ATTEMPTS):
        assert bench.reserve(2) is None, failures
        bench.ticks(LONGEST_BACKOFF)
        bench.fail()
    assert bench.reserve(2) is not None
    assert [lost.reason for lost in bench.got(ev.Lost)] == ["no space"]


# ---- writing the same chunk again ----------------------------------------------------------------


def test_the_old_file_stays_until_the_new_one_replaces_it() -> None:
    bench = Bench(4)
    bench.commit(0)
    bench.flush()
    bench.commit(0)
    assert not bench.under_way
    assert bench.core.table.stored_chunks == 0, "what is current is not on NVMe"
    bench.flush()
    bench.ticks(LONGEST_BACKOFF)
    assert not bench.under_way
    assert bench.core.stats.deletes == 0


def test_a_generation_superseded_while_it_is_written_is_replaced_afterwards() -> None:
    bench = Bench(4)
    bench.commit(0)
    bench.send(ev.Flush())
    bench.commit(0)
    assert bench.under_way == [ev.Write(key(0), 1, 0, PAGE)], "one write of a name at a time"
    bench.done()
    assert bench.core.table.stored_chunks == 0
    assert bench.under_way == [ev.Write(key(0), 2, PAGE, PAGE)]
    bench.done()
    assert bench.core.stats.deletes == 0


def test_a_flush_under_way_covers_what_is_committed_in_place_of_what_it_waits_for() -> None:
    bench = Bench(4, write_slots=1)
    bench.commit(0)
    bench.send(ev.Flush())
    bench.commit(0)
    bench.done()
    assert not bench.got(ev.Flushed), "only an older generation is on NVMe, and that is no more"
    bench.done()
    assert bench.got(ev.Flushed) == [ev.Flushed(())]


@pytest.mark.parametrize("failed", [0, 1])
def test_an_outdated_file_goes_with_the_generation_that_would_have_replaced_it(
    failed: int,
) -> None:
    bench = Bench(2, pressure="drop")
    bench.commit(0)
    bench.flush()
    bench.commit(0)
    bench.commit(1)
    for _ in range(failed):  # its file may be there, or still the older one
        bench.send(ev.Flush())
        bench.fail()
    bench.commit(2)
    assert bench.state(0) is State.ABSENT
    assert bench.under_way == [ev.Delete(key(0), 1 + failed)]
    bench.fail()
    bench.ticks(LONGEST_BACKOFF)
    assert ev.Delete(key(0), 1 + failed) in bench.under_way, "until it is gone"


def test_a_file_that_resists_its_removal_is_left_to_a_newer_generation() -> None:
    bench = Bench(2, pressure="drop")
    bench.commit(0)
    bench.flush()
    bench.commit(0, 1)
    bench.commit(2)
    assert bench.under_way == [ev.Delete(key(0), 1)]
    bench.fail()
    bench.commit(0)
    bench.ticks(LONGEST_BACKOFF)
    assert not bench.under_way
    bench.flush()
    bench.ticks(LONGEST_BACKOFF)
    assert not bench.under_way


def test_a_late_read_of_an_older_generation_is_not_served() -> None:
    bench = spilled(room=2, chunks=3)
    bench.send(ev.Ahead(0, (0,)))
    assert bench.reading == [0]
    bench.commit(0)
    bench.done()
    served = bench.boundary(0)
    assert served is not None
    assert [s.generation for s in served.chunks] == [4]
    assert bench.core.table.held(key(0), 1) is None


def test_a_superseded_window_keeps_its_bytes_until_the_next_window() -> None:
    bench = Bench(3)
    bench.commit(0)
    bench.boundary(0)
    bench.commit(0)
    assert bench.core.table.held(key(0), 1) is not None
    bench.boundary(0)
    assert bench.core.table.held(key(0), 1) is None


def test_a_chunk_written_again_keeps_its_place_on_the_ahead_list() -> None:
    bench = Bench(3)
    bench.commit(0)
    bench.send(ev.Ahead(0, (0,)))
    bench.commit(0)
    assert [s.generation for s in bench.got(ev.Stage)] == [2]
    assert bench.core.table.pages[key(0)].rank == 0


def test_a_lost_chunk_written_again_replaces_the_file_that_could_not_be_read() -> None:
    bench = spilled(room=1, chunks=2)
    bench.send(ev.Ahead(0, (0,)))
    bench.fail(damaged=True)
    assert bench.got(ev.Lost) == [ev.Lost(key(0), "I/O error")]
    bench.commit(0)
    assert not bench.got(ev.Delete)
    bench.flush()
    assert bench.state(0) is State.CLEAN


# ---- write-back ----------------------------------------------------------------------------------


def test_write_back_starts_above_its_mark_with_the_coldest() -> None:
    bench = Bench(4, write_back=WriteBack(0.5, 0.8, spare=0))
    bench.commit(0, 1)
    assert not bench.writing
    bench.boundary(0)
    bench.commit(2)
    assert bench.writing == [1]
    assert bench.core.stats.first_write_chunk == 3
    bench.done()
    assert not bench.writing


def test_write_back_yields_to_reads_until_it_is_urgent() -> None:
    bench = Bench(5, write_back=WriteBack(0.3, 0.7, spare=0))
    bench.send(ev.Adopt(key(9), 1, PAGE))
    bench.send(ev.Ahead(0, (9,)))
    bench.commit(0, 1, 2)
    assert bench.reading == [9]
    assert not bench.writing
    bench.commit(3)
    assert bench.writing == [0]
    assert bench.core.stats.first_read_chunk == 1


def test_write_back_keeps_room_for_the_next_commit_even_while_reading() -> None:
    bench = Bench(5, write_back=WriteBack(1, 1, spare=2))
    bench.send(ev.Adopt(key(9), 1, PAGE))
    bench.send(ev.Ahead(0, (9,)))
    bench.commit(0, 1)
    assert bench.reading == [9]
    assert not bench.writing, "there is room for two more"
    bench.commit(2)
    assert bench.writing == [0]
    bench.done()  # the read
    bench.done()  # the write
    assert not bench.writing, "one place is free and two clean chunks may leave"


def test_write_back_marks_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"0\.9 and 0\.2"):
        WriteBack(0.9, 0.2)


def test_one_chunk_that_cannot_be_written_does_not_stop_the_others() -> None:
    bench = Bench(4, write_back=WriteBack(0, 1))
    bench.commit(0, 1, 2)
    assert bench.writing == [0]
    bench.fail()
    bench.ticks(LONGEST_BACKOFF)
    assert bench.writing == [1]
    bench.done()
    assert bench.writing == [2]
    bench.done()
    assert bench.writing == [0]


def test_trouble_is_told_once_when_it_begins_and_once_when_it_ends() -> None:
    bench = Bench(4, write_back=WriteBack(0, 1))
    told = []
    bench.commit(0, 1)
    for step in (bench.fail, bench.fail, bench.done, bench.done):
        bench.ticks(LONGEST_BACKOFF)
        step()
        told += bench.got(ev.Health)
    assert told == [ev.Health("no space"), ev.Health("")]
    assert bench.core.stats.write_failures == {"no space": 2}


def test_failed_writes_are_retried_later_and_later_but_not_rarer_than_the_longest_pause() -> None:
    bench = Bench(2, write_back=WriteBack(0, 1))
    bench.commit(0)
    pauses = []
    for _ in range(6):
        bench.fail()
        pauses.append(0)
        while not bench.writing:
            bench.ticks(1)
            pauses[-1] += 1
    assert pauses == [2, 4, 8, 8, 8, 8]


# ---- flush ---------------------------------------------------------------------------------------


def test_flush_is_answered_when_all_that_was_committed_is_written() -> None:
    bench = Bench(4)
    bench.send(ev.Flush())
    assert bench.got(ev.Flushed) == [ev.Flushed(())]
    bench.commit(0, 1)
    bench.send(ev.Flush())
    bench.commit(2)  # not covered
    bench.done()
    assert not bench.got(ev.Flushed)
    bench.done()
    assert bench.got(ev.Flushed) == [ev.Flushed(())]
    assert bench.state(2) is State.DIRTY


def test_flush_names_what_a_broken_disk_did_not_take() -> None:
    bench = Bench(4)
    bench.commit(0, 1, 2, 3)
    bench.send(ev.Flush())
    bench.done()
    for _ in range(WRITE_ATTEMPTS):
        assert not bench.got(ev.Flushed)
        bench.ticks(LONGEST_BACKOFF)
        bench.fail()
    assert [sorted(f.failed) for f in bench.got(ev.Flushed)] == [[key(1), key(2), key(3)]]
    bench.flush()
    assert bench.got(ev.Flushed) == [ev.Flushed(())]


def test_flush_counts_a_dropped_chunk_as_failed() -> None:
    bench = Bench(2, pressure="drop")
    bench.commit(0, 1)
    bench.send(ev.Flush())
    assert bench.reserve(2) is not None
    bench.done()
    assert bench.got(ev.Flushed) == [ev.Flushed((key(1),))]

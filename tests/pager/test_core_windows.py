"""The core's rules for windows and for reading ahead, one by one."""

from __future__ import annotations

from tests.pager.bench import Bench, chunks, key, spilled
from worldpager.pager import events as ev
from worldpager.pager.core import READ_ATTEMPTS
from worldpager.pager.spill import LONGEST_BACKOFF
from worldpager.pager.states import State

# ---- windows -------------------------------------------------------------------------------------


def test_a_resident_set_is_served_fresh() -> None:
    bench = Bench(4)
    bench.commit(0, 1, 2)
    bench.send(ev.Ahead(0, (1,)))
    served = bench.boundary(1, 2)
    assert served is not None
    assert not served.stale
    assert [(s.chunk, s.source) for s in served.chunks] == [(1, "staged"), (2, "dram")]


def test_a_miss_serves_the_previous_set_whole_and_says_so() -> None:
    bench = spilled(room=3, chunks=4)
    bench.boundary(1, 3)
    served = bench.boundary(0)
    assert chunks(served) == [1, 3]
    assert served is not None
    assert served.stale
    assert served.reason == "previous set"


def test_nearest_fills_up_with_resident_neighbours() -> None:
    bench = spilled(room=3, chunks=4, fallback="nearest")
    served = bench.boundary(0, 2, ranking=(0, 3, 2, 1))
    assert chunks(served) == [2, 3]
    assert [s.source for s in served.chunks] == ["dram", "stale"]  # type: ignore[union-attr]


def test_each_wanted_chunk_is_counted_once() -> None:
    bench = spilled(room=4, chunks=5)
    bench.boundary(1, 2, 3)
    bench.boundary(0)  # missing: three others are served in the place of one
    bench.boundary(1, 2, 3, 0)  # missing, and the previous set is three of the four
    bench.boundary(77)  # never existed
    assert bench.core.stats.hits == {"staged": 0, "dram": 6, "nvme": 0, "stale": 1, "empty": 2}
    assert bench.core.stats.stale_windows == 3


def test_wait_mode_reads_and_then_serves() -> None:
    bench = spilled(room=4, chunks=6, fallback="wait")
    assert bench.boundary(0, 1) is None
    assert bench.got(ev.AwaitReads) == [ev.AwaitReads(0, (key(0), key(1)))]
    assert bench.reading == [0, 1]
    bench.done()
    assert bench.boundary(0, 1) is None
    bench.done()
    served = bench.boundary(0, 1)
    assert served is not None
    assert [(s.chunk, s.source) for s in served.chunks] == [(0, "nvme"), (1, "nvme")]
    assert bench.core.stats.fetched == 2


def test_what_a_waiting_window_has_gathered_stays_for_it() -> None:
    bench = spilled(room=2, chunks=3, fallback="wait")
    assert bench.boundary(0, 1) is None
    bench.done()
    assert bench.reserve(5) is None
    assert chunks(bench.boundary(0, 1)) == [0, 1]


def test_a_waiting_window_gets_room_by_writing() -> None:
    bench = spilled(room=2, chunks=3, fallback="wait")
    bench.commit(3, 4)
    assert bench.boundary(0) is None
    assert bench.writing == [3]
    bench.done()
    assert bench.reading == [0]


def test_a_waiting_window_that_can_never_have_room_is_served_what_is_there() -> None:
    bench = spilled(room=2, chunks=4, fallback="wait")
    assert bench.boundary(0, 1, 2) is None
    while bench.under_way:
        bench.done()
    served = bench.boundary(0, 1, 2)
    assert served is not None
    assert served.reason == "no room"
    assert len(served.chunks) == 2


def test_a_waiting_window_gives_up_a_chunk_that_is_lost() -> None:
    bench = spilled(room=2, chunks=4, fallback="wait")
    assert bench.boundary(0, 3) is None
    bench.fail(damaged=True)
    served = bench.boundary(0, 3)
    assert chunks(served) == [3]
    assert served is not None
    assert served.reason == "absent"


# ---- reading ahead -------------------------------------------------------------------------------


def test_a_new_ahead_list_replaces_the_old_one() -> None:
    bench = spilled(room=3, chunks=6, read_slots=1)
    bench.send(ev.Ahead(0, (0, 1)))
    assert bench.reading == [0]
    bench.send(ev.Ahead(0, (2,)))
    bench.done()  # what was being read is finished, but no longer brought near the device
    assert bench.state(0) is State.CLEAN
    assert not bench.got(ev.Stage)
    assert bench.reading == [2]
    bench.done()
    assert [s.key.chunk for s in bench.got(ev.Stage)] == [2]
    assert bench.state(1) is State.STORED
    bench.send(ev.Ahead(0, ()))
    assert [s.key.chunk for s in bench.got(ev.Unstage)] == [2]


def test_a_read_evicts_only_what_is_less_urgent() -> None:
    bench = spilled(room=3, chunks=5)
    bench.send(ev.Ahead(0, (2, 3, 4, 0, 1)))
    assert not bench.reading
    bench.send(ev.Ahead(0, (2, 0, 3, 4)))
    assert bench.reading == [0]
    assert bench.state(4) is State.STORED
    assert bench.state(2) is bench.state(3) is State.CLEAN


def test_speculation_leaves_a_place_for_the_next_commit() -> None:
    bench = spilled(room=3, chunks=5)
    bench.send(ev.Ahead(0, (4, 0, 1)))
    assert bench.reading == [0]
    bench.done()
    assert not bench.reading
    bench.commit(5)
    assert bench.state(0) is bench.state(4) is State.CLEAN


def test_reads_are_retried_later_and_later_and_then_given_up() -> None:
    bench = spilled(room=2, chunks=3)
    bench.send(ev.Ahead(0, (0,)))
    pauses = []
    for _ in range(READ_ATTEMPTS - 1):
        bench.fail()
        pauses.append(0)
        while not bench.reading:
            bench.ticks(1)
            pauses[-1] += 1
    assert pauses == [2, 4, 8, 8]
    bench.fail()
    assert bench.got(ev.Lost) == [ev.Lost(key(0), "I/O error")]
    bench.ticks(10 * LONGEST_BACKOFF)
    assert not bench.reading
    assert bench.core.stats.read_failures == {"I/O error": READ_ATTEMPTS}

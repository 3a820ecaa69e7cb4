"""Modelled time: shares of bandwidth, latency, threads, limits."""

from __future__ import annotations

import math

import pytest

from worldpager.errors import ConfigError
from worldpager.sim.devices import Direction, Disk, DiskModel, VirtualClock, Workers

READ: Direction = "read"
WRITE: Direction = "write"


def ends(model: DiskModel, *jobs: tuple[float, Direction, int], seed: int = 0) -> list[float]:
    """When each transfer ``(begins at, direction, bytes)`` ends."""
    clock = VirtualClock()
    disk = Disk(clock, model, seed)
    found = [math.nan] * len(jobs)
    for number, (begin, direction, nbytes) in enumerate(jobs):

        def done(number: int = number) -> None:
            found[number] = clock.now

        def start(direction: Direction = direction, nbytes: int = nbytes, done=done) -> None:
            disk.transfer(direction, nbytes, done)

        clock.after(begin, start)
    while clock.step():
        pass
    return found


def test_a_clock_keeps_the_order_of_equal_times() -> None:
    clock, seen = VirtualClock(), []
    for name in "abc":
        clock.after(1.0, lambda name=name: seen.append(name))
    clock.after(0.5, lambda: clock.after(0.5, lambda: seen.append("d")))
    clock.run(1.0)
    assert seen == ["a", "b", "c", "d"]
    assert clock.now == 1.0


def test_one_transfer_takes_latency_and_bytes() -> None:
    model = DiskModel(read_bandwidth=100, read_latency=0.5, write_bandwidth=50)
    assert ends(model, (1, READ, 200)) == pytest.approx([3.5])
    assert ends(model, (1, WRITE, 200)) == pytest.approx([5.0])


def test_reads_share_their_bandwidth() -> None:
    model = DiskModel(read_bandwidth=100)
    assert ends(model, (0, READ, 100), (0, READ, 100)) == pytest.approx([2, 2])
    assert ends(model, (0, READ, 100), (0.5, READ, 100)) == pytest.approx([1.5, 2])


def test_reads_and_writes_meet_on_a_shared_path() -> None:
    apart = DiskModel(read_bandwidth=100, write_bandwidth=100)
    assert ends(apart, (0, READ, 100), (0, WRITE, 100)) == pytest.approx([1, 1])
    shared = DiskModel(read_bandwidth=100, write_bandwidth=100, shared_bandwidth=100)
    assert ends(shared, (0, READ, 100), (0, WRITE, 100)) == pytest.approx([2, 2])
    assert ends(shared, (0, READ, 100), (0, READ, 100)) == pytest.approx([2, 2])


def test_one_request_alone_may_not_fill_the_disk() -> None:
    model = DiskModel(read_bandwidth=100, request_bandwidth=60)
    assert ends(model, (0, READ, 60)) == pytest.approx([1])
    assert ends(model, (0, READ, 50), (0, READ, 50)) == pytest.approx([1, 1])


def test_an_ideal_disk_takes_no_time() -> None:
    assert ends(DiskModel(), (2, READ, 10**12), (2, WRITE, 10**12)) == [2, 2]


def test_jitter_repeats_with_its_seed_and_keeps_the_mean() -> None:
    model = DiskModel(read_bandwidth=100, jitter=0.2)
    jobs = [(10.0 * n, READ, 100) for n in range(400)]
    once, again, other = (ends(model, *jobs, seed=seed) for seed in (1, 1, 2))
    assert once == again != other
    taken = [end - begin for end, (begin, _, _) in zip(once, jobs, strict=True)]
    assert sum(taken) / len(taken) == pytest.approx(1.0, abs=0.03)


def workers_ends(threads: int, limit: int | None, *jobs: tuple[float, int]) -> list[float]:
    clock = VirtualClock()
    workers = Workers(clock, Disk(clock, DiskModel(read_bandwidth=100)), READ, threads, limit)
    found: list[float] = []
    for begin, nbytes in jobs:
        clock.after(begin, lambda n=nbytes: workers.submit(n, lambda: found.append(clock.now)))
    while clock.step():
        pass
    return found


def test_threads_take_turns() -> None:
    assert workers_ends(1, None, (0, 100), (0, 100)) == pytest.approx([1, 2])
    assert workers_ends(2, None, (0, 100), (0, 100), (0, 100)) == pytest.approx([2, 2, 3])


def test_a_limit_holds_transfers_back_and_gives_no_credit() -> None:
    assert workers_ends(2, 50, (0, 100), (0, 100), (20, 100)) == pytest.approx([2, 4, 22])
    assert workers_ends(2, 1000, (0, 100)) == pytest.approx([1])  # the disk itself is slower


@pytest.mark.parametrize("bad", [{"read_bandwidth": 0}, {"jitter": -1}, {"shared_bandwidth": -1}])
def test_impossible_disks_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        DiskModel(**bad)

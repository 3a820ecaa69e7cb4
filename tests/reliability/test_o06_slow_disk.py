"""O6: slow and stuck disk, late prefetch."""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.reliability.faults import HangingIO, SlowIO
from tests.reliability.world import World, chunk_bytes, reference_spec
from worldpager.pager.pace import LONGEST_HOLD
from worldpager.tiers.io_backend import Bytes, SystemIO

BYTES = chunk_bytes(reference_spec())
COMPUTES, READS = 6, 2.4
"""A chunk computes for so many healthy boundaries (or longer), a read lasts so many chunks."""


def paced(world: World, chunks: range, seconds: float, ahead: int = 0) -> list[float]:
    """Run with ``seconds`` of computing a chunk; how long each retrieve took."""
    took, due = [], time.perf_counter()
    for chunk in chunks:
        began = time.perf_counter()
        world.retrieve(chunk, ahead)
        took.append(time.perf_counter() - began)
        world.check(chunk)
        world.write(chunk)
        due = max(due + seconds, time.perf_counter())
        threading.Event().wait(due - time.perf_counter())  # the model computes
    return took


@pytest.mark.parametrize(
    ("chunks", "computes"), [(60, 0.0), pytest.param(200, 0.05, marks=pytest.mark.slow)]
)
def test_late_reads_never_hold_a_window_up(tmp_path: Path, chunks: int, computes: float) -> None:
    """Measured against the healthy boundaries of the same run. One that waited for its reads would
    take a read's time or more, again and again.
    """
    io = SlowIO()
    world = World(tmp_path / "s", dram=12, io=io)
    with world.memory:
        healthy = float(np.median(paced(world, range(40), 0)[20:]))
        computes = max(computes, COMPUTES * healthy)
        reads = READS * computes
        io.set(read=reads)
        took = paced(world, range(40, 40 + chunks), computes)
        assert float(np.median(took)) <= max(3 * healthy, reads / 4)
        assert sum(seconds >= reads for seconds in took) <= chunks // 20, "others may take the cpu"
        assert world.memory.stats.backpressure <= chunks // 10
        assert world.memory.status().stale.get("previous set", 0) > 0, (
            "the disk must have been late"
        )
        io.set()
        world.memory._session.pager.settle()
        recovered = []
        for chunk in range(40 + chunks, 60 + chunks):
            recovered.append(world.step(chunk, 8).stale)
            world.memory.settle()
        assert not any(recovered[3:]), "fresh within three chunks"
        assert world.memory.occupancy.resident <= world.memory.status().pool
        assert not world.memory.status().lost


def test_one_stuck_read_does_not_stop_the_others(tmp_path: Path) -> None:
    io = HangingIO()
    world = World(tmp_path / "s", dram=12, io=io)
    with world.memory:
        world.run(range(60))
        world.memory.flush()
        world.memory.settle()
        stuck = next(chunk for chunk in range(5, 40) if not world.load(chunk))
        world.memory._session.pager.settle()
        io.hang("pread", 1)
        stuck = next(c for c in range(5, 40) if c != stuck and not world.load(c))
        assert io.reached.wait(30)
        pager, stream = world.memory._session.pager, world.memory._session.rollout.stream
        for other in (45, 46, 47, 48, 49):
            for _ in range(LONGEST_HOLD + 1):
                pager.ahead(stream, (other, stuck))  # as every chunk does
            deadline = time.monotonic() + 10
            with pager._lock:
                while not any(page.key.chunk == other for page in pager.core.table.resident()):
                    assert time.monotonic() < deadline, f"{other} never came beside a stuck read"
                    pager._progress.wait(0.05)
        commits = world.memory.stats.commits
        world.run(range(60, 90))  # nothing waits for it, all is exact
        assert world.memory.stats.commits == commits + 30 and not io.released
        io.release()
        world.memory._session.pager.settle()
        assert world.load_patiently(stuck)


def test_with_all_reads_and_writes_stuck_a_boundary_still_returns(tmp_path: Path) -> None:
    """Even in the smallest pool, where what hangs takes the room: what was not kept is counted."""
    io = HangingIO()
    world = World(tmp_path / "s", dram=10.7, io=io, chunks=120)
    world.memory._session.pager._patience = 0.05
    with world.memory:
        healthy = float(np.median(paced(world, range(50), 0)))
        world.memory.settle()
        io.hang("pread")
        io.hang("pwrite")
        worst = 0.0
        for chunk in range(50, 80):
            began = time.perf_counter()
            world.step(chunk)
            worst = max(worst, time.perf_counter() - began)
        assert worst <= 4 * world.memory._session.pager._patience + 100 * healthy
        assert set(world.memory.status().lost) <= {"pressure", "no room"}
        assert world.memory.status().lost, "something had to go, and is counted"
        io.release()
        world.memory.settle()
        world.run(range(80, 110))
        world.memory.flush()


def test_what_comes_late_for_an_older_pose_replaces_nothing(tmp_path: Path) -> None:
    """A read that was begun for an old pose ends after the windows have moved on."""
    io = HangingIO()
    world = World(tmp_path / "s", dram=12, io=io)
    with world.memory:
        world.run(range(60))
        world.memory.settle()
        io.hang("pread", 2)
        for chunk in range(60, 75):
            world.step(chunk)
        before = world.last
        io.release()
        world.memory.settle()
        assert world.retrieve(75, 8).stale or set(world.last.chunks) <= world.present()
        world.check(75)
        assert not set(before.chunks) - world.present()


class Ordered(SystemIO):
    """Writes take turns with the test: each waits for a permit. Notes the order of transfers."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.holding = False
        self.permits = threading.Semaphore(0)
        self.waiting = threading.Event()

    def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
        if self.holding and len(data) >= BYTES:
            self.waiting.set()
            assert self.permits.acquire(timeout=60)
            self.order.append("write")
        return super().pwrite(fd, data, offset)

    def pread(self, fd: int, out: Bytes, offset: int) -> int:
        if len(out) >= BYTES:
            self.order.append("read")
        return super().pread(fd, out, offset)

    def sync(self, fd: int) -> None:
        pass


def test_urgent_reads_overtake_a_backlog_of_writes(tmp_path: Path) -> None:
    io = Ordered()
    world = World(tmp_path / "s", dram=150, io=io, chunks=420)
    with world.memory:
        world.run(range(60), check=False)
        world.memory.flush()
        pager, stream = world.memory._session.pager, world.memory._session.rollout.stream
        world.run(range(60, 300), check=False)
        world.memory.flush()  # of 300 chunks the pool holds half
        world.memory.settle()
        gone = next(c for c in range(1, 300) if not world.load(c))
        pager.ahead(stream, ())
        pager.settle()
        io.holding = True
        world.run(range(300, 410), check=False)  # a backlog that no write may leave yet
        assert io.waiting.wait(30)
        assert world.memory.occupancy.dirty >= 100 * BYTES
        io.order.clear()
        missing = next(
            c for c in range(1, 300)
            if c != gone and not any(p.key.chunk == c for p in pager.core.table.resident())
        )  # fmt: skip
        pager.ahead(stream, (missing,))
        deadline = time.monotonic() + 10
        while "read" not in io.order:
            assert time.monotonic() < deadline
            with pager._lock:
                pager._progress.wait(0.01)
        assert io.order.count("write") <= 2
        io.holding = False
        io.permits.release(1000)


@pytest.mark.slow
def test_python_in_the_foreground_is_hardly_slowed_by_write_back(tmp_path: Path) -> None:
    def work() -> float:
        began = time.perf_counter()
        total = 0
        for i in range(1_500_000):
            total += i & 7
        return time.perf_counter() - began

    world = World(tmp_path / "s", dram=300, chunks=300)
    with world.memory:
        alone = statistics.median(work() for _ in range(7))
        world.run(range(280), check=False)
        thread = threading.Thread(target=world.memory.flush)
        thread.start()
        beside = []
        while thread.is_alive() or len(beside) < 3:
            beside.append(work())
            if not thread.is_alive():
                break
        thread.join()
        assert statistics.median(beside) <= 1.5 * alone

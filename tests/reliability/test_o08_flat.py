"""O8: flat for 3,000 chunks."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest

from tests.reliability.children import script
from tests.reliability.world import World

RUN = """
import os, statistics, sys, threading, time
from pathlib import Path
import psutil
from tests.reliability.world import World, forget_oracle
process, chunks = psutil.Process(), int(sys.argv[2])
world = World(Path(sys.argv[1]) / "s", dram=40, chunks=chunks)
took, samples = [], []
with world.memory:
    for chunk in range(chunks):
        began = time.perf_counter()
        world.retrieve(chunk)
        took.append(time.perf_counter() - began)
        world.check(chunk) if chunk % 10 == 0 else None
        world.write(chunk)
        forget_oracle()
        if chunk % 100 == 0:
            samples.append((chunk, process.memory_info().rss, process.num_fds(),
                            threading.active_count(), len(os.listdir("/dev/shm"))))
    assert world.memory.status().ok, world.memory.status()
first = [s for s in samples if s[0] >= 300][0]
last = samples[-1]
third = len(took) // 10
def spread(column):
    return max(abs(s[column] - first[column]) for s in samples[3:])
growth = last[1] - first[1]
slower = statistics.median(took[-third:]) / statistics.median(took[300:300 + third])
print(growth, spread(2), spread(3), spread(4), slower, sep="|")
"""
GROWTH_BYTES, ONCE_BYTES, SLOWER = 4096, 2 << 20, 1.5


def flat(tmp_path: Path, chunks: int) -> None:
    child = script(RUN, tmp_path, chunks, limit="-n 64")
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    growth, descriptors, threads, shared, slower = map(float, out.split("|"))
    # library pages that are touched for the first time count once, whenever that is
    assert growth <= GROWTH_BYTES * (chunks - 300) + ONCE_BYTES, "bytes of resident memory"
    assert descriptors <= 2 and threads <= 2 and shared == 0
    if chunks == 3000:  # the median of sixty calls says little on a busy machine
        assert slower <= SLOWER


def test_six_hundred_chunks_with_64_descriptors(tmp_path: Path) -> None:
    flat(tmp_path, 600)


@pytest.mark.slow
def test_three_thousand_chunks(tmp_path: Path) -> None:
    flat(tmp_path, 3000)


def cycles(directory: Path, times: int) -> None:
    def once() -> None:
        world = World(directory, dram=12)
        with world.memory:
            world.run(range(3), check=False)

    def level() -> tuple[int, int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(gc.get_objects())

    once()
    once()
    before = level()
    for _ in range(times):
        once()
    after = level()
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 20 * times, "objects left a cycle"


def test_opening_and_closing_returns_to_the_start_level(tmp_path: Path) -> None:
    cycles(tmp_path / "s", 20)


@pytest.mark.slow
def test_two_hundred_cycles(tmp_path: Path) -> None:
    cycles(tmp_path / "s", 200)

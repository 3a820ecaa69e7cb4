"""O13: the end."""

from __future__ import annotations

import errno
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.reliability.children import script
from tests.reliability.conftest import our_threads
from tests.reliability.faults import FailingIO, HangingIO, fail
from tests.reliability.world import World, leftovers
from worldpager.errors import BackgroundError, ClosedError

CLOSE_SECONDS, EXIT_SECONDS = 7.0, 2.0


def busy(directory: Path, **options: object) -> World:
    """A world whose write-back has much to do."""
    world = World(directory, dram=100, chunks=130, **options)  # type: ignore[arg-type]
    world.run(range(90), check=False)
    return world


def in_time(call: Callable[[], object]) -> None:
    began = time.perf_counter()
    try:
        call()
    finally:
        assert time.perf_counter() - began <= CLOSE_SECONDS


def test_at_once_and_twice(tmp_path: Path) -> None:
    world = busy(tmp_path / "s")
    in_time(world.memory.close)
    assert our_threads() == []
    assert leftovers(tmp_path / "s") == []
    in_time(world.memory.close)
    for call in (lambda: world.retrieve(90), world.memory.flush):
        with pytest.raises(ClosedError, match="closed"):
            call()
    assert world.memory.status().occupancy.dirty == 0
    again = World(tmp_path / "s", dram=12)
    with again.memory:
        assert again.present() == set(range(89))


def test_from_four_threads(tmp_path: Path) -> None:
    world = busy(tmp_path / "s")
    failures: list[BaseException] = []

    def close() -> None:
        try:
            world.memory.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=close) for _ in range(4)]
    in_time(lambda: [*(t.start() for t in threads), *(t.join() for t in threads)])
    assert failures == [] and our_threads() == [] and leftovers(tmp_path / "s") == []


def test_after_an_exception(tmp_path: Path) -> None:
    world = busy(tmp_path / "s")
    with pytest.raises(ZeroDivisionError), world.memory:
        raise ZeroDivisionError
    assert our_threads() == [] and leftovers(tmp_path / "s") == []


@pytest.mark.parametrize("on_miss", ["stale", "wait"])
def test_during_a_retrieve_in_another_thread(tmp_path: Path, on_miss: str) -> None:
    io = HangingIO()
    world = World(tmp_path / "s", dram=12, io=io, on_miss=on_miss, chunks=100_000)
    world.run(range(60), check=False)
    ended: list[BaseException | None] = []
    begun = threading.Event()

    def go_on() -> None:
        try:
            for chunk in range(60, 99_000):
                world.step(chunk, check=False)
                begun.set()
        except ClosedError as error:
            ended.append(error)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=go_on)
    thread.start()
    assert begun.wait(30)
    in_time(world.memory.close)
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(ended[0], ClosedError), ended


@pytest.mark.parametrize(
    ("call", "timeout"),
    [("pwrite", 1.0), *(pytest.param(call, 5.0, marks=pytest.mark.slow)
                        for call in ("pwrite", "sync", "pread"))],
)  # fmt: skip
def test_with_a_stuck_disk(tmp_path: Path, call: str, timeout: float) -> None:
    io = HangingIO()
    world = World(tmp_path / "s", dram=30, io=io)
    world.run(range(60), check=False)
    world.memory.flush()
    flushed = world.present()
    io.hang(call)
    world.run(range(60, 70), check=False)
    for chunk in (3, 5, 7):
        world.load(chunk)
    with pytest.raises(BackgroundError, match="slow or stuck"):
        in_time(lambda: world.memory.close(timeout))
    in_time(world.memory.close)
    assert [p for p in leftovers(tmp_path / "s") if p.suffix != ".tmp"] == [], "unlocked"
    again = World(tmp_path / "s", dram=12)  # another may go on here, before the disk wakes up
    with again.memory:
        assert flushed <= again.present(), "what flush acknowledged is there"
        before = again.present()
        io.release()
        for thread in our_threads():
            if "worldpager-read" in thread.name or "worldpager-write" in thread.name:
                thread.join(0.5)
        assert all(again.load_patiently(chunk) for chunk in before)
    third = World(tmp_path / "s", dram=12)
    with third.memory:
        assert third.present() == before, "the late writer published nothing"
        assert third.memory.status().ok


def test_a_failed_write_that_nobody_asked_about_is_told(tmp_path: Path) -> None:
    io = FailingIO()
    world = World(tmp_path / "s", dram=30, io=io)
    world.run(range(40), check=False)
    world.memory.flush()
    io.plan = fail("pwrite", errno.EIO)
    world.run(range(40, 120), check=False)
    io.plan = lambda call, nth: 0
    with pytest.raises(BackgroundError, match=r"lost.*I/O error"):
        in_time(world.memory.close)
    again = World(tmp_path / "s", dram=12)
    with again.memory:
        assert set(range(39)) <= again.present()
        assert all(again.load_patiently(chunk) for chunk in again.present())


def test_what_cannot_be_written_at_the_end_is_named(tmp_path: Path) -> None:
    io = FailingIO()
    world = World(tmp_path / "s", dram=30, io=io)
    world.run(range(20), check=False)
    io.plan = fail("pwrite", errno.EIO)
    with pytest.raises(BackgroundError, match="chunks could not be written"):
        in_time(world.memory.close)
    assert our_threads() == [] and leftovers(tmp_path / "s") == []


SCRIPT = """
import sys, time, threading
from pathlib import Path
from tests.reliability.world import World
from tests.reliability.faults import HangingIO
how = sys.argv[2]
io = HangingIO() if how == "stuck" else None
world = World(Path(sys.argv[1]), dram=40, chunks=100_001, io=io)
world.run(range(30), check=False)
world.memory.flush()
if how == "stuck":
    io.hang("pwrite"); io.hang("pread")
world.run(range(30, 60), check=False)
print("begun", flush=True)
if how == "interrupted":
    with world.memory:
        for chunk in range(60, 100_000):
            world.step(chunk, check=False)
if how == "raises":
    raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("how", "status"),
    [("stuck", 0), ("interrupted", None), pytest.param("forgets", 0, marks=pytest.mark.slow),
     pytest.param("raises", 3, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_script_ends_by_itself(tmp_path: Path, how: str, status: int | None) -> None:
    child = script(SCRIPT, tmp_path / "s", how)
    assert child.stdout is not None
    assert child.stdout.readline() == "begun\n"
    began = time.perf_counter()
    if how == "interrupted":
        child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    seconds = time.perf_counter() - began
    assert seconds <= EXIT_SECONDS + (CLOSE_SECONDS if how == "interrupted" else 0)
    if status is None:
        assert child.returncode != 0 and "KeyboardInterrupt" in err
    else:
        assert child.returncode == status, err
    again = World(tmp_path / "s", dram=12)
    with again.memory:
        assert set(range(29)) <= again.present(), "what flush acknowledged is there"
        assert all(again.load_patiently(chunk) for chunk in range(29))
    assert leftovers(tmp_path / "s") == []


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(20))
def test_ctrl_c_at_any_moment(tmp_path: Path, turn: int) -> None:
    child = script(SCRIPT, tmp_path / "s", "interrupted")
    assert child.stdout is not None
    child.stdout.readline()
    until = time.monotonic() + 0.0173 * turn
    while time.monotonic() < until:
        pass
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode != 0 and "KeyboardInterrupt" in err
    again = World(tmp_path / "s", dram=12)
    with again.memory:
        assert again.memory.status().ok
        assert all(again.load_patiently(chunk) for chunk in again.present())
    assert leftovers(tmp_path / "s") == []


FULL = """
import resource, sys
from worldpager.cli.app import main
limit = 30_000
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
import worldpager.tiers.directio as directio
write = directio.DirectIO.write_new
def limited(self, path, data):
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        write(self, path, data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
directio.DirectIO.write_new = limited
sys.argv[0] = "worldpager"
main()
"""


def test_the_command_line_says_what_was_lost_and_fails(tmp_path: Path) -> None:
    child = script(
        FULL, "rollout", "--chunks", 40, "--out", tmp_path / "out", "--no-compare"
    )  # fmt: skip
    _, err = child.communicate(timeout=120)
    assert child.returncode not in (0, None), err
    assert "chunks" in err and "no space" in err, err

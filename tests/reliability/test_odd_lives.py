"""Folders that are moved, replaced or on another disk; processes that end or fork in odd ways."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.reliability.children import Forked, Say, script
from tests.reliability.faults import HangingIO
from tests.reliability.world import World, chunk_bytes, leftovers, reference_spec
from worldpager.errors import BackgroundError, BudgetError, IdentityError, StoreError
from worldpager.model_adapter.opening import rollout_name

BYTES = chunk_bytes(reference_spec())


def filled(directory: Path, chunks: int = 40, **options: object) -> World:
    """A closed store of ``chunks``."""
    world = World(directory, dram=14, **options)  # type: ignore[arg-type]
    with world.memory:
        world.run(range(chunks + 1), check=False)
    return world


def all_there(directory: Path, like: World, chunks: int = 40, **options: object) -> None:
    again = World(directory, **({"dram": 14} | options))  # type: ignore[arg-type]
    again.remember(like)
    with again.memory:
        assert again.present() >= set(range(chunks))
        assert all(again.load_patiently(chunk) for chunk in again.present())
        assert again.memory.status().ok
    assert leftovers(directory) == []


def test_a_folder_moved_copied_or_reached_by_a_link_while_closed(
    tmp_path: Path, small_disk: Callable[[int], Path]
) -> None:
    like = filled(tmp_path / "s")
    (tmp_path / "s").rename(tmp_path / "elsewhere é")
    all_there(tmp_path / "elsewhere é", like)
    disk = small_disk(80 * BYTES)
    shutil.copytree(tmp_path / "elsewhere é", disk / "copy")
    all_there(disk / "copy", like)
    (tmp_path / "link").symlink_to(disk / "copy")
    all_there(tmp_path / "link", like)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_moved_while_open_is_not_written_to_in_its_old_place(
    tmp_path: Path, replaced: bool
) -> None:
    """What may lie there now is another's: neither chunk, nor record, nor lock is touched."""
    world = World(tmp_path / "s", dram=14)
    world.run(range(30))
    world.memory.flush()
    (tmp_path / "s").rename(tmp_path / "moved")
    if replaced:
        other = World(tmp_path / "s", dram=14)
        other.run(range(5), check=False)
        other.memory.flush()
    world.run(range(30, 60))  # whatever is served stays exact
    assert any("writing to disk fails" in problem for problem in world.memory.status().problems)
    with pytest.raises(BackgroundError, match="I/O error"):
        world.memory.close()
    if replaced:
        assert leftovers(tmp_path / "s"), "the other's lock is still there"
        other.run(range(5, 20), check=False)
        other.memory.close()
        all_there(tmp_path / "s", other, 19)
    else:
        assert not (tmp_path / "s").exists()
    all_there(tmp_path / "moved", world, 29)


def test_a_folder_removed_while_open(tmp_path: Path) -> None:
    world = World(tmp_path / "s", dram=14)
    world.run(range(30))
    shutil.rmtree(tmp_path / "s")
    world.run(range(30, 60))
    assert not world.memory.status().ok
    with pytest.raises(BackgroundError):
        world.memory.close()
    assert not (tmp_path / "s").exists()


def test_a_relative_path_means_the_folder_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(Path("s"), dram=14)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with world.memory:
        world.run(range(41))
    assert not list((tmp_path / "other").iterdir())
    all_there(tmp_path / "s", world)


def test_reopened_with_other_budgets_and_policies(tmp_path: Path) -> None:
    like = filled(tmp_path / "s")
    for options in (
        {"dram": 100}, {"dram": 11}, {"on_miss": "nearest"}, {"on_miss": "wait"},
        {"eviction": "lru"}, {"retrieval": "recent"}, {"pressure": "drop"}, {"prefetch": False},
        {"read_limit": 1 << 26}, {"disk": 1000 * BYTES},
    ):  # fmt: skip
        all_there(tmp_path / "s", like, **options)
    for options, error in (
        ({"dram": 3}, BudgetError), ({"codec": "int8", "dram": 40}, IdentityError),
        ({"session": "other"}, IdentityError),
    ):  # fmt: skip
        with pytest.raises(error):
            World(tmp_path / "s", **({"dram": 14} | options))  # type: ignore[arg-type]
    assert leftovers(tmp_path / "s") == []
    again = World(tmp_path / "s", dram=14, disk=10 * BYTES)  # less than is there: all can be read
    again.remember(like)
    assert all(again.load_patiently(chunk) for chunk in range(40))
    again.memory.close()
    all_there(tmp_path / "s", like)


def test_clocks_that_go_backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    readings = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: now - 1e6 * next(readings))
    like = filled(tmp_path / "s")
    all_there(tmp_path / "s", like)
    monkeypatch.setattr(time, "time", lambda: -1.0)
    all_there(tmp_path / "s", like)


def test_a_memory_that_begins_again_and_again_leaves_each_rollout_whole(tmp_path: Path) -> None:
    world = World(tmp_path / "s", dram=14)
    with world.memory:
        for _ in range(4):
            for layer in world.layers:
                layer["local_end_index"].zero_()
            world.base, world.begun = 0, None
            world.run(range(6), check=False)
    for number in range(4):
        assert len(list((tmp_path / "s" / rollout_name(number) / "kv").glob("*.0.0.0.0.0"))) >= 5


def test_two_memories_in_one_process_know_nothing_of_each_other(tmp_path: Path) -> None:
    first = World(tmp_path / "a", dram=14, session="a")
    second = World(tmp_path / "b", dram=14, session="b")
    with first.memory, second.memory:
        for chunk in range(40):
            first.step(chunk)
            second.step(chunk)
        first.memory.close()
        second.run(range(40, 60))
        assert second.memory.status().ok


END = """
import os, signal, sys, threading
from pathlib import Path
from tests.reliability.world import World
world = World(Path(sys.argv[1]), dram=14)
world.run(range(30), check=False)
world.memory.flush()
world.run(range(30, 40), check=False)
print("begun", flush=True)
how = sys.argv[2]
if how == "_exit": os._exit(3)
if how == "abort": os.abort()
if how == "term": os.kill(os.getpid(), signal.SIGTERM)
if how == "exec": os.execv("/bin/true", ["true"])
if how == "hup": os.kill(os.getpid(), signal.SIGHUP)
if how == "thread":
    threading.Thread(target=world.run, args=(range(40, 80),), kwargs={"check": False}).start()
    sys.exit(0)
if how == "fork":
    if os.fork() == 0:
        sys.exit(0)  # with finalizers and all
    os.wait()
    world.run(range(40, 60), check=False)
    world.memory.close()
    assert world.memory.status().ok
"""


@pytest.mark.parametrize(
    "how",
    ["fork", "thread", *(pytest.param(how, marks=pytest.mark.slow)
                         for how in ("term", "_exit", "abort", "exec", "hup"))],
)  # fmt: skip
def test_a_process_that_ends_in_an_odd_way(tmp_path: Path, how: str) -> None:
    child = script(END, tmp_path / "s", how)
    out, err = child.communicate(timeout=60)
    assert out == "begun\n", err
    if how == "fork":
        assert child.returncode == 0, err
        assert leftovers(tmp_path / "s") == []
    again = World(tmp_path / "s", dram=14)
    with again.memory:
        assert again.present() >= set(range(59 if how == "fork" else 29)), "what was flushed"
        assert all(again.load_patiently(chunk) for chunk in again.present())
    assert leftovers(tmp_path / "s") == []


def test_a_stopped_process_keeps_its_folder(tmp_path: Path) -> None:
    def job(say: Say) -> None:
        world = World(tmp_path / "s", dram=14)
        world.run(range(20), check=False)
        say("begun")
        signal.pause()

    child = Forked(job)
    child.wait_for("begun")
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(StoreError, match=f"process {child.pid}"):
        World(tmp_path / "s", dram=14)
    child.kill()
    with World(tmp_path / "s", dram=14).memory:
        pass


class Alarm(Exception):  # noqa: N818  # what a handler raises
    pass


def test_a_signal_handler_that_raises_anywhere_in_a_boundary(tmp_path: Path) -> None:
    """Whatever was under way, all that is reported afterwards, and after a restart, is exact."""

    def handler(number: int, frame: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, handler)
    world = World(tmp_path / "s", dram=14, chunks=2000)
    try:
        with world.memory:
            world.run(range(20), check=False)
            signal.setitimer(signal.ITIMER_REAL, 0.005)
            with pytest.raises(Alarm):
                for chunk in range(20, 2000):
                    world.step(chunk, check=False)
    except BackgroundError:
        pass  # it fell into a decision: what was not on disk is lost, and told
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    again = World(tmp_path / "s", dram=14)
    again.remember(world)
    with again.memory:
        assert all(again.load_patiently(chunk) for chunk in again.present())


def test_flush_and_status_from_many_threads_beside_the_model(tmp_path: Path) -> None:
    world = World(tmp_path / "s", dram=14)
    failures: list[BaseException] = []
    done = threading.Event()

    def ask() -> None:
        try:
            while not done.is_set():
                world.memory.flush()
                world.memory.status()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    with world.memory:
        for thread in threads:
            thread.start()
        world.run(range(60))
        world.run(range(30, 45), version=1)
        done.set()
        for thread in threads:
            thread.join(60)
        assert not failures
        world.memory.flush()
        taken = world.present() - {world.begun}
        assert all(world.load_patiently(chunk) for chunk in taken)


def test_dropped_and_its_folder_removed_while_its_disk_hangs(tmp_path: Path) -> None:
    """The one that comes after it in the same place is not disturbed by what wakes up late."""
    io = HangingIO()
    world = World(tmp_path / "s", dram=14, io=io)
    world.run(range(20))
    world.memory.flush()
    io.hang("sync")
    world.run(range(20, 34))
    with pytest.raises(BackgroundError):
        world.memory.close(0.5)
    shutil.rmtree(tmp_path / "s")
    other = World(tmp_path / "s", dram=14)
    with other.memory:
        other.run(range(10), check=False)
        io.release()
        other.run(range(10, 41), check=False)
    all_there(tmp_path / "s", other)

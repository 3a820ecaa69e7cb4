"""``worldpager status``: healthy while all is well, and not a moment longer."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.reliability import world as world_module
from tests.reliability.children import Forked, Say
from tests.reliability.faults import FailingIO, HangingIO, fail
from tests.reliability.world import World, chunk_bytes, chunk_file, reference_spec
from worldpager.errors import BackgroundError
from worldpager.model_adapter import record as record_module
from worldpager.model_adapter.memory import WorldMemory
from worldpager.pager.pool import MemoryPool
from worldpager.tiers.documents import STATUS

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _record_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "RECORD_SECONDS", 0.0)


def told(world: World) -> None:
    """Return once what the last boundary had recorded is on disk."""
    deadline = time.monotonic() + 30
    world.memory._recorder.note()
    while world.memory._recorder._pending:
        assert time.monotonic() < deadline
        world.memory._session.pool.writers.relieve()  # as the next boundary would
        os.sched_yield()


def health(worldpager: Command, store: Path) -> tuple[int, dict[str, object]]:
    status, printed, _ = worldpager("status", store, "--json")
    found = json.loads(printed)
    assert found["ok"] == (status == 0) == (found["problems"] == [])
    return status, found


def test_a_run_is_healthy_while_it_lasts_and_when_it_has_ended(
    tmp_path: Path, worldpager: Command
) -> None:
    world = World(tmp_path / "s", dram=12)
    with world.memory:
        world.run(range(40))
        told(world)
        status, found = health(worldpager, tmp_path / "s")
        assert status == 0, found
        assert (found["live"], found["pid"], found["closed"]) == (True, os.getpid(), False)
        assert found["status"]["occupancy"]["resident"] > 0  # type: ignore[index]
        world.run(range(40, 60))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    status, found = health(worldpager, tmp_path / "s")
    assert (status, found["live"], found["closed"]) == (0, False, True)
    assert found["rollouts"][0]["chunks"] == 59  # type: ignore[index]
    assert found["status"] == json.loads(json.dumps(world.memory.status().as_dict()))
    status, printed, _ = worldpager("status", tmp_path / "s")
    assert status == 0 and printed.startswith("healthy\n")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ENOSPC, "no space"), (errno.EIO, "I/O error")]
)
def test_a_disk_that_does_not_write_shows_at_once_and_what_it_cost_remains(
    tmp_path: Path, worldpager: Command, number: int, reason: str
) -> None:
    io = FailingIO()
    world = World(tmp_path / "s", dram=20, io=io)
    world.run(range(30), check=False)
    told(world)
    assert health(worldpager, tmp_path / "s")[0] == 0
    io.plan = fail("pwrite", number)
    world.run(range(30, 90), check=False)
    told(world)
    status, found = health(worldpager, tmp_path / "s")
    assert status == 1
    assert f"writing to disk fails: {reason}" in found["problems"]  # type: ignore[operator]
    assert any("chunks were lost" in text for text in found["problems"])  # type: ignore[attr-defined]
    io.plan = lambda call, nth: 0
    with pytest.raises(BackgroundError):
        world.memory.close()
    status, found = health(worldpager, tmp_path / "s")
    assert (status, found["closed"]) == (1, True)
    assert found["status"]["lost"][reason] > 0  # type: ignore[index]
    assert found["status"]["background_error"]  # type: ignore[index]
    with World(tmp_path / "s", dram=12).memory:  # a later run knows nothing of that
        pass
    assert health(worldpager, tmp_path / "s")[0] == 0


def test_what_a_flush_could_not_do_stays_until_one_could(tmp_path: Path) -> None:
    io = FailingIO()
    world = World(tmp_path / "s", dram=40, io=io)
    with world.memory:
        world.run(range(10), check=False)
        io.plan = fail("sync")
        with pytest.raises(BackgroundError):
            world.memory.flush()
        assert "could not be written" in world.memory.status().background_error
        assert not world.memory.status().ok
        io.plan = lambda call, nth: 0
        world.memory.flush()
        assert world.memory.status().background_error == ""
        assert world.memory.status().ok


def test_a_stuck_disk_at_the_end_is_told(tmp_path: Path, worldpager: Command) -> None:
    io = HangingIO()
    world = World(tmp_path / "s", dram=40, io=io)
    world.run(range(20), check=False)
    io.hang("pwrite")
    with pytest.raises(BackgroundError, match="slow or stuck"):
        world.memory.close(0.5)
    status, found = health(worldpager, tmp_path / "s")
    io.release()
    assert status == 1 and "slow or stuck" in found["status"]["background_error"]  # type: ignore[index]


def test_chunks_dropped_for_want_of_room_show(tmp_path: Path, worldpager: Command) -> None:
    io = HangingIO()
    world = World(tmp_path / "s", dram=11, io=io, pressure="drop")
    with world.memory:
        world.run(range(5), check=False)
        io.hang("pwrite")
        world.run(range(5, 40), check=False)
        told(world)
        status, found = health(worldpager, tmp_path / "s")
        assert status == 1 and "pressure" in found["status"]["lost"]  # type: ignore[index]
        io.release()


def test_damage_shows_before_and_after_it_is_met(tmp_path: Path, worldpager: Command) -> None:
    world = World(tmp_path / "t", dram=12)
    with world.memory:
        world.run(range(30))
    os.truncate(chunk_file(tmp_path / "t", 7), 100)
    status, found = health(worldpager, tmp_path / "t")
    assert status == 1 and found["rollouts"][0]["damaged"] == {"size": 1}  # type: ignore[index]
    world = World(tmp_path / "t", dram=12)
    with world.memory:
        told(world)
        status, found = health(worldpager, tmp_path / "t")
        assert status == 1 and found["status"]["damaged"] == {"size": 1}  # type: ignore[index]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_a_pool_that_should_be_pinned_and_is_not_shows(tmp_path: Path, worldpager: Command) -> None:
    with MemoryPool(12 * chunk_bytes(reference_spec())) as pool, pytest.MonkeyPatch.context() as m:
        m.setattr(world_module, "WorldMemory", partial(WorldMemory, pool=pool))
        world = World(tmp_path / "s", dram=12)
        with world.memory:
            assert world.memory.status().ok
            assert not pool.pin(torch.device("cuda"))
            world.run(range(3))
            told(world)
            status, found = health(worldpager, tmp_path / "s")
            assert status == 1 and "not page-locked" in found["problems"][0]  # type: ignore[index]


def test_a_killed_run_shows_with_what_it_lost_until_the_store_is_opened(
    tmp_path: Path, worldpager: Command
) -> None:
    def job(say: Say) -> None:
        world = World(tmp_path / "s", dram=40)
        world.run(range(10), check=False)
        told(world)
        say("ran")
        os.kill(os.getpid(), 9)

    child = Forked(job)
    assert child.end() == ["ran"]
    (tmp_path / "s" / "rollout-0" / "kv" / f".7.0.0.0.0.0.{child.pid}.1.tmp").write_bytes(b"half")
    status, found = health(worldpager, tmp_path / "s")
    assert (status, found["live"], found["pid"]) == (1, False, child.pid)
    text = " ".join(found["problems"])  # type: ignore[arg-type]
    assert "ended without closing" in text and "never ended" in text
    assert found["status"]["occupancy"]["dirty"] > 0  # type: ignore[index]
    assert found["rollouts"][0]["leftovers"]  # type: ignore[index]
    with World(tmp_path / "s", dram=12).memory:
        pass
    assert health(worldpager, tmp_path / "s")[0] == 0


def test_a_disk_that_takes_no_record_leaves_none_that_says_all_is_well(
    tmp_path: Path,
    worldpager: Command,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    world = World(tmp_path / "s", dram=12)
    with world.memory:
        world.run(range(5))
        told(world)
        with monkeypatch.context() as patch:
            patch.setattr(record_module, "_replace", full)
            for chunk in range(5, 9):
                world.step(chunk)
                told(world)
            status, found = health(worldpager, tmp_path / "s")
        assert status == 1 and "has recorded no status" in found["problems"][0]  # type: ignore[index]
        assert caplog.text.count("cannot be recorded") == 1
        world.step(9)
        told(world)
        assert health(worldpager, tmp_path / "s")[0] == 0


def test_a_record_is_shown_and_not_believed(tmp_path: Path, worldpager: Command) -> None:
    with World(tmp_path / "s", dram=12).memory:
        pass
    path = tmp_path / "s" / "rollout-0" / "kv" / STATUS
    assert path.stat().st_mode & 0o777 == 0o600
    record = json.loads(path.read_text())
    for wrong in (
        {"status": {"problems": 7, "occupancy": 3}, "closed": False},
        {"status": {"problems": ["\x1b[2J"], "occupancy": {"dirty": "much"}}, "closed": False},
    ):
        path.write_text(json.dumps(record | wrong))
        status, printed, _ = worldpager("status", tmp_path / "s")
        assert status in (0, 1) and "\x1b" not in printed
    for junk in ("", "{", "[" * 100_000, '{"recorded": NaN}'):
        path.write_text(junk)
        status, found = health(worldpager, tmp_path / "s")
        assert status == 0 and found["status"] is None
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert health(worldpager, tmp_path / "s")[1]["status"] is None


def test_what_is_no_store_is_a_misuse(tmp_path: Path, worldpager: Command) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    for name in ("photos", "nowhere"):
        status, printed, message = worldpager("status", tmp_path / name)
        assert (status, printed) == (2, "") and name in message
    assert worldpager("status")[0] == 2

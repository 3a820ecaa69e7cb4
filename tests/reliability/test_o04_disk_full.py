"""O4: disk full, and free again."""

from __future__ import annotations

import errno
import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tests.reliability.children import Forked, Say
from tests.reliability.faults import FailingIO
from tests.reliability.world import World, chunk_bytes, reference_spec
from worldpager.errors import BackgroundError

BYTES = chunk_bytes(reference_spec())
CHUNKS, FREED, RESUMES_WITHIN = 400, 300, 20
SLACK_SECONDS = 0.005


@dataclass
class Run:
    """What a run under trouble showed."""

    seconds: list[float] = field(default_factory=list)
    resident: int = 0
    resumed: int | None = None

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))


def run(world: World, free: Callable[[], object], trouble: Callable[[], object] = int) -> Run:
    """400 chunks along path Y; ``trouble()`` after 60 of them, ``free()`` after 300."""
    result, written = Run(), 0
    for chunk in range(CHUNKS):
        if chunk == 60:
            trouble()
        if chunk == FREED:
            free()
            written = world.memory.stats.writes
        began = time.perf_counter()
        world.retrieve(chunk)
        result.seconds.append(time.perf_counter() - began)
        world.check(chunk)
        world.write(chunk)
        result.resident = max(result.resident, world.memory.occupancy.resident)
        if chunk > FREED and result.resumed is None and world.memory.stats.writes > written:
            result.resumed = chunk - FREED
    return result


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    world = World(tmp_path_factory.mktemp("healthy") / "s", dram=20)
    with world.memory:
        return run(world, int)


def check(world: World, result: Run, healthy: Run, reason: str) -> None:
    status = world.memory.status()
    assert result.median <= 2 * healthy.median + SLACK_SECONDS
    assert result.resident <= status.pool == 20 * BYTES
    assert status.lost.get(reason, 0) > 100 and set(status.lost) == {reason}
    assert status.write_failures.get(reason, 0) >= 3 and set(status.write_failures) == {reason}
    assert not status.ok
    assert result.resumed is not None and result.resumed <= RESUMES_WITHIN


def check_warnings(records: list[logging.LogRecord]) -> None:
    told = [r.getMessage() for r in records if r.levelno >= logging.WARNING]
    assert sum("writing to disk fails" in line for line in told) == 1
    assert sum("works again" in line for line in told) == 1
    assert sum("is lost" in line for line in told) == 1


def check_reopened(directory: Path, world: World) -> None:
    again = World(directory, dram=500)
    again.remember(world)
    with again.memory:
        assert again.memory.status().ok, "no short or empty file counts as present"
        present = again.present()
        assert len(present) >= 60
        assert all(again.load_patiently(chunk) for chunk in present)


def test_a_full_file_system(
    small_disk: Callable[[int], Path], healthy: Run, caplog: pytest.LogCaptureFixture
) -> None:
    disk = small_disk(264 * BYTES)
    (disk / "balloon").write_bytes(bytes(200 * BYTES))
    world = World(disk / "s", dram=20, disk=1000 * BYTES)
    try:
        result = run(world, (disk / "balloon").unlink)
        check(world, result, healthy, "no space")
        check_warnings(caplog.records)
        with pytest.raises(BackgroundError, match="no space"):
            world.memory.flush()  # what was lost is told once to who asks
        world.memory.flush()
    finally:
        world.memory.close()
    check_reopened(disk / "s", world)


@pytest.mark.parametrize(
    "call",
    ["sync", *(pytest.param(call, marks=pytest.mark.slow)
               for call in ("pwrite", "rename", "open_new", "sync_folder"))],
)  # fmt: skip
def test_no_space_at_one_call(
    tmp_path: Path, healthy: Run, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    io = FailingIO()
    world = World(tmp_path / "s", dram=20, io=io)

    def full(called: str, nth: int) -> int:
        return errno.ENOSPC if called == call else 0

    try:
        result = run(
            world,
            lambda: setattr(io, "plan", lambda called, nth: 0),
            lambda: setattr(io, "plan", full),
        )
        check(world, result, healthy, "no space")
        check_warnings(caplog.records)
    finally:
        with pytest.raises(BackgroundError, match="no space"):
            world.memory.close()
    check_reopened(tmp_path / "s", world)


def test_writes_cut_short_by_a_limit_on_the_file_size(tmp_path: Path, healthy: Run) -> None:
    directory = tmp_path / "s"

    def job(say: Say) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

        def limit(nbytes: int) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))

        world = World(directory, dram=20)
        result = run(world, lambda: limit(hard), lambda: limit(50_000))
        check(world, result, healthy, "no space")
        try:
            world.memory.close()
        except BackgroundError:
            say("told")
        check_reopened(directory, world)
        say("done")

    said = Forked(job).end()
    assert said == ["told", "done"], "\n".join(said)


@pytest.mark.slow
def test_the_cap_is_a_full_disk_too(tmp_path: Path, healthy: Run) -> None:
    world = World(tmp_path / "s", dram=20, disk=70 * BYTES)
    cap = world.memory._session._disk_cap

    def raise_the_cap() -> None:
        cap.limit = 1000 * BYTES

    try:
        result = run(world, raise_the_cap)
        check(world, result, healthy, "no space")
    finally:
        with pytest.raises(BackgroundError, match="no space"):
            world.memory.close()
    check_reopened(tmp_path / "s", world)

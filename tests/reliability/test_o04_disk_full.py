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
from worldpager.pager.policies import WriteBack

BYTES = chunk_bytes(reference_spec())
RESUMES_WITHIN = 20
SLACK_SECONDS = 0.005


@dataclass(frozen=True)
class Plan:
    """Chunks of a run; after how many trouble begins, and space is freed."""

    chunks: int
    trouble: int
    freed: int


SHORT, FULL = Plan(150, 30, 110), Plan(400, 60, 300)
plans = pytest.mark.parametrize(
    "plan", [SHORT, pytest.param(FULL, marks=pytest.mark.slow)], ids=["short", "full"]
)


@dataclass
class Run:
    """What a run under trouble showed, and how long a healthy one took beside it."""

    seconds: list[float] = field(default_factory=list)
    healthy: list[float] = field(default_factory=list)
    resident: int = 0
    resumed: int | None = None


def run(
    world: World,
    plan: Plan,
    free: Callable[[], object],
    trouble: Callable[[], object] = int,
    **twins: object,
) -> Run:
    """Along path Y, in turns with a healthy twin, so that both meet the same load of the machine
    and the same work in the pager. ``twins``: options of the twin.
    """
    result, written = Run(), 0
    place = Path(world.memory.config.store).with_name("twin")
    twin = World(place, **({"dram": 20} | twins))  # type: ignore[arg-type]
    with twin.memory:
        for chunk in range(plan.chunks):
            if chunk == plan.trouble:
                trouble()
            if chunk == plan.freed:
                free()
                written = world.memory.stats.writes
            for one, seconds in ((world, result.seconds), (twin, result.healthy)):
                began = time.perf_counter()
                one.retrieve(chunk)
                seconds.append(time.perf_counter() - began)
            world.check(chunk)
            world.write(chunk)
            twin.write(chunk)
            result.resident = max(result.resident, world.memory.occupancy.resident)
            if (
                chunk > plan.freed
                and result.resumed is None
                and world.memory.stats.writes > written
            ):
                result.resumed = chunk - plan.freed
    return result


def check(world: World, plan: Plan, result: Run, reason: str) -> None:
    status = world.memory.status()
    assert np.median(result.seconds) <= 2 * np.median(result.healthy) + SLACK_SECONDS
    assert result.resident <= status.pool == 20 * BYTES
    assert status.lost.get(reason, 0) > (plan.freed - plan.trouble) * 0.4
    assert set(status.lost) == {reason}
    assert status.write_failures.get(reason, 0) >= 3 and set(status.write_failures) == {reason}
    assert not status.ok
    assert result.resumed is not None and result.resumed <= RESUMES_WITHIN


def check_warnings(records: list[logging.LogRecord]) -> None:
    told = [r.getMessage() for r in records if r.levelno >= logging.WARNING]
    assert sum("writing to disk fails" in line for line in told) == 1
    assert sum("works again" in line for line in told) == 1
    assert sum("is lost" in line for line in told) == 1


def check_reopened(directory: Path, world: World, plan: Plan) -> None:
    again = World(directory, dram=500)
    again.remember(world)
    with again.memory:
        assert again.memory.status().ok, "no short or empty file counts as present"
        present = again.present()
        assert len(present) >= plan.trouble
        assert all(again.load_patiently(chunk) for chunk in present)


@plans
def test_a_full_file_system(
    small_disk: Callable[[int], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, plan: Plan
) -> None:
    disk = small_disk((plan.trouble + 4 + 200) * BYTES)
    (disk / "balloon").write_bytes(bytes(200 * BYTES))
    (tmp_path / "s").symlink_to(disk / "s")
    world = World(tmp_path / "s", dram=20, disk=1000 * BYTES)
    try:
        result = run(world, plan, (disk / "balloon").unlink)
        check(world, plan, result, "no space")
        check_warnings(caplog.records)
        with pytest.raises(BackgroundError, match="no space"):
            world.memory.flush()  # what was lost is told once to who asks
        world.memory.flush()
    finally:
        world.memory.close()
    check_reopened(disk / "s", world, plan)


@plans
@pytest.mark.parametrize(
    "call",
    ["sync", *(pytest.param(call, marks=pytest.mark.slow)
               for call in ("pwrite", "rename", "open_new", "sync_folder"))],
)  # fmt: skip
def test_no_space_at_one_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str, plan: Plan
) -> None:
    io = FailingIO()
    world = World(tmp_path / "s", dram=20, io=io)

    def full(called: str, nth: int) -> int:
        return errno.ENOSPC if called == call else 0

    try:
        result = run(
            world,
            plan,
            lambda: setattr(io, "plan", lambda called, nth: 0),
            lambda: setattr(io, "plan", full),
        )
        check(world, plan, result, "no space")
        check_warnings(caplog.records)
    finally:
        with pytest.raises(BackgroundError, match="no space"):
            world.memory.close()
    check_reopened(tmp_path / "s", world, plan)


@plans
def test_writes_cut_short_by_a_limit_on_the_file_size(tmp_path: Path, plan: Plan) -> None:
    directory = tmp_path / "s"

    def job(say: Say) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

        def limit(nbytes: int) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))

        world = World(directory, dram=20)
        idle = {"dram": plan.chunks + 10, "write_back": WriteBack(1, 1, spare=0)}
        # the limit is the process's, so its twin writes nothing before it is lifted
        result = run(world, plan, lambda: limit(hard), lambda: limit(50_000), **idle)
        check(world, plan, result, "no space")
        try:
            world.memory.close()
        except BackgroundError:
            say("told")
        check_reopened(directory, world, plan)
        say("done")

    said = Forked(job).end()
    assert said == ["told", "done"], "\n".join(said)


@pytest.mark.slow
def test_the_cap_is_a_full_disk_too(tmp_path: Path) -> None:
    world = World(tmp_path / "s", dram=20, disk=70 * BYTES)
    cap = world.memory._session._disk_cap

    def raise_the_cap() -> None:
        cap.limit = 1000 * BYTES

    try:
        result = run(world, FULL, raise_the_cap)
        check(world, FULL, result, "no space")
    finally:
        with pytest.raises(BackgroundError, match="no space"):
            world.memory.close()
    check_reopened(tmp_path / "s", world, FULL)

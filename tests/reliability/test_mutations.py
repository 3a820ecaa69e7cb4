"""The checks can fail: for each of these defects, made on purpose, a scenario goes red."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.faults import FailingIO, HangingIO, YieldingIO, fail
from tests.reliability.world import World, chunk_bytes, chunk_file, folder_bytes, reference_spec
from worldpager.errors import BackgroundError, DamagedBlockError, IdentityError, StoreError
from worldpager.model_adapter.memory import WorldMemory
from worldpager.model_adapter.window import Moving
from worldpager.pager import core as core_module
from worldpager.pager import events as ev
from worldpager.pager import session as session_module
from worldpager.pager.events import ChunkKey
from worldpager.pager.runtime import Pager
from worldpager.pager.session import StreamFiles
from worldpager.pager.workers import Workers
from worldpager.quant.shard import verify_image
from worldpager.tiers import documents
from worldpager.tiers.lock import DirectoryLock
from worldpager.tiers.space import DiskCap
from worldpager.tiers.spec import StoreSpec

Patch = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[Path], None]
BYTES = chunk_bytes(reference_spec())


# ---- short scenarios ---------------------------------------------------------------------------


def exact(directory: Path) -> None:
    world = World(directory, dram=11, io=YieldingIO(0))
    with world.memory:
        world.run(range(120))
        world.retrieve(120)
        world.memory.flush()
        assert all(world.load_patiently(chunk) for chunk in range(120))


def damage(directory: Path) -> None:
    world = World(directory, dram=20)
    with world.memory:
        world.run(range(40))
    for chunk in (9, 10):
        path = chunk_file(directory, chunk)
        data = bytearray(path.read_bytes())
        data[5000] ^= 4
        path.write_bytes(data)
    chunk_file(directory, 12).write_bytes(chunk_file(directory, 20).read_bytes())
    again = World(directory, dram=20)
    again.remember(world)
    with again.memory:
        came = {chunk for chunk in range(39) if again.load_patiently(chunk)}
        assert came == set(range(39)) - {9, 10, 12}


def under_way(directory: Path) -> None:
    """A chunk that turns into another while the store is open."""
    world = World(directory, dram=12)
    with world.memory:
        world.run(range(60))
        world.memory.flush()
        os.replace(chunk_file(directory, 30), chunk_file(directory, 20))
        assert not world.load_patiently(20)
        assert world.memory.status().lost


def full(directory: Path) -> None:
    io = FailingIO()
    world = World(directory, dram=20, io=io)
    world.run(range(40))
    io.plan = fail("pwrite", errno.ENOSPC)
    world.run(range(40, 120))
    status = world.memory.status()
    assert status.write_failures.get("no space") and not status.ok
    assert status.lost.get("no space")
    with pytest.raises(BackgroundError):
        world.memory.close()
    again = World(directory, dram=20)
    again.remember(world)
    with again.memory:
        assert all(again.load_patiently(chunk) for chunk in again.present())


def stuck(directory: Path) -> None:
    io = HangingIO()
    world = World(directory, dram=12, io=io)
    try:
        world.run(range(60))
        world.memory.settle()
        io.hang("pread", 1)
        world.run(range(60, 100))
        assert world.memory.status().stale
        assert world.memory.last.stall_ms < 1000
    finally:
        io.release()
        world.memory.close()


def flushed(directory: Path) -> None:
    world = World(directory, dram=100)
    with world.memory:
        world.run(range(60))
        world.memory.flush()
        assert world.memory.occupancy.dirty == 0
        assert sum(1 for _ in directory.rglob("*.0.0.0.0.0")) == 59


def counted(directory: Path) -> None:
    world = World(directory, dram=20, disk=40 * BYTES)
    with world.memory:
        world.run(range(29), check=False)
        world.memory.flush()
        assert abs(world.memory.occupancy.disk - folder_bytes(directory)) < 4096
    world = World(directory, dram=20, disk=45 * BYTES)
    try:
        world.run(range(60), check=False)
    finally:
        with suppress(BackgroundError):
            world.memory.close()
    assert folder_bytes(directory) <= 45 * BYTES + 4096


def identity(directory: Path) -> None:
    with World(directory, dram=12).memory:
        pass
    with pytest.raises(IdentityError):
        World(directory, dram=12, spec=reference_spec(model="another"))


def two_writers(directory: Path) -> None:
    first = World(directory, dram=12)
    with first.memory:
        try:
            second = World(directory, dram=12)
        except OSError:
            return
        second.memory.close()
        raise AssertionError("two writers")


def leftovers_swept(directory: Path) -> None:
    world = World(directory, dram=12)
    with world.memory:
        world.run(range(5))
    temp = chunk_file(directory, 3).with_name(".3.0.0.0.0.0.4194305.7.tmp")
    temp.write_bytes(b"half")
    with World(directory, dram=12).memory:
        assert not temp.exists()


def warned_once(directory: Path) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("worldpager").addHandler(handler)
    try:
        full(directory)
    finally:
        logging.getLogger("worldpager").removeHandler(handler)
    assert sum("writing to disk fails" in r.getMessage() for r in records) == 1


# ---- defects -----------------------------------------------------------------------------------


def index_before_bytes(patch: pytest.MonkeyPatch) -> None:
    def commit(self: Pager, stream: int, chunk: int, nbytes: int, fill: Any) -> float:
        key = ChunkKey(stream, chunk)
        grant, waited = self._reserve(key, nbytes)
        assert grant is not None
        view = self._arena.view(grant.offset, nbytes)
        with self._lock:
            self._handle(ev.Commit(key, grant.generation))
            self._handle(ev.Flush())
        for _ in range(200):
            os.sched_yield()
        fill(view, grant.generation)
        return waited

    patch.setattr(Pager, "commit", commit)


def no_check_of_what_is_read(patch: pytest.MonkeyPatch) -> None:
    def read(self: StreamFiles, chunk: int, generation: int, out: Any) -> None:
        self._store.read(chunk, out, self._stream)

    patch.setattr(StreamFiles, "read", read)


def check_over_the_payload_only(patch: pytest.MonkeyPatch) -> None:
    def verify(image: Any, layers: int, **wanted: object) -> Any:
        return verify_image(image, layers)

    patch.setattr(session_module, "verify_image", verify)


def stale_set_unflagged(patch: pytest.MonkeyPatch) -> None:
    choose = WorldMemory._choose

    def unflagged(self: WorldMemory, step: Any, report: Any) -> Any:
        window = choose(self, step, report)
        report.stale, report.stale_reason = False, ""
        return window

    patch.setattr(WorldMemory, "_choose", unflagged)


def a_mixture_on_a_miss(patch: pytest.MonkeyPatch) -> None:
    from worldpager.prefetch.fallback import Stale

    def choose(self: Stale, wanted: Any, ranking: Any, resident: Any, previous: Any) -> Any:
        return core_module.Choice(tuple(c for c in wanted if resident(c)), "previous set")

    patch.setattr(Stale, "choose", choose)


def full_counted_as_success(patch: pytest.MonkeyPatch) -> None:
    write = Workers._write

    def written(self: Workers, job: ev.Write) -> Any:
        write(self, job)
        return ev.WriteDone(job.key, job.generation)

    patch.setattr(Workers, "_write", written)


def failures_not_told_at_the_end(patch: pytest.MonkeyPatch) -> None:
    def flush(self: Pager, timeout: float | None) -> None:
        self._flushed = None
        self._handle(ev.Flush())
        while self._flushed is None:
            self._wait()

    patch.setattr(Pager, "_flush", flush)


def flush_that_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pager, "_flush", lambda self, timeout: None)


def rename_before_the_bytes(patch: pytest.MonkeyPatch) -> None:
    from worldpager.tiers.directio import DirectIO

    def write_new(self: DirectIO, path: Path, data: Any) -> None:
        write(self, path, data[: len(data) // 2 // 4096 * 4096])

    write = DirectIO.write_new
    patch.setattr(DirectIO, "write_new", write_new)


def positions_of_the_slot(patch: pytest.MonkeyPatch) -> None:
    def place(self: Moving, start_frame: int, base: int, stored: Any) -> list[float]:
        return [[float(3 * i)] for i in range(len(stored))]

    patch.setattr(Moving, "place", place)


def any_identity_will_do(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StoreSpec, "check_same", lambda self, stored: None)


def nobody_locks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DirectoryLock, "_acquire", lambda self: os.open("/dev/null", os.O_RDONLY))


def temporary_files_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(documents, "sweep", lambda io, folder, shared=False: None)


@contextmanager
def _no_cap(self: DiskCap, nbytes: int, free: int, free_floor: int, *, beside: int) -> Any:
    yield


def the_cap_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DiskCap, "reserved", _no_cap)


def trouble_told_for_each_block(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pager, "_report", lambda self, event: _tell(self, event))


def _tell(pager: Pager, event: Any) -> None:
    with pager._lock:
        if isinstance(event, ev.WriteFailed):
            pager._report_health(event.reason)
        pager._handle(event)


DEFECTS: list[tuple[Patch, Check]] = [
    (index_before_bytes, exact),
    (no_check_of_what_is_read, damage),
    (check_over_the_payload_only, under_way),
    (stale_set_unflagged, stuck),
    (a_mixture_on_a_miss, stuck),
    (full_counted_as_success, full),
    (failures_not_told_at_the_end, full),
    (flush_that_does_not_wait, flushed),
    (rename_before_the_bytes, exact),
    (positions_of_the_slot, exact),
    (any_identity_will_do, identity),
    (nobody_locks, two_writers),
    (temporary_files_stay, leftovers_swept),
    (the_cap_is_ignored, counted),
    (trouble_told_for_each_block, warned_once),
]


@pytest.mark.parametrize("check", sorted({c for _, c in DEFECTS}, key=lambda c: c.__name__))
def test_without_a_defect_all_pass(tmp_path: Path, check: Check) -> None:
    check(tmp_path / "s")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("defect", "check"), DEFECTS, ids=lambda f: f.__name__)
def test_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: Patch, check: Check
) -> None:
    defect(monkeypatch)
    noticed = (
        AssertionError,
        pytest.fail.Exception,
        BackgroundError,
        DamagedBlockError,
        StoreError,
    )
    with pytest.raises(noticed):
        check(tmp_path / "s")

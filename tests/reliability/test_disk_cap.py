"""The disk cap covers every byte that a store writes, by outside measurement."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.reliability.faults import FailingIO
from tests.reliability.world import World, chunk_bytes, folder_bytes, reference_spec
from worldpager.errors import BackgroundError, StoreFullError
from worldpager.model_adapter import record
from worldpager.pager.session import publish_chunks
from worldpager.tiers import documents
from worldpager.tiers.io_backend import Bytes, SystemIO

BYTES = chunk_bytes(reference_spec())
BLOCK = 4096


class Watched(FailingIO):
    """Notes the most bytes that the directory ever held, measured after each call that adds some;
    no sync, since nothing crashes here.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._lock = threading.Lock()
        self.most = 0

    def _measure(self) -> None:
        with self._lock, suppress(FileNotFoundError):
            self.most = max(self.most, folder_bytes(self._directory))

    def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
        moved = super().pwrite(fd, data, offset)
        self._measure()
        return moved


def full_world(directory: Path, cap: int, rollouts: int) -> Watched:
    """Rollouts of a hundred chunks each under ``cap``; their peak on disk."""
    io = Watched(directory)
    world = World(directory, dram=12, disk=cap, io=io, chunks=120)
    memory = world.memory
    with suppress(BackgroundError), memory:  # what found no room is told when it closes
        for _ in range(rollouts):
            world.run(range(100), check=False)
            status = memory.status()
            assert abs(status.occupancy.disk - folder_bytes(directory)) <= BLOCK + BYTES
        memory.settle()
        publish_chunks(memory._session.rollout.store)
    assert memory.status().lost.get("no space", 0) > 0, "the cap must have been met"
    assert abs(memory.status().occupancy.disk - folder_bytes(directory)) <= BLOCK
    return io


@pytest.mark.parametrize("rollouts", [1, 3])
def test_never_a_byte_beyond_the_cap(tmp_path: Path, rollouts: int) -> None:
    cap = 70 * BYTES
    io = full_world(tmp_path / "s", cap, rollouts)
    assert 60 * BYTES < io.most <= cap
    assert folder_bytes(tmp_path / "s") <= cap


def test_the_record_of_the_run_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much there is to tell, it fits the room kept for it, old and new side by side."""
    cap, most, sizes = 70 * BYTES, 0, set()
    replace = record._replace

    def measured(path: Path, content: bytes) -> None:
        nonlocal most
        with suppress(FileNotFoundError):  # a temporary file that is gone by now
            most = max(most, folder_bytes(tmp_path / "s") + len(content))
        sizes.add(len(content))
        replace(path, content)

    monkeypatch.setattr(record, "_replace", measured)
    monkeypatch.setattr(record, "RECORD_SECONDS", 0.0)
    world = World(tmp_path / "s", dram=12, disk=cap, io=Watched(tmp_path / "s"), chunks=120)
    with suppress(BackgroundError), world.memory as memory:
        for chunk in range(100):
            world.step(chunk, check=False)
            if chunk > 40:  # more reasons than there ever are
                memory.rejected[f"reason {chunk}, at some length"] += 1
    assert world.memory.status().lost.get("no space", 0) > 0, "the cap must have been met"
    assert 60 * BYTES < most <= cap
    assert min(sizes) > 250 and max(sizes) <= documents.STATUS_BYTES
    said = record.read_record(SystemIO(), tmp_path / "s" / "rollout-0" / "kv")
    assert said is not None and said.problems, "what was cut is not what went wrong"


def test_a_full_directory_opens_again_and_its_metadata_was_written(tmp_path: Path) -> None:
    cap = 70 * BYTES
    full_world(tmp_path / "s", cap, 1)
    assert (tmp_path / "s/rollout-0/place/0.0").exists()
    for _ in range(5):  # each begins a rollout and is told that nothing fits
        again = World(tmp_path / "s", dram=12, disk=cap, chunks=120)
        with pytest.raises(BackgroundError, match="no space"), again.memory:
            again.run(range(20), check=False)
        assert folder_bytes(tmp_path / "s") <= cap
        assert abs(again.memory.status().occupancy.disk - folder_bytes(tmp_path / "s")) <= BLOCK


def test_a_cap_that_holds_no_rollout_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(StoreFullError, match="disk cap of 4KiB"):
        World(tmp_path / "s", dram=12, disk=4096)
    assert folder_bytes(tmp_path / "s") <= BLOCK
    with World(tmp_path / "s", dram=12, disk=70 * BYTES).memory:
        pass

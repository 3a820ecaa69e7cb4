from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from worldpager.errors import BudgetError, ClosedError, ConfigError
from worldpager.tiers import pinning
from worldpager.tiers.arena import HUGE_PAGE, Arena
from worldpager.tiers.extents import PAGE

MIB = 1 << 20


def resident() -> int:
    return psutil.Process().memory_info().rss


def test_memory_is_there_from_the_start_and_stays_as_it_is() -> None:
    before = resident()
    arena = Arena(64 * MIB)
    opened = resident()
    assert abs(opened - before - 64 * MIB) < 4 * MIB
    arena.view(0, arena.nbytes)[:] = 7
    assert abs(resident() - opened) < 4 * MIB
    arena.close()
    assert resident() - before < 4 * MIB


def test_views_are_aligned_and_share_the_memory() -> None:
    arena = Arena(4 * MIB + 5 * PAGE + 17)
    assert arena.nbytes == 4 * MIB + 5 * PAGE
    assert arena.view(0, 1).ctypes.data % HUGE_PAGE == 0
    view = arena.view(3 * PAGE, 100)
    assert view.ctypes.data % PAGE == 0
    assert view.dtype == np.uint8
    view[:] = 9
    assert arena.view(0, arena.nbytes).sum() == 900
    last = arena.view(arena.nbytes - PAGE, PAGE)
    last[:] = 1
    arena.close()


def test_a_small_budget_is_not_rounded_up_to_a_huge_page() -> None:
    before = resident()
    arena = Arena(640 << 10)
    assert arena.nbytes == 640 << 10
    assert resident() - before < MIB
    arena.close()


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(1, 1), (-PAGE, 1), (0, 2 * PAGE + 1), (2 * PAGE, 1), (0, -1)]
)
def test_ranges_outside_are_refused(offset: int, nbytes: int) -> None:
    with pytest.raises(ConfigError, match="no page-aligned range of a pool of 8192 bytes"):
        Arena(2 * PAGE).view(offset, nbytes)


def test_close_is_final_but_leaves_views_intact() -> None:
    arena = Arena(8 * MIB)
    view = arena.view(0, 8 * MIB)
    view[:] = 5
    arena.close()
    arena.close()
    assert (view == 5).all()
    with pytest.raises(ClosedError):
        arena.view(0, 1)
    before = resident()
    del view
    assert before - resident() > 7 * MIB


def test_budgets_that_cannot_be_met_are_refused_and_a_smaller_one_then_opens() -> None:
    with pytest.raises(ConfigError, match="at least 4096"):
        Arena(PAGE - 1)
    with pytest.raises(BudgetError, match="available under the limit"):
        Arena(1 << 50)
    Arena(PAGE).close()


def test_a_limit_on_address_space_is_named() -> None:
    code = (
        "import resource, psutil\n"
        "from worldpager.errors import BudgetError\n"
        "from worldpager.tiers.arena import Arena\n"
        "room = psutil.Process().memory_info().vms + (64 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (room, room))\n"
        "try: Arena(256 << 20)\n"
        "except BudgetError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "refused to map a DRAM budget of 256MiB" in run.stdout
    assert "ulimit -v" in run.stdout


def test_a_kernel_without_populate_touches_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worldpager.tiers.arena._MADV_POPULATE_WRITE", 9999)
    before = resident()
    arena = Arena(32 * MIB)
    assert resident() - before > 30 * MIB
    arena.close()


def in_a_child(job: Callable[[], bool]) -> bool:
    """Whether ``job`` says yes in a forked process, and that process ends well."""
    if (child := os.fork()) == 0:
        ok = False
        try:
            ok = job()
        finally:
            os._exit(0 if ok else 1)
    return os.waitpid(child, 0)[1] == 0


def test_a_forked_child_finds_the_pool_empty_and_costs_no_memory() -> None:
    arena = Arena(16 * MIB)
    arena.view(0, arena.nbytes)[:] = 1
    held = resident()

    def job() -> bool:
        return resident() < held - 12 * MIB and not arena.view(0, arena.nbytes).any()

    assert in_a_child(job)
    assert arena.view(0, arena.nbytes).all()
    arena.close()


def test_a_childs_own_pool_outlives_the_one_it_inherited() -> None:
    inherited = [Arena(16 * MIB)]

    def job() -> bool:
        own = [Arena(16 * MIB) for _ in range(4)]
        inherited.clear()  # unmaps what the parent mapped: nothing of the child's may lie there
        for arena in own:
            arena.view(0, arena.nbytes)[:] = 7
        return all(arena.view(0, arena.nbytes).all() for arena in own)

    assert in_a_child(job)
    assert inherited[0].view(0, 1) is not None


class FakeCuda:
    """Stands in for ``torch.cuda``: locks memory or fails with ``status``."""

    def __init__(self, status: int) -> None:
        self.status, self.locked = status, {}

    def is_available(self) -> bool:
        return True

    def device(self, device: torch.device) -> FakeCuda:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def cudart(self) -> SimpleNamespace:
        return SimpleNamespace(
            cudaHostRegister=self._register, cudaHostUnregister=self.locked.__delitem__
        )

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        if self.status == 0:
            self.locked[address] = nbytes
        return self.status


def fake_torch(cuda: FakeCuda) -> SimpleNamespace:
    def zeros(*args: object, **options: object) -> None:
        raise RuntimeError("the error that CUDA kept")

    return SimpleNamespace(cuda=cuda, zeros=zeros)


def test_pinning_locks_all_and_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(0)
    monkeypatch.setattr(pinning, "torch", fake_torch(cuda))
    arena = Arena(3 * MIB)
    assert arena.pin(torch.device("cuda:1"))
    assert arena.pinned_bytes == 3 * MIB
    assert arena.pin_reason == ""
    assert list(cuda.locked.values()) == [3 * MIB]
    arena.close()
    assert cuda.locked == {}
    assert arena.pinned_bytes == 0


def test_pinning_that_fails_says_why_and_the_pool_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "torch", fake_torch(FakeCuda(2)))
    arena = Arena(3 * MIB)
    assert not arena.pin(torch.device("cuda"))
    assert arena.pinned_bytes == 0
    assert "CUDA error 2" in arena.pin_reason
    arena.view(0, MIB)[:] = 1
    arena.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_without_cuda_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("tried to pin"))
    arena = Arena(PAGE)
    assert not arena.pin(torch.device("cuda"))
    assert "no CUDA device" in arena.pin_reason
    arena.close()


@pytest.mark.gpu
def test_pinned_memory_copies_asynchronously_and_is_released() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    arena = Arena(8 * MIB)
    assert arena.pin(device), arena.pin_reason
    host = torch.from_numpy(arena.view(0, 8 * MIB))
    host.fill_(3)
    assert host.is_pinned()
    assert host.to(device, non_blocking=True).sum().item() == 24 * MIB
    arena.close()
    assert not host.is_pinned()


@pytest.mark.gpu
def test_after_failed_pinning_the_next_cuda_call_succeeds() -> None:
    arena = Arena(8 * MIB)
    assert arena.pin(torch.device("cuda"))
    assert "CUDA error" in pinning.register(arena.view(0, 8 * MIB), torch.device("cuda"))
    assert torch.ones(4, device="cuda").sum().item() == 4
    arena.close()


def test_locked_memory_limit_does_not_matter() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(
        resource.RLIMIT_MEMLOCK, (min(64 << 10, hard if hard > 0 else 64 << 10), hard)
    )
    try:
        Arena(4 * MIB).close()
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))

"""A pool that sessions lease from: bytes only, nothing left, nobody disturbed."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worldpager import MemoryPool
from worldpager.errors import BudgetError, ClosedError, ConfigError
from worldpager.pager.pool import PLANNERS, POOL_READERS, POOL_WRITERS, Lease
from worldpager.tiers.extents import PAGE

MIB = 1 << 20


def threads() -> list[threading.Thread]:
    """The pools' threads; those that decode for attention are the process's."""
    mine = [t for t in threading.enumerate() if t.name.startswith("worldpager")]
    return [t for t in mine if not t.name.startswith("worldpager-levels")]


def test_the_pool_is_there_from_the_start_and_gone_at_the_end() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    with MemoryPool(64 * MIB + 17) as pool:
        assert pool.nbytes == pool.free == pool.largest_free == 64 * MIB
        assert abs(process.memory_info().rss - before - 64 * MIB) < 4 * MIB
        assert len(threads()) == POOL_READERS + POOL_WRITERS + PLANNERS
        pool.lease(MIB).close()
    pool.close()
    assert threads() == []
    assert process.memory_info().rss - before < 4 * MIB
    with pytest.raises(ClosedError, match="pool is closed"):
        pool.lease(PAGE)


def test_a_pool_that_cannot_be_is_refused() -> None:
    with pytest.raises(BudgetError, match="available under the limit"):
        MemoryPool(1 << 50)
    with pytest.raises(ConfigError, match="at least 4096"):
        MemoryPool(PAGE - 1)
    assert threads() == []


def test_leases_are_apart_and_bounded() -> None:
    with MemoryPool(4 * PAGE) as pool:
        first, second = pool.lease(2 * PAGE), pool.lease(PAGE + 5)
        assert (first.nbytes, second.nbytes) == (2 * PAGE, PAGE)
        with first.held(), second.held():
            first.view(0, 2 * PAGE)[:] = 1
            second.view(0, PAGE)[:] = 2
            assert (first.view(PAGE, PAGE) == 1).all() and (second.view(0, PAGE) == 2).all()
        for offset, nbytes in ((PAGE, 2 * PAGE), (-PAGE, PAGE), (1, 1), (0, -1)):
            with pytest.raises(ConfigError, match="no page-aligned range of a pool of 8192"):
                first.view(offset, nbytes)
        first.close()
        first.close()
        with pytest.raises(ClosedError):
            first.view(0, 1)
        assert pool.free == 3 * PAGE
        second.close()


def test_a_quota_that_cannot_be_met_is_refused_with_all_numbers() -> None:
    with MemoryPool(8 * PAGE) as pool:
        a, b, c = (pool.lease(2 * PAGE) for _ in range(3))
        a.close()
        assert (pool.free, pool.largest_free) == (4 * PAGE, 2 * PAGE)
        with pytest.raises(BudgetError) as refused:
            pool.lease(3 * PAGE)
        for number in (3 * PAGE, 8 * PAGE, 4 * PAGE, 2 * PAGE):
            assert f"({number} bytes)" in str(refused.value)
        assert pool.free == 4 * PAGE
        small = [pool.lease(PAGE) for _ in range(4)]  # by bytes, however many
        for lease in (b, c, *small):
            lease.close()
        assert pool.free == pool.largest_free == 8 * PAGE


def test_what_is_held_is_not_leased_again() -> None:
    with MemoryPool(2 * PAGE) as pool:
        lease = pool.lease(2 * PAGE)
        with lease.held():
            view = lease.view(0, PAGE)
            lease.close()
            with pytest.raises(BudgetError):
                pool.lease(PAGE)
            with pytest.raises(ClosedError):
                lease.held().__enter__()
            view[:] = 3
        assert pool.free == 2 * PAGE


def test_closing_a_pool_disturbs_no_session_and_frees_it_with_the_last() -> None:
    pool = MemoryPool(MIB)
    leases = [pool.lease(PAGE), pool.lease(PAGE)]
    pool.close()
    pool.close()
    with pytest.raises(ClosedError):
        pool.lease(PAGE)
    done = threading.Event()
    pool.readers.submit(done.set)
    assert done.wait(20)
    with leases[0].held():
        leases[0].view(0, PAGE)[:] = 1
    leases[0].close()
    assert threads()
    leases[1].close()
    assert threads() == []
    with pytest.raises(ClosedError):
        pool.arena.view(0, PAGE)


def test_a_dropped_pool_leaves_nothing() -> None:
    pool = MemoryPool(MIB)
    lease = pool.lease(PAGE)
    lease.close()
    del pool, lease
    gc.collect()
    for thread in threads():
        thread.join(20)
    assert threads() == []


def test_threads_that_cannot_be_started_leave_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = psutil.Process().memory_info().rss
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            MemoryPool(32 * MIB)
    gc.collect()
    assert threads() == [] and psutil.Process().memory_info().rss - before < 4 * MIB


def test_a_forked_child_may_not_use_the_pool() -> None:
    with MemoryPool(MIB) as pool:
        lease = pool.lease(PAGE)
        if (child := os.fork()) == 0:
            status = 1
            try:
                pool.lease(PAGE)
            except ClosedError:
                pool.close()
                lease.close()
                with MemoryPool(MIB) as own:
                    own.lease(PAGE).close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert pool.leases == 1
        pool.lease(PAGE).close()
        lease.close()


def test_pinning_that_was_asked_for_and_failed_shows() -> None:
    with MemoryPool(MIB) as pool:
        lease = pool.lease(PAGE)
        assert not lease.pin_failed and lease.pinned_bytes == 0
        if not torch.cuda.is_available():
            assert not pool.pin(torch.device("cuda"))
            assert lease.pin_failed and "no CUDA device" in lease.pin_reason
        lease.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[MemoryPool]:
    with MemoryPool(64 * PAGE) as pool:
        yield pool


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 7), st.booleans()), max_size=60))
def test_no_two_leases_share_a_byte_and_all_come_back(
    shared: MemoryPool, steps: list[tuple[int, int, bool]]
) -> None:
    live: list[tuple[int, Lease]] = []
    for mark, (pages, which, ends) in enumerate(steps, 1):
        if ends and live:
            _, lease = live.pop(which % len(live))
            lease.close()
        else:
            try:
                lease = shared.lease(pages * PAGE)
            except BudgetError:
                assert shared.largest_free < pages * PAGE
                continue
            with lease.held():
                lease.view(0, lease.nbytes)[:] = mark
            live.append((mark, lease))
        assert shared.free == 64 * PAGE - sum(lease.nbytes for _, lease in live)
        for mark_of, lease in live:
            with lease.held():
                assert (lease.view(0, lease.nbytes) == mark_of).all()
    for _, lease in live:
        lease.close()
    assert shared.free == shared.largest_free == 64 * PAGE

"""WorldMemory from end to end, with real threads and files: exact or absent, and never waiting."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.model_adapter.synthetic import (
    SyntheticFrontend,
    chunk_bytes,
    made,
    reference_spec,
    stored,
)
from worldpager.errors import BudgetError, ConfigError, PositionError
from worldpager.model_adapter.config import MemoryConfig
from worldpager.model_adapter.memory import WorldMemory


@pytest.mark.parametrize("codec", ["int4", "bf16"])
def test_every_window_is_exact_through_all_tiers(tmp_path: Path, codec: str) -> None:
    frontend = SyntheticFrontend(tmp_path / "s", reference_spec(), chunks_in_dram=12, codec=codec)
    with frontend.memory:
        for chunk in range(100):
            frontend.boundary(chunk)
            frontend.check_window(chunk)
            frontend.append(chunk)
            frontend.memory.settle()
        stats = frontend.memory.stats
        assert stats.bytes_read > 0 and stats.evictions > 0 and stats.fetched > 0
        assert stats.spill_chunk is not None and 10 <= stats.spill_chunk <= 13


def test_nothing_waits_without_settling_and_stale_is_the_previous_window(tmp_path: Path) -> None:
    spec = reference_spec()
    frontend = SyntheticFrontend(
        tmp_path / "s", spec, chunks_in_dram=11, read_limit=200_000, pressure="drop",
        on_miss="stale",
    )  # fmt: skip
    stale, previous = 0, ()
    with frontend.memory:
        for chunk in range(60):
            got = frontend.boundary(chunk)
            frontend.check_window(chunk)
            last = frontend.memory.last
            assert last.stall_ms == 0
            if last.stale:
                stale += 1
                assert got == previous and last.stale_reason
            frontend.append(chunk)
            previous = got
    assert stale > 0, "a starved disk must show"
    assert frontend.memory.stats.stale_windows == stale


def test_wait_mode_serves_everything_and_counts_the_stall(tmp_path: Path) -> None:
    frontend = SyntheticFrontend(
        tmp_path / "s", reference_spec(), chunks_in_dram=11, on_miss="wait", read_limit=5_000_000
    )
    with frontend.memory:
        for chunk in range(60):
            frontend.boundary(chunk)
            frontend.check_window(chunk)
            assert not frontend.memory.last.stale
            frontend.append(chunk)
        hits = frontend.memory.stats.hits
    assert hits["stale"] == hits["empty"] == 0


def test_nearest_serves_resident_chunks_and_says_so(tmp_path: Path) -> None:
    frontend = SyntheticFrontend(
        tmp_path / "s", reference_spec(), chunks_in_dram=11, on_miss="nearest", read_limit=200_000
    )
    reasons = set()
    with frontend.memory:
        for chunk in range(80):
            got = frontend.boundary(chunk)
            frontend.check_window(chunk)
            if frontend.memory.last.stale:
                assert got, "something near is always resident here"
                reasons.add(frontend.memory.last.stale_reason)
            frontend.append(chunk)
    assert reasons == {"nearest resident"}


def test_known_controls_leave_no_window_stale(tmp_path: Path) -> None:
    frontend = SyntheticFrontend(tmp_path / "s", reference_spec(), chunks_in_dram=12)
    with frontend.memory:
        for chunk in range(100):
            frontend.boundary(chunk, ahead=8)
            assert not frontend.memory.last.stale, chunk
            frontend.append(chunk)
            frontend.memory.settle()
        assert frontend.memory.stats.hits["dram"] == 0, "each wanted chunk was staged ahead"


def test_batch_items_do_not_influence_each_other(tmp_path: Path) -> None:
    spec = reference_spec(batch=2)
    frontend = SyntheticFrontend(tmp_path / "s", spec, chunks_in_dram=12)
    with frontend.memory:
        frontend.run(range(6))
        frontend.boundary(6)
        frontend.check_window(6)
        chunk = frontend.memory.last.retrieved[0]
        kv = made(spec, "session", chunk, 0)
        single = reference_spec()
        shift = frontend.spec.rope.temporal_rotation(0) if frontend.spec.rope else None
        assert shift is None
        alone = stored(single, "int4", (kv[0][1:], kv[1][1:]), 0)
        both = stored(spec, "int4", kv, 0)
        assert torch.equal(both[0][1:], alone[0]) and torch.equal(both[1][1:], alone[1])


def test_the_horizon_is_crossed_without_rewriting_anything(tmp_path: Path) -> None:
    spec = reference_spec(table=48)  # 16 chunks
    frontend = SyntheticFrontend(tmp_path / "s", spec, chunks_in_dram=40)
    with frontend.memory:
        for chunk in range(40):
            frontend.boundary(chunk)
            frontend.check_window(chunk)
            frontend.append(chunk)
            assert 0 <= chunk * 3 - frontend.base <= 45
        assert frontend.base > 0
        assert frontend.memory.stats.deletes == 0


def test_absolute_positions_refuse_the_first_chunk_beyond_the_table(tmp_path: Path) -> None:
    spec = reference_spec(table=48)
    frontend = SyntheticFrontend(tmp_path / "s", spec, chunks_in_dram=20, positions="absolute")
    with frontend.memory:
        frontend.run(range(16))
        commits = frontend.memory.stats.commits
        with pytest.raises(PositionError, match="48 rows"):
            frontend.boundary(16)
        assert frontend.memory.stats.commits == commits, "refused before anything changed"


def test_reopening_brings_back_everything(tmp_path: Path) -> None:
    spec = reference_spec()
    first = SyntheticFrontend(tmp_path / "s", spec, chunks_in_dram=12)
    with first.memory:
        first.run(range(41))
    second = SyntheticFrontend(tmp_path / "s", spec, chunks_in_dram=12, on_miss="wait")
    with second.memory:
        second.positions = first.positions
        assert second.memory.occupancy.stored > 38 * chunk_bytes(spec, "int4")
        for layer in range(spec.layers):  # the frontend restores its own window
            for name in ("k", "v"):
                second.layers[layer][name].copy_(first.layers[layer][name])
            second.layers[layer]["local_end_index"].copy_(first.layers[layer]["local_end_index"])
        second.boundary(41)
        assert len(second.memory.last.retrieved) == 3
        second.check_window(41)


def test_a_new_rollout_sees_nothing_of_the_one_before(tmp_path: Path) -> None:
    frontend = SyntheticFrontend(tmp_path / "s", reference_spec(), chunks_in_dram=12)
    with frontend.memory:
        frontend.run(range(20))
        for cache in frontend.layers:
            cache["local_end_index"].zero_()
        for chunk in range(12):
            assert all(other < chunk for other in frontend.boundary(chunk))
            frontend.check_window(chunk)
            frontend.append(chunk)
    assert {p.name for p in (tmp_path / "s").iterdir() if p.is_dir()} == {"rollout-0", "rollout-1"}


def test_non_finite_chunks_are_refused_counted_and_never_served(tmp_path: Path) -> None:
    frontend = SyntheticFrontend(tmp_path / "s", reference_spec(), chunks_in_dram=12)
    with frontend.memory:
        for chunk in range(12):
            frontend.boundary(chunk)
            assert 5 not in frontend.memory.last.retrieved
            frontend.append(chunk)
            if chunk == 5:
                end = int(frontend.layers[2]["local_end_index"])
                frontend.layers[2]["v"][0, end - 1, 1, 63] = float("nan")
        assert frontend.memory.rejected == {"non-finite": 1}
        assert frontend.memory.stats.commits == 10


def test_chunks_out_of_order_and_missing_poses_are_refused(tmp_path: Path) -> None:
    frontend = SyntheticFrontend(tmp_path / "s", reference_spec(), chunks_in_dram=12)
    with frontend.memory:
        frontend.run(range(3))
        with pytest.raises(ConfigError, match="chunk 4 was finished, but the last one begun was 2"):
            frontend.boundary(5)


def test_a_pool_too_small_is_refused_with_the_numbers(tmp_path: Path) -> None:
    config = MemoryConfig(store=tmp_path / "s", dram=200_000)
    with pytest.raises(BudgetError, match=r"195\.3KiB is too small.*3 chunks"):
        WorldMemory(config, reference_spec())
    assert not (tmp_path / "s").exists()


CHILD = """
import sys
from pathlib import Path
from tests.model_adapter.synthetic import SyntheticFrontend, reference_spec
frontend = SyntheticFrontend(Path(sys.argv[1]), reference_spec(), chunks_in_dram=12)
for chunk in range(300):
    frontend.boundary(chunk)
    frontend.append(chunk)
    if chunk == 20:
        frontend.memory.flush()
        print("flushed", flush=True)
    print(chunk, flush=True)
"""


@pytest.mark.parametrize("after", [0, 25, 60, 140])
def test_killed_at_any_moment_what_is_present_is_exact(tmp_path: Path, after: int) -> None:
    spec = reference_spec()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path / "s")], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    lines: list[str] = []
    while f"{after}\n" not in lines:
        lines.append(child.stdout.readline())
        assert lines[-1], "the child ended by itself"
    child.send_signal(signal.SIGKILL)
    lines += child.stdout.readlines()
    child.wait()
    begun = int(lines[-1])
    frontend = SyntheticFrontend(tmp_path / "s", spec, chunks_in_dram=200, on_miss="wait")
    with frontend.memory as memory:
        rollout = memory._session.rollout
        present = {record.chunk for record in rollout.found}
        assert present <= set(range(begun + 2))
        if "flushed\n" in lines:
            assert set(range(20)) <= present
        for chunk in sorted(present - {0}):
            window = memory._session.pager.acquire(rollout.stream, chunk, (chunk,), (chunk,))
            assert [c.chunk for c in window.chunks] == [chunk]
        assert not list((tmp_path / "s").rglob("*.tmp"))
        assert not memory.stats.read_failures

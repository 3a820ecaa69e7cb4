"""The simulator against the real runtime, the closed form and the published figures."""

from __future__ import annotations

from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model_adapter.synthetic import reference_spec
from tests.sim.lockstep import config_of, run_real
from worldpager.errors import ConfigError
from worldpager.model_adapter.rollout import ChunkMetrics
from worldpager.pager.eviction import eviction_names
from worldpager.pager.runtime import Pager
from worldpager.prefetch.actions import upright_poses
from worldpager.prefetch.paths import make_path
from worldpager.prefetch.poses import Floats
from worldpager.quant.codec import get_codec
from worldpager.sim.belady import Belady
from worldpager.sim.closed_form import chunk_bytes, pool_bytes
from worldpager.sim.devices import DiskModel
from worldpager.sim.predictions import Inputs, columns, poses_hash, sim_config
from worldpager.sim.presets import get_preset
from worldpager.sim.simulator import (
    PATIENCE_SECONDS,
    HostModel,
    SimChunk,
    SimConfig,
    Simulator,
    demands,
    reads_on_demand,
    simulate,
)
from worldpager.sim.traces import Trace, compare_policies

CHUNKS = 70


@pytest.mark.parametrize(
    ("path", "codec", "room", "retrieve", "ahead", "options"),
    [
        ("yaw-return", "int4", 13, 3, 0, {}),
        ("loop", "int8", 20, 3, 8, {"on_miss": "nearest"}),
        ("walk", "int4", 13, 2, 8, {"eviction": "furthest"}),
        ("yaw-return", "bf16", 40, 3, 0, {"eviction": "lru"}),
        ("walk", "int4", 30, 4, 0, {}),
    ],
    ids=lambda value: str(value),
)
def test_the_simulator_is_the_runtime(
    path: str,
    codec: str,
    room: float,
    retrieve: int,
    ahead: int,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = reference_spec(retrieve)
    frontend, real = run_real(
        tmp_path / "store", spec, monkeypatch, chunks=CHUNKS, ahead=ahead, path=path, codec=codec,
        chunks_in_dram=room, **options,
    )  # fmt: skip
    config = config_of(spec, chunks_in_dram=room, codec=codec, ahead=ahead, **options)
    for mine, theirs in zip(simulate(config, frontend.path), real, strict=True):
        assert {name: getattr(mine, name) for name in theirs} == theirs
    assert real[-1]["spill_chunk"] is not None
    assert real[-1]["chunk_reads_total"] > 0


# ---- what it must agree with ---------------------------------------------------------------------

GIB = 2**30
NVME = DiskModel(3.5e9, 3.0e9, 1e-4, 1e-4, shared_bandwidth=4.5e9)


def published(model: str, pool: int, codec: str = "int4-absmax", **changes: Any) -> SimConfig:
    """A model on the published machine; least recently used first, as the paper's figures fit."""
    geometry = get_preset(model)
    assert geometry.compute_seconds is not None
    config = SimConfig(
        pool_bytes=pool,
        chunk_bytes=chunk_bytes(geometry, get_codec(codec)).stored,
        compute_seconds=geometry.compute_seconds,
        disk=NVME,
        eviction="lru",
    )
    return replace(config, **changes)


def there_and_back(chunks: int, frames: int) -> Floats:
    """Chunk t revisits ``chunks - 1 - t``."""
    half = chunks * frames // 2
    positions = np.zeros((half, 3))
    positions[:, 2] = 0.1 * np.arange(half)
    out = upright_poses(positions, np.zeros(half), np.zeros(half))
    return np.concatenate([out, out[::-1]]).reshape(chunks, frames, 4, 4)


@pytest.mark.parametrize(
    ("codec", "memory_gib", "chunk"),
    [("bf16", 32, 60), ("int4-absmax", 32, 226), ("int4-absmax", 64, 492)],
)
def test_published_spill_points(codec: str, memory_gib: int, chunk: int) -> None:
    config = published("matrix-game-2", pool_bytes(memory_gib * GIB), codec, retrieval="none")
    rollout = simulate(config, make_path("loop", chunk + 3, 3))
    assert [c.spill_chunk for c in rollout[-4:]] == [None, chunk, chunk, chunk]


def test_the_gpu_alone_is_full_at_21() -> None:
    config = published("matrix-game-2", round(9.3 * GIB), "bf16")
    assert simulate(config, make_path("loop", 24, 3))[-1].spill_chunk == 21


@pytest.mark.parametrize(
    ("model", "memory_gib", "reserve_gib", "frames", "first_write", "first_read"),
    [
        ("lingbot-world-1.3b", 32, 4.1, 4, 102, 178),
        ("lingbot-world-1.3b", 64, 4.1, 4, 218, 236),
        ("matrix-game-2", 32, 4.85, 3, 226, 240),
    ],
)
def test_published_first_reads(
    model: str, memory_gib: int, reserve_gib: float, frames: int, first_write: int, first_read: int
) -> None:
    pool = round((memory_gib - reserve_gib) * GIB)
    ahead = published(model, pool)
    on_demand = replace(ahead, on_miss="wait", load_ahead=False)
    for config, stalls in ((ahead, False), (on_demand, True)):
        rollout = simulate(config, there_and_back(256, frames))
        last = rollout[-1]
        assert last.spill_chunk == first_write
        assert last.first_read_chunk is not None
        assert abs(last.first_read_chunk - first_read) <= 1
        assert any(chunk.stall_ms > 0 for chunk in rollout) == stalls


@pytest.mark.parametrize("gigabytes", [0.25, 0.5, 1.0, 5.0])
def test_no_median_stall_down_to_a_quarter_gigabyte(gigabytes: float) -> None:
    """At most two new chunks a step, all from NVMe: the published sweep. On demand, every window
    that needs a read waits for it, whatever the bandwidth.
    """
    path = there_and_back(120, 3)
    config = published(
        "matrix-game-2", 12 * 129_300_480, retrieve=2, on_miss="wait",
        read_limit=round(gigabytes * 1e9),
    )  # fmt: skip
    back = slice(70, None)
    ahead = [chunk.stall_ms for chunk in simulate(config, path)[back]]
    late = [chunk.stall_ms for chunk in simulate(replace(config, load_ahead=False), path)[back]]
    assert np.median(ahead) == 0
    assert np.median(late) > 0.9 * 129.3e6 / (gigabytes * 1e9) * 1e3 / 2


def test_three_new_chunks_a_step_stall_at_a_quarter_gigabyte() -> None:
    """As the closed form says: ``3 B / B_R - T`` each, once nothing of a set is there already."""
    jumps = there_and_back(240, 3)[:120]
    order = np.concatenate([np.arange(60), 3 * np.arange(20), 3 * np.arange(20)[::-1]])
    config = published("matrix-game-2", 9 * 129_300_480, on_miss="wait", read_limit=250_000_000)
    rollout = simulate(config, jumps[order])
    assert max(chunk.stall_ms for chunk in rollout) >= 340
    assert np.median([chunk.stall_ms for chunk in rollout[-30:]]) > 0


# ---- itself --------------------------------------------------------------------------------------


def small(**changes: Any) -> SimConfig:
    return replace(SimConfig(20 * 4096, 4096, 1.0, read_limit=8192), **changes)


def test_the_same_seed_gives_the_same_rollout() -> None:
    path = make_path("walk", 120, 3, 5)
    shaky = DiskModel(5_000, 20_000, jitter=0.5)
    runs = [simulate(small(disk=shaky, on_miss="wait", seed=s), path) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_its_fields_are_those_of_a_real_rollout() -> None:
    real = {field.name for field in fields(ChunkMetrics)}
    untold = {"rss_bytes", "commit_bytes", "commit_tokens", "active_tokens", "dense_tokens"}
    assert {field.name for field in fields(SimChunk)} == real - untold


def test_time_adds_up() -> None:
    host = HostModel(encode_seconds=0.25, decode_seconds=0.125)
    for chunk in simulate(small(host=host, on_miss="wait"), make_path("yaw-return", 80, 3)):
        parts = chunk.stall_ms + chunk.encode_ms + chunk.decode_ms
        assert chunk.boundary_ms == pytest.approx(parts)
        assert chunk.wall_ms == pytest.approx(chunk.boundary_ms + 1000)
        assert chunk.encode_ms == (250 if chunk.chunk else 0)
        assert chunk.decode_ms == 125 * len(chunk.retrieved)


def test_each_chunk_may_take_its_own_time() -> None:
    times = [0.5, 1.5, 0.25]
    rollout = simulate(small(compute_seconds=times), make_path("loop", 3, 3))
    assert [chunk.wall_ms for chunk in rollout] == pytest.approx([500, 1500, 250])
    with pytest.raises(ConfigError, match="compute times"):
        simulate(small(compute_seconds=times), make_path("loop", 4, 3))


def test_slow_writes_make_commits_wait_or_drop() -> None:
    path = make_path("loop", 80, 3)
    slow = small(write_limit=2048, read_limit=None)
    waited = simulate(slow, path)
    assert sum(chunk.stall_ms for chunk in waited) > 10_000
    simulator = Simulator(replace(slow, pressure="drop"), path)
    assert sum(chunk.stall_ms for chunk in simulator.run()) == 0
    assert simulator.stats.dropped["pressure"] > 10


def test_a_stuck_disk_costs_a_commit_twice_the_patience_at_most() -> None:
    stuck = small(disk=DiskModel(write_latency=1e6), on_miss="stale")
    rollout = simulate(stuck, make_path("loop", 40, 3))
    assert 0 < max(chunk.stall_ms for chunk in rollout) <= 2000 * PATIENCE_SECONDS + 100


def test_the_runtime_is_as_patient() -> None:
    patience = signature(Pager.__init__).parameters["patience"].default
    assert patience == PATIENCE_SECONDS


# ---- the bound -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["yaw-return", "loop", "walk"])
@pytest.mark.parametrize("room", [9, 20, 60])
def test_no_policy_reads_less_than_belady(path: str, room: int) -> None:
    config = small(pool_bytes=room * 4096)
    poses = make_path(path, 200, 3, seed=3)
    results = compare_policies(config, poses)
    bound = results[0]
    assert bound.name == "belady"
    assert [r.name for r in results[1:]] == eviction_names()
    assert all(result.reads >= bound.reads for result in results)
    if room == 9:
        assert bound.reads > 0


@given(
    seed=st.integers(0, 1000),
    room=st.integers(9, 40),
    retrieve=st.integers(1, 4),
    rule=st.sampled_from(eviction_names()),
)
@settings(max_examples=15, deadline=None)
def test_belady_is_the_least_on_any_walk(seed: int, room: int, retrieve: int, rule: str) -> None:
    config = small(pool_bytes=(room + 2 * retrieve) * 4096, retrieve=retrieve)
    path = make_path("walk", 80, 1, seed)
    least = reads_on_demand(config, path, Belady(demands(config, path)))
    assert least <= reads_on_demand(config, path, rule)


def test_a_trace_replays_as_it_ran_and_answers_what_if() -> None:
    path = make_path("yaw-return", 90, 3)
    inputs = Inputs(
        chunks=90, path="yaw-return", poses=poses_hash(path), dram_bytes=720 << 10,
        on_miss="wait", read_limit=60_000, chunk_time=0.5,
    )  # fmt: skip
    ran = columns(simulate(sim_config(inputs), path))
    trace = Trace.of(inputs, path, ran)
    same = trace.replay(trace.config())
    assert same.model_dump(exclude={"stall_ms"}) == trace.outcome.model_dump(exclude={"stall_ms"})
    assert same.stall_ms == pytest.approx(trace.outcome.stall_ms)
    assert same.stalled
    more = trace.replay(replace(trace.config(), pool_bytes=2 << 20))
    assert more.bytes_read < same.bytes_read
    assert not trace.replay(replace(trace.config(), read_limit=None)).stalled

"""The closed-form model against the published figures and the reference vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldpager.errors import ConfigError
from worldpager.quant.codec import get_codec
from worldpager.sim import closed_form
from worldpager.sim.presets import PRESETS, get_preset

GIB = 2**30
VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parent / "vectors" / "worldpager_model.json").read_text()
)
MG2 = get_preset("matrix-game-2")
T_C = VECTORS["stall"]["T_c_s"]
INT4_BYTES = VECTORS["bytes_per_chunk"]["int4_4.25bit"]


def test_geometry_of_matrix_game() -> None:
    geometry = VECTORS["geometry"]
    assert MG2.layers == geometry["layers"]
    assert MG2.heads * MG2.head_dim == geometry["dim"]
    assert MG2.tokens_per_frame == geometry["tokens_per_latent_frame"]
    assert MG2.frames_per_chunk == geometry["latent_frames_per_chunk"]
    assert MG2.video_frames_per_chunk == geometry["video_frames_per_chunk"]
    assert MG2.video_fps == geometry["fps"]
    assert MG2.kv_elements_per_chunk == geometry["kv_elements_per_chunk"]


@pytest.mark.parametrize(("codec", "vector"), [("bf16", "bf16"), ("int4-absmax", "int4_4.25bit")])
def test_payload_of_a_chunk(codec: str, vector: str) -> None:
    size = closed_form.chunk_bytes(MG2, get_codec(codec))
    assert size.payload == VECTORS["bytes_per_chunk"][vector]


def test_payload_of_a_block() -> None:
    payload = get_codec("int4-absmax").payload_size(MG2.block_shape)
    assert payload == VECTORS["int4_block_bytes_layer_chunk"]


@pytest.mark.parametrize(
    ("model", "bf16_bytes"),
    [
        ("matrix-game-2", 486_604_800),
        ("self-forcing", 862_617_600),
        ("lingbot-world", 5_111_808_000),
        ("lingbot-world-1.3b", 1_111_818_240),
        ("longlive", 2_595_225_600),
        ("builtin", 98_304),
    ],
)
def test_bf16_payload_of_each_model(model: str, bf16_bytes: int) -> None:
    assert closed_form.chunk_bytes(get_preset(model), get_codec("bf16")).payload == bf16_bytes


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "int3", "int4-absmax"])
@pytest.mark.parametrize("model", PRESETS)
def test_stored_bytes_add_headers_padding_and_tail_and_no_more(model: str, codec: str) -> None:
    geometry = get_preset(model)
    size = closed_form.chunk_bytes(geometry, get_codec(codec))
    overhead = size.stored - size.payload
    assert size.stored % 4096 == 0
    assert geometry.layers * 64 + 256 + 16 * geometry.layers + 4 <= overhead
    assert overhead < geometry.layers * (64 + 4096) + 2 * 4096


@pytest.mark.parametrize(
    ("codec", "memory_gib", "chunk"),
    [("bf16", 32, 60), ("int4-absmax", 32, 226), ("int4-absmax", 64, 492)],
)
@pytest.mark.parametrize("kind", ["payload", "stored"])
def test_published_spill_points(codec: str, memory_gib: int, chunk: int, kind: str) -> None:
    size = getattr(closed_form.chunk_bytes(MG2, get_codec(codec)), kind)
    pool = closed_form.pool_bytes(memory_gib * GIB)
    assert closed_form.spill_chunk(pool, size) == chunk


@pytest.mark.parametrize("reserve_gib", VECTORS["pool_reserve_gib"])
def test_both_ends_of_the_reserve_give_the_published_points(reserve_gib: float) -> None:
    # The ends are rounded to 1e-6 GiB, so step inside by that much.
    low, high = VECTORS["pool_reserve_gib"]
    reserve = round(min(max(reserve_gib, low + 1e-6), high - 1e-6) * GIB)
    assert low * GIB < closed_form.DEFAULT_RESERVE_BYTES < high * GIB
    for case, chunk in VECTORS["spill_chunk"]["paper"].items():
        codec, memory = case.split("@")
        size = VECTORS["bytes_per_chunk"]["bf16" if codec == "bf16" else "int4_4.25bit"]
        pool = closed_form.pool_bytes(int(memory.removesuffix("GiB")) * GIB, reserve)
        assert closed_form.spill_chunk(pool, int(size)) == chunk


def test_predicted_spill_points() -> None:
    predicted = VECTORS["spill_chunk"]["model_prediction"]
    for case, chunk in predicted.items():
        codec, memory = case.split("@")
        if codec.startswith("int8"):
            continue  # of another int8 layout than ours
        size = VECTORS["bytes_per_chunk"]["bf16" if codec == "bf16" else "int4_4.25bit"]
        pool = closed_form.pool_bytes(int(memory.removesuffix("GiB")) * GIB)
        assert closed_form.spill_chunk(pool, int(size)) == chunk, case


def test_gpu_budget_spills_at_21() -> None:
    low, high = (gib * GIB for gib in VECTORS["gpu_bf16_budget_gib"])
    size = int(VECTORS["bytes_per_chunk"]["bf16"])
    assert closed_form.spill_chunk(round(low), size) == 21
    assert closed_form.spill_chunk(round(high) - 1, size) == 21


@pytest.mark.parametrize("case", VECTORS["stall"]["cases"])
def test_stalls(case: dict[str, float]) -> None:
    new_bytes = case["r_chunks"] * INT4_BYTES
    bandwidth = case["B_R_GBs"] * 1e9
    prefetched = closed_form.stall_prefetched_seconds(new_bytes, bandwidth, T_C)
    on_demand = closed_form.stall_on_demand_seconds(new_bytes, bandwidth)
    assert prefetched * 1e3 == pytest.approx(case["prefetch_ms"], abs=0.05)
    assert on_demand * 1e3 == pytest.approx(case["on_demand_ms"], abs=0.05)
    enough = closed_form.zero_stall_read_bandwidth(new_bytes, T_C) <= bandwidth
    assert enough == (prefetched == 0)


def test_write_bandwidth() -> None:
    needed = closed_form.required_write_bandwidth(INT4_BYTES, T_C)
    assert needed / 1e6 == pytest.approx(VECTORS["stall"]["min_write_MBs"], abs=0.05)


def test_horizon() -> None:
    horizon = closed_form.positional_horizon_chunks(1024, MG2.frames_per_chunk)
    assert horizon == VECTORS["horizon"]["mg2_chunks"] == 341
    minutes = horizon * MG2.video_seconds_per_chunk / 60
    assert minutes == pytest.approx(VECTORS["horizon"]["mg2_minutes"])
    lingbot = get_preset("lingbot-world").frames_per_chunk
    assert (
        closed_form.positional_horizon_chunks(1024, lingbot) == VECTORS["horizon"]["lingbot_chunks"]
    )


@pytest.mark.parametrize("case", VECTORS["first_read"]["cases"])
def test_first_read_there_and_back(case: dict[str, float]) -> None:
    found = closed_form.first_read_chunk(int(case["N"]), int(case["W"]))
    assert found is not None
    for name in ("closed_form", "paper_prefetch", "paper_on_demand", "paper_table5_revisits_from"):
        if name in case:
            assert abs(found - case[name]) <= VECTORS["first_read"]["tolerance_chunks"], name


def test_a_session_that_fits_reads_nothing() -> None:
    assert closed_form.first_read_chunk(100, 100) is None
    assert closed_form.first_read_chunk(101, 100) == 100


def test_a_reserve_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="reserve"):
        closed_form.pool_bytes(4 * GIB)


def _first_that_does_not_fit(pool: int, sizes: list[int]) -> int:
    used = 0
    for number, size in enumerate(sizes, start=1):
        used += size
        if used > pool:
            return number
    raise AssertionError("the pool outlasts the list")


@given(
    pool=st.integers(1, 10_000),
    size=st.integers(100, 500),
    sink=st.integers(0, 4),
    sink_size=st.integers(100, 2000),
)
def test_spill_and_session_by_counting(pool: int, size: int, sink: int, sink_size: int) -> None:
    sizes = [sink_size] * sink + [size] * 110
    assert closed_form.spill_chunk(pool, size, sink, sink_size) == _first_that_does_not_fit(
        pool, sizes
    )
    for chunks in (1, sink + 1, 50):
        assert closed_form.session_bytes(chunks, size, sink, sink_size) == sum(sizes[:chunks])


def test_every_wall_of_matrix_game() -> None:
    walls = {wall.name: wall.rows for wall in MG2.walls}
    assert walls == {"position table": 1024, "action table": 7500}
    chunks = [closed_form.positional_horizon_chunks(w.rows, 3) for w in MG2.walls]
    assert chunks == [341, 2500]  # nearest first; a session of 3,000 chunks meets both


@pytest.mark.parametrize(
    ("model", "chunks"),
    [("lingbot-world", 256), ("self-forcing", 341), ("longlive", 128), ("matrix-game-2", 341)],
)
def test_the_first_wall_of_each_model(model: str, chunks: int) -> None:
    geometry = get_preset(model)
    rows = geometry.walls[0].rows
    assert closed_form.positional_horizon_chunks(rows, geometry.frames_per_chunk) == chunks


def test_real_time_factor_as_published() -> None:
    """9.5 frames a second of a video at 16; 3,000 chunks in 63.2 minutes."""
    assert closed_form.real_time_factor(MG2.video_seconds_per_chunk, 12 / 9.5) == pytest.approx(
        9.5 / 16
    )


def test_wear() -> None:
    """One chunk of 129.25 MB every 1.2105 s is 106.8 MB/s, 9.2 TB a day; 600 TB last 65 days."""
    day = closed_form.written_bytes(86_400, INT4_BYTES, T_C)
    assert day / 1e12 == pytest.approx(9.226, abs=0.001)
    life = closed_form.disk_life_seconds(600e12, INT4_BYTES, T_C)
    assert life / 86_400 == pytest.approx(600e12 / day)
    assert closed_form.written_bytes(life, INT4_BYTES, T_C) == pytest.approx(600e12)


def test_device_memory() -> None:
    assert closed_form.staging_bytes(3, 100) == 600
    bf16 = closed_form.chunk_bytes(MG2, get_codec("bf16")).payload
    assert closed_form.window_bytes(MG2, 3) == 5 * bf16  # three retrieved, recent, current
    assert closed_form.window_bytes(get_preset("builtin"), 3) == 6 * 98_304  # and a sink

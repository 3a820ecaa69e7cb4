"""``make_plan``: one object with every answer."""

from __future__ import annotations

import pytest

from worldpager.errors import ConfigError
from worldpager.quant.codec import get_codec
from worldpager.sim.closed_form import chunk_bytes, pool_bytes
from worldpager.sim.plan import Plan, make_plan
from worldpager.sim.presets import get_preset

GIB = 2**30


def plan(
    model: str = "matrix-game-2", codec: str = "int4-absmax", memory_gib: int = 32, **more: float
) -> Plan:
    return make_plan(
        get_preset(model),
        get_codec(codec),
        pool_bytes(memory_gib * GIB),
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("codec", "memory_gib", "chunk"),
    [("int4-absmax", 32, 226), ("bf16", 32, 60), ("int4-absmax", 64, 492)],
)
def test_published_spill_points(codec: str, memory_gib: int, chunk: int) -> None:
    answer = plan(codec=codec, memory_gib=memory_gib)
    assert answer.payload_spill_chunk == answer.spill_chunk == chunk


def test_the_published_session() -> None:
    answer = plan()
    assert answer.payload_chunk_bytes == 129_254_400
    assert answer.positional_horizon_chunks == 341
    assert answer.spill_seconds == pytest.approx(169.5)
    assert answer.session_video_seconds == pytest.approx(37.5 * 60)
    for prefix in ("", "payload_"):
        write = getattr(answer, f"{prefix}required_write_bandwidth")
        session = getattr(answer, f"{prefix}session_bytes")
        assert write / 1e6 == pytest.approx(106.8, abs=0.05)
        assert session / 1e9 == pytest.approx(387.8, abs=0.05)


@pytest.mark.parametrize(("codec", "bits"), [("int4", 4.25), ("int3", 3.25), ("int8", 8.5)])
def test_our_codecs_with_headers_and_padding(codec: str, bits: float) -> None:
    answer = plan(codec=codec)
    assert answer.payload_bits_per_element <= bits
    assert answer.payload_bits_per_element < answer.bits_per_element <= 1.002 * bits
    # At this size of block the padding is too small to move the spill point by a chunk.
    assert abs(answer.spill_chunk - answer.payload_spill_chunk) <= 1


def test_our_int4_spills_no_earlier_than_the_published_one() -> None:
    assert plan(codec="int4").spill_chunk >= 226


def test_the_sink_is_counted_in_16_bits() -> None:
    geometry = get_preset("builtin")
    small = chunk_bytes(geometry, get_codec("int4")).stored
    sink = chunk_bytes(geometry, get_codec("bf16")).stored
    answer = make_plan(geometry, get_codec("int4"), sink + 19 * small, chunks=100)
    assert (answer.sink_chunks, answer.sink_chunk_bytes) == (1, sink)
    assert answer.spill_chunk == 21
    assert answer.session_bytes == sink + 99 * small


def test_compute_time_is_given_or_published_or_real_time() -> None:
    assert plan().chunk_seconds == 1.2105
    assert plan(chunk_seconds=2.0).chunk_seconds == 2.0
    assert plan("self-forcing").chunk_seconds == 0.75


def test_a_bandwidth_is_judged() -> None:
    slow = plan(read_bandwidth=250e6, write_bandwidth=100e6)
    assert slow.stall_prefetched_seconds == pytest.approx(0.3406, rel=1e-2)
    assert slow.stall_on_demand_seconds == pytest.approx(1.5511, rel=1e-2)
    assert slow.writes_keep_up is False
    enough = plan(read_bandwidth=slow.zero_stall_read_bandwidth, write_bandwidth=107e6)
    assert enough.stall_prefetched_seconds == pytest.approx(0, abs=1e-9)
    assert enough.writes_keep_up is True


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [("chunks", 0, "chunks"), ("chunk_seconds", -1.0, "chunk time"), ("retrieve", -1, "retrieved")],
)
def test_nonsense_is_refused_by_name(option: str, value: float, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        plan(**{option: value})


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"doom.*matrix-game-2.*builtin"):
        get_preset("doom")


def test_every_wall_is_in_the_plan_and_whose_it_is() -> None:
    found = [(h.name, h.rows, h.chunks, h.ours) for h in plan().horizons]
    assert found == [("position table", 1024, 341, True), ("action table", 7500, 2500, False)]
    assert plan().horizons[1].seconds == 2500 * 0.75


def test_speed_and_device_memory() -> None:
    answer = plan()
    assert answer.frames_per_second == pytest.approx(9.91, abs=0.005)
    assert answer.real_time_factor == pytest.approx(0.62, abs=0.001)
    assert answer.staging_bytes == 6 * answer.chunk_bytes
    assert answer.window_bytes == 5 * 486_604_800


def test_pruning_counts_in_bytes() -> None:
    whole, half = plan(), plan(tokens_kept=0.5)
    assert half.tokens_kept == 0.5
    assert half.chunk_bytes == pytest.approx(whole.chunk_bytes / 2, rel=3e-3)
    assert half.spill_chunk == pytest.approx(2 * whole.spill_chunk, abs=2)
    needed = half.zero_stall_read_bandwidth, half.required_write_bandwidth, half.session_bytes
    full = whole.zero_stall_read_bandwidth, whole.required_write_bandwidth, whole.session_bytes
    assert needed == pytest.approx([value / 2 for value in full], rel=3e-3)
    assert half.window_bytes == 3.5 * 486_604_800, "only retrieved chunks are pruned"
    sink = plan("longlive", tokens_kept=0.5)
    assert sink.sink_chunk_bytes == plan("longlive").sink_chunk_bytes, "the sink stays whole"
    for share in (0, 1.5):
        with pytest.raises(ConfigError, match="share of tokens"):
            plan(tokens_kept=share)


def test_wear_of_a_rated_drive() -> None:
    answer = plan(rated_bytes=600 * 10**12)
    assert answer.written_per_day == pytest.approx(24 * answer.written_per_hour)
    assert answer.written_per_hour / 1e9 == pytest.approx(384.4, abs=0.2)
    assert answer.disk_life_hours == pytest.approx(600e12 / answer.written_per_hour)
    assert plan().disk_life_hours is None

"""All answers of the closed-form model for one model, codec and machine."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from worldpager.errors import ConfigError
from worldpager.quant.codec import Codec, get_codec
from worldpager.sim import closed_form
from worldpager.sim.presets import POSITION_TABLE, ModelGeometry

DAY = 86_400.0


class Horizon(BaseModel):
    """Where one of a model's tables ends, in chunks and in seconds of video. ``ours``: whether
    WorldPager's positions stay clear of it; the frontend has to see to any other.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    rows: int
    chunks: int
    seconds: float
    ours: bool


class Plan(BaseModel):
    """What to expect of a rollout. Bytes, seconds, and bytes per second throughout.

    Figures count headers, padding and the 16-bit chunks of the sink, as WorldPager stores them;
    those named ``payload_`` count codec payload alone, every chunk alike, as papers do. Chunk
    numbers count from 1. ``spill_seconds`` is seconds of video.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    codec: str
    chunks: int
    pool_bytes: int
    chunk_seconds: float
    video_seconds_per_chunk: float
    retrieve: int
    tokens_kept: float

    chunk_bytes: int
    sink_chunks: int
    sink_chunk_bytes: int
    bits_per_element: float
    spill_chunk: int
    spill_seconds: float
    first_read_chunk: int | None
    zero_stall_read_bandwidth: float
    required_write_bandwidth: float
    session_bytes: int
    session_video_seconds: float
    written_per_hour: float
    written_per_day: float
    positional_horizon_chunks: int
    positional_horizon_seconds: float
    horizons: tuple[Horizon, ...]
    real_time_factor: float
    frames_per_second: float
    staging_bytes: int
    window_bytes: int

    payload_chunk_bytes: int
    payload_bits_per_element: float
    payload_spill_chunk: int
    payload_zero_stall_read_bandwidth: float
    payload_required_write_bandwidth: float
    payload_session_bytes: int

    read_bandwidth: float | None = None
    stall_prefetched_seconds: float | None = None
    stall_on_demand_seconds: float | None = None
    write_bandwidth: float | None = None
    writes_keep_up: bool | None = None
    rated_bytes: int | None = None
    disk_life_hours: float | None = None


def make_plan(
    geometry: ModelGeometry,
    codec: Codec,
    pool_bytes: int,
    *,
    chunks: int = 3000,
    retrieve: int = 3,
    chunk_seconds: float | None = None,
    read_bandwidth: float | None = None,
    write_bandwidth: float | None = None,
    rated_bytes: int | None = None,
    tokens_kept: float = 1.0,
) -> Plan:
    """Answer every question for a pool of ``pool_bytes`` and a session of ``chunks`` chunks.

    ``retrieve``: chunks that each window newly needs from NVMe, at worst the whole retrieval set.
    ``chunk_seconds``: compute time per chunk; None takes the published one, else real time. With a
    bandwidth given, the plan also says what it leads to, and with ``rated_bytes`` how many hours of
    generating the disk is rated for. ``tokens_kept``: the share of a chunk's tokens that pruning
    keeps, on average; the sink is never pruned. Raises :class:`ConfigError` for values
    that no rollout can have.
    """
    seconds = chunk_seconds or geometry.compute_seconds or geometry.video_seconds_per_chunk
    for name, value in (("chunks", chunks), ("chunk time", seconds), ("pool", pool_bytes)):
        if value <= 0:
            raise ConfigError(f"{name} must be positive, not {value}")
    if retrieve < 0:
        raise ConfigError(f"the number of retrieved chunks cannot be {retrieve}")

    size = closed_form.chunk_bytes(geometry, codec, tokens_kept)
    sink = closed_form.chunk_bytes(geometry, get_codec("bf16")) if geometry.sink_chunks else size
    unequal = (geometry.sink_chunks, sink.stored)
    spill = closed_form.spill_chunk(pool_bytes, size.stored, *unequal)
    horizon = closed_form.positional_horizon_chunks(
        geometry.position_table_rows, geometry.frames_per_chunk
    )
    video_seconds = geometry.video_seconds_per_chunk
    new_bytes = retrieve * size.stored
    needed_write = closed_form.required_write_bandwidth(size.stored, seconds)
    return Plan(
        model=geometry.name,
        codec=codec.name,
        chunks=chunks,
        pool_bytes=pool_bytes,
        chunk_seconds=seconds,
        video_seconds_per_chunk=video_seconds,
        retrieve=retrieve,
        tokens_kept=tokens_kept,
        chunk_bytes=size.stored,
        sink_chunks=geometry.sink_chunks,
        sink_chunk_bytes=sink.stored,
        bits_per_element=8 * size.stored / geometry.kv_elements_per_chunk,
        spill_chunk=spill,
        spill_seconds=spill * video_seconds,
        first_read_chunk=closed_form.first_read_chunk(chunks, spill),
        zero_stall_read_bandwidth=closed_form.zero_stall_read_bandwidth(new_bytes, seconds),
        required_write_bandwidth=needed_write,
        session_bytes=closed_form.session_bytes(chunks, size.stored, *unequal),
        session_video_seconds=chunks * video_seconds,
        written_per_hour=closed_form.written_bytes(3600, size.stored, seconds),
        written_per_day=closed_form.written_bytes(DAY, size.stored, seconds),
        positional_horizon_chunks=horizon,
        positional_horizon_seconds=horizon * video_seconds,
        horizons=horizons(geometry),
        real_time_factor=closed_form.real_time_factor(video_seconds, seconds),
        frames_per_second=geometry.video_frames_per_chunk / seconds,
        staging_bytes=closed_form.staging_bytes(retrieve, size.stored),
        window_bytes=closed_form.window_bytes(geometry, retrieve, tokens_kept=tokens_kept),
        payload_chunk_bytes=size.payload,
        payload_bits_per_element=8 * size.payload / geometry.kv_elements_per_chunk,
        payload_spill_chunk=closed_form.spill_chunk(pool_bytes, size.payload),
        payload_zero_stall_read_bandwidth=closed_form.zero_stall_read_bandwidth(
            retrieve * size.payload, seconds
        ),
        payload_required_write_bandwidth=closed_form.required_write_bandwidth(
            size.payload, seconds
        ),
        payload_session_bytes=closed_form.session_bytes(chunks, size.payload),
        read_bandwidth=read_bandwidth,
        stall_prefetched_seconds=None
        if read_bandwidth is None
        else closed_form.stall_prefetched_seconds(new_bytes, read_bandwidth, seconds),
        stall_on_demand_seconds=None
        if read_bandwidth is None
        else closed_form.stall_on_demand_seconds(new_bytes, read_bandwidth),
        write_bandwidth=write_bandwidth,
        writes_keep_up=None if write_bandwidth is None else write_bandwidth >= needed_write,
        rated_bytes=rated_bytes,
        disk_life_hours=None
        if rated_bytes is None
        else closed_form.disk_life_seconds(rated_bytes, size.stored, seconds) / 3600,
    )


def horizons(geometry: ModelGeometry) -> tuple[Horizon, ...]:
    """Every wall of a model, the nearest first."""
    found = []
    for wall in geometry.walls:
        chunks = closed_form.positional_horizon_chunks(wall.rows, geometry.frames_per_chunk)
        found.append(
            Horizon(
                name=wall.name,
                rows=wall.rows,
                chunks=chunks,
                seconds=chunks * geometry.video_seconds_per_chunk,
                ours=wall.name == POSITION_TABLE,
            )
        )
    return tuple(found)

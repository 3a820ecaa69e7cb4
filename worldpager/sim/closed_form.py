"""The closed-form model: where a rollout spills, and what bandwidth keeps it free of stalls.

With ``B`` bytes per chunk, a pool of ``P`` bytes, read and write bandwidth ``B_R`` and ``B_W``, a
compute time of ``T`` seconds per chunk and ``r`` bytes that the next window has yet to get::

    first spill            chunk 1 + floor(P / B), counted from 1
    stall, prefetched      max(0, r / B_R - T)
    stall, on demand       r / B_R
    writes keep up         iff B_W >= B / T

Beside these stand wear, device memory, horizons and speed, each with its source. The four lines
are the analytical model of the WorldPager paper; its published spill points fix 4.25 bits per
element and a reserve of 4.81 to 4.89 GiB between the host's memory and the pool. Bytes are bytes,
bandwidths bytes per second, times seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from worldpager.errors import ConfigError
from worldpager.quant.codec import Codec
from worldpager.quant.shard import ShardLayout
from worldpager.sim.presets import ModelGeometry
from worldpager.units import format_size

DEFAULT_RESERVE_BYTES = round(4.85 * 2**30)
"""Host memory that is not the pool: what the published spill points imply. Measure your own."""


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """One chunk's size: its codec payload, and its shard image as it lies in DRAM and on NVMe."""

    payload: int
    stored: int


def chunk_bytes(geometry: ModelGeometry, codec: Codec, tokens_kept: float = 1.0) -> ChunkBytes:
    """Size of a chunk under ``codec``; ``tokens_kept``: the share of its tokens that pruning keeps.

    Payload is ``2 * layers * heads * head_dim * tokens * bits / 8``, side data included. The stored
    size adds each block's header, the bitmap of a pruned one, its padding to 4,096 bytes, and the
    shard's tail. Raises :class:`ConfigError` for another share.
    """
    if not 0 < tokens_kept <= 1:
        raise ConfigError(f"the share of tokens kept is above 0 and at most 1, not {tokens_kept}")
    whole = geometry.block_shape
    shape = replace(whole, tokens=max(1, round(tokens_kept * whole.tokens)))
    layout = ShardLayout.for_chunk(codec, [shape] * geometry.layers, whole.tokens)
    return ChunkBytes(geometry.layers * codec.payload_size(shape), layout.nbytes)


def pool_bytes(host_memory_bytes: int, reserve_bytes: int = DEFAULT_RESERVE_BYTES) -> int:
    """The pool that a host has room for: its memory less a fixed reserve.

    Raises :class:`ConfigError` where the reserve leaves nothing.
    """
    if host_memory_bytes <= reserve_bytes:
        raise ConfigError(
            f"a reserve of {format_size(reserve_bytes)} leaves no pool in "
            f"{format_size(host_memory_bytes)} of host memory; give a smaller reserve or the pool"
        )
    return host_memory_bytes - reserve_bytes


def spill_chunk(
    pool_bytes: int, chunk_bytes: int, sink_chunks: int = 0, sink_chunk_bytes: int = 0
) -> int:
    """The chunk, counted from 1, for which the pool has no room: ``1 + floor(P / B)``.

    The first ``sink_chunks`` chunks may have a size of their own.
    """
    after_sink = pool_bytes - sink_chunks * sink_chunk_bytes
    if after_sink < 0:
        return 1 + pool_bytes // sink_chunk_bytes
    return 1 + sink_chunks + after_sink // chunk_bytes


def session_bytes(
    chunks: int, chunk_bytes: int, sink_chunks: int = 0, sink_chunk_bytes: int = 0
) -> int:
    """Bytes that ``chunks`` chunks leave behind, wherever they lie."""
    in_sink = min(chunks, sink_chunks)
    return in_sink * sink_chunk_bytes + (chunks - in_sink) * chunk_bytes


def first_read_chunk(chunks: int, spill_chunk: int) -> int | None:
    """First chunk whose window needs NVMe on a there-and-back path: ``(N - 1 + W) / 2``.

    Chunk ``t`` of ``N`` revisits ``N - 1 - t``, and the oldest chunks leave DRAM first from chunk
    ``W`` on. A published pattern, within one chunk of each of its figures. None where nothing
    spills before the end.
    """
    return None if spill_chunk >= chunks else (chunks - 1 + spill_chunk) // 2


def zero_stall_read_bandwidth(new_bytes: float, chunk_seconds: float) -> float:
    """Least read bandwidth at which prefetch hides every read: ``r / T``."""
    return new_bytes / chunk_seconds


def required_write_bandwidth(chunk_bytes: float, chunk_seconds: float) -> float:
    """Least write bandwidth at which write-back keeps up with the model: ``B / T``."""
    return chunk_bytes / chunk_seconds


def stall_prefetched_seconds(
    new_bytes: float, read_bandwidth: float, chunk_seconds: float
) -> float:
    """Wait per chunk where reads start one chunk ahead: ``max(0, r / B_R - T)``."""
    return max(0.0, new_bytes / read_bandwidth - chunk_seconds)


def stall_on_demand_seconds(new_bytes: float, read_bandwidth: float) -> float:
    """Wait per chunk where reads start when the window is needed: ``r / B_R``."""
    return new_bytes / read_bandwidth


def positional_horizon_chunks(position_table_rows: int, frames_per_chunk: int) -> int:
    """Chunks until a model without re-mapped positions runs off its table: ``floor(rows / F)``.

    Source: the Wan family slices a table of 1,024 rows by the absolute latent frame and fails
    where it ends; 341 chunks of 3 frames, 256 of 4, as published. Matrix-Game 2.0's action modules
    slice one of 7,500 rows alike: 2,500 chunks (found in its code, and by running past it).
    """
    return position_table_rows // frames_per_chunk


def real_time_factor(video_seconds: float, chunk_seconds: float) -> float:
    """Seconds of video made in a second: ``V / T``; 1 keeps up with who watches.

    Source: the definition; the published 9.5 frames a second at 16 are 0.59.
    """
    return video_seconds / chunk_seconds


def written_bytes(seconds: float, chunk_bytes: float, chunk_seconds: float) -> float:
    """Bytes that write-back puts on the drive in ``seconds`` of generating: ``seconds * B / T``.

    Source: every chunk is written exactly once, be it spilled or flushed at the end, so the write
    condition ``B_W >= B / T`` with equality is also the wear.
    """
    return seconds * chunk_bytes / chunk_seconds


def disk_life_seconds(rated_bytes: float, chunk_bytes: float, chunk_seconds: float) -> float:
    """Seconds of generating without a pause until a drive has taken what it is rated for:
    ``rated / (B / T)``.

    Source: drive makers rate bytes written by the host (TBW), so what a drive multiplies inside is
    already counted; whole shards of many megabytes, written in order, are its kindest load.
    """
    return rated_bytes * chunk_seconds / chunk_bytes


def staging_bytes(retrieve: int, chunk_bytes: int) -> int:
    """Device memory that keeps the next window's chunks ready beside those of this one: ``2 k B``.

    Source: ours. What a window was served stays until the next one is complete, so both sets are
    there at once; stored form, decoded only on their way into the window.
    """
    return 2 * retrieve * chunk_bytes


def window_bytes(
    geometry: ModelGeometry, retrieve: int, recent_chunks: int = 1, tokens_kept: float = 1.0
) -> int:
    """The frontend's own cache in 16 bits: sink, ``retrieve`` retrieved, recent, current chunk.

    Source: ``2 bytes * elements`` for each chunk that attention sees, of retrieved ones the share
    ``tokens_kept``; the layout is WorldKV's.
    """
    chunks = geometry.sink_chunks + retrieve * tokens_kept + recent_chunks + 1
    return round(chunks * 2 * geometry.kv_elements_per_chunk)

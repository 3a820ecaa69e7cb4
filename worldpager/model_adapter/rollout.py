"""A rollout of the built-in world model with WorldPager as its memory: the main job."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import xxhash

from worldpager.model_adapter.builtin import RolloutPipeline, load_model
from worldpager.model_adapter.builtin.model import WEIGHTS, ModelConfig
from worldpager.model_adapter.frontend import ChunkStep, KVSpec, Poses
from worldpager.model_adapter.memory import MemoryConfig, WorldMemory
from worldpager.model_adapter.ring_cache import RingCache
from worldpager.prefetch.planner import PATH_AHEAD
from worldpager.quant.rope import RopeLayout


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """What to run. ``path``: poses ``[chunks, frames, 4, 4]``; sizes in bytes, rates in bytes per
    second, ``chunk_time`` in seconds. ``seed``: of the noise, and so of the world that the model
    dreams up.
    """

    chunks: int
    path: Poses
    dram_bytes: int
    store_dir: Path
    out_dir: Path
    disk_bytes: int | None = None
    codec: str = "int4"
    retrieve: int = 3
    on_miss: str = "stale"
    read_limit: int | None = None
    write_limit: int | None = None
    chunk_time: float | None = None
    seed: int = 0
    positions: str = "moving"


@dataclass(frozen=True, slots=True)
class ChunkMetrics:
    """One chunk of a rollout: times in milliseconds, sizes in bytes, totals since the start."""

    chunk: int
    wall_ms: float
    model_ms: float
    boundary_ms: float
    stall_ms: float
    decode_ms: float
    encode_ms: float
    stale: bool
    stale_reason: str
    retrieved: list[int]
    hits: dict[str, int]
    resident_bytes: int
    dirty_bytes: int
    stored_bytes: int
    chunk_reads_total: int
    bytes_read_total: int
    bytes_written_total: int
    from_nvme_total: int
    """Retrieved chunks that had come back from NVMe since they were last served."""
    spill_chunk: int | None
    first_read_chunk: int | None
    rss_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def builtin_spec(config: ModelConfig, retrieve: int, model: str) -> KVSpec:
    """The built-in model's cache geometry, with a window of ``retrieve`` retrieved chunks."""
    frames = config.frames_per_chunk
    return KVSpec(
        model=model,
        layers=config.layers,
        heads=config.heads,
        head_dim=config.head_dim,
        tokens_per_frame=config.tokens_per_frame,
        frames_per_chunk=frames,
        sink_frames=frames,
        recent_frames=frames,
        retrieve_frames=retrieve * frames,
        rope=RopeLayout.wan(config.head_dim, table_len=config.rope_rows),
    )


def weights_identity(path: Path = WEIGHTS) -> str:
    """Identity of the built-in weights: the hash of their file."""
    return f"builtin-{xxhash.xxh3_64_hexdigest(path.read_bytes())}"


class MemoryHook:
    """Calls ``boundary`` before each chunk of a pipeline: what a frontend's glue does."""

    def __init__(self, memory: WorldMemory, path: Poses) -> None:
        self._memory = memory
        self._path = path

    def __call__(self, chunk: int, pipeline: RolloutPipeline) -> None:
        spec, ahead = self._memory.spec, max(PATH_AHEAD)

        def lower(frames: int) -> None:
            pipeline.base += frames

        step = ChunkStep(
            chunk=chunk,
            start_frame=chunk * spec.frames_per_chunk,
            finished=chunk - 1 if chunk else None,
            poses=self._path[chunk],
            poses_ahead=self._path[chunk + 1 : chunk + 1 + ahead],
            finished_poses=self._path[chunk - 1] if chunk else None,
        )
        self._memory.boundary(step, RingCache(pipeline.kv_cache, spec, lower))


def run_rollout(config: RolloutConfig) -> Generator[ChunkMetrics, None, None]:
    """Run, yielding after each chunk; frames go to ``out_dir/frames.bin`` as raw uint8 RGB.

    Closing the iterator early ends the rollout cleanly. Raises as :class:`WorldMemory`.
    """
    model = load_model()
    spec = builtin_spec(model.config, config.retrieve, weights_identity())
    memory_config = MemoryConfig(
        store=config.store_dir,
        dram=config.dram_bytes,
        disk=config.disk_bytes,
        codec=config.codec,
        on_miss=config.on_miss,
        positions=config.positions,
        read_limit=config.read_limit,
        write_limit=config.write_limit,
    )
    with (
        closing(WorldMemory(memory_config, spec)) as memory,
        (config.out_dir / "frames.bin").open("wb") as film,
    ):
        pipeline = RolloutPipeline(
            model,
            config.seed,
            retrieve_chunks=config.retrieve,
            before_chunk=MemoryHook(memory, config.path),
        )
        process = psutil.Process()
        for chunk in range(config.chunks):
            began = time.perf_counter()
            frames = pipeline.generate(chunk, config.path[chunk])
            model_seconds = time.perf_counter() - began - memory.last.boundary_ms / 1e3
            if config.chunk_time is not None:
                time.sleep(max(0.0, config.chunk_time - model_seconds))
            wall = time.perf_counter() - began
            film.write((frames * 255).round().to(torch.uint8).numpy().tobytes())
            film.flush()
            yield _metrics(memory, wall * 1e3, model_seconds * 1e3, process.memory_info().rss)


def _metrics(memory: WorldMemory, wall_ms: float, model_ms: float, rss: int) -> ChunkMetrics:
    report, stats, occupancy = memory.last, memory.stats, memory.occupancy
    return ChunkMetrics(
        chunk=report.chunk,
        wall_ms=wall_ms,
        model_ms=model_ms,
        boundary_ms=report.boundary_ms,
        stall_ms=report.stall_ms,
        decode_ms=report.decode_ms,
        encode_ms=report.encode_ms,
        stale=report.stale,
        stale_reason=report.stale_reason,
        retrieved=list(report.retrieved),
        hits={name: report.hits[name] for name in stats.hits},
        resident_bytes=occupancy.resident,
        dirty_bytes=occupancy.dirty,
        stored_bytes=occupancy.stored,
        chunk_reads_total=stats.reads,
        bytes_read_total=stats.bytes_read,
        bytes_written_total=stats.bytes_written,
        from_nvme_total=stats.fetched,
        spill_chunk=stats.spill_chunk,
        first_read_chunk=stats.first_read_chunk,
        rss_bytes=rss,
    )

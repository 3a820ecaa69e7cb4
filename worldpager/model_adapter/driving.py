"""What every rollout of ours shares, whatever its frontend: options, steps along a camera path, the
loop with its pace, and one line of metrics a chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from worldpager.errors import ConfigError
from worldpager.model_adapter.config import MemoryConfig
from worldpager.model_adapter.frontend import ChunkStep, KVSpec, Poses
from worldpager.model_adapter.memory import WorldMemory
from worldpager.pager.policies import WriteBack
from worldpager.prefetch.planner import PATH_AHEAD

ATTENTION = ("dense", "sparse", "int4")


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """What to run. ``path``: poses ``[chunks, frames, 4, 4]``; sizes in bytes, rates in bytes per
    second, ``chunk_time`` in seconds. ``seed``: of the noise, and so of the world that the model
    dreams up. ``known_ahead``: chunks whose poses are known before they begin, 0 in a live session.
    The rest as in :class:`MemoryConfig`.
    """

    chunks: int
    path: Poses
    dram_bytes: int
    store_dir: Path
    out_dir: Path
    disk_bytes: int | None = None
    codec: str = "int4"
    retrieve: int = 3
    retrieval: str = "camera"
    eviction: str = "redundant"
    on_miss: str = "nearest"
    read_limit: int | None = None
    write_limit: int | None = None
    chunk_time: float | None = None
    seed: int = 0
    positions: str = "moving"
    pruning: str = "none"
    page_frames: int | None = None
    known_ahead: int = max(PATH_AHEAD)
    prefetch: bool = True
    write_back: WriteBack = field(default_factory=WriteBack)
    attention: str = "dense"
    """``dense``; ``sparse``: to chosen frames only; ``int4``: retrieved blocks read undecoded."""

    def __post_init__(self) -> None:
        if self.attention not in ATTENTION:
            raise ConfigError(f"no attention {self.attention!r}; known are {', '.join(ATTENTION)}")
        if self.attention == "int4" and self.codec not in ("int4", "int3"):
            raise ConfigError(
                f"attention 'int4' reads stored blocks of int4 or int3, not {self.codec}; choose "
                "one of these codecs or another attention"
            )

    def memory(self) -> MemoryConfig:
        """The part that the memory needs."""
        return MemoryConfig(
            store=self.store_dir,
            dram=self.dram_bytes,
            disk=self.disk_bytes,
            codec=self.codec,
            retrieval=self.retrieval,
            eviction=self.eviction,
            on_miss=self.on_miss,
            positions=self.positions,
            pruning=self.pruning,
            page_frames=self.page_frames,
            read_limit=self.read_limit,
            write_limit=self.write_limit,
            prefetch=self.prefetch,
            write_back=self.write_back,
        )


def path_step(
    spec: KVSpec, path: Poses, chunk: int, known_ahead: int = max(PATH_AHEAD)
) -> ChunkStep:
    """``chunk`` of a rollout along ``path``, as its loop announces it."""
    return ChunkStep(
        chunk=chunk,
        start_frame=chunk * spec.frames_per_chunk,
        finished=chunk - 1 if chunk else None,
        poses=path[chunk],
        poses_ahead=path[chunk + 1 : chunk + 1 + known_ahead],
        finished_poses=path[chunk - 1] if chunk else None,
    )


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
    wanted: list[int]
    """What retrieval chose; ``retrieved`` differs where the window is stale."""
    preferred: list[int]
    """What it preferred for being in the DRAM pool."""
    epoch: int
    """Of the prompt that the chunk is made under."""
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
    commit_bytes: int
    """Stored size of the chunk committed at this boundary; 0 where none was."""
    commit_tokens: int
    active_tokens: int
    """Tokens of the past in the window, in each layer and head alike."""
    dense_tokens: int
    """What they would be without pruning."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors of these sizes gain nothing from torch's threads, which wait for each other where the
    processor is busy; the pager's threads have use for the other cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_chunks(
    memory: WorldMemory, config: RolloutConfig, generate: Callable[[int], None]
) -> Generator[ChunkMetrics, None, None]:
    """Run all chunks, yielding after each.

    ``generate`` computes one chunk and calls ``memory.boundary`` for it on the way; where its own
    share takes less than ``config.chunk_time`` the chunk is padded to that.
    """
    process = psutil.Process()
    for chunk in range(config.chunks):
        began = time.perf_counter()
        generate(chunk)
        model_seconds = time.perf_counter() - began - memory.last.boundary_ms / 1e3
        if config.chunk_time is not None:
            time.sleep(max(0.0, config.chunk_time - model_seconds))
        wall = time.perf_counter() - began
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
        wanted=list(report.wanted),
        preferred=list(report.preferred),
        epoch=report.epoch,
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
        commit_bytes=report.stored_bytes,
        commit_tokens=report.stored_tokens,
        active_tokens=report.active_tokens,
        dense_tokens=report.dense_tokens,
    )

"""A rollout without a model: the shape of the real one, figures that can be checked by hand."""

from __future__ import annotations

import numpy as np

from worldpager.model_adapter.builtin.rooms import IMAGE_SIZE
from worldpager.model_adapter.rollout import ChunkMetrics

CHUNK = 40_960
POOL_CHUNKS = 10
SPILL = POOL_CHUNKS + 1
FIRST_READ = 40
FRAMES_PER_CHUNK = 3


def fake_metrics(chunk: int, retrieve: int = 3) -> ChunkMetrics:
    """Chunk ``chunk`` (from 0) of a run that fills its pool at 10 chunks and reads from 40 on."""
    reads = max(0, chunk + 2 - FIRST_READ)
    return ChunkMetrics(
        chunk=chunk,
        wall_ms=100.0 + chunk % 10,
        model_ms=90.0,
        boundary_ms=4.0,
        stall_ms=0.0,
        decode_ms=1.5,
        encode_ms=2.0,
        stale=chunk == 5,
        stale_reason="not resident" if chunk == 5 else "",
        retrieved=list(range(min(chunk, retrieve))),
        wanted=list(range(min(chunk, retrieve))),
        preferred=[],
        epoch=0,
        hits={"staged": min(chunk, retrieve), "dram": 0, "nvme": 0, "stale": 0, "empty": 0},
        resident_bytes=min(chunk + 1, POOL_CHUNKS) * CHUNK,
        dirty_bytes=min(chunk + 1, 4) * CHUNK,
        stored_bytes=max(0, chunk - 3) * CHUNK,
        chunk_reads_total=reads,
        from_nvme_total=reads // 2,
        bytes_read_total=reads * CHUNK,
        bytes_written_total=max(0, chunk - 3) * CHUNK,
        rss_bytes=300_000_000 + 100 * chunk,
        commit_bytes=CHUNK if chunk else 0,
        commit_tokens=48 if chunk else 0,
        active_tokens=48 * min(chunk, retrieve),
        dense_tokens=48 * min(chunk, retrieve),
        spill_chunk=SPILL if chunk + 1 >= SPILL else None,
        first_read_chunk=FIRST_READ if reads else None,
    )


def picture(pose: np.ndarray, noise: float, rng: np.random.Generator) -> np.ndarray:
    """A frame that depends on the pose alone, plus noise of the given standard deviation."""
    ramp = np.arange(IMAGE_SIZE * IMAGE_SIZE * 3, dtype=np.float64)
    clean = 127 + 100 * np.sin(ramp / 50 + 10 * pose[0, 0] + 5 * pose[0, 2])
    return np.clip(clean + rng.normal(0, noise, clean.shape), 0, 255).astype(np.uint8)

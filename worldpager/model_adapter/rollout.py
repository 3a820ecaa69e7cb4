"""A rollout of the built-in world model with WorldPager as its memory: the main job."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
import xxhash

from worldpager.model_adapter.builtin import RolloutPipeline, load_model
from worldpager.model_adapter.builtin.model import WEIGHTS, ModelConfig
from worldpager.model_adapter.builtin.queries import chunk_query
from worldpager.model_adapter.driving import (
    ChunkMetrics,
    RolloutConfig,
    one_thread,
    path_step,
    run_chunks,
)
from worldpager.model_adapter.frontend import KVSpec, Poses
from worldpager.model_adapter.memory import WorldMemory
from worldpager.model_adapter.pruning import CleanProbe
from worldpager.model_adapter.ring_cache import PagedRingCache, RingCache
from worldpager.prefetch.planner import PATH_AHEAD
from worldpager.quant.rope import RopeLayout

_ASK_AHEAD = 2
"""Chunks ahead whose queries are worth computing: as far as loads are planned."""

__all__ = ["ChunkMetrics", "RolloutConfig", "builtin_spec", "run_rollout", "weights_identity"]

SPARSE_MASS = 0.9
"""Share of attention that ``sparse`` keeps at least."""


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

    def __init__(
        self,
        memory: WorldMemory,
        path: Poses,
        known_ahead: int = max(PATH_AHEAD),
        cache: type[RingCache] = RingCache,
    ) -> None:
        self._memory = memory
        self._path = path
        self._ahead = known_ahead
        self._cache = cache

    def __call__(self, chunk: int, pipeline: RolloutPipeline) -> None:
        spec = self._memory.spec

        def lower(frames: int) -> None:
            pipeline.base += frames

        cache = self._cache(pipeline.kv_cache, spec, lower)
        step = path_step(spec, self._path, chunk, self._ahead)
        if pipeline.probe is not None:
            step = replace(step, predictions=pipeline.probe.take())
        if self._memory.wants_query:
            asked = [
                chunk_query(pipeline, chunk + ahead, poses)
                for ahead, poses in enumerate([self._path[chunk], *step.poses_ahead[:_ASK_AHEAD]])
            ]
            step = replace(step, query=asked[0], queries_ahead=asked[1:])
        self._memory.boundary(step, cache)


def run_rollout(config: RolloutConfig) -> Generator[ChunkMetrics, None, None]:
    """Run, yielding after each chunk; frames go to ``out_dir/frames.bin`` as raw uint8 RGB.

    Closing the iterator early ends the rollout cleanly. Raises as :class:`WorldMemory`.
    """
    model = load_model()
    spec = builtin_spec(model.config, config.retrieve, weights_identity())
    model.set_sparse(SPARSE_MASS if config.attention == "sparse" else None)
    cache = PagedRingCache if config.attention == "int4" else RingCache
    frames = torch.empty(0)

    def generate(chunk: int) -> None:
        nonlocal frames
        frames = pipeline.generate(chunk, config.path[chunk])

    with (
        one_thread(),
        closing(WorldMemory(config.memory(), spec)) as memory,
        (config.out_dir / "frames.bin").open("wb") as film,
    ):
        pipeline = RolloutPipeline(
            model,
            config.seed,
            retrieve_chunks=config.retrieve,
            before_chunk=MemoryHook(memory, config.path, config.known_ahead, cache),
            probe=CleanProbe(cell=(model.config.patch, model.config.patch)),
        )
        for metrics in run_chunks(memory, config, generate):
            film.write((frames * 255).round().to(torch.uint8).numpy().tobytes())
            film.flush()
            yield metrics

"""From a preset to what runs it without a model."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial

from worldpager.model_adapter.driving import ChunkMetrics, RolloutConfig
from worldpager.model_adapter.frontend import KVSpec
from worldpager.model_adapter.synthetic import run_synthetic
from worldpager.quant.rope import RopeLayout
from worldpager.sim.presets import ModelGeometry

Rollout = Callable[[RolloutConfig], Generator[ChunkMetrics, None, None]]


def kv_spec(geometry: ModelGeometry, retrieve: int) -> KVSpec:
    """A synthetic frontend's cache with the geometry of a preset: sink, ``retrieve`` retrieved
    chunks, one recent.
    """
    frames = geometry.frames_per_chunk
    return KVSpec(
        model=f"synthetic {geometry.name}",
        layers=geometry.layers,
        heads=geometry.heads,
        head_dim=geometry.head_dim,
        tokens_per_frame=geometry.tokens_per_frame,
        frames_per_chunk=frames,
        sink_frames=geometry.sink_chunks * frames,
        recent_frames=frames,
        retrieve_frames=retrieve * frames,
        rope=RopeLayout.wan(geometry.head_dim, table_len=geometry.position_table_rows),
    )


def synthetic_rollout(geometry: ModelGeometry, retrieve: int) -> Rollout:
    """Runs ``geometry`` without a model."""
    return partial(run_synthetic, spec=kv_spec(geometry, retrieve))

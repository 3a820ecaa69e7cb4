"""A finished rollout's folder read back: what it was given, where it went, what it did."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from worldpager.cli.metrics import METRICS, Column, check_metrics, read_metrics
from worldpager.errors import ConfigError
from worldpager.prefetch.paths import make_path
from worldpager.prefetch.poses import Floats, as_poses
from worldpager.quant.codec import get_codec
from worldpager.sim.predictions import Inputs, poses_hash
from worldpager.sim.presets import get_preset

SUMMARY, POSES = "summary.json", "poses.npy"
MOST_CHUNKS = 1 << 18
"""Chunks beyond which a folder is not taken for a rollout's: four days of them."""
_NOT_OURS = (ValueError, KeyError, TypeError)


@dataclass(frozen=True, slots=True)
class Run:
    """A rollout that has ended. ``started`` may be estimated from when its files were written,
    at the latest; ``status`` as in its summary.
    """

    folder: Path
    inputs: Inputs
    path: Floats
    metrics: Mapping[str, Column]
    status: str
    started: datetime
    started_is_estimate: bool

    @property
    def chunks(self) -> int:
        """Chunks that were generated."""
        return len(self.metrics["chunk"])

    @property
    def late_chunks(self) -> int:
        """Chunks whose model took longer than the chunk time that the run was padded to."""
        planned = self.inputs.chunk_time
        return 0 if planned is None else int((self.metrics["model_ms"] > planned * 1010).sum())


def read_run(folder: Path) -> Run:
    """The rollout in ``folder``. Raises :class:`ConfigError` where there is none, or where its
    camera path cannot be had again.
    """
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        metrics = read_metrics(folder / METRICS)
        check_metrics(metrics)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} holds no finished rollout: {Path(error.filename).name} is missing"
        ) from None
    except (NotADirectoryError, AttributeError, OverflowError, RecursionError, *_NOT_OURS) as error:
        raise ConfigError(f"{folder} is not a rollout's folder: {error}") from None
    if not isinstance(summary, dict) or not metrics:
        raise ConfigError(f"{folder} holds a rollout without a single chunk")
    options = summary.get("options") or {}
    if not isinstance(options, dict):
        raise ConfigError(f"{folder / SUMMARY} does not say with which options the rollout ran")
    path = _path(folder, options)
    known = {name: options[name] for name in Inputs.model_fields if name in options}
    known |= {"chunks": len(path), "poses": poses_hash(path)}
    known.setdefault("path", POSES)
    known["tokens_kept"] = summary.get("tokens_kept", 1.0)
    if "dram_bytes" not in known:
        raise ConfigError(f"{folder / SUMMARY} does not say how large the pool was")
    try:
        inputs = Inputs(**known)
        started, estimated = _started(folder, summary)
    except (OverflowError, *_NOT_OURS) as error:
        raise ConfigError(
            f"{folder / SUMMARY} cannot be understood: {' '.join(str(error).split())}"
        ) from None
    return Run(folder, inputs, path, metrics, str(summary.get("status", "")), started, estimated)


def _path(folder: Path, options: Mapping[str, Any]) -> Floats:
    """The camera path: as stored beside the metrics, else made again from its name and seed."""
    stored = folder / POSES
    if stored.exists():
        return _stored_path(stored)
    try:
        name, chunks = str(options["path"]), int(options["chunks"])
        seed = int(options.get("seed") or 0)
    except _NOT_OURS as error:
        raise ConfigError(
            f"{folder} has neither {POSES} nor usable options of the path in {SUMMARY} ({error}); "
            "its camera path cannot be had again"
        ) from None
    if not (0 < chunks <= MOST_CHUNKS and seed >= 0):
        raise ConfigError(f"{folder / SUMMARY} speaks of {chunks} chunks and the seed {seed}")
    frames = get_preset(str(options.get("model", "builtin"))).frames_per_chunk
    return make_path(name, chunks, frames, seed)


def _stored_path(file: Path) -> Floats:
    """The poses in a file; mapped at first, so that nothing is allocated from what it says."""
    try:
        stored = np.load(file, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header lets numpy's parser errors of all kinds out
        raise ConfigError(f"{file} cannot be read as a plain array: {error}") from None
    if not isinstance(stored, np.ndarray) or stored.dtype.kind not in "fiu":
        raise ConfigError(f"{file} must hold one array of numbers")
    if stored.ndim != 4 or stored.shape[2:] != (4, 4) or not 0 < len(stored) <= MOST_CHUNKS:
        raise ConfigError(f"{file} must hold poses [chunks, frames, 4, 4], not {stored.shape}")
    poses = np.array(stored, dtype=np.float64)
    as_poses(poses.reshape(-1, 4, 4), str(file))
    return poses


def _started(folder: Path, summary: Mapping[str, Any]) -> tuple[datetime, bool]:
    """When the rollout began: as its summary says, else not later than its last line of metrics
    less its duration.
    """
    if (stated := summary.get("started")) is not None:
        moment = datetime.fromisoformat(str(stated))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)), False
    ended = datetime.fromtimestamp((folder / METRICS).stat().st_mtime, UTC)
    return ended - timedelta(seconds=float(summary.get("wall_seconds") or 0.0)), True


def check_pool(inputs: Inputs) -> None:
    """Raise :class:`BudgetError` for a pool that no memory would open with."""
    from worldpager.model_adapter.config import SINK_CODEC
    from worldpager.model_adapter.frontend import KVSpec
    from worldpager.model_adapter.opening import pool_bytes
    from worldpager.model_adapter.pruning import ChunkPruning

    geometry = get_preset(inputs.model)
    frames = geometry.frames_per_chunk
    spec = KVSpec(
        model=geometry.name,
        layers=geometry.layers,
        heads=geometry.heads,
        head_dim=geometry.head_dim,
        tokens_per_frame=geometry.tokens_per_frame,
        frames_per_chunk=frames,
        sink_frames=geometry.sink_chunks * frames,
        recent_frames=frames,
        retrieve_frames=inputs.retrieve * frames,
        rope=None,
    )
    most = ChunkPruning(inputs.pruning, spec, spec).most_tokens
    pool_bytes(inputs.dram_bytes, get_codec(inputs.codec), get_codec(SINK_CODEC), spec, most)

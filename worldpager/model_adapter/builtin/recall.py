"""How well the built-in model recalls: a view asked for again, with and without its old chunk."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worldpager.model_adapter.builtin.layers import rope_angles, rotate
from worldpager.model_adapter.builtin.model import ModelConfig, WorldModel, denoise
from worldpager.model_adapter.builtin.pipeline import RolloutPipeline
from worldpager.model_adapter.builtin.rooms import Floats as Floats32
from worldpager.model_adapter.builtin.scenes import (
    CHUNKS,
    FRAMES,
    Floats,
    anywhere,
    cameras,
    make_scenes,
)


def psnr(image: Tensor, reference: Tensor, peak: float = 1.0) -> float:
    """Peak signal to noise ratio in dB; `peak` is the width of the value range."""
    error = float((image.double() - reference.double()).square().mean())
    return math.inf if error == 0.0 else 10.0 * math.log10(peak * peak / error)


@torch.no_grad()
def window_recall(model: WorldModel, worlds: int = 32, seed: int = 10_000) -> dict[str, float]:
    """PSNR in dB of a revisited view over held-out rooms, with the right chunk and without it.

    The window holds five true chunks at unrelated poses; the current chunk repeats the pose of
    one of the three retrieved ones, which is left out for the second figure.
    """
    rng = np.random.default_rng(seed)
    noise = torch.Generator().manual_seed(seed)
    motions = [[anywhere(rng) for _ in range(CHUNKS - 1)] for _ in range(worlds)]
    wanted = rng.integers(1, 4)
    scenes = make_scenes(rng, [[*chunks, chunks[wanted]] for chunks in motions])
    frames = scenes.frames.view(worlds, CHUNKS, FRAMES, *scenes.frames.shape[2:])
    poses = scenes.poses.view(worlds, CHUNKS, FRAMES, 4, 4)
    tokens = model.config.tokens_per_chunk
    start = torch.randn(frames[:, 0].shape, generator=noise)
    out = {}
    for name, left_out in (("with", None), ("without", wanted)):
        cache = model.new_cache(worlds, CHUNKS * tokens)
        shown = [c for c in range(CHUNKS - 1) if c != left_out]
        for place, chunk in enumerate(shown):
            model(
                frames[:, chunk], torch.zeros(worlds), poses[:, chunk],
                kv_cache=cache, current_start=place * tokens,
            )  # fmt: skip
        made = denoise(model, start, poses[:, -1], cache, len(shown) * tokens)
        out[name] = psnr(made, frames[:, -1], peak=2.0)
    return out


class ExactMemory:
    """Keeps every chunk's KV as it was and lays the window by hand: what a pager has to equal.

    To be set as a pipeline's `before_chunk`. The retrieved chunks are the nearest by pose among
    those older than the recent ones; they come in time order, rotated to sit right before the
    recent ones. Sink and recent keep their bits as long as their positions stay.
    """

    def __init__(self, poses: Floats, retrieve: int = 3) -> None:
        self.poses = poses
        """Poses of all chunks of the rollout: float64 `[N, frames, 4, 4]`."""
        self.retrieve = retrieve
        self.kept: list[list[tuple[Tensor, Tensor]]] = []
        """For each finished chunk and layer, K and V: bf16 `[1, tokens, heads, head_dim]`."""
        self.chosen: list[list[int]] = []

    def __call__(self, chunk: int, pipeline: RolloutPipeline) -> None:
        if chunk == 0:
            return
        tokens = pipeline.config.tokens_per_chunk
        finished = []
        for cache in pipeline.kv_cache:
            end = int(cache["local_end_index"])
            rows = slice(end - tokens, end)
            finished.append((cache["k"][:, rows].clone(), cache["v"][:, rows].clone()))
        self.kept.append(finished)

        sink = list(range(min(pipeline.sink_chunks, chunk)))
        recent = list(range(max(len(sink), chunk - pipeline.recent_chunks), chunk))
        older = np.arange(len(sink), recent[0] if recent else chunk)
        order = np.argsort(self._distance(older, chunk), kind="stable")
        retrieved = sorted(int(c) for c in older[order[: self.retrieve]])
        self.chosen.append(retrieved)

        frames = pipeline.config.frames_per_chunk
        window = [*sink, *retrieved, *recent]
        first_retrieved = chunk - len(recent) - len(retrieved)
        for place, which in enumerate(window):
            moved = 0
            if which in retrieved:
                moved = (first_retrieved + place - len(sink) - which) * frames
            rows = slice(place * tokens, (place + 1) * tokens)
            for cache, (k, v) in zip(pipeline.kv_cache, self.kept[which], strict=True):
                cache["k"][:, rows] = moved_in_time(k, moved, pipeline.config)
                cache["v"][:, rows] = v
        for cache in pipeline.kv_cache:
            cache["local_end_index"].fill_(len(window) * tokens)

    def _distance(self, chunks: NDArray[np.int64], to: int) -> Floats:
        """Mean distance of frames' places and axes, frames matched first to last and reversed."""
        target = self.poses[to, :, :3]
        there = self.poses[chunks][:, :, :3]
        ways = [np.abs(there - target), np.abs(there[:, ::-1] - target)]
        return np.asarray(np.minimum(*(way.sum(axis=(1, 2, 3)) for way in ways)))


def moved_in_time(k: Tensor, frames: int, config: ModelConfig) -> Tensor:
    """Keys `[B, T, H, D]` rotated by that many frames more, with angles computed in float64."""
    if frames == 0:
        return k
    pairs = config.rope_split[0]
    angles = frames * rope_angles(2, pairs, config.rope_theta)[1]
    turned = k.double()
    turned[..., : 2 * pairs] = rotate(
        turned[..., : 2 * pairs], angles.cos()[None], angles.sin()[None]
    )
    return turned.to(k.dtype)


def turning_path(chunks: int, per_chunk: float = 10.0, lap: int = 36) -> Floats:
    """Turning in place by `per_chunk` degrees a chunk for `lap` chunks, then back, and again.

    Poses `[chunks, FRAMES, 4, 4]`; what comes after the first lap shows only views of that lap.
    """
    frame = np.arange(chunks * FRAMES)
    there = lap * FRAMES
    place = np.abs((frame + there) % (2 * there) - there)
    yaw = np.radians(place * per_chunk / FRAMES)
    zero = np.zeros(len(yaw))
    return cameras(zero, zero, yaw).reshape(chunks, FRAMES, 4, 4)


def circling_path(chunks: int, radius: float = 2.0, lap: int = 36) -> Floats:
    """Walking a circle, looking ahead, `lap` chunks a round: poses `[chunks, FRAMES, 4, 4]`."""
    turn = np.arange(chunks * FRAMES) * 2 * np.pi / (lap * FRAMES)
    path = cameras(-radius * np.cos(turn), radius * np.sin(turn), turn)
    return path.reshape(chunks, FRAMES, 4, 4)


def roll_out(pipeline: RolloutPipeline, poses: Floats, observed: Floats32 | None = None) -> Tensor:
    """Run a path: poses `[N, frames, 4, 4]` to frames `[N, frames, H, W, 3]` in [0, 1].

    observed `[M, frames, H, W, 3]`: the first M chunks, taken as seen instead of generated.
    """
    out = []
    for chunk, where in enumerate(poses):
        if observed is not None and chunk < len(observed):
            given = torch.from_numpy(observed[chunk])
            pipeline.observe(chunk, where, given)
            out.append(given)
        else:
            out.append(pipeline.generate(chunk, where))
    return torch.stack(out)


def revisit_psnr(frames: Tensor, poses: Floats, first: int) -> list[float]:
    """PSNR in dB of each chunk from `first` on against the same poses' frames before `first`."""
    flat, views = frames.flatten(0, 1), poses.reshape(-1, 16)
    seen = views[: first * FRAMES]
    out = []
    for chunk in range(first, len(frames)):
        rows = range(chunk * FRAMES, (chunk + 1) * FRAMES)
        same = [int(np.abs(seen - views[row]).sum(axis=1).argmin()) for row in rows]
        out.append(psnr(frames[chunk], flat[same]))
    return out

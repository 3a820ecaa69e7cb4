"""What the built-in model is trained and judged on: short camera paths through random rooms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worldpager.model_adapter.builtin.rooms import random_colours, render_tables

Floats = NDArray[np.float64]

CHUNKS = 6
"""Chunks of a window: sink, three retrieved, recent, current."""
FRAMES = 3
REACH = 3.2
"""Cameras stay within this distance of the middle, along x and z, in units."""


@dataclass(frozen=True)
class Scenes:
    """A batch of sequences: frames `[B, N, 3, H, W]` in [-1, 1], poses `[B, N, 4, 4]`."""

    frames: Tensor
    poses: Tensor


def cameras(x: Floats, z: Floats, yaw: Floats) -> Floats:
    """Level cameras at eye height: x, z, yaw (radians) `[N]` to camera-to-world `[N, 4, 4]`."""
    sin, cos = np.sin(yaw), np.cos(yaw)
    out = np.tile(np.eye(4), (len(yaw), 1, 1))
    out[:, 0, 0], out[:, 0, 2], out[:, 2, 0], out[:, 2, 2] = cos, sin, -sin, cos
    out[:, 0, 3], out[:, 2, 3] = x, z
    return out


@dataclass(frozen=True)
class Motion:
    """A chunk's camera: place and yaw of its first frame, and their constant change a frame.

    Units for x and z, radians for yaw; yaw 0 looks along z, positive yaw turns towards x.
    """

    x: float
    z: float
    yaw: float
    dx: float
    dz: float
    turn: float

    def after(self, chunks: float) -> Motion:
        """The same motion continued for that many chunks (negative: before)."""
        n = chunks * FRAMES
        return Motion(
            self.x + n * self.dx, self.z + n * self.dz, self.yaw + n * self.turn,
            self.dx, self.dz, self.turn,
        )  # fmt: skip

    def poses(self) -> Floats:
        """Camera-to-world poses of the chunk's frames: float64 `[FRAMES, 4, 4]`."""
        n = np.arange(FRAMES)
        x = np.clip(self.x + n * self.dx, -REACH, REACH)
        z = np.clip(self.z + n * self.dz, -REACH, REACH)
        return cameras(x, z, np.asarray(self.yaw + n * self.turn))


def anywhere(rng: np.random.Generator) -> Motion:
    """A random camera: turning in place, walking ahead or back, or walking while turning."""
    yaw = rng.uniform(-np.pi, np.pi)
    turn = 0.0 if rng.random() < 0.15 else np.radians(rng.choice([-1, 1]) * rng.uniform(1, 7))
    speed = 0.0 if rng.random() < 0.5 else rng.uniform(-0.1, 0.2)
    heading = yaw + (0.0 if rng.random() < 0.8 else rng.uniform(-np.pi, np.pi))
    x, z = rng.uniform(-REACH, REACH, size=2) * (0.2 if rng.random() < 0.3 else 1.0)
    return Motion(x, z, yaw, speed * np.sin(heading), speed * np.cos(heading), turn)


def near(rng: np.random.Generator, motion: Motion) -> Motion:
    """The same view again: as it was or a little off, now and then passed the other way."""
    off = rng.choice([0.0, 0.5, 1.0])
    moved = Motion(
        motion.x + off * rng.uniform(-0.4, 0.4),
        motion.z + off * rng.uniform(-0.4, 0.4),
        motion.yaw + off * np.radians(rng.uniform(-12, 12)),
        motion.dx,
        motion.dz,
        motion.turn,
    )
    if rng.random() < 0.35:
        last = moved.after((FRAMES - 1) / FRAMES)
        return Motion(last.x, last.z, last.yaw, -last.dx, -last.dz, -last.turn)
    return moved


def rollout_like(rng: np.random.Generator, chunks: int = CHUNKS) -> list[Motion]:
    """Sink anywhere, retrieved mostly near the current view, recent just before it."""
    current = anywhere(rng)
    recent = current.after(-1)
    retrieved = [near(rng, current)]
    while len(retrieved) < chunks - 3:
        if rng.random() < 0.7:
            retrieved.append(near(rng, current.after(rng.uniform(-1.5, 1.5))))
        else:
            retrieved.append(near(rng, current) if rng.random() < 0.5 else anywhere(rng))
    order = rng.permutation(len(retrieved))
    sink = near(rng, current) if rng.random() < 0.15 else anywhere(rng)
    return [sink, *(retrieved[i] for i in order), recent, current]


def jumping(rng: np.random.Generator, chunks: int = CHUNKS) -> list[Motion]:
    """Three of four chunks near an earlier one, the others a walk on or a jump."""
    out = [anywhere(rng)]
    while len(out) < chunks:
        if rng.random() < 0.75:
            out.append(near(rng, out[rng.integers(len(out))]))
        else:
            out.append(out[-1].after(1) if rng.random() < 0.5 else anywhere(rng))
    return out


def make_scenes(rng: np.random.Generator, motions: list[list[Motion]]) -> Scenes:
    """Random rooms seen along the given motions, one list of chunks a sequence."""
    poses = np.stack([np.concatenate([m.poses() for m in chunks]) for chunks in motions])
    images = render_tables(random_colours(rng, len(motions)), poses)
    frames = torch.from_numpy(images).permute(0, 1, 4, 2, 3) * 2 - 1
    return Scenes(frames.contiguous(), torch.from_numpy(poses.astype(np.float32)))

"""Camera paths of ``worldpager recall``: there and back, so that every gap between visits occurs.

A path goes on for half of its chunks and returns frame by frame the way it came: chunk ``n + k`` of
``2 n`` shows what chunk ``n - 1 - k`` showed, ``2 k + 1`` chunks later.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from worldpager.prefetch.actions import upright_poses
from worldpager.prefetch.paths import REACH, make_path

Path = npt.NDArray[np.float64]

FRAMES = 3
_TURN = np.radians(10.0)
"""Turned a chunk: a view of 90 degrees is out of sight after nine chunks."""

GAPS = {"short": (8, 24), "mid": (24, 72), "long": (72, 10**9)}
"""Classes of gaps between a first visit and a revisit, in chunks, from and up to."""


def recall_path(name: str, chunks: int, seed: int) -> Path:
    """Poses ``[chunks, FRAMES, 4, 4]`` of the path called ``name``; ``chunks`` is even."""
    out = _OUTWARD[name](chunks // 2, seed).reshape(-1, 4, 4)
    return np.concatenate([out, out[::-1]]).reshape(chunks, FRAMES, 4, 4)


def _turning(chunks: int, seed: int) -> Path:
    """Turning round and round while drifting from one side of the room to the other."""
    rng = np.random.default_rng((seed, 1))
    share = np.linspace(-1.0, 1.0, chunks * FRAMES)
    heading = rng.uniform(-np.pi, np.pi)
    reach, aside = rng.uniform(1.0, 1.6), rng.uniform(-0.8, 0.8)
    along = np.array([np.sin(heading), 0.0, np.cos(heading)])
    across = np.array([along[2], 0.0, -along[0]])
    positions = reach * share[:, None] * along + aside * across
    yaw = rng.uniform(-np.pi, np.pi) + rng.choice([-1, 1]) * _TURN / FRAMES * np.arange(len(share))
    return upright_poses(positions, yaw, np.zeros(len(share)))


def _spiral(chunks: int, seed: int) -> Path:
    """Walking round the middle of the room, looking ahead, nearer to it lap by lap."""
    rng = np.random.default_rng((seed, 2))
    frames = chunks * FRAMES
    radius = np.linspace(rng.uniform(2.2, REACH - 0.2), rng.uniform(0.8, 1.4), frames)
    side = rng.choice([-1, 1])
    angle = rng.uniform(-np.pi, np.pi) + side * _TURN / FRAMES * np.arange(frames)
    positions = np.stack([-side * radius * np.cos(angle), 0 * angle, side * radius * np.sin(angle)])
    return upright_poses(positions.T, angle, np.zeros(frames))


def _walk(chunks: int, seed: int) -> Path:
    """The walker of :mod:`worldpager.prefetch.paths`, who also retraces steps on the way."""
    return make_path("walk", chunks, FRAMES, seed)


_OUTWARD: dict[str, Callable[[int, int], Path]] = {
    "turning": _turning,
    "spiral": _spiral,
    "walk": _walk,
}
PATHS = tuple(_OUTWARD)

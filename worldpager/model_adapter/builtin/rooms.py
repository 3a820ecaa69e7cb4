"""Square rooms with coloured panels: the worlds that the built-in model lives in.

A room is a box seen from inside, `2 * HALF[0]` by `2 * HALF[2]` units, its walls cut into panels
of one of eight colours, its floor into tiles. What a panel looks like cannot be guessed from any
other panel, so a view that comes back right has been remembered. Poses are camera-to-world, OpenCV
convention (x right, y down, z forward), the origin in the middle of the room at eye height.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

HALF = (4.0, 2.0, 4.0)
"""Half extents of the box along x, y and z, in units (one unit is about a metre)."""
IMAGE_SIZE = 32
SUPERSAMPLE = 2
"""Rays per pixel and axis: without them panel edges jump by whole pixels between frames."""

WALL_ROWS, WALL_COLUMNS, FLOOR_TILES = 2, 6, 4
_PER_WALL = WALL_ROWS * WALL_COLUMNS
_FLOOR = 4 * _PER_WALL
_CEILING = _FLOOR + FLOOR_TILES * FLOOR_TILES
SURFACES = _CEILING + 1
"""Entries of a room's colour table: four walls of panels, the floor's tiles, the ceiling."""

PALETTE: Floats = np.array(
    [
        [0.90, 0.18, 0.16],
        [0.16, 0.70, 0.25],
        [0.18, 0.32, 0.92],
        [0.95, 0.82, 0.15],
        [0.75, 0.22, 0.80],
        [0.15, 0.80, 0.85],
        [0.95, 0.52, 0.12],
        [0.92, 0.92, 0.92],
    ],
    dtype=np.float32,
)
"""The eight panel colours, RGB in [0, 1]."""

_CEILING_COLOUR = np.array([0.75, 0.75, 0.78], dtype=np.float32)
_FLOOR_GAIN = 0.7
_LIGHT_REACH = 7.0
_FRAMES_AT_ONCE = 8


@dataclass(frozen=True)
class Room:
    """One room: a table of surface colours, float32 `[SURFACES, 3]`, RGB in [0, 1]."""

    colours: Floats

    @classmethod
    def random(cls, seed: int) -> Room:
        """The room of that seed; equal seeds give equal rooms on every machine."""
        return cls(random_colours(np.random.default_rng(seed), 1)[0])


def random_colours(rng: np.random.Generator, rooms: int) -> Floats:
    """Colour tables of `rooms` random rooms: float32 `[rooms, SURFACES, 3]`."""
    table = PALETTE[rng.integers(0, len(PALETTE), size=(rooms, SURFACES))]
    table[:, _FLOOR:_CEILING] *= _FLOOR_GAIN
    table[:, _CEILING] = _CEILING_COLOUR
    return table


def camera_rays(size: int, per_axis: int = 1) -> Floats:
    """Rays in the camera frame with z = 1 for a 90 degree field of view.

    float32 `[size * size * per_axis**2, 3]`, ordered row, column, then sub-ray, so that a pixel's
    rays lie next to each other.
    """
    n = size * per_axis
    grid = ((np.arange(n) + 0.5) * 2.0 / n - 1.0).reshape(size, per_axis)
    y, x = np.broadcast_arrays(grid[:, None, :, None], grid[None, :, None, :])
    rays = np.stack([x, y, np.ones_like(x)], axis=-1)
    return np.asarray(rays.reshape(-1, 3), dtype=np.float32)


def render(room: Room, poses: NDArray[np.floating], size: int = IMAGE_SIZE) -> Floats:
    """Views of a room: poses `[N, 4, 4]` to float32 `[N, size, size, 3]`, RGB in [0, 1]."""
    views: Floats = render_tables(room.colours[None], poses[None], size)[0]
    return views


def render_tables(colours: Floats, poses: NDArray[np.floating], size: int = IMAGE_SIZE) -> Floats:
    """Views of several rooms at once.

    colours `[R, SURFACES, 3]`, poses `[R, N, 4, 4]`; float32 `[R, N, size, size, 3]` in [0, 1].
    """
    rooms, frames = poses.shape[:2]
    flat = poses.reshape(rooms * frames, 4, 4).astype(np.float32)
    rays = camera_rays(size, SUPERSAMPLE)
    lengths = np.linalg.norm(rays, axis=1)
    room_of = np.repeat(np.arange(rooms, dtype=np.int32), frames) * SURFACES
    table = np.ascontiguousarray(colours.reshape(rooms * SURFACES, 3))
    out = np.empty((rooms * frames, size, size, 3), dtype=np.float32)
    # A few frames at a time: the intermediates then stay in the processor's cache.
    for first in range(0, rooms * frames, _FRAMES_AT_ONCE):
        part = slice(first, min(first + _FRAMES_AT_ONCE, rooms * frames))
        surface, depth = _hit(flat[part], rays)
        light = 1.0 / (1.0 + (depth * lengths / _LIGHT_REACH) ** 2)
        colour = np.take(table, surface + room_of[part, None], axis=0) * light[..., None]
        colour = colour.reshape(len(colour), size, size, SUPERSAMPLE**2, 3)
        out[part] = colour.mean(axis=3)
    return out.reshape(rooms, frames, size, size, 3)


def _hit(poses: Floats, rays: Floats) -> tuple[NDArray[np.int32], Floats]:
    """Where rays meet the box: entry of the colour table and ray parameter, each `[F, P]`."""
    direction = np.matmul(poses[:, :3, :3], rays.T)
    origin = poses[:, :3, 3]
    # A ray nearly parallel to a face must keep its sign: a clamp to +eps would send it to the
    # opposite wall, a few pixels would explode, and training with them.
    tiny = np.float32(1e-6)
    direction = np.where(np.abs(direction) < tiny, np.where(direction < 0, -tiny, tiny), direction)
    half = np.asarray(HALF, dtype=np.float32)[None, :, None]
    steps = (np.copysign(half, direction) - origin[:, :, None]) / direction
    depth = steps.min(axis=1)
    point = (origin[:, :, None] + depth[:, None] * direction) / half
    on_x = steps[:, 0] <= depth
    on_y = steps[:, 1] <= depth
    positive = direction > 0

    across = np.where(on_x, point[:, 2], point[:, 0])
    column = _cell(across, WALL_COLUMNS)
    row = _cell(point[:, 1], WALL_ROWS)
    wall = np.where(on_x, positive[:, 0], positive[:, 2] + np.int32(2))
    panel = wall * np.int32(_PER_WALL) + row * np.int32(WALL_COLUMNS) + column
    tile = _cell(point[:, 2], FLOOR_TILES) * np.int32(FLOOR_TILES) + _cell(point[:, 0], FLOOR_TILES)
    flat = np.where(positive[:, 1], tile + np.int32(_FLOOR), np.int32(_CEILING))
    return np.where(on_y, flat, panel).astype(np.int32), depth


def _cell(position: Floats, cells: int) -> NDArray[np.int32]:
    """Index of the cell that a position in [-1, 1] falls into, `cells` of equal width."""
    index = ((position + np.float32(1.0)) * np.float32(cells / 2)).astype(np.int32)
    return np.clip(index, 0, cells - 1)

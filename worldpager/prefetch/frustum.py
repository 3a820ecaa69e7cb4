"""How much of their view two cameras share: points of one frustum counted inside the other."""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from worldpager.prefetch.distance import DECIMALS
from worldpager.prefetch.poses import Floats
from worldpager.quant.kernels import kernel

POINTS = 32
"""Points of each frustum, spread evenly over directions and over 1 / depth; mirrored left to right,
so that a turn to either side shares the same."""

_GOLDEN = 1.2207440846057596
"""Root of ``x^4 = x + 1``: its powers make the evenly spread sequence of three dimensions."""

Points = npt.NDArray[np.float32]
_kernel: Any = kernel  # compiled functions carry no types


def shared_views(
    places: Floats, query: Floats, half_sizes: tuple[float, float], near: float, far: float
) -> Floats:
    """Mean of the two shares, float64 `[n]` in [0, 1], of places `[n, 12]` with the place `[12]`.

    ``half_sizes``: half the image's width and height at depth 1; ``near`` and ``far``: depths.
    Takes mean rotations as they are stored and makes them rotations again.
    """
    points = _points(*half_sizes, near, far)
    out = np.empty(len(places), dtype=np.float64)
    _shares(places, query, points, np.float32(half_sizes[0]), np.float32(half_sizes[1]),
            np.float32(near), np.float32(far), out)  # fmt: skip
    return np.round(out, DECIMALS)


@cache
def _points(across: float, down: float, near: float, far: float) -> Points:
    """Points inside a frustum in camera axes, float32 `[3, POINTS]`; none on its surface."""
    steps = _GOLDEN ** -np.arange(1.0, 4.0)
    u, v, w = ((0.5 + np.arange(1, POINTS // 2 + 1)[:, None] * steps) % 1.0).T
    depth = 1 / (w / near + (1 - w) / far)
    x, y = (2 * u - 1) * across * depth, (2 * v - 1) * down * depth
    half = np.stack([x, y, depth])
    mirrored = half * np.array([[-1.0], [1.0], [1.0]])
    return np.concatenate([half, mirrored], axis=1).astype(np.float32)


@_kernel
def _axes(place, out):  # type: ignore[no-untyped-def]
    """Right, down and forward axes as columns of ``out`` `[3, 3]`, from a mean rotation."""
    fx, fy, fz = place[5], place[8], place[11]
    size = np.sqrt(fx * fx + fy * fy + fz * fz)
    if size < 1e-9:
        fx, fy, fz, size = 0.0, 0.0, 1.0, 1.0
    fx, fy, fz = fx / size, fy / size, fz / size
    rx, ry, rz = place[3], place[6], place[9]
    along = rx * fx + ry * fy + rz * fz
    rx, ry, rz = rx - along * fx, ry - along * fy, rz - along * fz
    size = np.sqrt(rx * rx + ry * ry + rz * rz)
    if size < 1e-9:  # any axis across the view will do
        rx, ry, rz = fz, 0.0, -fx
        size = np.sqrt(rx * rx + rz * rz)
        if size < 1e-9:
            rx, size = 1.0, 1.0
    rx, ry, rz = rx / size, ry / size, rz / size
    out[0, 0], out[1, 0], out[2, 0] = rx, ry, rz
    out[0, 1], out[1, 1], out[2, 1] = fy * rz - fz * ry, fz * rx - fx * rz, fx * ry - fy * rx
    out[0, 2], out[1, 2], out[2, 2] = fx, fy, fz


def _lanes(function: Any) -> Any:
    """Compile for whole registers at once: sums of ones and zeros are exact in any order."""
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": {"reassoc", "nnan", "nsz"},
    }
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no writable cache directory
        return numba.njit(**options)(function)


@_lanes
def _inside(px, py, pz, m, o, across, down, near, far):  # type: ignore[no-untyped-def]
    """Points of either frustum that are in the other. ``m``, ``o``: from the candidate's axes to
    the query's.
    """
    m00, m01, m02 = m[0, 0], m[0, 1], m[0, 2]
    m10, m11, m12 = m[1, 0], m[1, 1], m[1, 2]
    m20, m21, m22 = m[2, 0], m[2, 1], m[2, 2]
    ox, oy, oz = o[0], o[1], o[2]
    zero, one = np.float32(0), np.float32(1)
    count = zero
    for s in range(len(px)):
        x, y, z = px[s], py[s], pz[s]
        ax = m00 * x + m01 * y + m02 * z + ox
        ay = m10 * x + m11 * y + m12 * z + oy
        az = m20 * x + m21 * y + m22 * z + oz
        x, y, z = x - ox, y - oy, z - oz
        bx = m00 * x + m10 * y + m20 * z
        by = m01 * x + m11 * y + m21 * z
        bz = m02 * x + m12 * y + m22 * z
        a = min(min(across * az - abs(ax), down * az - abs(ay)), min(az - near, far - az))
        b = min(min(across * bz - abs(bx), down * bz - abs(by)), min(bz - near, far - bz))
        count += one if a >= zero else zero
        count += one if b >= zero else zero
    return count


@_kernel
def _shares(places, query, points, across, down, near, far, out):  # type: ignore[no-untyped-def]
    ours, theirs = np.empty((3, 3)), np.empty((3, 3))
    _axes(query, ours)
    m, o = np.empty((3, 3), dtype=np.float32), np.empty(3, dtype=np.float32)
    px, py, pz = points[0], points[1], points[2]
    for row in range(len(places)):
        place = places[row]
        _axes(place, theirs)
        for i in range(3):
            total = 0.0
            for axis in range(3):
                total += ours[axis, i] * (place[axis] - query[axis])
            o[i] = total
            for j in range(3):
                total = 0.0
                for axis in range(3):
                    total += ours[axis, i] * theirs[axis, j]
                m[i, j] = total
        out[row] = _inside(px, py, pz, m, o, across, down, near, far) / (2 * len(px))

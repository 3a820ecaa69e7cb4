"""From keys and mouse to camera poses.

Action-driven models such as Matrix-Game 2.0 are given no pose, only controls: one row per pixel
frame of keys ``[W, S, A, D]`` and of mouse rates ``[pitch, yaw]``, +-0.1 while the mouse moves, up
and right positive. How far a key press goes is the game's secret, so it is declared here, and the
poses are what the declared walker would see. Retrieval needs no more than that: equal ways lead to
equal poses.

Walker: it stands upright (world y points down), turns by yaw and pitch, never rolls, and moves in
the horizontal plane along its heading whatever its pitch. In each frame it moves along the heading
half way through that frame's turn, which makes the rule reversible: the opposite actions in
opposite order lead back exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from worldpager.errors import ConfigError
from worldpager.prefetch.poses import Floats, as_poses

KEYS = ("W", "S", "A", "D")
"""Order of the keyboard columns; the first two alone where a game has no sideways keys."""

_UPRIGHT = 1e-3


@dataclass(frozen=True, slots=True)
class ActionScale:
    """What the controls are worth.

    ``units_per_frame``: world units per frame with a key held, the same in every direction.
    ``degrees_per_mouse_unit``: turn per frame for a mouse rate of 1; the default makes 0.1 held for
    the 12 frames of a chunk 15 degrees. ``pitch_limit``: degrees up and down at which pitch stops.
    """

    units_per_frame: float = 0.0875
    degrees_per_mouse_unit: float = 12.5
    pitch_limit: float = 85.0

    def __post_init__(self) -> None:
        for field in ("units_per_frame", "degrees_per_mouse_unit"):
            value = getattr(self, field)
            if not (np.isfinite(value) and value >= 0):
                raise ConfigError(f"{field} must be finite and not negative, not {value}")
        if not 0 <= self.pitch_limit < 90:
            raise ConfigError(
                f"pitch_limit must be at least 0 and below 90 degrees, not {self.pitch_limit}"
            )


def integrate_actions(
    start: npt.ArrayLike,
    keyboard: npt.ArrayLike,
    mouse: npt.ArrayLike | None = None,
    scale: ActionScale | None = None,
) -> Floats:
    """The pose after each row of controls, float64 `[n, 4, 4]`.

    ``start``: pose `[4, 4]` before the first row. ``keyboard``: `[n, 4]` as :data:`KEYS`, or
    `[n, 2]` without A and D; several keys at once move diagonally at the same speed. ``mouse``:
    `[n, 2]` pitch and yaw, or None for games without one. Raises :class:`ConfigError` for wrong
    shapes, values that are not finite, a start pose that is rolled or looks straight up or down.
    """
    scale = scale or ActionScale()
    keys = _rows(keyboard, "keyboard", (4, 2))
    turns = np.zeros((len(keys), 2)) if mouse is None else _rows(mouse, "mouse", (2,))
    if len(turns) != len(keys):
        raise ConfigError(f"keyboard has {len(keys)} rows but mouse has {len(turns)}; give as many")
    position, yaw0, pitch0 = _walker(start)

    rate = np.radians(scale.degrees_per_mouse_unit)
    steps = rate * turns[:, 1]
    yaw = yaw0 + np.cumsum(steps)
    pitch = _clamped(pitch0, rate * turns[:, 0], float(np.radians(scale.pitch_limit)))

    forward = keys[:, 0] - keys[:, 1]
    right = keys[:, 3] - keys[:, 2] if keys.shape[1] == 4 else np.zeros(len(keys))
    pace = scale.units_per_frame / np.maximum(np.hypot(forward, right), 1.0)
    heading = yaw - 0.5 * steps
    sin, cos = np.sin(heading), np.cos(heading)
    moves = np.zeros((len(keys), 3))
    moves[:, 0] = pace * (forward * sin + right * cos)
    moves[:, 2] = pace * (forward * cos - right * sin)
    return upright_poses(position + np.cumsum(moves, axis=0), yaw, pitch)


def latent_poses(frames: Floats, frames_per_latent: int = 4) -> Floats:
    """The poses at latent frames: every ``frames_per_latent``-th of `[n, 4, 4]`, the last included.

    A first chunk of 9 rows gives rows 0, 4, 8; every later chunk of 12 gives rows 3, 7, 11.
    """
    return frames[(len(frames) - 1) % frames_per_latent :: frames_per_latent]


def upright_poses(positions: Floats, yaw: Floats, pitch: Floats) -> Floats:
    """Poses `[n, 4, 4]` without roll: positions `[n, 3]`, yaw and pitch `[n]` in radians.

    Yaw 0 looks along +z, yaw 90 degrees along +x; positive pitch looks up.
    """
    out = np.zeros((len(positions), 4, 4))
    sy, cy, sp, cp = np.sin(yaw), np.cos(yaw), np.sin(pitch), np.cos(pitch)
    out[:, 0, 0], out[:, 0, 1], out[:, 0, 2] = cy, sy * sp, sy * cp
    out[:, 1, 1], out[:, 1, 2] = cp, -sp
    out[:, 2, 0], out[:, 2, 1], out[:, 2, 2] = -sy, cy * sp, cy * cp
    out[:, :3, 3] = positions
    out[:, 3, 3] = 1.0
    return out


def _rows(values: npt.ArrayLike, name: str, widths: tuple[int, ...]) -> Floats:
    rows = np.asarray(values, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] not in widths:
        wanted = " or ".join(f"[n, {width}]" for width in widths)
        raise ConfigError(f"{name} must have shape {wanted}, not {list(rows.shape)}")
    if not np.isfinite(rows).all():
        index = int(np.argmin(np.isfinite(rows).all(axis=1)))
        raise ConfigError(f"{name} row {index} holds NaN or infinity: {rows[index]}")
    return rows


def _walker(start: npt.ArrayLike) -> tuple[Floats, float, float]:
    """Position, yaw and pitch of an upright start pose."""
    pose = as_poses(np.asarray(start)[None], "start")[0]
    forward = pose[:3, 2]
    level = float(np.hypot(forward[0], forward[2]))
    if abs(pose[1, 0]) > _UPRIGHT or pose[1, 1] < 0 or level < _UPRIGHT:
        raise ConfigError(
            "the start pose is rolled or looks straight up or down, so the walker has no heading; "
            f"turn the world until its y axis points down (right axis {pose[:3, 0]}, forward axis "
            f"{forward})"
        )
    yaw = float(np.arctan2(forward[0], forward[2]))
    return pose[:3, 3], yaw, float(np.arctan2(-forward[1], level))


def _clamped(start: float, steps: Floats, limit: float) -> Floats:
    """Running sum that never leaves ``[-limit, limit]``, except to come back from outside."""

    def turn(pitch: float, step: float) -> float:
        return min(max(pitch + step, min(pitch, -limit)), max(pitch, limit))

    sums = list(accumulate(steps.tolist(), turn, initial=start))
    return np.array(sums[1:], dtype=np.float64)

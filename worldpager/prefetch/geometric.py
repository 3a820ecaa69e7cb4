"""Retrieval that looks at cameras, or at nothing but time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from worldpager.errors import ConfigError
from worldpager.prefetch.actions import ActionScale
from worldpager.prefetch.distance import camera_distances
from worldpager.prefetch.index import PlaceIndex, View
from worldpager.prefetch.poses import Floats
from worldpager.prefetch.ranking import Query, Ranking, Scored, nearness_of

_SCALE = ActionScale()


@dataclass(frozen=True)
class CameraDistance(Scored):
    """Nearest cameras first: the distance of :mod:`worldpager.prefetch.distance` (WorldKV)."""

    name: ClassVar[str] = "camera"
    needs_poses: ClassVar[bool] = True

    def distances(self, view: View, query: Query) -> Floats:
        return camera_distances(view.places, place_in(query, self.name))


@dataclass(frozen=True)
class ActionDistance(CameraDistance):
    """Camera distance between pseudo-poses, for models that are given keys and mouse but no camera.

    ``units_per_frame``, ``degrees_per_mouse_unit``, ``pitch_limit``: what the controls are worth,
    as in :class:`ActionScale`. ``next_actions``: how many of the likeliest next actions have their
    chunks loaded ahead; 1 for the action held on alone.
    """

    name: ClassVar[str] = "action"
    controls: ClassVar[bool] = True
    """Poses are made from ``ChunkStep.control``."""

    units_per_frame: float = _SCALE.units_per_frame
    degrees_per_mouse_unit: float = _SCALE.degrees_per_mouse_unit
    pitch_limit: float = _SCALE.pitch_limit
    next_actions: int = 3

    def __post_init__(self) -> None:
        Scored.__post_init__(self)
        if self.next_actions < 1:
            raise ConfigError(f"next_actions must be at least 1, not {self.next_actions}")
        _ = self.scale

    @property
    def scale(self) -> ActionScale:
        """What the controls are worth. Raises :class:`ConfigError` for impossible values."""
        return ActionScale(self.units_per_frame, self.degrees_per_mouse_unit, self.pitch_limit)


@dataclass(frozen=True)
class FieldOfView(Scored):
    """Most of the view shared first, for models whose cameras are calibrated.

    Distance: 1 less the mean of two shares, of what the query's frustum holds that the candidate's
    does too and the reverse, over :data:`POINTS` points of each; walls are not known, so nothing
    hides anything. ``horizontal``: the camera's full angle in degrees; ``aspect``: width over
    height; ``near``, ``far``: depths between which the scene lies, in world units.
    """

    name: ClassVar[str] = "fov"
    needs_poses: ClassVar[bool] = True

    horizontal: float = 90.0
    aspect: float = 1.0
    near: float = 0.1
    far: float = 8.0

    def __post_init__(self) -> None:
        Scored.__post_init__(self)
        if not (0 < self.horizontal < 180 and 0 < self.aspect < np.inf):
            raise ConfigError(
                f"a camera sees 0 to 180 degrees at a positive aspect, not {self.horizontal} at "
                f"{self.aspect}"
            )
        if not 0 < self.near < self.far < np.inf:
            raise ConfigError(f"depths must satisfy 0 < near < far, not {self.near}, {self.far}")

    @classmethod
    def from_intrinsics(
        cls, fx: float, fy: float, width: int, height: int, *, near: float, far: float
    ) -> FieldOfView:
        """For a pinhole camera: focal lengths and image size in pixels."""
        if min(fx, fy, width, height) <= 0:
            raise ConfigError(f"intrinsics must be positive: {fx}, {fy}, {width} x {height}")
        across, down = width / (2 * fx), height / (2 * fy)
        return cls(
            horizontal=float(np.degrees(2 * np.arctan(across))),
            aspect=across / down,
            near=near,
            far=far,
        )

    def distances(self, view: View, query: Query) -> Floats:
        from worldpager.prefetch.frustum import shared_views  # numba: slow to import

        across = float(np.tan(np.radians(self.horizontal) / 2))
        half_sizes = (across, across / self.aspect)
        place = place_in(query, self.name)
        return 1.0 - shared_views(view.places, place, half_sizes, self.near, self.far)


@dataclass(frozen=True)
class Recent(Scored):
    """The newest candidates first: a longer recent window, whatever the camera does."""

    name: ClassVar[str] = "recent"

    def distances(self, view: View, query: Query) -> Floats:
        return nearness_of(np.arange(len(view.ids), dtype=np.float64))


class Nothing:
    """Retrieves nothing: sink and recent only, the baseline without memory."""

    name = "none"
    needs_poses = False

    def rank(
        self,
        index: PlaceIndex,
        query: Query,
        candidates: range,
        count: int | None = None,
        resident: Iterable[int] = (),
    ) -> Ranking:
        return Ranking(np.empty(0, dtype=np.int64), np.empty(0))


def place_in(query: Query, policy: str) -> Floats:
    """The query's place. Raises :class:`ConfigError` where it has none."""
    if query.place is None:
        raise ConfigError(f"retrieval by {policy} needs poses; give them or choose another policy")
    return query.place

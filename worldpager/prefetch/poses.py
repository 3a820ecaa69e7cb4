"""Camera poses, their conventions, and the place of a chunk.

Inside WorldPager a pose is a float64 4x4 camera-to-world matrix in OpenCV axes: the columns of its
rotation are the camera's right, down and forward directions in the world, its translation is in
world units. Whatever else a frontend uses is declared as a :class:`PoseConvention` and converted
once, at the door.

The *place* of a chunk is what retrieval compares: the mean translation of its latent frames and the
arithmetic mean of their rotation matrices. The mean is not made a rotation again, as in WorldKV's
code; a chunk that turns is therefore at a small distance from itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.spatial.transform import Rotation, Slerp

from worldpager.errors import ConfigError

Floats = npt.NDArray[np.float64]

PLACE = 12
"""Numbers of a place: mean translation (3), then the mean rotation matrix row by row (9)."""

ORTHONORMAL_TOLERANCE = 1e-3
"""Largest entry of ``R^T R - I`` that is taken for rounding (bfloat16 poses stay below it)."""

FURTHEST = 1e9
"""Largest coordinate in world units: squares and their sums then stay exact enough and finite."""


@dataclass(frozen=True, slots=True)
class PoseConvention:
    """How a frontend writes its poses down.

    ``right``, ``down``, ``forward``: the axis of the frontend's camera that points that way in the
    image, such as ``"+x"`` or ``"-z"``. ``scale``: world units per unit of the frontend's
    translations. ``camera_to_world``: False where the matrices map world to camera.

    The world's own axes are left as they are. Raises :class:`ConfigError` for axes that are not
    three different ones or that form a left-handed camera, and for a scale that is not positive.
    """

    right: str = "+x"
    down: str = "+y"
    forward: str = "+z"
    scale: float = 1.0
    camera_to_world: bool = True

    def __post_init__(self) -> None:
        names = [sign + axis for sign in "+-" for axis in "xyz"]
        axes = (self.right, self.down, self.forward)
        if any(axis not in names for axis in axes) or round(np.linalg.det(self._axes())) != 1:
            raise ConfigError(
                f"camera axes right, down, forward = {axes} are not a right-handed frame; give "
                f"three different ones of {', '.join(names)}"
            )
        if not (np.isfinite(self.scale) and self.scale > 0):
            raise ConfigError(f"a pose scale must be positive and finite, not {self.scale}")

    def _axes(self) -> Floats:
        """Columns: OpenCV's right, down and forward in the frontend's camera axes, `[3, 3]`."""
        matrix = np.zeros((3, 3))
        for column, name in enumerate((self.right, self.down, self.forward)):
            if len(name) == 2 and name[1] in "xyz":
                matrix["xyz".index(name[1]), column] = -1.0 if name[0] == "-" else 1.0
        return matrix

    def to_opencv(self, poses: npt.ArrayLike, name: str = "poses") -> Floats:
        """Poses of this convention `[N, 4, 4]` as ours, checked by :func:`as_poses`."""
        checked = as_poses(poses, name)
        if not self.camera_to_world:
            checked = _inverse(checked)
        checked[:, :3, :3] @= self._axes()
        checked[:, :3, 3] *= self.scale
        return checked

    def from_opencv(self, poses: npt.ArrayLike) -> Floats:
        """Our poses `[N, 4, 4]` in this convention: the inverse of :meth:`to_opencv`."""
        checked = as_poses(poses)
        checked[:, :3, 3] /= self.scale
        checked[:, :3, :3] @= self._axes().T
        return checked if self.camera_to_world else _inverse(checked)


OPENCV = PoseConvention()
OPENGL = PoseConvention(right="+x", down="-y", forward="-z")


def _inverse(poses: Floats) -> Floats:
    out = poses.copy()
    out[:, :3, :3] = np.swapaxes(poses[:, :3, :3], 1, 2)
    out[:, :3, 3] = -np.einsum("nij,nj->ni", out[:, :3, :3], poses[:, :3, 3])
    return out


def as_poses(array: npt.ArrayLike, name: str = "poses") -> Floats:
    """A fresh float64 copy of `[N, 4, 4]` poses after checking that each is a rigid motion.

    ``name`` is what messages call the array. Raises :class:`ConfigError` naming the first pose at
    fault and what is wrong with it: shape, dtype, not finite, last row, not a rotation, mirrored,
    or further than 1e9 units from the origin.
    """
    try:
        given = np.asarray(array)
    except ValueError as error:
        raise ConfigError(f"{name} cannot be read as one array: {error}") from None
    if given.ndim != 3 or given.shape[1:] != (4, 4):
        raise ConfigError(f"{name} must have shape [N, 4, 4], not {list(given.shape)}")
    if given.dtype.kind not in "fiu":
        raise ConfigError(f"{name} must hold real numbers, not {given.dtype}")
    poses = np.array(given, dtype=np.float64)
    _check(~np.isfinite(poses).all(axis=(1, 2)), poses, name, "holds NaN or infinity")
    _check(
        (np.abs(poses[:, 3] - (0.0, 0.0, 0.0, 1.0)) > 1e-6).any(axis=1),
        poses,
        name,
        "does not end in the row 0 0 0 1; give camera-to-world matrices, not transposed ones",
    )
    _check(
        (np.abs(poses[:, :3, 3]) > FURTHEST).any(axis=1),
        poses,
        name,
        f"lies more than {FURTHEST:g} units from the origin; scale the translations down",
    )
    rotations = poses[:, :3, :3]
    # Entries beyond 2 cannot belong to a rotation; clipping keeps their squares finite.
    clipped = np.clip(rotations, -2.0, 2.0)
    skew = np.abs(np.swapaxes(clipped, 1, 2) @ clipped - np.eye(3)).max(axis=(1, 2), initial=0.0)
    _check(
        skew > ORTHONORMAL_TOLERANCE,
        poses,
        name,
        "has a rotation that is not orthonormal; remove scale and shear from it",
    )
    _check(
        np.linalg.det(clipped) < 0,
        poses,
        name,
        "has a mirrored (left-handed) rotation; flip one camera axis",
    )
    poses[:, 3] = (0.0, 0.0, 0.0, 1.0)
    return poses


def _check(bad: npt.ArrayLike, poses: Floats, name: str, defect: str) -> None:
    """Raise for the first pose that is ``bad`` `[N]`."""
    if np.any(bad):
        index = int(np.argmax(bad))
        values = np.array2string(poses[index], precision=4, separator=", ").replace("\n", "")
        raise ConfigError(f"{name}[{index}] {defect}; it is {values}")


def place_of(poses: npt.ArrayLike, *, project_so3: bool = False) -> Floats:
    """Place of a chunk from its latent poses: `[..., F, 4, 4]` to float64 `[..., 12]`.

    Mean translation, then the arithmetic mean of the rotation matrices. ``project_so3`` replaces
    that mean by the nearest rotation (singular value decomposition), off as in WorldKV's code.
    """
    given = np.asarray(poses, dtype=np.float64)
    if given.ndim < 3 or given.shape[-2:] != (4, 4) or given.shape[-3] == 0:
        raise ConfigError(f"a chunk's poses must be [F, 4, 4] with F >= 1, not {list(given.shape)}")
    mean = given[..., :3, :].mean(axis=-3)
    rotation = mean[..., :3]
    if project_so3:
        rotation = nearest_rotation(rotation)
    flat = rotation.reshape(*rotation.shape[:-2], 9)
    return np.concatenate([mean[..., 3], flat], axis=-1)


def nearest_rotation(matrices: Floats) -> Floats:
    """The rotations nearest to `[..., 3, 3]` matrices in the Frobenius norm."""
    u, _, vt = np.linalg.svd(matrices)
    # A mean of opposed rotations may be closest to a reflection; turn the weakest axis round.
    u[..., :, 2] *= np.linalg.det(u @ vt)[..., None]
    return np.asarray(u @ vt, dtype=np.float64)


def interpolate_poses(poses: npt.ArrayLike, at: npt.ArrayLike) -> Floats:
    """Poses between key poses: keys `[N, 4, 4]`, fractional key indices `[M]` to `[M, 4, 4]`.

    Translation is linear, rotation slerp along the shortest arc, so from +170 to -170 degrees it
    passes 180. Raises :class:`ConfigError` for an index outside ``[0, N - 1]``.
    """
    keys = as_poses(poses)
    where = np.asarray(at, dtype=np.float64)
    if where.ndim != 1 or not (where.size == 0 or 0 <= where.min() <= where.max() <= len(keys) - 1):
        raise ConfigError(
            f"poses can be interpolated at indices 0 to {len(keys) - 1} of the {len(keys)} given; "
            f"{where} is outside"
        )
    out = np.tile(np.eye(4), (len(where), 1, 1))
    if len(where) == 0:
        return out
    lower = np.minimum(where.astype(np.int64), max(len(keys) - 2, 0))
    upper = np.minimum(lower + 1, len(keys) - 1)
    part = (where - lower)[:, None]
    out[:, :3, 3] = (1.0 - part) * keys[lower, :3, 3] + part * keys[upper, :3, 3]
    rotations = Rotation.from_matrix(keys[:, :3, :3])
    if len(keys) == 1:
        out[:, :3, :3] = keys[:, :3, :3]
    else:
        out[:, :3, :3] = Slerp(np.arange(len(keys)), rotations)(where).as_matrix()
    return out

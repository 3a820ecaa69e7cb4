"""Poses: conventions, checks, places, interpolation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from worldpager.errors import ConfigError
from worldpager.prefetch.actions import upright_poses
from worldpager.prefetch.poses import (
    OPENCV,
    OPENGL,
    PoseConvention,
    as_poses,
    interpolate_poses,
    nearest_rotation,
    place_of,
)

VECTORS = Path(__file__).with_name("vectors")


def yaw_poses(degrees, positions=None):
    degrees = np.asarray(degrees, dtype=float)
    positions = np.zeros((len(degrees), 3)) if positions is None else np.asarray(positions, float)
    return upright_poses(positions, np.radians(degrees), np.zeros(len(degrees)))


def random_poses(seed, n):
    rng = np.random.default_rng(seed)
    out = np.tile(np.eye(4), (n, 1, 1))
    out[:, :3, :3] = Rotation.from_quat(rng.normal(size=(n, 4))).as_matrix()
    out[:, :3, 3] = rng.normal(size=(n, 3))
    return out


# ---- conventions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "convention",
    [
        OPENCV,
        OPENGL,
        PoseConvention(scale=0.01),
        PoseConvention("+x", "-y", "-z", scale=3.0, camera_to_world=False),
        PoseConvention("+y", "-z", "-x"),
    ],
)
def test_conversion_round_trip(convention):
    poses = random_poses(1, 5)
    ours = convention.to_opencv(poses)
    as_poses(ours)
    assert np.allclose(convention.from_opencv(ours), poses, atol=1e-12)


def test_opengl_looks_along_minus_z_and_its_y_points_up():
    ours = OPENGL.to_opencv(np.eye(4)[None])[0]
    assert ours[:3, 2].tolist() == [0, 0, -1]  # forward
    assert ours[:3, 1].tolist() == [0, -1, 0]  # down
    assert ours[:3, 0].tolist() == [1, 0, 0]  # right


def test_scale_and_world_to_camera():
    pose = random_poses(2, 1)
    ours = PoseConvention(scale=2.0, camera_to_world=False).to_opencv(np.linalg.inv(pose))
    assert np.allclose(ours[0, :3, 3], 2.0 * pose[0, :3, 3])
    assert np.allclose(ours[0, :3, :3], pose[0, :3, :3])


def test_conversion_leaves_its_input_alone():
    poses = random_poses(3, 2)
    before = poses.copy()
    OPENGL.to_opencv(poses)
    OPENGL.from_opencv(poses)
    assert (poses == before).all()


@pytest.mark.parametrize(
    "axes", [("+x", "+y", "-z"), ("+x", "+x", "+z"), ("x", "+y", "+z"), ("+x", "+y", "up")]
)
def test_bad_axes_are_refused(axes):
    with pytest.raises(ConfigError, match="right-handed"):
        PoseConvention(*axes)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_scale_is_refused(scale):
    with pytest.raises(ConfigError, match="scale"):
        PoseConvention(scale=scale)


# ---- checks --------------------------------------------------------------------------------------


def spoiled(change):
    poses = random_poses(4, 6)
    change(poses)
    return poses


def set_at(*where, to):
    def change(poses):
        poses[where] = to

    return change


@pytest.mark.parametrize(
    ("change", "defect"),
    [
        (set_at(3, 0, 3, to=np.nan), r"poses\[3\] holds NaN"),
        (set_at(5, 1, 1, to=np.inf), r"poses\[5\] holds NaN or infinity"),
        (set_at(2, 3, 3, to=2.0), r"poses\[2\] does not end in the row"),
        (set_at(1, slice(0, 3), slice(0, 3), to=2 * np.eye(3)), r"poses\[1\].*not orthonormal"),
        (set_at(1, slice(0, 3), slice(0, 3), to=np.zeros((3, 3))), r"poses\[1\].*not orthonormal"),
        (set_at(0, 0, 0, to=1e300), r"poses\[0\].*not orthonormal"),
        (set_at(4, slice(0, 3), slice(0, 3), to=-np.eye(3)), r"poses\[4\].*mirrored"),
        (set_at(4, 0, 3, to=1e12), r"poses\[4\].*from the origin"),
    ],
)
def test_defects_are_named(change, defect):
    with pytest.raises(ConfigError, match=defect):
        as_poses(spoiled(change))


@pytest.mark.parametrize("shape", [(4, 4), (2, 3, 4), (2, 3, 4, 4), (0,)])
def test_wrong_shapes_are_refused(shape):
    with pytest.raises(ConfigError, match=r"\[N, 4, 4\]"):
        as_poses(np.zeros(shape))


def test_wrong_kinds_are_refused():
    with pytest.raises(ConfigError, match="real numbers"):
        as_poses(np.eye(4, dtype=complex)[None])
    with pytest.raises(ConfigError, match="real numbers"):
        as_poses(np.full((1, 4, 4), "x"))
    with pytest.raises(ConfigError, match="one array"):
        as_poses([[1, 2], [3]])


def test_low_precision_poses_are_accepted_and_copied():
    poses = random_poses(5, 50)
    single = poses.astype(np.float32)
    checked = as_poses(single)
    assert checked.dtype == np.float64
    assert np.allclose(checked, poses, atol=1e-6)
    as_poses(poses.astype(np.float16))  # 11 bits
    assert as_poses(poses) is not poses
    assert as_poses(np.empty((0, 4, 4))).shape == (0, 4, 4)


def test_own_name_in_the_message():
    with pytest.raises(ConfigError, match=r"path\.npy\[0\]"):
        as_poses(np.zeros((1, 4, 4)), "path.npy")


# ---- places --------------------------------------------------------------------------------------


def test_place_is_mean_translation_and_plain_mean_of_rotations():
    poses = random_poses(6, 3)
    place = place_of(poses)
    assert place.shape == (12,)
    assert np.allclose(place[:3], poses[:, :3, 3].mean(axis=0))
    assert np.allclose(place[3:].reshape(3, 3), poses[:, :3, :3].mean(axis=0))


def test_place_of_a_turning_chunk_is_the_formula():
    step = 8.0
    mean = place_of(yaw_poses([0, step, 2 * step]))[3:].reshape(3, 3)
    shrink = (1 + 2 * np.cos(np.radians(step))) / 3
    middle = yaw_poses([step])[0, :3, :3]
    assert np.allclose(mean, middle @ np.diag([shrink, 1, shrink]))
    projected = place_of(yaw_poses([0, step, 2 * step]), project_so3=True)[3:].reshape(3, 3)
    assert np.allclose(projected, middle)


def test_place_of_many_chunks_at_once():
    poses = random_poses(7, 12).reshape(4, 3, 4, 4)
    for switch in (False, True):
        each = np.stack([place_of(chunk, project_so3=switch) for chunk in poses])
        assert np.array_equal(place_of(poses, project_so3=switch), each)


@pytest.mark.parametrize("shape", [(4, 4), (0, 4, 4), (3, 3, 4)])
def test_place_of_no_poses_is_refused(shape):
    with pytest.raises(ConfigError, match=r"\[F, 4, 4\]"):
        place_of(np.zeros(shape))


@given(st.integers(0, 10**6))
def test_nearest_rotation_is_a_rotation(seed):
    matrix = np.random.default_rng(seed).normal(size=(3, 3))
    rotation = nearest_rotation(matrix)
    assert np.allclose(rotation.T @ rotation, np.eye(3))
    assert np.linalg.det(rotation) > 0


# ---- interpolation -------------------------------------------------------------------------------


def test_interpolation_vector():
    case = json.loads((VECTORS / "pose_interpolation.json").read_text())
    keys = yaw_poses(case["yaw_in"], case["xyz_in"])
    out = interpolate_poses(keys, np.linspace(0, len(keys) - 1, case["n_out"]))
    assert np.allclose(out[:, :3, 3], case["xyz_out"], atol=1e-5)
    yaw = np.degrees(np.arctan2(out[:, 0, 2], out[:, 2, 2]))
    wrapped = (yaw - np.array(case["yaw_out"]) + 180) % 360 - 180
    assert np.abs(wrapped).max() < 1e-3


def test_interpolation_ends_and_refusals():
    keys = random_poses(8, 3)
    assert np.allclose(interpolate_poses(keys, [0, 1, 2]), keys)
    assert np.allclose(interpolate_poses(keys[:1], [0.0, 0.0]), keys[[0, 0]])
    assert interpolate_poses(keys, []).shape == (0, 4, 4)
    for bad in ([-0.1], [2.1], [np.nan], 1.0):
        with pytest.raises(ConfigError, match="indices 0 to 2"):
            interpolate_poses(keys, bad)
    with pytest.raises(ConfigError, match="indices"):
        interpolate_poses(keys[:0], [0])

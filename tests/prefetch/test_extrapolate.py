"""Extrapolated poses are exact for constant motion, and known ones are passed on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from worldpager.errors import ConfigError
from worldpager.prefetch.extrapolate import ConstantVelocity, Hold, poses_ahead
from worldpager.prefetch.poses import as_poses


def moving(seed, frames, turn_limit=0.5):
    """Constant velocity and constant world turn from a random start, `[frames, 4, 4]`."""
    rng = np.random.default_rng(seed)
    turn = rng.uniform(-1, 1, 3) * turn_limit
    out = np.tile(np.eye(4), (frames, 1, 1))
    start = Rotation.from_quat(rng.normal(size=4))
    steps = np.arange(frames)[:, None]
    out[:, :3, :3] = (Rotation.from_rotvec(steps * turn) * start).as_matrix()
    out[:, :3, 3] = rng.normal(size=3) + steps * rng.normal(size=3)
    return out


@given(st.integers(0, 10**6), st.sampled_from([2, 3, 4]))
def test_constant_motion_is_predicted_exactly(seed, frames):
    truth = moving(seed, 3 * frames).reshape(3, frames, 4, 4)
    ahead = ConstantVelocity().predict(truth[0], None, 2)
    assert np.allclose(ahead, truth[1:], atol=1e-9)
    as_poses(ahead.reshape(-1, 4, 4))


@given(st.integers(0, 10**6))
def test_one_frame_chunks_use_the_previous_chunk(seed):
    truth = moving(seed, 4).reshape(4, 1, 4, 4)
    ahead = ConstantVelocity().predict(truth[1], truth[0], 2)
    assert np.allclose(ahead, truth[2:], atol=1e-9)


def test_one_frame_without_history_is_held():
    truth = moving(0, 1).reshape(1, 4, 4)
    ahead = ConstantVelocity().predict(truth, None, 2)
    assert np.array_equal(ahead, np.stack([truth, truth]))


def test_turns_through_half_a_circle_do_not_flip():
    yaw = np.radians([170.0, 175.0, 180.0])
    current = np.tile(np.eye(4), (3, 1, 1))
    current[:, :3, :3] = Rotation.from_euler("y", yaw[:, None]).as_matrix()
    ahead = ConstantVelocity().predict(current, None, 1)[0]
    expected = Rotation.from_euler("y", [[185.0], [190.0], [195.0]], degrees=True).as_matrix()
    assert np.allclose(ahead[:, :3, :3], expected)


def test_standing_still_stays_exactly_still():
    current = moving(3, 3)[[0, 0, 0]]
    ahead = ConstantVelocity().predict(current, None, 2)
    assert np.allclose(ahead, current[0], atol=1e-14)


def test_hold_repeats_the_last_pose():
    current = moving(1, 3)
    ahead = Hold().predict(current, None, 2)
    assert ahead.shape == (2, 3, 4, 4)
    assert (ahead == current[-1]).all()
    ahead[0, 0] = 0  # fresh memory
    assert (current[-1] != 0).any()


def test_known_poses_are_passed_on_and_continued():
    path = moving(2, 9).reshape(3, 3, 4, 4)
    other = moving(5, 9).reshape(3, 3, 4, 4)
    both = poses_ahead(ConstantVelocity(), path[0], None, 2, known=[other[0], other[1], other[2]])
    assert np.array_equal(both, other[:2])
    one = poses_ahead(ConstantVelocity(), path[0], None, 3, known=[other[0]])
    assert np.allclose(one, other, atol=1e-9)
    none = poses_ahead(ConstantVelocity(), path[0], None, 2)
    assert np.allclose(none, path[1:], atol=1e-9)
    assert poses_ahead(Hold(), path[0], None, 0).shape == (0, 3, 4, 4)


def test_known_poses_of_one_frame_give_the_velocity():
    path = moving(4, 5).reshape(5, 1, 4, 4)
    ahead = poses_ahead(ConstantVelocity(), path[0], None, 3, known=[path[1]])
    assert np.allclose(ahead, path[1:4], atol=1e-9)


def test_known_poses_of_another_shape_are_refused():
    current = moving(0, 3)
    with pytest.raises(ConfigError, match=r"\[2, 4, 4\]"):
        poses_ahead(Hold(), current, None, 1, known=[current[:2]])

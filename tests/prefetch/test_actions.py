"""Keys and mouse to poses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldpager.errors import ConfigError
from worldpager.prefetch.actions import ActionScale, integrate_actions, latent_poses
from worldpager.prefetch.poses import as_poses

START = np.eye(4)
W, S, A, D = np.eye(4)
NONE = np.zeros(4)


def held(key, pitch=0.0, yaw=0.0, frames=12):
    return np.tile(key, (frames, 1)), np.tile((pitch, yaw), (frames, 1))


def angles(pose):
    forward = pose[:3, 2]
    return np.degrees(np.arctan2(forward[0], forward[2])), np.degrees(np.arcsin(-forward[1]))


@pytest.mark.parametrize(
    ("key", "direction"), [(W, (0, 0, 1)), (S, (0, 0, -1)), (A, (-1, 0, 0)), (D, (1, 0, 0))]
)
def test_keys_move_as_named(key, direction):
    end = integrate_actions(START, *held(key))[-1]
    assert np.allclose(end[:3, 3], 12 * 0.0875 * np.array(direction))
    assert np.allclose(end[:3, :3], np.eye(3))


def test_a_chunk_of_mouse_is_fifteen_degrees_and_right_is_positive():
    end = integrate_actions(START, *held(NONE, yaw=0.1))[-1]
    assert angles(end) == pytest.approx((15.0, 0.0))
    assert end[0, 2] > 0  # looks towards +x, the right


def test_up_is_positive_pitch_and_y_points_down():
    end = integrate_actions(START, *held(NONE, pitch=0.1))[-1]
    assert angles(end) == pytest.approx((0.0, 15.0))
    assert end[1, 2] < 0


def test_pitch_stops_at_its_limit_and_comes_back():
    up = integrate_actions(START, *held(NONE, pitch=1.0, frames=20))
    assert angles(up[-1])[1] == pytest.approx(85.0)
    down = integrate_actions(up[-1], *held(NONE, pitch=-1.0, frames=1))
    assert angles(down[-1])[1] == pytest.approx(85.0 - 12.5)
    beyond = integrate_actions(
        up[-1], *held(NONE, pitch=-0.1, frames=1), ActionScale(pitch_limit=30.0)
    )
    assert angles(beyond[-1])[1] == pytest.approx(85.0 - 1.25)


def test_walking_ignores_pitch_and_follows_yaw():
    up = integrate_actions(START, *held(NONE, pitch=0.2, yaw=0.6))[-1]
    walked = integrate_actions(up, *held(W))[-1]
    assert angles(up) == pytest.approx((90.0, 30.0))
    assert np.allclose(walked[:3, 3], (1.05, 0, 0))


def test_diagonals_are_not_faster_and_opposites_cancel():
    diagonal = integrate_actions(START, *held(W + D))[-1]
    assert np.linalg.norm(diagonal[:3, 3]) == pytest.approx(1.05)
    still = integrate_actions(START, *held(W + S))[-1]
    assert np.allclose(still, START)


def test_two_key_games_and_games_without_mouse():
    walked = integrate_actions(START, np.tile((1.0, 0.0), (12, 1)))
    assert np.allclose(walked, integrate_actions(START, *held(W)))


@given(st.integers(0, 10**6), st.integers(1, 40))
def test_poses_are_rigid_never_rolled_and_undone_by_the_opposite(seed, rows):
    rng = np.random.default_rng(seed)
    keys = np.eye(5)[rng.integers(0, 5, rows)][:, :4]
    mouse = rng.choice((-0.1, 0.0, 0.1), size=(rows, 2))
    there = integrate_actions(START, keys, mouse)
    assert np.abs(there[:, 1, 0]).max() == 0.0
    as_poses(there)
    back = integrate_actions(there[-1], keys[::-1][:, [1, 0, 3, 2]], -mouse[::-1])
    assert np.allclose(back[-1], START, atol=1e-9)
    assert np.allclose(back[:-1], there[:-1][::-1], atol=1e-9)


def test_integration_in_parts_is_integration_at_once():
    keys, mouse = held(W + A, pitch=0.05, yaw=-0.1, frames=24)
    whole = integrate_actions(START, keys, mouse)
    first = integrate_actions(START, keys[:9], mouse[:9])
    rest = integrate_actions(first[-1], keys[9:], mouse[9:])
    assert np.allclose(whole, np.concatenate([first, rest]))
    assert np.array_equal(whole, integrate_actions(START, keys, mouse))


def test_latent_rows_of_the_first_and_of_later_chunks():
    numbered = np.arange(12)[:, None, None] * np.ones((1, 4, 4))
    assert latent_poses(numbered[:9])[:, 0, 0].tolist() == [0, 4, 8]
    assert latent_poses(numbered)[:, 0, 0].tolist() == [3, 7, 11]


def test_refusals():
    keys, mouse = held(W)
    for bad_keys, bad_mouse, text in (
        (keys[:, :3], mouse, "keyboard must have shape"),
        (keys, mouse[:, :1], "mouse must have shape"),
        (keys, mouse[:5], "12 rows but mouse has 5"),
        (keys * np.nan, mouse, "keyboard row 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            integrate_actions(START, bad_keys, bad_mouse)
    rolled = np.eye(4)
    rolled[:2, :2] = [[0, -1], [1, 0]]
    nadir = np.eye(4)
    nadir[:3, :3] = [[1, 0, 0], [0, 0, 1], [0, -1, 0]]
    upside_down = np.diag([-1.0, -1.0, 1.0, 1.0])
    for start in (rolled, nadir, upside_down):
        with pytest.raises(ConfigError, match="rolled"):
            integrate_actions(start, keys, mouse)
    for scale in ({"units_per_frame": -1.0}, {"degrees_per_mouse_unit": np.nan}):
        with pytest.raises(ConfigError, match="finite"):
            ActionScale(**scale)
    with pytest.raises(ConfigError, match="pitch_limit"):
        ActionScale(pitch_limit=90.0)

"""The renderer: repeatable, finite, and true to the geometry of the box."""

import numpy as np
import pytest

from worldpager.model_adapter.builtin.rooms import (
    HALF,
    PALETTE,
    SURFACES,
    Room,
    random_colours,
    render,
    render_tables,
)
from worldpager.model_adapter.builtin.scenes import cameras


def one_camera(x: float = 0.0, z: float = 0.0, degrees: float = 0.0) -> np.ndarray:
    return cameras(np.array([x]), np.array([z]), np.radians(np.array([degrees])))


def test_room_depends_on_the_seed_alone() -> None:
    assert np.array_equal(Room.random(3).colours, Room.random(3).colours)
    assert not np.array_equal(Room.random(3).colours, Room.random(4).colours)


def test_render_is_repeatable_and_in_range() -> None:
    poses = np.concatenate([one_camera(1.0, -2.0, a) for a in range(0, 360, 30)])
    first, again = render(Room.random(0), poses), render(Room.random(0), poses)
    assert first.shape == (12, 32, 32, 3)
    assert first.dtype == np.float32
    assert np.array_equal(first, again)
    assert np.isfinite(first).all()
    assert first.min() > 0.0
    assert first.max() <= 1.0


@pytest.mark.parametrize("degrees", [0, 45, 90, 180, 270])
@pytest.mark.parametrize("place", [(0.0, 0.0), (3.9, 0.0), (0.0, -3.9), (3.9, 3.9)])
def test_no_explosion_for_rays_along_faces(place: tuple[float, float], degrees: int) -> None:
    image = render(Room.random(1), one_camera(*place, degrees), size=33)
    assert np.isfinite(image).all()
    assert image.max() <= 1.0


def test_views_of_a_room_of_one_colour_are_alike_on_all_four_sides() -> None:
    room = Room(np.ones((SURFACES, 3), dtype=np.float32))
    views = [render(room, one_camera(degrees=a))[0] for a in (0, 90, 180, 270)]
    for view in views[1:]:
        np.testing.assert_allclose(view, views[0], atol=1e-5)
    np.testing.assert_allclose(views[0], views[0][:, ::-1], atol=1e-5)


def test_a_full_turn_returns_to_the_same_view() -> None:
    room = Room.random(5)
    there, back = render(room, one_camera(1, 1, 17)), render(room, one_camera(1, 1, 377))
    np.testing.assert_allclose(there, back, atol=1e-4)


def test_light_falls_off_with_distance() -> None:
    room = Room(np.ones((SURFACES, 3), dtype=np.float32))
    far, close = (render(room, one_camera(z=z))[0, 16, 16, 0] for z in (-3.0, 3.0))
    assert close > far


def test_the_camera_looks_along_z_with_x_to_the_right() -> None:
    colours = np.zeros((SURFACES, 3), dtype=np.float32)
    colours[36:48] = (0.0, 1.0, 0.0)  # the wall at +z
    colours[12:24] = (1.0, 0.0, 0.0)  # the wall at +x
    ahead = render(Room(colours), one_camera())[0]
    assert ahead[16, 16, 1] > 0.3
    turned = render(Room(colours), one_camera(degrees=45))[0]
    assert turned[16, 4, 1] > 0.3
    assert turned[16, 28, 0] > 0.3


def test_batch_equals_one_by_one() -> None:
    rng = np.random.default_rng(0)
    tables = random_colours(rng, 2)
    poses = np.stack([np.concatenate([one_camera(0.3, 0.1, a) for a in (5, 50, 95)])] * 2)
    both = render_tables(tables, poses)
    for table, where, images in zip(tables, poses, both, strict=True):
        np.testing.assert_array_equal(render(Room(table), where), images)


def test_panels_have_palette_colours() -> None:
    table = random_colours(np.random.default_rng(1), 1)[0]
    walls = table[:48]
    assert all((np.abs(PALETTE - colour).sum(axis=1) < 1e-6).any() for colour in walls)
    assert HALF[0] == HALF[2]

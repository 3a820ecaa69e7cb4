"""The index against a dictionary, its memory, and the nearness that eviction asks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldpager.errors import ConfigError
from worldpager.prefetch.actions import upright_poses
from worldpager.prefetch.index import PlaceIndex
from worldpager.prefetch.poses import place_of


def place_at(x, yaw=0.0):
    return place_of(upright_poses(np.array([[x, 0.0, 0.0]]), np.radians([yaw]), np.zeros(1)))


def index_of(*places):
    index = PlaceIndex()
    for chunk, place in enumerate(places):
        index.add(chunk, place)
    return index


steps = st.lists(
    st.tuples(st.booleans(), st.integers(0, 80), st.floats(-5, 5)), min_size=1, max_size=150
)


@given(steps, st.integers(-5, 90), st.integers(-5, 90))
def test_behaves_like_a_sorted_dictionary(script, start, stop):
    index, model = PlaceIndex(), {}
    snapshots = []
    for adds, chunk, x in script:
        if adds:
            index.add(chunk, place_at(x))
            model[chunk] = x
        else:
            index.remove(chunk)
            model.pop(chunk, None)
        snapshots.append((index.within(range(100)), dict(model)))
    assert len(index) == len(model)
    assert index.ids.tolist() == sorted(model)
    assert all((chunk in index) == (chunk in model) for chunk in range(-1, 82))
    ids, places = index.within(range(start, stop))
    expected = [chunk for chunk in sorted(model) if start <= chunk < stop]
    assert ids.tolist() == expected
    assert places[:, 0].tolist() == [model[chunk] for chunk in expected]
    # What a reader holds never changes under it.
    for (ids, places), then in snapshots:
        assert dict(zip(ids.tolist(), places[:, 0].tolist(), strict=True)) == then


def test_place_is_a_copy_and_unknown_chunks_are_an_error():
    index = index_of(place_at(1.0))
    index.place(0)[:] = 7
    assert index.place(0)[0] == 1.0
    with pytest.raises(KeyError):
        index.place(1)


def test_bad_places_are_refused():
    index = PlaceIndex()
    for bad in (np.full(12, np.nan), np.zeros(11), np.zeros((3, 4))):
        with pytest.raises(ConfigError, match="chunk 3"):
            index.add(3, bad)
    with pytest.raises(ConfigError, match="negative"):
        index.add(-1, np.zeros(12))
    with pytest.raises(ConfigError, match="NaN"):
        index.set_path(np.full((1, 12), np.inf))
    assert len(index) == 0


def test_a_hundred_thousand_chunks_take_a_few_megabytes():
    index = PlaceIndex()
    place = place_at(0.0)
    for chunk in range(100_000):
        index.add(chunk, place)
    assert len(index) == 100_000
    assert index.nbytes < 16 * 2**20


def test_distance_to_path_is_to_its_nearest_place():
    index = index_of(*(place_at(x) for x in range(5)))
    assert index.to_path([0, 4]).tolist() == [0.0, 0.0]
    index.set_path(place_at(0.0))
    assert index.to_path([4, 2, 0]).tolist() == [0.5, 0.125, 0.0]
    index.set_path([place_at(0.0), place_at(4.0)])
    assert index.to_path([4, 2, 0]).tolist() == [0.0, 0.125, 0.0]


def test_chunks_without_a_place_are_infinitely_far():
    index = index_of(place_at(0.0), place_at(1.0))
    index.set_path(place_at(0.0))
    assert index.to_path([7, 1, 0]).tolist() == [np.inf, 0.5, 0.0]
    between = index.between([1, 7, 0])
    assert between[0].tolist() == [0.0, np.inf, 0.5]
    assert np.isinf(between[1]).all()
    assert np.isinf(PlaceIndex().to_path([1, 2])).all()
    assert np.isinf(PlaceIndex().between([1, 2])).all()
    assert index.to_path([]).shape == (0,)
    assert index.between([]).shape == (0, 0)


def test_between_is_symmetric_and_zero_for_copies():
    index = index_of(place_at(0, 10), place_at(1, 20), place_at(0, 10), place_at(0, 50))
    between = index.between([0, 1, 2, 3])
    assert np.array_equal(between, between.T)
    assert between[0, 2] == 0.0
    assert between.max() <= 1.0

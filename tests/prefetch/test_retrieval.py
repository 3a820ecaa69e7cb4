"""Retrieval by camera distance: the reference vectors, ties, wraps, and the other policies."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from worldpager.errors import ConfigError
from worldpager.prefetch import retrieval
from worldpager.prefetch.actions import upright_poses
from worldpager.prefetch.distance import camera_distances, separations
from worldpager.prefetch.index import PlaceIndex
from worldpager.prefetch.poses import place_of
from worldpager.prefetch.retrieval import (
    CameraDistance,
    Query,
    Ranking,
    Selection,
    candidate_range,
    get_policy,
    policy_names,
)

VECTOR = json.loads((Path(__file__).with_name("vectors") / "worldkv_distance.json").read_text())
CASES = {case["name"]: case for case in VECTOR["cases"]}


def indexed(case):
    """Index of the case's chunks and the places of all of them."""
    yaw = np.radians(np.asarray(case["yaw_deg_per_latent_frame"], dtype=float))
    poses = upright_poses(np.asarray(case["xyz_per_latent_frame"]), yaw, np.zeros(len(yaw)))
    places = place_of(poses.reshape(-1, case["chunk_size"], 4, 4))
    index = PlaceIndex()
    for chunk in range(case["chunk_id"]):
        index.add(chunk, places[chunk])
    return index, places


def index_of(places):
    index = PlaceIndex()
    for chunk, place in enumerate(places):
        index.add(chunk, place)
    return index


def yaw_places(*degrees):
    yaw = np.radians(np.asarray(degrees, dtype=float))
    return place_of(upright_poses(np.zeros((len(yaw), 3)), yaw, np.zeros(len(yaw)))[:, None])


def random_places(seed, n, frames=3):
    rng = np.random.default_rng(seed)
    poses = np.tile(np.eye(4), (n, frames, 1, 1))
    turns = Rotation.from_quat(rng.normal(size=(n * frames, 4))).as_matrix()
    poses[..., :3, :3] = turns.reshape(n, frames, 3, 3)
    poses[..., :3, 3] = rng.normal(size=(n, frames, 3))
    return place_of(poses)


# ---- the reference vectors -----------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["expect"]])
def test_distance_vector(name):
    case, expect = CASES[name], CASES[name]["expect"]
    index, places = indexed(case)
    ids = expect["candidate_ids"]
    candidates = range(ids[0], ids[-1] + 1)  # the vector's: with the official gap of one chunk
    found, rows = index.within(candidates)
    assert found.tolist() == ids
    query = places[case["chunk_id"]]
    squared, angle = separations(rows, query[None])
    assert np.allclose(squared[:, 0], expect["trans_sq"], atol=1e-5)
    assert np.allclose(angle[:, 0], expect["rot_rad"], atol=1e-3)
    assert np.allclose(camera_distances(rows, query), expect["combined"], atol=1e-5)
    k = case["retrieval_frames"] // case["chunk_size"]
    picked = Selection.best(CameraDistance().rank(index, Query(query), candidates, k), k)
    assert list(picked.best_first) == expect["selected_ids_best_first"]
    assert list(picked.chunks) == sorted(expect["selected_ids_best_first"])


@pytest.mark.parametrize("schedule", VECTOR["candidate_schedule"])
def test_candidates_are_the_official_ones_without_the_gap(schedule):
    """The official window leaves one chunk that is neither recent nor a candidate; ours does not:
    every finished chunk is sink, candidate or recent.
    """
    case = VECTOR["candidate_schedule"][schedule]
    size = case["chunk_size"]
    sink = -(-case["sink_frames"] // size)
    # Recent frames in the vector include the current chunk, ours are finished chunks only.
    recent = case["recent_frames_incl_current"] // size - 1
    for row in case["rows"]:
        chunk, official = row["chunk_id"], row["candidate_ids"]
        ours = list(candidate_range(chunk, sink, recent))
        official_stop = max(sink, chunk - (recent + 1))
        assert official == list(range(sink, official_stop))
        assert ours == official + list(range(official_stop, max(sink, chunk - recent)))
        seen = {*range(min(sink, chunk)), *ours, *range(max(0, chunk - recent), chunk)}
        assert seen == set(range(chunk))


def test_no_candidates_yet():
    case = CASES["no_candidate_yet"]
    index, places = indexed(case)
    ranking = CameraDistance().rank(index, Query(places[3]), range(1, 1), 3)
    assert len(ranking) == 0
    assert Selection.best(ranking, 3) == Selection((), (), ())


# ---- the rules -----------------------------------------------------------------------------------


def test_wrap_at_half_a_turn():
    index = index_of(yaw_places(-175, 150, 179, -179.5))
    ranking = CameraDistance().rank(index, Query(yaw_places(180)[0]), range(4))
    assert ranking.ids.tolist() == [3, 2, 0, 1]
    assert ranking.distances[:2] == pytest.approx([0.5 * 0.5 / 30, 0.5 * 1 / 30])


def test_equal_chunks_stand_in_id_order_whatever_the_count():
    index = index_of(yaw_places(*([40] * 30 + [20] + [40] * 30)))
    for k in range(1, 61):
        ids = CameraDistance().rank(index, Query(yaw_places(20)[0]), range(61), k).ids.tolist()
        assert ids == [30, *[i for i in range(61) if i != 30]][:k]


def test_noise_neither_breaks_ties_nor_is_blown_up():
    rng = np.random.default_rng(0)
    places = np.tile(yaw_places(33)[0], (50, 1)) + rng.normal(size=(50, 12)) * 1e-15
    ranking = CameraDistance().rank(index_of(places), Query(places[7]), range(50))
    assert ranking.ids.tolist() == list(range(50))
    assert (ranking.distances == 0).all()


@given(st.lists(st.integers(0, 35), min_size=2, max_size=40), st.integers(1, 8))
def test_symmetric_turns_tie(tens, k):
    """Chunks as far to the left as to the right of the query, taken in id order."""
    index = index_of(yaw_places(*(10 * ten for ten in tens)))
    ids = CameraDistance().rank(index, Query(yaw_places(0)[0]), range(len(tens)), k).ids.tolist()
    away = [min(ten, 36 - ten) for ten in tens]
    assert ids == sorted(range(len(tens)), key=lambda i: (away[i], i))[:k]


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 45))
def test_the_first_of_a_full_ranking_is_the_short_ranking(seed, n, k):
    places = random_places(seed, n + 1)
    index = index_of(places[:n])
    full = CameraDistance().rank(index, Query(places[n]), range(n))
    short = CameraDistance().rank(index, Query(places[n]), range(n), k)
    assert short.ids.tolist() == full.ids[:k].tolist()
    assert (np.diff(full.distances) >= 0).all()
    assert full.distances.min(initial=0.0) >= 0
    assert full.distances.max(initial=0.0) <= 1
    selection = Selection.best(full, k)
    assert list(selection.chunks) == sorted(selection.best_first)
    assert len(selection.distances) == min(k, n)


@given(st.integers(0, 10**6), st.integers(2, 30))
def test_distance_is_the_formula(seed, n):
    places = random_places(seed, n + 1)
    rows, query = places[:n], places[n]
    a = [((row[:3] - query[:3]) ** 2).sum() for row in rows]
    matrices = places[:, 3:].reshape(-1, 3, 3)
    traces = [np.trace(matrix.T @ matrices[n]) for matrix in matrices[:n]]
    b = [np.arccos(np.clip((trace - 1) / 2, -1, 1)) for trace in traces]
    expected = 0.5 * np.array(a) / max(a) + 0.5 * np.array(b) / max(b)
    assert np.allclose(camera_distances(rows, query), expected, atol=1e-9)


def test_chunks_not_in_the_index_are_never_listed():
    index = index_of(yaw_places(0, 10, 20, 30))
    index.remove(2)
    ids = CameraDistance().rank(index, Query(yaw_places(20)[0]), candidate_range(50, 1, 1)).ids
    assert ids.tolist() == [1, 3]


def test_resident_chunks_are_preferred_only_on_request():
    index = index_of(yaw_places(10, 11, 50))
    query = yaw_places(0)[0]
    assert CameraDistance().rank(index, Query(query), range(3), 1, [1]).ids.tolist() == [0]
    eager = CameraDistance(prefer_resident=True)
    ranking = eager.rank(index, Query(query), range(3), 1, [1])
    assert ranking.ids.tolist() == [1]
    assert ranking.distances[0] == pytest.approx(0.8 * 0.5 * 11 / 50 - 0.002)
    assert eager.rank(index, Query(query), range(3), 1).ids.tolist() == [0]


def test_recent_and_none():
    index = index_of(yaw_places(0, 10, 20, 30))
    recent = get_policy("recent").rank(index, Query(), range(1, 4), 2)
    assert recent.ids.tolist() == [3, 2]
    assert Selection.best(recent, 2).chunks == (2, 3)
    assert len(get_policy("none").rank(index, Query(), range(4), 3)) == 0


def test_camera_without_poses_is_refused():
    with pytest.raises(ConfigError, match="needs poses"):
        CameraDistance().rank(PlaceIndex(), Query(), range(3), 1)


# ---- by name -------------------------------------------------------------------------------------


class Entry:
    """A stand-in for an installed entry point."""

    value = "stranger:Oldest"

    def __init__(self, name):
        self._name = name

    def load(self):
        name = self._name

        class Oldest:
            needs_poses = False

            def rank(self, index, query, candidates, count=None, resident=()):
                ids = index.within(candidates)[0][:count]
                return Ranking(ids, np.zeros(len(ids)))

        Oldest.name = name
        return Oldest


@pytest.fixture
def installed(monkeypatch):
    def install(*names):
        monkeypatch.setattr(retrieval, "entry_points", lambda group: [Entry(n) for n in names])
        retrieval._policies.cache_clear()

    yield install
    monkeypatch.undo()
    retrieval._policies.cache_clear()


def test_builtin_names():
    assert policy_names()[:3] == ["camera", "recent", "none"]
    assert isinstance(get_policy("camera"), CameraDistance)
    with pytest.raises(ConfigError, match=r"'far'.*camera, recent, none"):
        get_policy("far")


def test_a_stranger_can_add_a_policy(installed):
    installed("oldest")
    ranking = get_policy("oldest").rank(index_of(yaw_places(0, 1, 2)), Query(), range(3), 2)
    assert ranking.ids.tolist() == [0, 1]


def test_a_name_taken_twice_is_refused(installed):
    installed("camera")
    with pytest.raises(ConfigError, match=r"'camera' from 'stranger:Oldest'"):
        policy_names()

"""The load list: order, marks, what may be on it, and that known controls make it right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldpager.errors import ConfigError
from worldpager.prefetch.extrapolate import Hold
from worldpager.prefetch.index import PlaceIndex
from worldpager.prefetch.paths import make_path
from worldpager.prefetch.planner import PrefetchPlanner
from worldpager.prefetch.poses import place_of
from worldpager.prefetch.retrieval import (
    CameraDistance,
    Query,
    Selection,
    candidate_range,
    get_policy,
)


def run(path, planner, known=0):
    """Recall of the predicted sets for c+1, and of the load lists, over a rollout."""
    index = PlaceIndex()
    hits = loads = total = 0
    plan = None
    for chunk, poses in enumerate(path):
        query = place_of(poses)
        candidates = candidate_range(chunk, planner.sink, planner.recent)
        ranking = planner.policy.rank(index, Query(query), candidates, planner.k)
        true = set(Selection.best(ranking, planner.k).chunks)
        if plan is not None:
            hits += len(true & set(plan.sets[0].chunks))
            loads += len(true & set(plan.chunks))
            total += len(true)
        previous = path[chunk - 1] if chunk else None
        ahead = path[chunk + 1 : chunk + 1 + known]
        plan = planner.plan(index, chunk, poses, previous=previous, known=list(ahead))
        assert all(item.chunk < chunk for item in plan.wanted)
        index.add(chunk, query)
    return hits / total, loads / total


@pytest.mark.parametrize("name", ["yaw-return", "loop", "walk"])
def test_known_controls_give_full_recall(name):
    planner = PrefetchPlanner(CameraDistance(), k=3)
    assert run(make_path(name, 150, 3), planner, known=2) == (1.0, 1.0)


def test_recall_without_known_controls():
    path = make_path("yaw-return", 180, 3)
    guessed, loaded = run(path, PrefetchPlanner(CameraDistance(), k=3))
    held, _ = run(path, PrefetchPlanner(CameraDistance(), k=3, extrapolator=Hold()))
    assert guessed > 0.95  # wrong only where the camera turns back
    assert loaded >= guessed
    assert held < 0.5


def stored(path, chunks):
    index = PlaceIndex()
    for chunk in range(chunks):
        index.add(chunk, place_of(path[chunk]))
    return index


@given(
    chunk=st.integers(1, 119),
    k=st.integers(0, 6),
    extra=st.integers(0, 4),
    horizon=st.integers(1, 3),
    recent=st.integers(0, 3),
)
def test_list_is_the_rankings_in_order_without_doubles(chunk, k, extra, horizon, recent):
    path = make_path("walk", 130, 3, seed=3)
    index = stored(path, chunk)
    planner = PrefetchPlanner(
        CameraDistance(), k=k, sink=2, recent=recent, extra=extra, horizon=horizon
    )
    plan = planner.plan(index, chunk, path[chunk], known=list(path[chunk + 1 : chunk + 4]))
    expected, marks = [], {}
    for step in range(1, horizon + 1):
        query = place_of(path[chunk + step])
        last = min(chunk, chunk + step - recent)
        ranking = planner.policy.rank(index, Query(query), range(2, max(2, last)), k + extra)
        assert plan.sets[step - 1] == Selection.best(ranking, k)
        for rank, other in enumerate(ranking.ids.tolist()):
            if other not in marks:
                expected.append(other)
                marks[other] = (step, rank < k)
    assert list(plan.chunks) == expected
    assert {item.chunk: (item.ahead, item.required) for item in plan.wanted} == marks
    assert plan.path.shape == (5, 12)
    assert np.array_equal(plan.path[0], place_of(path[chunk]))


def test_a_chunk_needed_later_keeps_its_first_mark():
    """An extra rank of c+1 that c+2 requires stays where c+1 put it: it is loaded early enough."""
    path = make_path("yaw-return", 80, 3)
    planner = PrefetchPlanner(CameraDistance(), k=1, extra=3)
    plan = planner.plan(stored(path, 60), 60, path[60], known=list(path[61:63]))
    assert plan.sets[1].chunks[0] in plan.chunks[:4]
    assert len(set(plan.chunks)) == len(plan.chunks)


def test_path_is_now_and_one_two_four_eight_chunks_ahead():
    path = make_path("loop", 40, 3)
    plan = PrefetchPlanner(CameraDistance(), k=3).plan(stored(path, 20), 20, path[20])
    yaw = np.degrees(np.arctan2(plan.path[:, 3 + 2], plan.path[:, 3 + 8]))
    assert (np.diff(yaw) % 360) == pytest.approx([10, 10, 20, 40])


def test_without_poses():
    index = stored(make_path("loop", 10, 3), 10)
    nothing = PrefetchPlanner(CameraDistance(), k=3).plan(index, 10, None)
    assert nothing.chunks == ()
    assert nothing.sets == ()
    assert len(nothing.path) == 0
    recent = PrefetchPlanner(get_policy("recent"), k=2, extra=1).plan(index, 10, None)
    assert recent.chunks == (9, 8, 7)
    assert len(recent.path) == 0


def test_nothing_to_plan_at_the_start():
    path = make_path("loop", 4, 3)
    plan = PrefetchPlanner(CameraDistance(), k=3).plan(PlaceIndex(), 0, path[0])
    assert plan.chunks == ()
    assert [selection.chunks for selection in plan.sets] == [(), ()]


@pytest.mark.parametrize("name", ["k", "sink", "recent", "extra"])
def test_negative_sizes_are_refused(name):
    with pytest.raises(ConfigError, match=name):
        PrefetchPlanner(CameraDistance(), **{"k": 3, name: -1})


def test_horizon_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="horizon"):
        PrefetchPlanner(CameraDistance(), k=3, horizon=0)

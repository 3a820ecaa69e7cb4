"""Fallbacks: only resident chunks, in time order, with a reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldpager.errors import ConfigError
from worldpager.prefetch.fallback import fallback_names, get_fallback
from worldpager.prefetch.paths import make_path
from worldpager.prefetch.poses import place_of
from worldpager.prefetch.retrieval import CameraDistance, Query
from worldpager.prefetch.retriever import Retriever

RANKING = (5, 9, 2, 7, 1, 3)


def choose(name, wanted, resident, previous=()):
    return get_fallback(name).choose(wanted, RANKING, resident.__contains__, previous)


def test_stale_serves_the_previous_set_whole():
    choice = choose("stale", (2, 5, 9), {1, 3, 5, 9}, previous=(1, 3))
    assert choice.chunks == (1, 3)
    assert choice.reason == "previous set"
    assert not choice.wait


def test_stale_never_serves_a_lost_chunk():
    assert choose("stale", (2, 5, 9), {3}, previous=(1, 3)).chunks == (3,)


def test_stale_has_nothing_before_the_first_set():
    choice = choose("stale", (2, 5, 9), {5, 9})
    assert choice.chunks == ()
    assert choice.reason == "no previous set"


def test_nearest_keeps_what_is_there_and_fills_up_by_rank():
    choice = choose("nearest", (2, 5, 9), {9, 1, 3, 7}, previous=(1, 3))
    assert choice.chunks == (1, 7, 9)
    assert choice.reason == "nearest resident"


def test_nearest_with_too_few_or_none():
    assert choose("nearest", (2, 5, 9), {3}).chunks == (3,)
    choice = choose("nearest", (2, 5, 9), set(), previous=(1,))
    assert choice.chunks == ()
    assert choice.reason == "nothing resident"


def test_wait_waits():
    choice = choose("wait", (2, 5, 9), {5}, previous=(1, 3))
    assert choice.wait
    assert choice.chunks == ()


@pytest.mark.parametrize("name", ["stale", "nearest"])
@given(data=st.data())
def test_only_resident_chunks_in_time_order_never_too_many(name, data):
    ids = st.integers(0, 12)
    ranking = data.draw(st.permutations(range(13)))
    wanted = tuple(sorted(ranking[: data.draw(st.integers(1, 6))]))
    resident = data.draw(st.frozensets(ids))
    previous = tuple(sorted(data.draw(st.frozensets(ids, max_size=len(wanted)))))
    policy = get_fallback(name)
    choice = policy.choose(wanted, ranking, resident.__contains__, previous)
    assert set(choice.chunks) <= resident
    assert list(choice.chunks) == sorted(set(choice.chunks))
    assert len(choice.chunks) <= len(wanted)
    assert choice.reason
    assert not choice.wait
    if name == "nearest":
        assert set(wanted) & resident <= set(choice.chunks)
        assert len(choice.chunks) == min(len(wanted), len(resident))


def test_names():
    assert fallback_names() == ["nearest", "stale", "wait"]
    with pytest.raises(ConfigError, match=r"'hope'.*nearest, stale, wait"):
        get_fallback("hope")


def test_further_candidates_are_ranked_only_for_a_window_that_lacks_something():
    policy, asked = CameraDistance(), []

    class Counting:
        name, needs_poses = policy.name, True

        def rank(self, index, query, candidates, count=None, resident=()):
            asked.append(count)
            return policy.rank(index, query, candidates, count, resident)

    retriever = Retriever(Counting(), k=2, sink=1, recent=1)
    poses = make_path("loop", 20, 3)
    for chunk in range(12):
        retriever.note(chunk, place_of(poses[chunk]))
    wanted, ranking = retriever.choose(12, poses[12])
    assert asked == [2] and ranking.first == ranking[:2]
    in_order = policy.rank(retriever.index, Query(place_of(poses[12])), range(1, 11)).ids
    assert list(ranking) == in_order.tolist() and len(ranking) == 10
    assert asked == [2, None], "once for all who ask"
    choice = get_fallback("nearest").choose(wanted, ranking, {3, 4, 5}.__contains__, ())
    assert choice.chunks == tuple(sorted([c for c in in_order.tolist() if c in (3, 4, 5)][:2]))

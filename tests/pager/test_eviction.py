"""Eviction policies: what they choose on small cases, and that they save reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldpager.errors import ConfigError
from worldpager.pager.events import ChunkKey
from worldpager.pager.eviction import LARGE_POOL, eviction_names, get_eviction
from worldpager.prefetch.index import PlaceIndex
from worldpager.prefetch.paths import make_path
from worldpager.prefetch.planner import PrefetchPlanner
from worldpager.prefetch.poses import place_of
from worldpager.prefetch.retrieval import CameraDistance, Query, Selection, candidate_range


@dataclass
class Page:
    key: ChunkKey
    last_used: int = 0
    nbytes: int = 1


class Line:
    """Chunks on a line at given places, the camera at 0."""

    def __init__(self, places):
        self.places = places

    def to_path(self, chunks):
        return np.abs([self.places[chunk] for chunk in chunks])

    def between(self, chunks):
        places = np.array([self.places[chunk] for chunk in chunks])
        return np.abs(places[:, None] - places)


def pages(*chunks, stream=0, used=None):
    return [Page(ChunkKey(stream, chunk), used[i] if used else 0) for i, chunk in enumerate(chunks)]


def victim(name, candidates, nearness=None):
    lookup = nearness if callable(nearness) else lambda stream: nearness
    return get_eviction(name, lookup).victim(candidates).key


def test_lru_takes_the_longest_unused_then_the_smaller_key():
    assert victim("lru", pages(1, 2, 3, used=[5, 3, 4])) == (0, 2)
    assert victim("lru", pages(3, 1, 2, used=[4, 4, 4])) == (0, 1)
    assert victim("lru", pages(0, stream=1) + pages(7, stream=0)) == (0, 7)


def test_furthest_takes_the_furthest_then_the_longest_unused():
    line = Line({1: 2.0, 2: -5.0, 3: 4.0, 4: 5.0})
    assert victim("furthest", pages(1, 2, 3), line) == (0, 2)
    assert victim("furthest", pages(1, 2, 4, used=[0, 9, 8]), line) == (0, 4)
    assert victim("furthest", pages(4, 2, used=[8, 8]), line) == (0, 2)


def test_chunks_that_are_never_asked_for_go_first():
    line = Line({chunk: float(chunk) for chunk in range(60)} | {7: np.inf})
    for name in ("furthest", "redundant"):
        assert victim(name, pages(*range(60)), line) == (0, 7)


def test_small_pools_ignore_redundancy():
    places = {chunk: float(chunk) for chunk in range(LARGE_POOL)} | {30: 29.0}
    few = pages(*range(LARGE_POOL - 1))
    assert victim("redundant", few, Line(places)) == (0, LARGE_POOL - 2)


def test_large_pools_drop_the_newer_of_the_closest_pair_in_the_far_half():
    places = {chunk: float(chunk) for chunk in range(LARGE_POOL)}
    places[30] = 28.9  # closest to 29 in the far half; 30 is newer than 29
    places[3] = 2.0  # a closer pair, but near the path
    assert victim("redundant", pages(*range(LARGE_POOL)), Line(places)) == (0, 30)
    places[29], places[30] = places[30], places[29]
    assert victim("redundant", pages(*range(LARGE_POOL)), Line(places)) == (0, 30)


def test_equally_close_pairs_give_up_the_newest_chunk():
    laps = Line({chunk: 20.0 + chunk % 30 for chunk in range(90)})
    pool = pages(*range(90))
    gone = []
    while len(pool) > 60:
        gone.append(victim("redundant", pool, laps))
        pool = [page for page in pool if page.key != gone[-1]]
    assert gone[0] == (0, 89)
    assert {page.key.chunk for page in pool} >= set(range(30))  # the first lap is whole


def test_a_stream_without_poses_falls_back_to_lru():
    line = Line({0: 9.0, 1: 1.0})
    both = pages(0, 1, stream=0, used=[5, 6]) + pages(0, 1, stream=1, used=[4, 7])
    only_first = {0: line}.get
    assert victim("furthest", both, only_first) == (1, 0)
    # The stream that was idle longest gives one up, and chooses by its own path.
    both = pages(0, 1, stream=0, used=[8, 2]) + pages(0, 1, stream=1, used=[4, 7])
    assert victim("furthest", both, only_first) == (0, 0)


@given(st.data())
def test_the_victim_is_one_of_the_pages_and_does_not_depend_on_their_order(data):
    keys = data.draw(st.sets(st.tuples(st.integers(0, 1), st.integers(0, 99)), min_size=1))
    some = [Page(ChunkKey(*key), data.draw(st.integers(0, 5))) for key in sorted(keys)]
    line = Line({chunk: float(chunk * 7 % 23) for chunk in range(100)})
    for name in eviction_names():
        key = victim(name, some, line)
        assert key in keys
        assert victim(name, data.draw(st.permutations(some)), line) == key


def test_names():
    assert eviction_names() == ["redundant", "furthest", "lru"]
    with pytest.raises(ConfigError, match=r"'fifo'.*redundant, furthest, lru"):
        get_eviction("fifo", lambda stream: None)


# ---- reads in a small simulation -----------------------------------------------------------------


def reads(path, eviction, pool, k=3):
    """Chunks read back in a rollout without prefetch: the same demands for every policy."""
    index = PlaceIndex()
    policy = get_eviction(eviction, lambda stream: index)
    planner = PrefetchPlanner(CameraDistance(), k=k)
    held: dict[int, Page] = {}
    count = 0
    for chunk, poses in enumerate(path):
        place = place_of(poses)
        ranking = planner.policy.rank(index, Query(place), candidate_range(chunk, 1, 1), k)
        wanted = Selection.best(ranking, k).chunks
        index.set_path(planner.plan(index, chunk, poses).path)
        count += sum(other not in held for other in wanted)
        for other in wanted:
            held[other] = Page(ChunkKey(0, other), chunk)
        held[chunk] = Page(ChunkKey(0, chunk), chunk)
        index.add(chunk, place)
        pinned = {*wanted, chunk, chunk - 1}
        while len(held) > pool:
            spare = [page for other, page in held.items() if other not in pinned]
            del held[policy.victim(spare).key.chunk]
    return count


@pytest.mark.parametrize(
    ("name", "pool", "share"), [("yaw-return", 20, 1.0), ("yaw-return", 60, 0.8), ("loop", 60, 0.7)]
)
def test_geometry_reads_less_than_lru(name, pool, share):
    path = make_path(name, 216, 3)
    lru = reads(path, "lru", pool)
    furthest = reads(path, "furthest", pool)
    redundant = reads(path, "redundant", pool)
    assert furthest <= lru
    assert redundant <= furthest
    assert redundant <= share * lru

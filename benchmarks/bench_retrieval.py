"""Choosing a retrieval set, and an eviction victim, against the time a chunk takes.

Run: ``pytest benchmarks/bench_retrieval.py`` (times are of one core; a chunk takes about 1,200 ms).
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from worldpager.pager.events import ChunkKey
from worldpager.pager.eviction import get_eviction
from worldpager.pager.states import Page
from worldpager.prefetch.index import PlaceIndex
from worldpager.prefetch.keys import stored_row
from worldpager.prefetch.planner import PrefetchPlanner
from worldpager.prefetch.poses import place_of
from worldpager.prefetch.retrieval import CameraDistance, Query, candidate_range, get_policy

CHUNKS = 10_000
FRAMES = 3


@pytest.fixture(scope="module")
def poses():
    rng = np.random.default_rng(0)
    out = np.tile(np.eye(4), (CHUNKS, FRAMES, 1, 1))
    turns = Rotation.from_quat(rng.normal(size=(CHUNKS * FRAMES, 4))).as_matrix()
    out[..., :3, :3] = turns.reshape(CHUNKS, FRAMES, 3, 3)
    out[..., :3, 3] = rng.normal(size=(CHUNKS, FRAMES, 3))
    return out


@pytest.fixture(scope="module")
def index(poses):
    index = PlaceIndex()
    for chunk, place in enumerate(place_of(poses)):
        index.add(chunk, place)
    return index


@pytest.mark.parametrize("count", [3, 6, None], ids=["k=3", "k=6", "all"])
def test_choose(benchmark, index, poses, count):
    query = place_of(poses[0])
    candidates = candidate_range(CHUNKS + 1, 1, 1)
    ranking = benchmark(CameraDistance().rank, index, Query(query), candidates, count)
    assert len(ranking) == (count or CHUNKS - 1)


@pytest.fixture(scope="module", params=[128, 1536], ids=["built-in", "wan-1.3b"])
def width(request):
    """Of a page's mean key: heads times channels."""
    return request.param


@pytest.fixture(scope="module")
def rich(poses, width):
    """An index with keys and prompts: all that any policy looks at, as mean and as bounds."""
    rng = np.random.default_rng(0)
    found = {}
    for kind in ("mean", "bounds"):
        found[kind] = PlaceIndex()
        for chunk, place in enumerate(place_of(poses)):
            row = rng.standard_normal(width if kind == "mean" else 2 * width)
            found[kind].add(chunk, place, epoch=chunk // 100, keys=stored_row(row))
        for epoch in range(CHUNKS // 100 + 1):
            found[kind].set_prompt(epoch, rng.standard_normal(4096))
    return found


POLICIES = [
    "camera", "camera:prefer_resident=true", "action", "fov", "recent", "none", "query", "bound",
    "attention", "prompt", "prompt:stage1=100", "hybrid:camera=1,query=1",
    "hybrid:fov=1,query=1,by=ranks",
]  # fmt: skip


@pytest.mark.parametrize("text", POLICIES)
def test_every_policy(benchmark, rich, poses, width, text):
    policy = get_policy(text, heads=width // 64)
    index = rich[getattr(policy, "keys", "") or "mean"]
    vector = np.random.default_rng(1).standard_normal(width).astype(np.float32)
    query = Query(place_of(poses[0]), vector, CHUNKS // 100)
    candidates = candidate_range(CHUNKS + 1, 1, 1)
    resident = tuple(range(0, CHUNKS, 50))
    ranking = benchmark(policy.rank, index, query, candidates, 3, resident)
    assert len(ranking) == (0 if text == "none" else 3)
    benchmark.extra_info["index MB"] = round(index.nbytes / 1e6, 1)


def test_plan(benchmark, index, poses):
    planner = PrefetchPlanner(CameraDistance(), k=3)
    plan = benchmark(planner.plan, index, CHUNKS, poses[0])
    assert len(plan.sets) == 2


@pytest.mark.parametrize("policy", ["lru", "furthest", "redundant"])
@pytest.mark.parametrize("pool", [20, 160, 1000])
def test_evict(benchmark, index, poses, policy, pool):
    pages = [Page(ChunkKey(0, chunk), 0, 1) for chunk in range(pool)]
    index.set_path(place_of(poses[:5]))
    assert benchmark(get_eviction(policy, lambda stream: index).victim, pages) in pages

"""The policies beside camera distance: what each prefers, ties, options, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldpager.errors import ConfigError
from worldpager.prefetch.actions import upright_poses
from worldpager.prefetch.geometric import ActionDistance, CameraDistance, FieldOfView
from worldpager.prefetch.hybrid import Hybrid
from worldpager.prefetch.index import PlaceIndex
from worldpager.prefetch.keys import bounds_row, stored_row
from worldpager.prefetch.poses import place_of
from worldpager.prefetch.ranking import Query, Selection, nearness_of, smallest
from worldpager.prefetch.retrieval import get_policy, policy_names
from worldpager.prefetch.retriever import NOWHERE

ALL = (
    "camera", "recent", "fov", "action", "query", "bound", "attention:heads=2", "prompt",
    "hybrid:camera=1,query=1", "hybrid:fov=1,attention=2,by=ranks",
)  # fmt: skip


def places(yaws, xs=0.0, zs=0.0):
    yaw = np.radians(np.asarray(yaws, dtype=float))
    positions = np.zeros((len(yaw), 3))
    positions[:, 0], positions[:, 2] = xs, zs
    return place_of(upright_poses(positions, yaw, np.zeros(len(yaw)))[:, None])


def index_of(rows, width=8, bounds=False, seed=0, epochs=None):
    rng = np.random.default_rng(seed)
    index = PlaceIndex()
    for chunk, place in enumerate(rows):
        k = rng.standard_normal((5, width)).astype(np.float32)
        row = bounds_row(k.min(0), k.max(0)) if bounds else k.mean(0)
        epoch = 0 if epochs is None else epochs[chunk]
        index.add(chunk, place, epoch=epoch, keys=stored_row(row))
    return index


def asked(width=8, place=None, epoch=0, seed=1):
    keys = np.random.default_rng(seed).standard_normal(width).astype(np.float32)
    return Query(places([33])[0] if place is None else place, keys, epoch)


# ---- what holds for all --------------------------------------------------------------------------


@pytest.mark.parametrize("text", ALL)
def test_rankings_are_prefixes_of_one_another_and_repeat(text):
    policy = get_policy(text)
    index = index_of(places(range(0, 360, 7)), bounds="bound" in text)
    full = policy.rank(index, asked(), range(2, 40))
    assert sorted(full.ids.tolist()) == list(range(2, 40))
    assert (np.diff(full.distances) >= 0).all()
    assert full.distances.min() >= 0 and full.distances.max() <= 2
    for k in (1, 3, 17, 38, 99):
        short = policy.rank(index, asked(), range(2, 40), k)
        assert short.ids.tolist() == full.ids[:k].tolist()


@pytest.mark.parametrize("text", ALL)
def test_equal_chunks_stand_in_the_order_of_their_ids(text):
    if text == "recent":
        pytest.skip("no two chunks are equally recent")
    index = PlaceIndex()
    row = stored_row(np.arange(16.0 if "bound" in text else 8.0))
    for chunk in (9, 4, 7, 2, 30, 11):
        index.add(chunk, places([20])[0], keys=row)
    ranking = get_policy(text).rank(index, asked(), range(40), 4)
    assert ranking.ids.tolist() == [2, 4, 7, 9]


@pytest.mark.parametrize("text", ALL)
def test_an_empty_index_gives_an_empty_ranking(text):
    policy, index = get_policy(text), index_of(places([0, 1]), bounds="bound" in text)
    assert len(policy.rank(PlaceIndex(), asked(), range(9), 3)) == 0
    assert len(policy.rank(index, asked(), range(5, 9), 3)) == 0


@pytest.mark.parametrize("text", ALL)
def test_another_prompts_chunks_are_left_out_or_moved_back_on_request(text):
    epochs = [0, 0, 1, 1, 2, 2]
    index = index_of(places([0, 10, 20, 30, 40, 50]), bounds="bound" in text, epochs=epochs)
    joint = ":" if ":" not in text else ","
    only = get_policy(f"{text}{joint}other_prompt=inf").rank(index, asked(epoch=1), range(6))
    assert sorted(only.ids.tolist()) == [2, 3]
    behind = get_policy(f"{text}{joint}other_prompt=3").rank(index, asked(epoch=1), range(6))
    assert sorted(behind.ids[:2].tolist()) == [2, 3] and len(behind) == 6


@pytest.mark.parametrize("text", ALL)
def test_the_bonus_for_resident_chunks_is_small_and_off_by_default(text):
    joint = ":" if ":" not in text else ","
    index = index_of(places(range(0, 360, 9)), bounds="bound" in text)
    plain, eager = get_policy(text), get_policy(f"{text}{joint}prefer_resident=true")
    without = plain.rank(index, asked(), range(40))
    assert plain.rank(index, asked(), range(40), resident=[5]).ids.tolist() == without.ids.tolist()
    with_bonus = eager.rank(index, asked(), range(40), resident=without.ids[:20].tolist())
    far = dict(zip(without.ids.tolist(), without.distances.tolist(), strict=True))
    for unit, distance in zip(with_bonus.ids.tolist(), with_bonus.distances.tolist(), strict=True):
        held = unit in without.ids[:20]
        assert distance == pytest.approx(0.8 * far[unit] - 0.002 if held else far[unit], abs=1e-8)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, np.inf]), max_size=40), st.integers(0, 45))
def test_smallest_is_a_stable_sort(values, count):
    distances = np.array(values, dtype=np.float64)
    assert (
        smallest(distances, count).tolist() == np.argsort(distances, kind="stable")[:count].tolist()
    )


def test_scores_become_distances():
    got = nearness_of(np.array([3.0, -np.inf, 1.0, 2.0]))
    assert got.tolist() == [0.0, np.inf, 1.0, 0.5]
    assert nearness_of(np.array([2.0, 2.0])).tolist() == [0.0, 0.0]


# ---- field of view -------------------------------------------------------------------------------


def test_the_same_view_is_shared_whole_and_the_opposite_one_not_at_all():
    index = index_of(places([30, 210, 75, 120]))
    ranking = FieldOfView().rank(index, Query(places([30])[0]), range(4))
    distance = dict(zip(ranking.ids.tolist(), ranking.distances.tolist(), strict=True))
    assert distance[0] == 0.0 and distance[1] == 1.0
    assert distance[2] == pytest.approx(0.5, abs=0.13)  # half of 90 degrees
    assert distance[3] == 1.0


def test_shared_view_against_sampling_the_frusta():
    """A dense sample of both frusta, counted without our kernel."""
    rng = np.random.default_rng(3)
    policy = FieldOfView(horizontal=70, aspect=1.5, near=0.5, far=6)
    across = np.tan(np.radians(35))
    down = across / 1.5

    def inside(points, pose):
        local = (points - pose[:3, 3]) @ pose[:3, :3]
        x, y, z = local.T
        return (abs(x) <= across * z) & (abs(y) <= down * z) & (z >= 0.5) & (z <= 6)

    def sample(pose, n=40_000):
        z = 1 / rng.uniform(1 / 6, 1 / 0.5, n)
        local = np.stack([rng.uniform(-across, across, n) * z, rng.uniform(-down, down, n) * z, z])
        return local.T @ pose[:3, :3].T + pose[:3, 3]

    poses = upright_poses(rng.uniform(-1, 1, (30, 3)), rng.uniform(0, 1.5, 30),
                          rng.uniform(-0.4, 0.4, 30))  # fmt: skip
    index = index_of(place_of(poses[1:, None]))
    ranking = policy.rank(index, Query(place_of(poses[:1])), range(29))
    for unit, distance in zip(ranking.ids.tolist(), ranking.distances.tolist(), strict=True):
        pose = poses[unit + 1]
        shares = inside(sample(poses[0]), pose).mean(), inside(sample(pose), poses[0]).mean()
        assert 1 - distance == pytest.approx(np.mean(shares), abs=0.12)


def test_field_of_view_sees_depth_where_camera_distance_sees_metres():
    """Turned on the spot by 60 degrees little is shared; far ahead, looking the same way, more."""
    index = index_of(np.concatenate([places([60]), places([0], zs=2.0)]))
    query = Query(places([0])[0])
    assert FieldOfView(far=12).rank(index, query, range(2)).ids.tolist() == [1, 0]


def test_a_mean_rotation_and_a_degenerate_one_are_handled():
    yaw = np.radians([0, 20, 40])
    turning = place_of(upright_poses(np.zeros((3, 3)), yaw, np.zeros(3)))
    index = index_of([turning, np.array([0.0] * 12)])
    got = FieldOfView().rank(index, Query(places([20])[0]), range(2))
    assert got.ids[0] == 0 and got.distances[0] == 0.0 and np.isfinite(got.distances).all()


def test_intrinsics():
    made = FieldOfView.from_intrinsics(400, 400, 800, 400, near=0.2, far=9)
    assert made.horizontal == pytest.approx(90) and made.aspect == pytest.approx(2)
    with pytest.raises(ConfigError, match="intrinsics"):
        FieldOfView.from_intrinsics(0, 1, 2, 3, near=0.1, far=1)


# ---- keys ----------------------------------------------------------------------------------------


def test_the_query_finds_the_pages_it_points_at():
    index = PlaceIndex()
    for chunk, angle in enumerate(np.radians([0, 50, 100, 200])):
        index.add(chunk, NOWHERE, keys=stored_row([np.cos(angle), np.sin(angle)]))
    query = Query(keys=np.array([np.cos(0.9), np.sin(0.9)], dtype=np.float32))
    assert get_policy("query").rank(index, query, range(4)).ids.tolist() == [1, 2, 0, 3]


def test_attention_does_not_let_one_loud_head_decide():
    """Head 0 has large keys and hardly cares; head 1 wants page 1 clearly."""
    rows = [[5.0, 0, 0.0, 0], [4.9, 0, 6.0, 0], [5.3, 0, -6.0, 0]]
    index = PlaceIndex()
    for chunk, row in enumerate(rows):
        index.add(chunk, NOWHERE, keys=stored_row(row))
    query = Query(keys=np.array([40, 0, 1, 0], dtype=np.float32))
    assert get_policy("query").rank(index, query, range(3), 1).ids.tolist() == [2]
    wide = Query(keys=np.array([0.4, 0, 1, 0], dtype=np.float32))
    assert get_policy("attention:heads=2").rank(index, wide, range(3), 1).ids.tolist() == [1]


def test_pages_without_keys_are_never_retrieved_by_keys():
    index = index_of(places([0, 10, 20]))
    index.add(3, NOWHERE)
    for text in ("query", "attention:heads=4", "prompt", "hybrid:camera=1,query=1"):
        assert 3 not in get_policy(text).rank(index, asked(), range(9)).ids
    assert 3 in get_policy("camera").rank(index, asked(), range(9)).ids


@pytest.mark.parametrize("text", ["query", "bound", "attention:heads=12"])
def test_a_wide_index_is_searched_by_a_shortlist_that_rarely_misses(text):
    """Keys of a walk: pages that follow each other are alike, and all share a large common part."""
    rng, width, n, k = np.random.default_rng(0), 1536, 3000, 4
    basis = rng.standard_normal((12, width)) / np.sqrt(12)
    angles = np.cumsum(rng.normal(0, 0.05, (n, 12)), axis=0)
    common = 4 * rng.standard_normal(width)
    means = common + np.cos(angles) @ basis + 0.05 * rng.standard_normal((n, width))
    spread = np.abs(1 + 0.02 * rng.standard_normal((n, width)))
    index = PlaceIndex()
    for chunk in range(n):
        row = bounds_row(means[chunk] - spread[chunk], means[chunk] + spread[chunk])
        index.add(chunk, NOWHERE, keys=stored_row(row if text == "bound" else means[chunk]))
    hits = 0
    for page in range(100, n, 100):
        query = (np.cos(angles[page]) @ basis).astype(np.float32)
        products = means @ query
        if text == "bound":
            products = products + spread @ np.abs(query)
        if "attention" in text:
            by_head = np.einsum("nhd,hd->nh", means.reshape(n, 12, -1), query.reshape(12, -1))
            weights = np.exp((by_head - by_head.max(0)) / np.sqrt(128))
            products = (weights / weights.sum(0)).mean(1)
        true = set(np.argsort(-products)[:k].tolist())
        got = get_policy(text).rank(index, Query(keys=query), range(n), k)
        hits += len(true & set(got.ids.tolist()))
    assert hits / (k * len(range(100, n, 100))) > 0.9


def test_keys_that_do_not_fit_are_refused():
    index = index_of(places([0, 1]))
    with pytest.raises(ConfigError, match="12 numbers"):
        get_policy("query").rank(index, asked(12), range(2))
    with pytest.raises(ConfigError, match="needs the chunk's mean query"):
        get_policy("query").rank(index, Query(), range(2))
    with pytest.raises(ConfigError, match="5 numbers wide"):
        index.add(2, NOWHERE, keys=stored_row(np.ones(5)))
    with pytest.raises(ConfigError, match="heads do not divide"):
        get_policy("attention:heads=3").rank(index, asked(), range(2))
    for bad in ([], [np.nan], [[1.0]]):
        with pytest.raises(ConfigError):
            stored_row(bad)


# ---- prompts -------------------------------------------------------------------------------------


def prompted():
    index = index_of(places(range(8)), epochs=[0, 0, 1, 1, 1, 2, 2, 3])
    for epoch, prompt in enumerate([[1, 0.1], [1, 1], [0, 1]]):
        index.set_prompt(epoch, prompt)
    return index


def test_before_the_query_is_known_the_nearest_prompts_newest_pages_come_first():
    index = prompted()
    index.set_prompt(4, [0.1, 1])
    coarse = get_policy("prompt").rank(index, Query(epoch=4), range(8))
    assert coarse.ids.tolist() == [6, 5]
    two = get_policy("prompt:stage1=2").rank(index, Query(epoch=4), range(8))
    assert two.ids.tolist() == [6, 5, 4, 3, 2]
    fine = get_policy("prompt:stage1=2").rank(index, asked(epoch=4), range(8), 3)
    assert set(fine.ids.tolist()) <= set(two.ids.tolist())


def test_the_current_prompts_own_pages_are_always_let_through():
    coarse = get_policy("prompt:stage1=1").rank(prompted(), Query(epoch=0), range(8))
    assert coarse.ids.tolist() == [1, 0, 4, 3, 2]


def test_without_an_embedding_all_prompts_are_let_through():
    coarse = get_policy("prompt").rank(prompted(), Query(epoch=3), range(8))
    assert coarse.ids.tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


def test_prompts_that_cannot_be_compared_are_refused():
    index = prompted()
    index.set_prompt(5, [1, 2, 3])
    with pytest.raises(ConfigError, match="embedding of 2 numbers"):
        get_policy("prompt").rank(index, Query(epoch=5), range(8))
    for bad in ([0, 0], [np.nan, 1], [[1.0]]):
        with pytest.raises(ConfigError, match="embedding"):
            index.set_prompt(6, bad)


# ---- hybrid --------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 999), weight=st.floats(0.1, 10))
def test_a_hybrid_by_scores_is_the_weighted_mean(seed, weight):
    index = index_of(places(np.random.default_rng(seed).integers(0, 360, 20)), seed=seed)
    parts = {get_policy("camera"): weight, get_policy("query"): 1.0}
    view, query = index.view(range(20)), asked(seed=seed)
    want = sum(w * p.distances(view, query) for p, w in parts.items()) / (weight + 1)
    assert Hybrid(parts=parts).distances(view, query) == pytest.approx(want, abs=1e-8)


def test_a_hybrid_by_ranks_does_not_care_about_scale():
    index = PlaceIndex()
    for chunk, yaw in enumerate([0, 1, 2, 170]):
        index.add(chunk, places([yaw])[0], keys=stored_row([float(chunk), 0.0]))
    query = Query(places([0])[0], np.array([1.0, 0.0], dtype=np.float32))
    ranks = get_policy("hybrid:camera=1.1,query=1,by=ranks").rank(index, query, range(4))
    assert ranks.ids.tolist() == [0, 1, 2, 3]
    scores = get_policy("hybrid:camera=1.1,query=1").rank(index, query, range(4))
    assert scores.ids.tolist() == [2, 3, 1, 0]


def test_a_hybrid_knows_what_its_parts_need():
    made = get_policy("hybrid:camera=1,prompt=0.5")
    assert made.needs_poses and made.keys == "mean" and not made.needs_query
    assert not get_policy("hybrid:query=1,recent=1").needs_poses
    assert get_policy("hybrid:query=1,recent=1").needs_query
    ahead = get_policy("hybrid:query=1,recent=1")
    index = index_of(places([0, 1, 2]))
    assert ahead.ranks_ahead and ahead.rank(index, Query(), range(3), 2).ids.tolist() == [2, 1]


# ---- by name -------------------------------------------------------------------------------------


def test_options_are_read_and_checked():
    assert set(policy_names()) >= {text.partition(":")[0] for text in ALL}
    made = get_policy("fov:horizontal=75,far=12")
    assert made == FieldOfView(horizontal=75.0, far=12.0)
    assert get_policy("action:units_per_frame=0.1,next_actions=2") == ActionDistance(
        units_per_frame=0.1, next_actions=2
    )
    assert get_policy("camera:prefer_resident=true") == CameraDistance(prefer_resident=True)
    for bad, why in (
        ("fov:wide=3", "no option 'wide'; known are prefer_resident, other_prompt, horizontal"),
        ("fov:far", "cannot be read at 'far'"),
        ("fov:far=x", "must be a number"),
        ("fov:far=1,far=2", "cannot be read"),
        ("action:next_actions=1.5", "whole number"),
        ("camera:prefer_resident=2", "true or false"),
        ("fov:near=9", "near < far"),
        ("fov:horizontal=190", "180"),
        ("none:a=1", "known are none"),
        ("hybrid", "needs policies"),
        ("hybrid:camera=0", "positive"),
        ("hybrid:camera=1,by=luck", "by scores or ranks"),
        ("hybrid:query=1,bound=1", "cannot combine"),
        ("hybrid:none=1", "cannot contain 'none'"),
        ("hybrid:nope=1", "no retrieval policy 'nope'"),
        ("prompt:stage1=-1", "stage1"),
        ("attention:heads=-1", "heads"),
        ("camera:other_prompt=-1", "other_prompt"),
        ("action:next_actions=0", "next_actions"),
        ("action:pitch_limit=90", "pitch_limit"),
    ):
        with pytest.raises(ConfigError, match=why):
            get_policy(bad)


def test_selection_is_in_time_order_whatever_the_scores():
    ranking = get_policy("query").rank(index_of(places(range(20))), asked(), range(20), 6)
    chosen = Selection.best(ranking, 6)
    assert list(chosen.chunks) == sorted(chosen.chunks)
    assert chosen.best_first == tuple(ranking.ids.tolist())

"""Controls: pseudo-poses, habits, next actions in the plan; what is stored beside a chunk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldpager.errors import ConfigError, DamagedBlockError
from worldpager.prefetch.actions import ActionScale, integrate_actions, latent_poses
from worldpager.prefetch.annex import Annex
from worldpager.prefetch.controls import Habits, Walker
from worldpager.prefetch.geometric import CameraDistance
from worldpager.prefetch.index import PlaceIndex
from worldpager.prefetch.keys import StoredRow, stored_row
from worldpager.prefetch.planner import PrefetchPlanner
from worldpager.prefetch.poses import place_of

FORWARD, STILL = (1.0, 0, 0, 0), (0.0, 0, 0, 0)


def rows(key=STILL, yaw=0.0, count=12):
    return {"keyboard": np.tile(key, (count, 1)), "mouse": np.tile((0.0, yaw), (count, 1))}


# ---- the walker ----------------------------------------------------------------------------------


def test_a_walker_is_the_integrator_chunk_by_chunk():
    """The first chunk may have 9 rows, as Matrix-Game 2.0's has; the later ones 12."""
    scale = ActionScale(0.1, 10.0)
    counts, rng = (9, 12, 12, 12), np.random.default_rng(0)
    keyboard = rng.integers(0, 2, (45, 4)).astype(float)
    mouse = rng.choice((-0.1, 0.0, 0.1), (45, 2))
    whole = integrate_actions(np.eye(4), keyboard, mouse, scale)
    walker, at = Walker(scale, 3), 0
    for count in counts:
        part = slice(at, at + count)
        got = walker.walk({"keyboard": keyboard[part], "mouse": mouse[part]})
        assert np.allclose(got, latent_poses(whole[part]))
        assert np.allclose(walker.pose, whole[at + count - 1])
        at += count


def test_known_controls_and_a_given_start_are_followed():
    walker = Walker(ActionScale(), 3)
    start = np.eye(4)
    start[:3, 3] = (5, 0, 5)
    first = rows(FORWARD) | {"ahead": [rows(FORWARD), rows(STILL, 0.1)], "start": start}
    walker.walk(first)
    ahead = walker.ahead(first)
    assert len(ahead) == 2 and walker.pose[2, 3] == pytest.approx(5 + 12 * 0.0875)
    assert np.allclose(walker.walk(rows(FORWARD)), ahead[0])
    assert np.allclose(walker.walk(rows(STILL, 0.1)), ahead[1])


def test_a_chunk_walked_again_leads_to_the_same_place():
    walker, once = Walker(ActionScale(), 3), Walker(ActionScale(), 3)
    for chunk, (control, times) in enumerate(
        [(rows(FORWARD), 1), (rows(FORWARD, 0.1), 3), (rows(STILL, 0.2), 2)]
    ):
        want = once.walk(control, chunk)
        for _ in range(times):
            assert np.array_equal(walker.walk(control, chunk), want)
        assert np.array_equal(walker.before, once.before)
    for mine, theirs in zip(
        walker.branches(rows(FORWARD), 4), once.branches(rows(FORWARD), 4), strict=True
    ):
        assert np.array_equal(mine, theirs), "habits count a chunk once"


def test_a_walker_that_is_refused_stays():
    walker = Walker(ActionScale(), 3)
    walker.walk(rows(FORWARD))
    before = walker.pose.copy()
    for bad in ({}, {"keyboard": np.zeros((5, 4))}, {"keyboard": np.full((12, 4), np.nan)}):
        with pytest.raises(ConfigError):
            walker.walk(bad)
        with pytest.raises(ConfigError):
            walker.check(bad)
    assert np.array_equal(walker.pose, before)
    assert np.array_equal(walker.before, np.eye(4))


def test_keys_alone_and_games_with_two_keys():
    walker = Walker(ActionScale(), 3)
    control = {"keyboard": np.tile((1.0, 0.0), (12, 1))}
    walker.walk(control)
    (branch,) = walker.branches(control, 1)
    assert branch.shape == (3, 4, 4)
    assert branch[-1, 2, 3] == pytest.approx(24 * 0.0875)


# ---- habits --------------------------------------------------------------------------------------


def test_habits_put_going_on_first_and_then_what_mostly_followed():
    habits = Habits()
    a, b, c = (0.0,), (1.0,), (2.0,)
    for action in (a, a, b, a, b, a, c, a, b, a, b):
        habits.see(action)
    assert habits.next(a, 3) == [b, a, c], "b followed a four times"
    assert habits.next(b, 9) == [a, b, c]
    assert habits.next((9.0,), 2) == [(9.0,), a], "what was never seen goes on, or is usual"


@given(st.lists(st.sampled_from([(0.0,), (1.0,), (2.0,), (3.0,)]), max_size=60))
def test_habits_depend_on_the_log_alone(log):
    guesses = []
    for _ in range(2):
        habits, made = Habits(), []
        for action in log:
            habits.see(action)
            made.append(habits.next(action, 3))
        guesses.append(made)
    assert guesses[0] == guesses[1]
    assert all(1 <= len(set(guess)) == len(guess) <= 3 for guess in guesses[0])


# ---- in the plan ---------------------------------------------------------------------------------


def game(chunks, seed=0):
    """A player who turns, stands and walks; the controls of each chunk."""
    rng, out, current = np.random.default_rng(seed), [], rows(FORWARD)
    for _ in range(chunks):
        if rng.random() < 0.3:
            key = FORWARD if rng.random() < 0.5 else STILL
            current = rows(key, float(rng.choice((-0.1, 0.0, 0.1))))
        out.append(current)
    return out


def misses(next_actions, log):
    """Windows with a chunk that was not on the load list, and the length of the lists."""
    index, walker = PlaceIndex(), Walker(ActionScale(0.0875, 25.0), 3)
    planner = PrefetchPlanner(CameraDistance(), k=3, extra=0, horizon=1)
    late = loads = 0
    listed: set[int] = set()
    plans = []
    for chunk, control in enumerate(log):
        poses = walker.walk(control)
        ranking = planner.policy.rank(index, _query(poses), range(1, max(1, chunk - 1)), 3)
        late += not set(ranking.ids.tolist()) <= listed
        branches = walker.branches(control, next_actions)
        plan = planner.plan(index, chunk, poses, branches=branches)
        listed, loads = set(plan.chunks), loads + len(plan.chunks)
        plans.append(plan.chunks)
        index.add(chunk, place_of(poses))
    return late, loads / len(log), plans


def _query(poses):
    from worldpager.prefetch.ranking import Query

    return Query(place_of(poses))


def test_the_likeliest_next_actions_catch_what_no_extrapolation_can():
    log = game(160)
    one, three = misses(1, log), misses(3, log)
    assert three[0] < 0.7 * one[0]
    assert one[1] < three[1] < 3 * one[1]


def test_the_same_log_gives_the_same_plans():
    assert misses(3, game(80))[2] == misses(3, game(80))[2]


def test_branches_come_first_in_order_of_likelihood_and_known_controls_replace_them():
    index, walker = PlaceIndex(), Walker(ActionScale(), 3)
    for chunk in range(40):
        control = rows(STILL, 0.1)
        index.add(chunk, place_of(walker.walk(control)))
    poses = walker.walk(rows(STILL, 0.1))
    planner = PrefetchPlanner(CameraDistance(), k=2, extra=1, horizon=1)
    left, right = (Walker(ActionScale(), 3, walker.pose).walk(rows(STILL, y)) for y in (-0.1, 0.1))
    sets = []
    for branch in (left, right):
        ranking = planner.policy.rank(index, _query(branch), range(1, 40), 2)
        sets.append(ranking.ids.tolist())
    plan = planner.plan(index, 40, poses, branches=[left, right])
    union = list(dict.fromkeys(sets[0] + sets[1]))
    assert list(plan.chunks[: len(union)]) == union
    assert all(item.required for item in plan.wanted[:2])
    known = planner.plan(index, 40, poses, branches=[left], known=[right])
    assert known.wanted == planner.plan(index, 40, poses, known=[right]).wanted


# ---- the annex -----------------------------------------------------------------------------------


@given(
    keys=st.none() | st.integers(1, 300),
    prompt=st.none() | st.integers(1, 300),
    pose=st.booleans(),
)
def test_an_annex_comes_back_as_it_was(keys, prompt, pose):
    rng = np.random.default_rng(0)
    annex = Annex(
        None if keys is None else stored_row(rng.standard_normal(keys)),
        None if prompt is None else rng.standard_normal(prompt).astype(np.float32),
        None if not pose else np.vstack([rng.standard_normal((3, 4)), [0, 0, 0, 1]]),
    )
    data = annex.pack()
    back = Annex.unpack(data)
    assert (data == b"") == (keys is None and prompt is None and not pose)
    if keys is not None:
        assert isinstance(back.keys, StoredRow) and back.keys.scale == annex.keys.scale
        assert np.array_equal(back.keys.values, annex.keys.values)
    assert (back.keys is None) == (keys is None)
    for got, want in ((back.prompt, annex.prompt), (back.pose, annex.pose)):
        assert (got is None) == (want is None)
        assert got is None or np.array_equal(got, want)


@given(st.binary(min_size=1, max_size=200))
def test_an_annex_of_random_bytes_is_damage_and_nothing_else(data):
    try:
        Annex.unpack(data)
    except DamagedBlockError as error:
        assert error.reason == "annex"

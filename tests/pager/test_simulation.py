"""The core under a seeded scheduler: every promise is kept, and a broken one would be noticed."""

from __future__ import annotations

import pytest

from tests.pager import simulation
from tests.pager.mutations import MUTATIONS, Mutation
from tests.pager.simulation import STEPS, fails, make_steps, run, shrink
from worldpager.pager.room import Room

BLOCK = 25  # seeds to a test, so that a failure names few of them


@pytest.mark.parametrize("first", range(0, 100, BLOCK))
def test_keeps_every_promise(first: int) -> None:
    found = [text for seed in range(first, first + BLOCK) if (text := fails(seed, STEPS))]
    assert not found, "\n".join(found)


# The next two take a million steps between them.


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1_000, 2_800, 100))
def test_keeps_every_promise_in_many_histories(first: int) -> None:
    found = [text for seed in range(first, first + 100) if (text := fails(seed, STEPS))]
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10_000, 10_010))
def test_keeps_every_promise_in_long_histories(seed: int) -> None:
    assert not fails(seed, 10_000)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_notices(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    assert any(fails(seed, 300) for seed in range(200)), "200 seeds did not notice"


def test_the_same_seed_gives_the_same_history() -> None:
    first, second = (run(5, make_steps(5, 300)) for _ in range(2))
    assert first == second
    assert len(first[1]) > 300


def test_a_failure_is_shrunk_to_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent loss under pressure takes a handful of steps, and that many are left."""
    monkeypatch.setattr(Room, "lose", lambda room, key, reason: None)
    seed = next(seed for seed in range(100) if fails(seed, 300))
    assert f"--seed {seed} --steps 300" in fails(seed, 300)
    steps = shrink(seed, make_steps(seed, 300), seconds=10)
    error, _ = run(seed, steps)
    assert error is not None
    assert simulation.promise(error) == simulation.promise(run(seed, make_steps(seed, 300))[0])
    assert len(steps) < 60

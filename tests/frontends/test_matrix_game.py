"""Matrix-Game 2.0: controls in place of poses, two loops, two tables that end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.frontends import game, wan
from worldpager import attach
from worldpager.model_adapter.frontend import ChunkStep
from worldpager.model_adapter.frontends.base import WindowOptions
from worldpager.model_adapter.frontends.matrix_game import MatrixGame
from worldpager.testing import CHECKS, Case, nothing_retrieved

CHUNKS = 6


def offline(dtype: torch.dtype) -> Any:
    return wan.seeded(game.GamePipeline, dtype)


def streaming(dtype: torch.dtype) -> Any:
    held = iter(range(1000))

    def ask() -> tuple[torch.Tensor, torch.Tensor]:
        turning = next(held) % 4 > 1
        return torch.tensor([1.0, 0, 0, 0]), torch.tensor([0.0, 0.1 * turning])

    return wan.seeded(lambda: game.GameStreamingPipeline(ask), dtype)


def case(make: Callable[[torch.dtype], Any]) -> Case:
    return Case(
        make=make,
        run=game.run,
        attend_everything=lambda pipeline: wan.attend_everything(pipeline, CHUNKS * wan.CHUNK),
        chunks=CHUNKS,
        beyond=game.ACTION_TABLE // wan.CHUNK + 3,
        lengthen=game.lengthen,
        options={"retrieval": "recent"},
    )


RUNS = [
    (check, make)
    for make in (offline, streaming)
    for check in CHECKS
    # each rollout of the live loop is asked other controls, so that no two are alike
    if not (make is streaming and check.__name__ == "detaching")
]


@pytest.mark.parametrize(("check", "make"), RUNS, ids=lambda f: f.__name__)
def test_conformance(
    check: Callable[[Case, Path], str], make: Callable[[torch.dtype], Any], tmp_path: Path
) -> None:
    print(check(case(make), tmp_path))


def steps(pipeline: Any, folder: Path, chunks: int) -> list[ChunkStep]:
    """The steps of a rollout that retrieves by what the controls lead to, as by default."""
    seen: list[ChunkStep] = []
    with attach(pipeline, store=folder / "store", dram="64MiB", on_miss="wait") as attachment:
        assert attachment.frontend == "matrix-game-2"
        assert attachment.memory.config.retrieval == "action"
        attachment.listeners.append(lambda step, _, __: seen.append(step))
        game.run(pipeline, chunks)
    return seen


def test_each_chunk_has_its_own_rows_of_controls(tmp_path: Path) -> None:
    given = game.controls(CHUNKS, torch.float32)
    seen = steps(offline(torch.float32), tmp_path, CHUNKS)
    for name in ("keyboard", "mouse"):
        rows = np.concatenate([step.control[name] for step in seen])
        assert np.array_equal(rows, given[f"{name}_cond"][0].numpy())
    assert [len(step.control["keyboard"]) for step in seen] == [9, *[12] * (CHUNKS - 1)]


def test_the_offline_loop_knows_what_follows_and_the_live_one_does_not(tmp_path: Path) -> None:
    seen = steps(offline(torch.float32), tmp_path / "a", CHUNKS)
    assert [len(step.control["ahead"]) for step in seen] == [5, 4, 3, 2, 1, 0]
    following = seen[0].control["ahead"][0]
    assert np.array_equal(following["keyboard"], seen[1].control["keyboard"])
    live = steps(streaming(torch.float32), tmp_path / "b", CHUNKS)
    assert all(not step.control["ahead"] for step in live)


def test_a_runners_keys_are_walked(tmp_path: Path) -> None:
    adapter = MatrixGame(offline(torch.float32), WindowOptions())
    keys = torch.zeros(1, 9, 7)
    keys[0, :4, 3] = keys[0, 4:, 6] = 1  # turn left, then a step to the right
    rows = adapter._rows({"keyboard_cond": keys}, 0)
    assert rows is not None
    assert rows["mouse"][:, 1].tolist() == pytest.approx([-0.1] * 4 + [0.0] * 5)
    assert rows["keyboard"].tolist() == [[1, 0, 0, 0]] * 4 + [[1, 0, 0, 1]] * 5


def test_a_window_that_is_no_whole_number_of_chunks_is_kept_as_it_is(tmp_path: Path) -> None:
    """The driving game shows one frame of the chunk before, of three."""
    odd = Case(
        make=lambda dtype: wan.seeded(lambda: game.GamePipeline(local=4), dtype),
        run=game.run,
        attend_everything=lambda pipeline: None,
        options={"retrieval": "recent"},
    )
    print(nothing_retrieved(odd, tmp_path))


def test_rollouts_follow_each_other(tmp_path: Path) -> None:
    pipeline = offline(torch.float32)
    want = game.run(pipeline, CHUNKS)
    retrieved: list[int] = []
    with attach(
        pipeline, store=tmp_path / "s", dram="64MiB", retrieval="recent", retrieve=0,
        positions="moving",
    ) as attachment:  # fmt: skip
        attachment.listeners.append(lambda step, _, __: retrieved.append(step.chunk))
        game.run(pipeline, wan.horizon() + 1)  # the base has moved
        again = game.run(pipeline, CHUNKS)
    assert all(torch.equal(a, b) for a, b in zip(again, want, strict=True))
    assert retrieved == [*range(wan.horizon() + 1), *range(CHUNKS)]

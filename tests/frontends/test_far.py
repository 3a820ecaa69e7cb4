"""AnyFlow-FAR: chunks come back in full among those that are packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import worldpager
from tests.frontends import far, wan
from worldpager.errors import FrontendError
from worldpager.testing import CHECKS, Case

WINDOW = {"tokens_per_frame": far.PLACES}


def make(dtype: torch.dtype) -> Any:
    return wan.seeded(far.Pipeline, dtype)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[Case, Path], str], tmp_path: Path) -> None:
    case = Case(
        make=make,
        run=lambda pipeline, chunks: pipeline.run(chunks),
        attend_everything=far.keep_exactly,
        options={"window": WINDOW},
    )
    print(check(case, tmp_path))


def test_a_first_chunk_of_another_size_is_left_to_the_model(tmp_path: Path) -> None:
    pipeline, steps = make(torch.bfloat16), []
    with worldpager.attach(
        pipeline, store=tmp_path / "store", dram="64MiB", on_miss="wait", window=WINDOW
    ) as attachment:
        attachment.listeners.append(lambda step, report, _: steps.append((step, report.retrieved)))
        pipeline.run(5, lead=1)
    assert [step.start_frame for step, _ in steps] == [0, 2, 4, 6, 8]
    assert [len(ids) for _, ids in steps] == [0, 0, 0, 1, 2]


@pytest.mark.parametrize(
    "window", [{"tokens_per_frame": 16}, {**WINDOW, "batch": 2}, {**WINDOW, "frames_per_chunk": 1}]
)
def test_other_sizes_are_refused(window: dict[str, int], tmp_path: Path) -> None:
    pipeline = make(torch.float32)
    with (
        worldpager.attach(pipeline, store=tmp_path / "store", dram="64MiB", window=window),
        pytest.raises(FrontendError, match="to attach"),
    ):
        pipeline.run(4)


def test_recent_chunks_are_the_models_own(tmp_path: Path) -> None:
    with pytest.raises(FrontendError, match="leave recent="):
        worldpager.attach(make(torch.float32), store=tmp_path / "store", recent=2)

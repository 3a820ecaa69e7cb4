"""Self-Forcing's family: few steps, guidance with two caches, a window of any size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.frontends import wan
from worldpager.testing import CHECKS, Case

CHUNKS = 6
PIPELINES = {
    "few steps": lambda: wan.Pipeline(),
    "with a sink": lambda: wan.Pipeline(local=9, sink=3),
    "with no roll": lambda: wan.Pipeline(local=-1),
    "guided": lambda: wan.GuidedPipeline(),
}


def case(kind: str) -> Case:
    return Case(
        make=lambda dtype: wan.seeded(PIPELINES[kind], dtype),
        run=wan.run,
        attend_everything=lambda pipeline: wan.attend_everything(pipeline, 9 * wan.CHUNK),
        chunks=9 if kind == "with no roll" else CHUNKS,
        beyond=wan.horizon(),
        lengthen=wan.lengthen if kind == "few steps" else None,
    )


@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[Case, Path], str], kind: str, tmp_path: Path) -> None:
    if kind == "with no roll" and check.__name__ in ("nothing_retrieved", "detaching"):
        pytest.skip("by itself this loop ends where its ring is full")
    print(check(case(kind), tmp_path))


torch.set_num_threads(1)

"""Self-Forcing's family: few steps, guidance with two caches, a window of any size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

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


RUNS = [
    (check, kind)
    for kind in PIPELINES
    for check in CHECKS
    # by itself the loop that does not roll ends where its ring is full
    if not (kind == "with no roll" and check.__name__ in ("nothing_retrieved", "detaching"))
]


@pytest.mark.parametrize(("check", "kind"), RUNS, ids=lambda part: getattr(part, "__name__", part))
def test_conformance(check: Callable[[Case, Path], str], kind: str, tmp_path: Path) -> None:
    print(check(case(kind), tmp_path))

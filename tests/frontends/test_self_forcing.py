"""Self-Forcing's family: few steps, guidance with two caches, a window of any size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frontends import wan
from worldpager import FrontendError, attach
from worldpager.model_adapter import host_cache
from worldpager.testing import CHECKS, Case, everything_retrieved

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


def test_a_cache_on_another_device_is_copied_on_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, but for the GPU: every slot is decoded elsewhere and copied."""
    monkeypatch.setattr(host_cache, "in_host_memory", lambda tensor: False)
    print(everything_retrieved(case("guided"), tmp_path))


def test_a_model_that_denoises_several_chunks_at_once_is_refused(tmp_path: Path) -> None:
    class Rolling(wan.SelfAttention):
        def forward(self, *args: Any, updating_cache: bool = False, **kwargs: Any) -> torch.Tensor:
            return super().forward(*args, **kwargs)

    pipeline = wan.seeded(wan.Pipeline, torch.float32)
    for block in pipeline.generator.model.blocks:
        block.self_attn = Rolling(6, 0)
    with pytest.raises(FrontendError, match="no moment between two chunks"):
        attach(pipeline, store=tmp_path / "s", dram="64MiB")

"""The refiner of SANA-WM: a history that is not whole chunks, a rotation over all heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import worldpager
from tests.frontends import refiner, wan
from worldpager.errors import FrontendError
from worldpager.model_adapter.frontends.base import WindowOptions
from worldpager.model_adapter.frontends.sana_wm import RefinerCache, SanaRefiner
from worldpager.testing import CHECKS, Case

WINDOW = {"tokens_per_frame": wan.TOKENS}


def make(dtype: torch.dtype) -> Any:
    return wan.seeded(refiner.Pipeline, dtype)


def attend_everything(pipeline: Any) -> None:
    pipeline.shown = 1000


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[Case, Path], str], tmp_path: Path) -> None:
    case = Case(
        make=make,
        run=lambda pipeline, chunks: pipeline.run(chunks),
        attend_everything=attend_everything,
        chunks=8,
        options={"window": WINDOW},
    )
    print(check(case, tmp_path))


def test_a_key_is_moved_to_where_the_model_itself_would_put_it() -> None:
    pipeline = make(torch.float32)
    adapter, size = SanaRefiner(pipeline, WindowOptions()), {"batch_size": 1, "device": "cpu"}
    adapter._build = pipeline.transformer.build_rotary_emb_for_absolute_positions
    adapter._size = {**size, "height": 1, "width": wan.TOKENS}
    k = torch.randn(1, wan.TOKENS, wan.DIM)
    here, there = (refiner.turn(k, adapter._positions([at])) for at in (20.0, 17.0))
    keys = here.clone().view(1, wan.TOKENS, wan.HEADS, wan.HEAD_DIM)
    held = type("Cache", (), {"layer_caches": []})
    RefinerCache(held, adapter.spec, adapter).shift(keys, -3.0)
    torch.testing.assert_close(keys.flatten(2), there, atol=1e-4, rtol=0)
    assert (here - there).abs().max() > 1


@pytest.mark.parametrize("window", [{"tokens_per_frame": 16}, {**WINDOW, "batch": 2}])
def test_other_sizes_are_refused(window: dict[str, int], tmp_path: Path) -> None:
    pipeline = make(torch.float32)
    with (
        worldpager.attach(pipeline, store=tmp_path / "store", dram="64MiB", window=window),
        pytest.raises(FrontendError, match="to attach"),
    ):
        pipeline.run(2)

"""LongLive 2: absolute and relative positions, guidance, a batch, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import worldpager
from tests.frontends import longlive, wan
from worldpager.errors import FrontendError
from worldpager.testing import CHECKS, Case

PIPELINES: dict[str, dict[str, Any]] = {
    "absolute": {},
    "absolute, no sink": {"sink": 0},
    "relative": {"relative": True},
    "relative, guided": {"relative": True, "guidance": 3.0},
}


def make(dtype: torch.dtype, **options: Any) -> Any:
    return wan.seeded(lambda: longlive.Pipeline(**options), dtype)


def attend_everything(pipeline: Any) -> None:
    pipeline.local_attn_size = 60


def lengthen(pipeline: Any) -> None:
    pipeline.generator.model.freqs = wan.wan_table(4 * wan.TABLE)


def case(kind: str, batch: int = 1) -> Case:
    return Case(
        make=lambda dtype: make(dtype, **PIPELINES[kind]),
        run=lambda pipeline, chunks: longlive.run(pipeline, chunks, batch),
        attend_everything=attend_everything,
        beyond=None if kind.startswith("relative") else wan.TABLE // longlive.CHUNK + 2,
        lengthen=lengthen if kind == "absolute, no sink" else None,  # a sink keeps its place
        options={"window": {"batch": batch}},
    )


@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[Case, Path], str], kind: str, tmp_path: Path) -> None:
    print(check(case(kind), tmp_path))


@pytest.mark.parametrize("check", CHECKS[:2], ids=lambda check: check.__name__)
def test_conformance_of_a_batch(check: Callable[[Case, Path], str], tmp_path: Path) -> None:
    print(check(case("absolute", batch=2), tmp_path))


def test_no_position_scheme_matters_to_relative_positions(tmp_path: Path) -> None:
    outputs = []
    for scheme in ("absolute", "moving", "fractional"):
        pipeline = make(torch.float32, relative=True)
        with worldpager.attach(
            pipeline, store=tmp_path / scheme, dram="64MiB", codec="bf16", positions=scheme,
            on_miss="wait",
        ) as attachment:  # fmt: skip
            assert attachment.memory.horizon is None
            outputs.append(longlive.run(pipeline, 6))
    for other in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs[0], other, strict=True))


def test_a_second_rollout_begins_anew(tmp_path: Path) -> None:
    want = longlive.run(make(torch.float32), 5)
    pipeline = make(torch.float32)
    with worldpager.attach(pipeline, store=tmp_path / "store", dram="64MiB", retrieve=0):
        for _ in range(2):
            got = longlive.run(pipeline, 5)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("name", "message"), [("quantize_kv", "NVFP4"), ("multi_shot_sink", "pins a chunk")]
)
def test_what_cannot_be_moved_is_refused(name: str, message: str, tmp_path: Path) -> None:
    pipeline = make(torch.float32)
    setattr(pipeline, name, True)
    with pytest.raises(FrontendError, match=message):
        worldpager.attach(pipeline, store=tmp_path / "store")


def test_guidance_switched_on_under_a_memory_is_refused(tmp_path: Path) -> None:
    pipeline = make(torch.float32)
    with worldpager.attach(pipeline, store=tmp_path / "store", dram="64MiB"):
        pipeline.guidance_scale = 3.0
        with pytest.raises(FrontendError, match="attach again"):
            longlive.run(pipeline, 2)


def test_time_scaled_positions_have_no_wall(tmp_path: Path) -> None:
    pipeline = make(torch.float32)
    pipeline.inference_t_scale = 0.5
    with worldpager.attach(pipeline, store=tmp_path / "store", dram="64MiB") as attachment:
        rope = attachment.memory.spec.rope
    assert rope is not None and rope.scale == 0.5 and rope.table_len is None

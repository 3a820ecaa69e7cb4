"""LingBot-World: a cache local to the loop, a path from a file, windows of both versions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import worldpager
from tests.frontends import lingbot, wan
from worldpager.errors import FrontendError
from worldpager.model_adapter.frontends.lingbot import camera_path
from worldpager.testing import CHECKS, Case

CHUNKS = 6
PIPELINES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "version 1": (3, {"shown": 6}, {"recent": 1, "window": {"sink": 0}}),
    "version 2, chunks of 4": (4, {"local": 12, "sink": 4}, {}),
    "version 2, half a chunk of sink": (4, {"local": 14, "sink": 6}, {}),
    "version 2, guided": (3, {"local": 6, "guided": True}, {}),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A camera that goes round and round."""
    angle = np.linspace(0, 20, 400)
    poses = np.tile(np.eye(4), (400, 1, 1))
    poses[:, 0, 0] = poses[:, 2, 2] = np.cos(angle)
    poses[:, 0, 2], poses[:, 2, 0] = np.sin(angle), -np.sin(angle)
    poses[:, 0, 3] = 5 * np.sin(angle)
    np.save(tmp_path / "poses.npy", poses)
    return tmp_path


def run(pipeline: Any, chunks: int, chunk: int, folder: Path) -> list[torch.Tensor]:
    frame_num = 4 * (chunks * chunk - 1) + 1
    made: list[torch.Tensor] = pipeline.generate(
        "a street", action_path=str(folder), chunk_size=chunk, frame_num=frame_num
    )
    return made


def attend_everything(pipeline: Any) -> None:
    pipeline.shown = None
    if hasattr(pipeline, "local_attn_size"):
        pipeline.local_attn_size = 60


def window(chunk: int, more: dict[str, Any]) -> dict[str, Any]:
    sizes = {"tokens_per_frame": wan.TOKENS, "frames_per_chunk": chunk}
    return {**more, "window": {**sizes, **more.get("window", {})}}


def case(kind: str, folder: Path) -> Case:
    chunk, made, more = PIPELINES[kind]

    def lengthen(pipeline: Any) -> None:
        pipeline.model.freqs = wan.wan_table(4 * wan.TABLE)

    return Case(
        make=lambda dtype: wan.seeded(lambda: lingbot.Pipeline(**made), dtype),
        run=lambda pipeline, chunks: run(pipeline, chunks, chunk, folder),
        attend_everything=attend_everything,
        chunks=CHUNKS,
        beyond=wan.TABLE // chunk + 2 if kind == "version 1" else None,
        lengthen=lengthen,
        options=window(chunk, more),
    )


@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(
    check: Callable[[Case, Path], str], kind: str, folder: Path, tmp_path: Path
) -> None:
    print(check(case(kind, folder), tmp_path / "stores"))


def test_memory_is_chosen_along_the_path_in_the_folder(folder: Path, tmp_path: Path) -> None:
    pipeline = wan.seeded(lambda: lingbot.Pipeline(), torch.bfloat16)
    reports = []
    with worldpager.attach(
        pipeline, store=tmp_path / "store", dram="64MiB", retrieve=2, **window(3, {})
    ) as attachment:
        assert attachment.frontend == "lingbot-world"
        attachment.listeners.append(lambda step, report, _: reports.append((step, report)))
        run(pipeline, 20, 3, folder)
        run(pipeline, 5, 3, folder)
    path = camera_path(folder, 4 * 59 + 1, 3)
    for (step, report), poses in zip(reports[:20], path, strict=True):
        np.testing.assert_array_equal(step.poses, poses)
        assert len(report.retrieved) == min(2, max(0, step.chunk - 2))
    assert any(r.retrieved and r.retrieved[-1] < s.chunk - 3 for s, r in reports[:20])
    assert [step.chunk for step, _ in reports[20:]] == list(range(5))  # begun anew


def test_camera_path_is_spread_over_the_video_frames(folder: Path) -> None:
    path = camera_path(folder, 81, 3)
    assert path.shape == (7, 3, 4, 4)
    poses = np.load(folder / "poses.npy")
    np.testing.assert_allclose(path.reshape(-1, 4, 4), poses[:81:4], atol=1e-12)
    assert camera_path(folder, 81, 4).shape == (5, 4, 4, 4)
    np.testing.assert_allclose(camera_path(folder, 81, 4)[-1, -1], poses[80], atol=1e-12)


def test_too_short_a_path_is_refused(folder: Path) -> None:
    with pytest.raises(FrontendError, match="too few"):
        camera_path(folder, 5, 3)
    np.save(folder / "poses.npy", np.zeros((9, 3, 4)))
    with pytest.raises(FrontendError, match="shape"):
        camera_path(folder, 81, 3)


def test_another_size_is_refused_with_what_to_give(folder: Path, tmp_path: Path) -> None:
    pipeline = wan.seeded(lambda: lingbot.Pipeline(), torch.float32)
    with (
        worldpager.attach(
            pipeline, store=tmp_path / "store", dram="64MiB", window={"tokens_per_frame": 16}
        ),
        pytest.raises(FrontendError, match="'tokens_per_frame': 8"),
    ):
        run(pipeline, 2, 3, folder)


def test_a_forward_outside_generate_is_left_alone(folder: Path, tmp_path: Path) -> None:
    pipeline = wan.seeded(lambda: lingbot.Pipeline(local=6), torch.float32)
    warm = pipeline._initialize_self_kv_cache(2, [1, 48, 2, 64], torch.float32, "cpu")
    with worldpager.attach(
        pipeline, store=tmp_path / "store", dram="64MiB", **window(3, {})
    ) as attachment:
        pipeline.model(
            x=[torch.zeros(4, 3, 4, 8)], t=torch.tensor(1.0), context=torch.zeros(wan.DIM),
            kv_cache=warm, poses=torch.zeros(3, 4, 4),
        )  # fmt: skip
        assert warm[0]["k"].shape[1] == 48
        assert attachment.chunk is None


def test_several_processes_are_refused(tmp_path: Path) -> None:
    pipeline = wan.seeded(lambda: lingbot.Pipeline(), torch.float32)
    pipeline.sp_size = 8
    with pytest.raises(FrontendError, match="sp_size=8"):
        worldpager.attach(pipeline, store=tmp_path / "store")

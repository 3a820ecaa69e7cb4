"""The shipped weights: loaded without pickle, and able to recall."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

from worldpager.model_adapter.builtin.model import WEIGHTS, ModelConfig, WorldModel, load_model
from worldpager.model_adapter.builtin.pipeline import RolloutPipeline
from worldpager.model_adapter.builtin.recall import (
    ExactMemory,
    circling_path,
    psnr,
    revisit_psnr,
    roll_out,
    turning_path,
    window_recall,
)
from worldpager.model_adapter.builtin.rooms import Room, render
from worldpager.model_adapter.builtin.scenes import FRAMES


@pytest.fixture(scope="module")
def model() -> WorldModel:
    return load_model()


def test_weights_file_is_small_and_says_where_it_comes_from() -> None:
    assert WEIGHTS.stat().st_size < 10_000_000
    with safe_open(str(WEIGHTS), framework="pt") as file:
        facts = file.metadata()
        dtypes = {file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    assert dtypes == {torch.float32}
    assert ModelConfig(**json.loads(facts["config"])) == ModelConfig()
    assert {"steps", "seed", "minutes", "with", "without"} <= facts.keys()


def test_loaded_model_is_ready_for_inference(model: WorldModel) -> None:
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_500_000


def test_a_view_comes_back_only_with_its_chunk(model: WorldModel) -> None:
    figures = window_recall(model, worlds=8)
    assert figures["with"] > 22.0
    assert figures["with"] - figures["without"] > 7.0


def test_a_rollout_recalls_its_first_lap_only_with_memory(model: WorldModel) -> None:
    lap, chunks = 36, 60
    poses = turning_path(chunks, lap=lap)
    truth = render(Room.random(42), poses.reshape(-1, 4, 4)).reshape(chunks, FRAMES, 32, 32, 3)
    means = {}
    for name in ("memory", "window"):
        pipeline = RolloutPipeline(model, seed=3)
        if name == "memory":
            pipeline.before_chunk = ExactMemory(poses)
        frames = roll_out(pipeline, poses, observed=truth[:lap])
        means[name] = float(np.mean(revisit_psnr(frames, poses, lap)))
    assert means["memory"] > 22.0
    assert means["memory"] - means["window"] > 8.0


def test_psnr() -> None:
    zero = torch.zeros(4)
    assert psnr(zero, zero) == float("inf")
    assert psnr(zero + 0.1, zero) == pytest.approx(20.0, abs=1e-4)
    assert psnr(zero + 0.2, zero, peak=2.0) == pytest.approx(20.0, abs=1e-4)


def test_paths_come_back_to_where_they_were() -> None:
    turning = turning_path(73).reshape(-1, 4, 4)
    assert np.allclose(turning[108 - 5], turning[108 + 5])
    assert np.allclose(turning[0], turning[216])
    circle = circling_path(37).reshape(-1, 4, 4)
    assert np.allclose(circle[0], circle[108])
    step = circle[1, :3, 3] - circle[0, :3, 3]
    assert step @ circle[0, :3, 2] > 0.99 * np.linalg.norm(step)

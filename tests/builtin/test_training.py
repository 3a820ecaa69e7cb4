"""The training script: its random draws stay in bounds, and it trains, saves and repeats itself."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from worldpager.model_adapter.builtin import training
from worldpager.model_adapter.builtin.model import load_model
from worldpager.model_adapter.builtin.scenes import (
    CHUNKS,
    FRAMES,
    REACH,
    jumping,
    make_scenes,
    rollout_like,
)


def test_positions_ascend_within_the_table() -> None:
    rng = np.random.default_rng(0)
    drawn = np.stack([training.random_positions(rng, 1024) for _ in range(500)])
    assert (np.diff(drawn, axis=1) >= FRAMES).all()
    assert drawn.min() >= 0
    assert drawn.max() + FRAMES <= 1024
    assert drawn.max() > 900


def test_chunks_see_only_earlier_ones_and_never_lose_sink_and_recent_alone() -> None:
    seen = training.visible_chunks(np.random.default_rng(0), 64)
    assert not seen.triu().any()
    sparse = (seen[:, -1].sum(-1) == 2) & seen[:, -1, 0] & seen[:, -1, -2]
    assert sparse.any()
    masks = training.attention_masks(seen, 4)
    assert [mask.shape for mask in masks] == [(128, 1, 1, 4 * (i + 1)) for i in range(CHUNKS)]
    assert all((mask[..., -4:] == 0).all() for mask in masks)


def test_levels_are_often_pure_noise() -> None:
    level = training.random_levels(np.random.default_rng(0), 500)
    assert float(level.min()) >= 0.0
    assert float((level == 1).float().mean()) == pytest.approx(0.2, abs=0.05)
    assert float(level.median()) > 0.7


@pytest.mark.parametrize("draw", [rollout_like, jumping])
def test_cameras_stay_in_the_room(draw: object) -> None:
    assert callable(draw)
    rng = np.random.default_rng(1)
    scenes = make_scenes(rng, [draw(rng) for _ in range(20)])
    assert scenes.frames.shape == (20, CHUNKS * FRAMES, 3, 32, 32)
    assert float(scenes.poses[..., (0, 2), 3].abs().max()) <= REACH + 1e-6
    assert float(scenes.poses[..., 1, 3].abs().max()) == 0.0
    turned = scenes.poses[..., :3, :3]
    torch.testing.assert_close(turned @ turned.mT, torch.eye(3).expand_as(turned))


def test_perturbed_context_keeps_the_scene() -> None:
    rng, noise = np.random.default_rng(2), torch.Generator().manual_seed(2)
    scenes = make_scenes(rng, [jumping(rng) for _ in range(8)])
    changed = training.perturbed(scenes.frames, rng, noise)
    error = (changed - scenes.frames).square().mean((2, 3, 4))
    assert float(error.min()) == 0.0
    assert 0.0 < float(error.max()) < 0.3


def test_two_steps_repeat_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "BATCH", 2)
    monkeypatch.setattr(training, "window_recall", lambda model: {"with": 0.0, "without": 0.0})
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in files:
        training.train(path, steps=2, minutes=60, seed=1, scratch=tmp_path)
    first, second = (load_file(str(path)) for path in files)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert load_model(files[0]).config == load_model(files[1]).config

"""The training script: its random draws stay in bounds, and it trains, saves and repeats itself."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from worldpager.model_adapter.builtin import contexts, training
from worldpager.model_adapter.builtin.contexts import CHUNKS
from worldpager.model_adapter.builtin.layers import damaged
from worldpager.model_adapter.builtin.model import ModelConfig, load_model
from worldpager.model_adapter.builtin.scenes import (
    FRAMES,
    REACH,
    jumping,
    make_scenes,
    rollout_like,
)


def test_positions_ascend_within_the_table() -> None:
    rng = np.random.default_rng(0)
    drawn = np.stack([contexts.random_positions(rng, 1024) for _ in range(500)])
    assert (np.diff(drawn, axis=1) >= FRAMES).all()
    assert drawn.min() >= 0
    assert drawn.max() + FRAMES <= 1024
    assert drawn.max() > 900


def test_chunks_see_only_earlier_ones_and_now_and_then_sink_and_recent_alone() -> None:
    seen = contexts.visible_chunks(np.random.default_rng(0), 64)
    assert not np.triu(seen).any()
    sparse = (seen[:, -1].sum(-1) == 2) & seen[:, -1, 0] & seen[:, -1, -2]
    assert sparse.any()


def test_old_chunks_lose_tokens_and_sink_and_predecessor_none() -> None:
    rng, config = np.random.default_rng(0), ModelConfig()
    kept = contexts.kept_tokens(rng, 64, config)
    frame = config.tokens_per_frame
    share = kept[:, 1:].mean(-1)
    assert kept[:, 0].all()
    assert (share == 1).all(1).any()
    assert share.min() < 0.3
    anchored = kept[:, 1:, :frame].all(-1) & ~kept[:, 1:, frame:].all(-1)
    assert anchored.any()

    seen = np.tri(CHUNKS, k=-1, dtype=bool)[None].repeat(64, 0)
    seen[:, -1, 1] = False
    masks = contexts.attention_masks(seen, kept)
    tokens = config.tokens_per_chunk
    assert [mask.shape for mask in masks] == [(128, 1, 1, tokens * (i + 1)) for i in range(CHUNKS)]
    last = (masks[-1][::2, 0, 0] == 0).view(64, CHUNKS, tokens).numpy()
    assert last[:, [0, -2, -1]].all()
    assert not last[:, 1].any()
    assert (last[:, 2:-2] == kept[:, 2:-2]).all()


def test_damage_is_of_the_size_asked_for() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 1, CHUNKS, 48, 2, 64) * torch.rand(2, 1, CHUNKS, 48, 2, 1)
    damage = torch.rand(2, CHUNKS) * (torch.arange(CHUNKS) % 2)
    error = (damaged(x, damage) - x).square().sum((1, 3, 4, 5)) / x.square().sum((1, 3, 4, 5))
    torch.testing.assert_close(error.sqrt(), damage, rtol=0.1, atol=0)


def test_a_dream_is_held_to_its_own_first_visits() -> None:
    rng = np.random.default_rng(3)
    motions = [[*jumping(rng, CHUNKS - 1)] for _ in range(2)]
    scenes = make_scenes(rng, [[*chunks, chunks[2]] for chunks in motions])
    starts = np.arange(CHUNKS) * FRAMES
    dream = contexts.dreamed(load_model(), scenes.frames, scenes.poses, starts, seen=1)
    assert torch.equal(dream[:, :FRAMES], scenes.frames[:, :FRAMES])
    assert not torch.equal(dream[:, FRAMES:], scenes.frames[:, FRAMES:])
    truth = contexts.truth_of_a_dream(scenes.frames, scenes.poses, dream, limit=0.0)
    last, visit = slice(-FRAMES, None), slice(2 * FRAMES, 3 * FRAMES)
    assert torch.equal(truth.frames[:, last], dream[:, visit])
    assert (truth.counts[:, -1] == 1).all()
    assert (truth.counts[:, 0] == 0).all()


def test_levels_are_often_pure_noise() -> None:
    level = training.random_levels(np.random.default_rng(0), 500)
    assert float(level.min()) >= 0.0
    assert float((level == 1).float().mean()) == pytest.approx(0.2, abs=0.05)
    assert float(level.median()) > 0.7


@pytest.mark.parametrize("draw", [rollout_like, jumping])
def test_cameras_stay_in_the_room(draw: object) -> None:
    assert callable(draw)
    rng = np.random.default_rng(1)
    scenes = make_scenes(rng, [draw(rng, CHUNKS) for _ in range(20)])
    assert scenes.frames.shape == (20, CHUNKS * FRAMES, 3, 32, 32)
    assert float(scenes.poses[..., (0, 2), 3].abs().max()) <= REACH + 1e-6
    assert float(scenes.poses[..., 1, 3].abs().max()) == 0.0
    turned = scenes.poses[..., :3, :3]
    torch.testing.assert_close(turned @ turned.mT, torch.eye(3).expand_as(turned))


def test_perturbed_context_keeps_the_scene() -> None:
    rng, noise = np.random.default_rng(2), torch.Generator().manual_seed(2)
    scenes = make_scenes(rng, [jumping(rng, CHUNKS) for _ in range(8)])
    changed = contexts.perturbed(scenes.frames, rng, noise)
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

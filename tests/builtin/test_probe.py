"""The built-in sampler's clean predictions: free, repeatable, and worth pruning by."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from worldpager.errors import ConfigError
from worldpager.model_adapter.builtin.model import WorldModel, load_model
from worldpager.model_adapter.builtin.pipeline import RolloutPipeline
from worldpager.model_adapter.builtin.recall import revisit_psnr, roll_out, turning_path
from worldpager.model_adapter.builtin.rooms import Room, render
from worldpager.model_adapter.builtin.scenes import FRAMES
from worldpager.model_adapter.config import MemoryConfig
from worldpager.model_adapter.memory import WorldMemory
from worldpager.model_adapter.pruning import CleanProbe
from worldpager.model_adapter.rollout import (
    MemoryHook,
    RolloutConfig,
    builtin_spec,
    run_rollout,
)
from worldpager.prefetch.paths import make_path
from worldpager.quant.pruning import CleanPredictions
from worldpager.quant.pruning.consistency import probe_seed, token_scores


@pytest.fixture(scope="module")
def model() -> WorldModel:
    return load_model()


def probed(
    model: WorldModel, *, probe: CleanProbe | None, seen: int = 0, chunks: int = 3
) -> tuple[torch.Tensor, list[CleanPredictions | None], RolloutPipeline]:
    poses = turning_path(chunks)
    truth = render(Room.random(42), poses[:seen].reshape(-1, 4, 4)).reshape(seen, FRAMES, 32, 32, 3)
    taken: list[CleanPredictions | None] = []

    def note(chunk: int, pipeline: RolloutPipeline) -> None:
        if probe is not None:
            taken.append(probe.take())

    pipeline = RolloutPipeline(model, seed=3, probe=probe, before_chunk=note)
    frames = roll_out(pipeline, poses, observed=truth if seen else None)
    if probe is not None:
        taken.append(probe.take())
    return frames, taken, pipeline


@pytest.mark.parametrize("seen", [0, 2])
def test_looking_changes_nothing(model: WorldModel, seen: int) -> None:
    plain, _, without = probed(model, probe=None, seen=seen)
    frames, taken, with_probe = probed(model, probe=CleanProbe((8, 8)), seen=seen)
    assert torch.equal(plain, frames)
    for ours, theirs in zip(with_probe.kv_cache, without.kv_cache, strict=True):
        for name in ("k", "v", "local_end_index", "global_end_index"):
            assert torch.equal(ours[name], theirs[name])
    assert taken[0] is None and all(found is not None for found in taken[1:])


def test_predictions_are_the_samplers_own(model: WorldModel) -> None:
    frames, taken, _ = probed(model, probe=CleanProbe((8, 8)))
    for chunk, found in enumerate(taken[1:]):
        assert found is not None and found.grid == (3, 4, 4)
        final = (found.final.permute(1, 2, 3, 0).clamp(-1, 1) + 1) / 2
        assert torch.equal(final, frames[chunk])
        scores = token_scores(found)
        assert scores.shape == (48,) and (scores > 0).all()


def test_an_observed_chunk_is_probed_with_noise_of_its_own(model: WorldModel) -> None:
    _, taken, pipeline = probed(model, probe=CleanProbe((8, 8)), seen=2, chunks=2)
    _, again, _ = probed(model, probe=CleanProbe((8, 8)), seen=2, chunks=2)
    found, same = taken[2], again[2]
    assert found is not None and same is not None
    assert torch.equal(found.probe, same.probe)
    # by hand: the clean chunk at the probe step's level, seen with the same cache
    noise = np.random.default_rng(probe_seed(3, 1)).standard_normal((1, 3, 3, 32, 32), np.float32)
    clean = found.final.transpose(0, 1)[None]
    level = pipeline.levels[2]
    noisy = (1 - level) * clean + level * torch.from_numpy(noise)
    poses = torch.as_tensor(turning_path(2)[1], dtype=torch.float32)[None]
    with torch.no_grad():
        by_hand = model(
            noisy, torch.full((1,), level), poses, kv_cache=pipeline.kv_cache,
            current_start=pipeline.current_start(1),
        )  # fmt: skip
    assert torch.equal(by_hand[0].transpose(0, 1), found.probe)


def test_a_step_that_is_none_is_refused(model: WorldModel) -> None:
    with pytest.raises(ConfigError, match="step 3 cannot be compared with the last of 4"):
        RolloutPipeline(model, probe=CleanProbe(probe_step=3))


def test_a_pruned_rollout_stores_less_and_says_what(tmp_path: Path) -> None:
    config = RolloutConfig(
        chunks=30, path=make_path("yaw-return", 30, 3), dram_bytes=2**20, out_dir=tmp_path,
        store_dir=tmp_path / "s", pruning="decoprune:0.0007", on_miss="wait",
    )  # fmt: skip
    with closing(run_rollout(config)) as steps:
        lines = list(steps)
    sizes = {line.commit_bytes for line in lines[2:]}
    kept = [line.commit_tokens for line in lines[1:]]
    assert kept[0] == 48 and len(set(kept)) > 3 and len(sizes) > 1
    assert all(line.active_tokens <= line.dense_tokens for line in lines)
    assert sum(line.active_tokens for line in lines) < sum(line.dense_tokens for line in lines)


@pytest.mark.slow
def test_unsure_tokens_are_worth_more_than_sure_ones(model: WorldModel, tmp_path: Path) -> None:
    """At equal rate, over rooms: what DeCoPrune keeps recalls better than what it drops first."""
    lap, chunks, rooms = 36, 60, 6
    poses = turning_path(chunks, lap=lap)
    found: dict[str, list[float]] = {
        "none": [],
        "decoprune:0.01": [],
        "reversed/decoprune:0.01": [],
    }
    for room in range(rooms):
        truth = render(Room.random(30_000 + room), poses.reshape(-1, 4, 4))
        truth = truth.reshape(chunks, FRAMES, 32, 32, 3)
        for policy, values in found.items():
            config = MemoryConfig(
                store=tmp_path / f"{room}-{len(values)}-{policy.replace('/', '-')}", dram=2**24,
                codec="bf16", pruning=policy, on_miss="wait",
            )  # fmt: skip
            with WorldMemory(config, builtin_spec(model.config, 3, "builtin")) as memory:
                pipeline = RolloutPipeline(
                    model, room, before_chunk=MemoryHook(memory, poses), probe=CleanProbe((8, 8))
                )
                frames = roll_out(pipeline, poses, observed=truth[:lap])
            values.append(float(np.mean(revisit_psnr(frames, poses, lap))))
    whole, kept, dropped = (np.array(values) for values in found.values())
    assert (kept > dropped).mean() > 0.8
    assert kept.mean() > dropped.mean() + 0.5
    assert whole.mean() > kept.mean() - 2

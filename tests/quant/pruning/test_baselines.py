"""What pruning is compared with, against the official code's numbers, and policies by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from worldpager.errors import ConfigError
from worldpager.quant.pruning import (
    CleanPredictions,
    FinishedChunk,
    get_pruning,
    pruning_names,
)
from worldpager.quant.pruning.baselines import (
    block_scores,
    middle_start,
    sink_and_recent,
    strip_scores,
)
from worldpager.quant.pruning.policies import Consistency
from worldpager.quant.pruning.preference import highest

VECTOR = json.loads(
    (Path(__file__).parents[1] / "vectors" / "decoprune_baselines.json").read_text()
)
FRAMES, ROWS, COLUMNS = 3, 4, 4
TOKENS = FRAMES * ROWS * COLUMNS


def chunk(seed: int = 0, number: int = 5, layers: int = 2, scored: bool = True) -> FinishedChunk:
    made = torch.Generator().manual_seed(seed)
    keys = [torch.randn(TOKENS, 2, 8, generator=made) for _ in range(layers)]
    final, noise = torch.randn(2, 4, FRAMES, 2 * ROWS, 2 * COLUMNS, generator=made)
    predictions = CleanPredictions(final + 0.31 * noise, final)
    return FinishedChunk(number, FRAMES, keys, predictions if scored else None)


def ids_of(name: str, subject: FinishedChunk) -> list[list[int]]:
    policy = get_pruning(name)
    assert policy is not None
    found = policy.prefer(subject)
    assert found is not None
    return [preference.ids().tolist() for preference in found]


def test_strips() -> None:
    case = VECTOR["forcingkv_patch_scores"]
    keys = torch.tensor([case["prev_keys"], case["cur_keys"]])[:, :, None]
    scores = strip_scores(keys, case["patches"])[0]
    np.testing.assert_allclose(scores, case["expect"], atol=1e-5)
    assert highest(-scores, 1).tolist() == case["lowest_1"]
    assert highest(-np.array([0.5, 0.9, 0.5, 0.5]), 2).tolist() == case["lowest_tie_break"]


def test_windows_of_whole_frames() -> None:
    for case in VECTOR["middle_window_start_frame"]:
        assert middle_start(case["chunk"]) == case["start"]
    case = VECTOR["sink_recent_ids"]
    found = sink_and_recent(case["frames_seen"], case["frame_tokens"], case["sink"], case["recent"])
    assert found.tolist() == case["expect"]
    case = VECTOR["streaming_finish_chunk"]
    recent = case["local"] - case["sink"]
    assert sink_and_recent(case["frames_seen"], 1, case["sink"], recent).tolist() == case["kept"]
    assert sink_and_recent(3, 2, 4, 4).tolist() == [0, 1, 2, 3, 4, 5], "none is named twice"


def test_blocks_are_two_dimensional_and_look_one_frame_ahead() -> None:
    keys = torch.randn(2, 16, 1, 3, generator=torch.Generator().manual_seed(0))
    keys[1] = keys[0]
    keys[1, [2, 3, 6, 7]] *= -1  # the block at the top right of a 4 x 4 frame
    scores, owner = block_scores(keys, (4, 4), (2, 2))
    np.testing.assert_allclose(scores, [[1, -1, 1, 1]], atol=1e-6)
    assert np.flatnonzero(owner == 1).tolist() == [2, 3, 6, 7]
    with pytest.raises(ConfigError, match="cannot be cut"):
        block_scores(keys, (4, 4), (3, 2))


@pytest.mark.parametrize("name", [n for n in pruning_names() if n != "none"])
def test_controls_keep_as_many_tokens_as_what_they_control(name: str) -> None:
    subject = chunk()
    chosen = ids_of(name, subject)
    for control in ("random", "reversed"):
        other = ids_of(f"{control}/{name}", subject)
        assert [len(ids) for ids in other] == [len(ids) for ids in chosen]
        assert other != chosen
    assert ids_of(f"random/{name}", subject) == ids_of(f"random/{name}", subject)
    assert all(ids == sorted(set(ids)) and ids[-1] < TOKENS for ids in chosen)
    assert len({len(ids) for ids in chosen}) == 1, "all layers keep equally many"


@pytest.mark.parametrize(
    "name", ["worldkv", "worldkv:0.25", "worldkv-pooled", "worldkv-paper", "decoprune", "forcingkv"]
)
def test_no_chunk_exceeds_what_its_policy_says(name: str) -> None:
    policy = get_pruning(name)
    assert policy is not None
    for ids in ids_of(name, chunk()):
        assert len(ids) <= policy.most_tokens(FRAMES, ROWS * COLUMNS)


def test_reversed_keeps_what_would_go_first() -> None:
    subject = chunk()
    kept, reverse = (
        ids_of("decoprune:0.12", subject)[0],
        ids_of("reversed/decoprune:0.12", subject)[0],
    )
    assert 0 < len(kept) < TOKENS / 2
    assert not set(kept) & set(reverse)


def test_decoprune_has_one_mask_for_all_layers_and_worldkv_one_for_each() -> None:
    assert len(ids_of("decoprune", chunk())) == 1
    first, second = ids_of("worldkv", chunk())
    assert first != second and len(first) == len(second)


def test_a_chunk_of_which_nothing_would_stay_keeps_its_best_token() -> None:
    latents = torch.zeros(4, FRAMES, 2 * ROWS, 2 * COLUMNS)
    early = latents.clone()
    early[:, 1, 2, 6] = 0.1
    subject = FinishedChunk(3, FRAMES, chunk().keys, CleanPredictions(early, latents))
    assert ids_of("decoprune:0.1", subject) == [[16 + 4 + 3]]


def test_scores_that_are_not_finite_stay_and_the_floor_holds() -> None:
    latents = torch.zeros(4, FRAMES, 2 * ROWS, 2 * COLUMNS)
    early = latents.clone()
    early[:, 0, 0, 0] = torch.nan
    early[:, 2, 7, 7] = 0.1
    subject = FinishedChunk(3, FRAMES, chunk().keys, CleanPredictions(early, latents))
    assert ids_of("decoprune", subject) == [[0]]
    floored = Consistency("decoprune", floor=2).prefer(subject)
    assert floored is not None
    # frame 1 has nothing above the floor's own threshold
    assert floored[0].ids().tolist() == [0, 1, 32, 47]


def test_a_chunk_without_predictions_is_kept_whole() -> None:
    for name in ("decoprune", "random/decoprune"):
        policy = get_pruning(name)
        assert policy is not None and policy.needs_predictions
        assert policy.prefer(chunk(scored=False)) is None


def test_other_latents_are_refused() -> None:
    wrong = CleanPredictions(*torch.zeros(2, 4, FRAMES, 2 * ROWS, COLUMNS))
    policy = get_pruning("decoprune")
    assert policy is not None
    with pytest.raises(ConfigError, match="the chunk has 48"):
        policy.prefer(FinishedChunk(3, FRAMES, chunk().keys, wrong))


def test_strips_and_blocks_are_kept_whole() -> None:
    (ids,) = ids_of("forcingkv", chunk())  # strips of 8: 6 do not divide 16
    later = [i for i in ids if i >= 16]
    assert len(ids) == 16 + 16 and all(later.count(i) == 1 for i in later)
    strips = {i // 8 for i in later}
    assert sorted(later) == [8 * s + i for s in sorted(strips) for i in range(8)]
    (ids,) = ids_of("temporal-difference", chunk())  # a block of 4 x 4 is a whole frame here
    assert ids[-16:] == list(range(32, 48)) and len(ids) == 32


def test_names() -> None:
    assert get_pruning("none") is None
    policy = get_pruning("random/worldkv:0.25")
    assert policy is not None and policy.name == "random/worldkv"
    for wrong, why in (
        ("worldky", "known are none, worldkv"),
        ("shuffled/worldkv", "no pruning policy"),
        ("worldkv:half", "no number"),
        ("worldkv:2", "keep ratio"),
        ("decoprune:nan", "finite"),
        ("random/none", "no pruning policy|no number|none"),
    ):
        with pytest.raises(ConfigError, match=why):
            get_pruning(wrong)

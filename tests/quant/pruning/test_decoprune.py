"""DeCoPrune's mask, schedule, positions and head map against the official code's numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worldpager.errors import ConfigError
from worldpager.quant.pruning.baselines import sink_and_recent
from worldpager.quant.pruning.consistency import (
    CleanPredictions,
    due,
    probe_seed,
    renoised,
    spatial_floor,
    threshold_mask,
    token_scores,
)
from worldpager.quant.pruning.heads import HeadMap
from worldpager.quant.pruning.preference import highest, random_order
from worldpager.quant.rope import RopeLayout

VECTORS = Path(__file__).parents[1] / "vectors"
MASK = json.loads((VECTORS / "decoprune_mask.json").read_text())
ROPE = json.loads((VECTORS / "decoprune_rope.json").read_text())

NAMES = {
    "mse": "mse",
    "normalized_mse": "normalised",
    "chunk_normalized_mse": "chunk-normalised",
    "cosine": "cosine",
}


def predictions() -> CleanPredictions:
    latent = MASK["latent"]
    return CleanPredictions(torch.tensor(latent["probe_x0"]), torch.tensor(latent["final_x0"]))


@pytest.mark.parametrize("name", NAMES)
def test_scores(name: str) -> None:
    found = token_scores(predictions(), NAMES[name])
    np.testing.assert_allclose(found, MASK["latent"]["scores"][name], rtol=1e-5, atol=1e-5)


def test_the_threshold_is_strict_and_what_is_not_finite_stays() -> None:
    case = MASK["threshold"]
    scores = [float(score) for score in case["scores"]]
    assert threshold_mask(scores, case["gamma"]).tolist() == [bool(x) for x in case["keep_mse"]]
    cosine = threshold_mask(scores, case["gamma"], "cosine").tolist()
    assert cosine == [bool(x) for x in case["keep_cosine_le"]]
    for gamma in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="finite"):
            threshold_mask(scores, gamma)


def test_spatial_floor() -> None:
    case = MASK["spatial_floor"]
    mask = threshold_mask(case["scores"], case["gamma"])
    found = spatial_floor(
        case["scores"], mask, case["grid"], least=case["min_keep"], block=case["block"]
    )
    assert found.tolist() == [bool(x) for x in case["keep"]]
    case = case["second"]
    mask = threshold_mask(case["scores"], 0.1)
    found = spatial_floor(
        case["scores"], mask, case["grid"], least=case["min_keep"], block=case["block"],
        threshold=case["floor_threshold"],
    )  # fmt: skip
    assert found.tolist() == [bool(x) for x in case["keep"]]


@given(
    seed=st.integers(0, 10_000),
    grid=st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 9)),
    least=st.integers(0, 17),
)
def test_the_floor_only_adds_the_best_of_each_block(seed: int, grid: tuple, least: int) -> None:
    scores = np.random.default_rng(seed).integers(0, 6, grid).astype(float)
    mask = threshold_mask(scores.reshape(-1), 4)
    found = spatial_floor(scores.reshape(-1), mask, grid, least=least, threshold=1).reshape(grid)
    mask = mask.reshape(grid)
    assert (found >= mask).all()
    for frame in range(grid[0]):
        for row in range(0, grid[1], 4):
            for column in range(0, grid[2], 4):
                at = (frame, slice(row, row + 4), slice(column, column + 4))
                if scores[at].max() <= 1:
                    assert np.array_equal(found[at], mask[at])
                    continue
                assert found[at].sum() == max(mask[at].sum(), min(least, found[at].size))
                out, in_ = scores[at][~found[at]], scores[at][found[at]]
                assert not len(out) or not len(in_) or out.max() <= in_.min()


def test_random_control() -> None:
    case = MASK["random_control"]
    order = random_order(case["candidate_count"], case["seed"])
    assert highest(order, case["keep_count"]).tolist() == case["keep"]
    later = random_order(4, case["seed"], first=4)
    assert np.argsort(later).tolist() == np.argsort(order[4:]).tolist(), "an id has one rank"


def test_the_schedule_of_compaction() -> None:
    case = MASK["compaction_schedule"]
    tokens, window = case["tokens_per_chunk"], case["local_window_chunks"]
    stays = np.flatnonzero(threshold_mask(case["scores_each_chunk"], case["gamma"]))
    whole = np.arange(tokens)
    before: set[int] = set()
    for row in case["rows"]:
        chunk = row["chunk"]
        dense = [i for i in range(chunk) if i not in before]
        assert dense == row["dense_chunks_seen_while_denoising"]
        pruned = {i for i in range(chunk) if due(i, chunk, window)}
        assert sorted(pruned - before) == row["compacted_before_its_clean_pass"]
        live = [i * tokens + t for i in range(chunk + 1) for t in (stays if i in pruned else whole)]
        assert live == row["live_ids_after_clean"]
        before = pruned
    assert due(3, 6, window=1) and not due(3, 6, window=2)
    assert not due(0, 1000), "chunk 0 is never scored"


def test_a_rotation_to_a_fractional_position_serves_pruned_rows_too() -> None:
    case = ROPE["rotation"]
    rope = RopeLayout.wan(128)
    assert rope.split[0] == ROPE["temporal_pair_count"]["all_bands_64"]
    np.testing.assert_allclose(rope.frequencies[:2], case["pair_frequencies"], atol=1e-5)
    key = torch.zeros(5, 1, 128)
    key[..., 0::2] = 1
    moved = rope.temporal_rotation(case["virtual"] - case["frame"])
    assert moved is not None and moved.pairs == case["pairs_rotated"]
    rows = torch.tensor([0, 3])
    pruned = moved.apply_(key[rows])
    assert torch.equal(pruned, moved.apply_(key.clone())[rows])
    np.testing.assert_allclose(pruned[0, 0, :2], case["key_pair0_after"], atol=1e-5)
    np.testing.assert_allclose(pruned[0, 0, 2:4], case["key_pair1_after"], atol=1e-5)
    assert torch.equal(pruned[0, 0, 44:46], torch.tensor([1.0, 0.0]))


def test_the_probe_of_an_observed_chunk() -> None:
    assert probe_seed(7, 3) == 7 + 4 * 104729
    clean, noise = torch.tensor([2.0]), torch.tensor([-1.0])
    assert renoised(clean, noise, 0.75).item() == pytest.approx(0.25 * 2 - 0.75)


def test_predictions_must_fit_each_other_and_their_cells() -> None:
    good = torch.zeros(2, 1, 4, 4)
    for other in (torch.zeros(2, 1, 4, 6), torch.zeros(1, 4, 4)):
        with pytest.raises(ConfigError, match="clean predictions"):
            CleanPredictions(good, other)
    with pytest.raises(ConfigError, match="whole cells"):
        CleanPredictions(torch.zeros(2, 1, 5, 4), torch.zeros(2, 1, 5, 4))
    assert CleanPredictions(good, good, cell=(4, 2)).grid == (1, 1, 2)


def head_map(**changes) -> str:
    fields = {
        "model": "m", "num_layers": 2, "num_heads": 3,
        "layers": [
            {"layer_idx": 1, "static_head": [2, 0], "dynamic_head": [1]},
            {"layer_idx": 0, "static_head": [0], "dynamic_head": [1, 2]},
        ],
    }  # fmt: skip
    return json.dumps(fields | changes)


def test_a_head_map_partitions_all_heads_of_its_model() -> None:
    found = HeadMap.read(head_map(), model="m", layers=2, heads=3)
    assert found.static_heads(1) == (2, 0)
    assert found.static_heads(0) == (), "layer 0 is dynamic whatever the map says"
    # 12 frames of 5 tokens, chunks of 4 frames: a static head sees the first and the last
    static = len(sink_and_recent(12, 5, 4, 4))
    assert static == 40
    assert found.active([60, 33], static) == 3 * 60 + 33 + 2 * 40


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": "other"}, "other"),
        ({"num_heads": 4}, "4 heads"),
        ({"num_layers": 3}, "3 layers"),
        ({"layers": [{"layer_idx": 0, "static_head": [], "dynamic_head": [0, 1, 2]}]}, "2 layers"),
        (
            {"layers": [{"layer_idx": 0, "static_head": [], "dynamic_head": [0, 1, 2]}] * 2},
            "2 layers once",
        ),
        (
            {
                "layers": [
                    {"layer_idx": 0, "static_head": [], "dynamic_head": [0, 1, 2]},
                    {"layer_idx": 1, "static_head": [0, 1], "dynamic_head": [1, 2]},
                ]
            },
            "3 heads once",
        ),
        ({"layers": "none"}, "no head map"),
    ],
)
def test_another_head_map_is_refused(changes: dict, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        HeadMap.read(head_map(**changes), model="m", layers=2, heads=3)

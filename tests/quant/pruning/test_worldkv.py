"""WorldKV's compression against the official code's numbers, and where ours is to differ."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worldpager.errors import ConfigError
from worldpager.quant.pruning.similarity import (
    budget_ratio,
    compress_set,
    kept_per_chunk,
    kept_per_frame,
    key_similarity,
    novelty,
)

VECTOR = json.loads(
    (Path(__file__).parents[1] / "vectors" / "worldkv_compression.json").read_text()
)
FRAMES = VECTOR["chunk_frames"]
SIZE = VECTOR["frame_tokens"]
KEYS = torch.tensor(VECTOR["keys"], dtype=torch.float32)[:, None]  # one head


def kept(keys: torch.Tensor, frames: int, ratio: float, *, pooled: bool = False, **options):
    preference = novelty(key_similarity(keys, frames, **options), ratio, pooled=pooled)
    return list(range(len(keys))) if preference is None else preference.ids().tolist()


def test_both_forms_of_the_similarity() -> None:
    centroid, mean = (
        key_similarity(KEYS, FRAMES, form=f).reshape(-1) for f in ("centroid", "mean")
    )
    np.testing.assert_allclose(centroid[SIZE:], VECTOR["cosine_to_centroid_nonanchor"], atol=1e-5)
    np.testing.assert_allclose(mean[SIZE:], VECTOR["paper_mean_cosine_nonanchor"], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "ratio", "pooled"),
    [
        ("per_frame_keep_0_25", 0.25, False),
        ("per_frame_keep_0_5", 0.5, False),
        ("pooled_keep_0_25", 0.25, True),
        ("pooled_keep_0_5", 0.5, True),
        ("per_frame_keep_0_26_ceil", 0.26, False),
        ("keep_1_0_is_identity", 1.0, False),
        ("keep_0_keeps_one_per_frame", 0.0, False),
    ],
)
def test_kept_tokens(name: str, ratio: float, pooled: bool) -> None:
    assert kept(KEYS, FRAMES, ratio, pooled=pooled) == VECTOR["expect"][name]


def test_heads_count_as_one_vector() -> None:
    case = VECTOR["two_heads"]
    keys = torch.tensor(case["keys_token_head_dim"], dtype=torch.float32)
    similarity = key_similarity(keys, case["chunk_frames"]).reshape(-1)
    np.testing.assert_allclose(
        similarity[case["frame_tokens"] :], case["cosine_nonanchor"], atol=1e-5
    )
    assert kept(keys, case["chunk_frames"], 0.5, pooled=True) == case["pooled_keep_0_5"]


def test_the_two_forms_part_where_anchor_keys_differ_in_norm() -> None:
    case = VECTOR["anchor_norm_matters"]
    keys = torch.tensor(case["keys"], dtype=torch.float32)[:, None]
    frames, size = case["chunk_frames"], case["frame_tokens"]
    for form, name in (("centroid", "cosine_to_centroid"), ("mean", "paper_mean_cosine")):
        similarity = key_similarity(keys, frames, form=form).reshape(-1)
        np.testing.assert_allclose(similarity[size:], case[name], atol=1e-5)
    assert kept(keys, frames, 0.25) == case["official_code_keeps"]
    assert kept(keys, frames, 0.25, form="mean") == case["paper_formula_would_keep"]


def test_a_set_with_rotating_anchors() -> None:
    first, second = compress_set([KEYS, KEYS], FRAMES, 0.25, rotate=True)
    together = [*first, *(second + len(KEYS))]
    assert together == VECTOR["anchor_rotate_two_chunks_keep_0_25"]
    assert [len(ids) for ids in compress_set([KEYS] * 2, FRAMES, 1.0)] == [len(KEYS)] * 2


def test_counts_of_real_geometries() -> None:
    expected = VECTOR["kept_token_formula"]
    assert kept_per_chunk(0.25, 3, 880) == expected["F3_880_0_25"]
    assert kept_per_chunk(0.25, 3, 1560) == expected["F3_1560_0_25"]
    assert kept_per_chunk(0.5, 3, 1560) == expected["F3_1560_0_5"]


def test_a_float_a_hair_above_a_whole_number_keeps_no_extra_token() -> None:
    """``ceil(0.07 * 100)`` is 8 in the official code's arithmetic."""
    assert 0.07 * 100 > 7
    assert kept_per_frame(0.07, 100) == 7
    assert kept_per_frame(0.071, 100) == 8


def test_six_chunks_into_the_room_of_three() -> None:
    ratio = budget_ratio(6, 3, 3)
    assert ratio == 0.25
    chunks = [torch.randn(36, 2, 4, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    assert sum(len(ids) for ids in compress_set(chunks, 3, ratio)) == 3 * 36
    assert budget_ratio(3, 3, 3) == 1
    for chunks_, budget in ((6, 1), (3, 4), (0, 1)):
        with pytest.raises(ConfigError):
            budget_ratio(chunks_, budget, 3)


@pytest.mark.parametrize("form", ["centroid", "mean"])
def test_heads_split_over_processes_choose_alike(form: str) -> None:
    keys = torch.randn(30, 4, 8, generator=torch.Generator().manual_seed(1))
    whole = key_similarity(keys, 3, form=form)
    both, parts, found = threading.Barrier(2), [None, None], [None, None]

    def rank(which: int) -> None:
        def reduce(part: torch.Tensor) -> torch.Tensor:
            parts[which] = part
            both.wait(30)
            total = parts[0] + parts[1]
            both.wait(30)
            return total

        found[which] = key_similarity(keys[:, 2 * which : 2 * which + 2], 3, 0, form, reduce)

    threads = [threading.Thread(target=rank, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0], whole, atol=1e-6)


@given(
    seed=st.integers(0, 10_000),
    frames=st.integers(2, 4),
    size=st.integers(1, 9),
    ratio=st.floats(0, 1),
    anchor=st.integers(0, 3),
    pooled=st.booleans(),
)
def test_the_anchor_stays_and_the_count_is_the_formula(
    seed: int, frames: int, size: int, ratio: float, anchor: int, pooled: bool
) -> None:
    anchor %= frames
    keys = torch.randn(frames * size, 2, 4, generator=torch.Generator().manual_seed(seed))
    similarity = key_similarity(keys, frames, anchor)
    preference = novelty(similarity, ratio, anchor, pooled)
    if preference is None:
        assert kept_per_chunk(ratio, frames, size) == frames * size
        return
    ids = preference.ids()
    assert len(ids) == kept_per_chunk(ratio, frames, size)
    assert (np.diff(ids) > 0).all()
    assert set(range(anchor * size, (anchor + 1) * size)) <= set(ids.tolist())
    dropped = np.setdiff1d(np.arange(frames * size), ids)
    flat = similarity.reshape(-1)
    for frame in range(frames):
        mine = slice(None) if pooled else np.s_[frame * size : (frame + 1) * size]
        pool = np.arange(frames * size)[mine]
        rest = np.intersect1d(pool, dropped)
        stays = np.setdiff1d(
            np.intersect1d(pool, ids), np.arange(anchor * size, anchor * size + size)
        )
        if len(rest) and len(stays):
            assert flat[stays].max() <= flat[rest].min()


def test_equal_tokens_stay_by_the_smaller_id() -> None:
    keys = torch.ones(12, 1, 2)
    assert kept(keys, 3, 0.5) == [0, 1, 2, 3, 4, 5, 8, 9]


def test_a_token_that_cannot_be_judged_is_not_dropped() -> None:
    keys = KEYS.clone()
    keys[5] = torch.nan
    assert 5 in kept(keys, FRAMES, 0.25)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_ratios_that_are_none(ratio: float) -> None:
    with pytest.raises(ConfigError, match="keep ratio"):
        kept_per_frame(ratio, 10)


def test_tokens_that_are_not_whole_frames() -> None:
    with pytest.raises(ConfigError, match="not 3 frames"):
        key_similarity(KEYS[:10], 3)

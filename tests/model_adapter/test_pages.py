"""The page index: reference vectors of HKV, moved keys, Quest's range."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.model_adapter.synthetic import reference_spec
from worldpager.model_adapter.frontend import KVSpec
from worldpager.model_adapter.pages import mean_query, page_row
from worldpager.prefetch.index import PlaceIndex
from worldpager.prefetch.keys import StoredRow, query_row
from worldpager.prefetch.keys import scores as key_scores
from worldpager.prefetch.ranking import Query, Selection
from worldpager.prefetch.retrieval import get_policy
from worldpager.prefetch.retriever import NOWHERE
from worldpager.quant.rope import RopeLayout

FILE = Path(__file__).parent.parent / "prefetch" / "vectors" / "hkv_pages.json"
VECTOR = json.loads(FILE.read_text())


def hkv_spec() -> KVSpec:
    return KVSpec(
        model="hkv", layers=1, heads=1, head_dim=6, tokens_per_frame=1, frames_per_chunk=2,
        sink_frames=0, recent_frames=0, retrieve_frames=2, rope=RopeLayout(split=(1, 1, 1)),
        dtype=torch.float32,
    )  # fmt: skip


def row_of(row: StoredRow | None) -> np.ndarray:
    assert row is not None
    return row.values * row.scale


def hkv_index() -> tuple[PlaceIndex, dict[tuple[int, int], int]]:
    """The vectors' archive: each official chunk is one prompt's window, its pages our units."""
    index, units = PlaceIndex(), {}
    for chunk, case in enumerate(VECTOR["chunks"]):
        keys = torch.tensor(case["stored_keys"])
        for page, (start, end) in enumerate(case["page_spans"]):
            row = page_row(
                hkv_spec(), keys[None, start:end, None], case["start_frame"] + start, "mean"
            )
            want = VECTOR["page_index"][chunk][page]
            assert row_of(row) == pytest.approx(np.array(want), abs=4e-5)
            units[chunk, page] = len(units)
            index.add(units[chunk, page], NOWHERE, epoch=chunk, keys=row)
        index.set_prompt(chunk, np.mean(case["prompt_tokens"], axis=0))
    return index, units


def test_page_keys_and_scores_are_those_of_the_official_code() -> None:
    index, _ = hkv_index()
    query = query_row(VECTOR["query"], "mean")
    keys = index.view(range(9)).keys
    assert keys is not None
    got = key_scores(keys, query) / np.sqrt(6)
    want = [score for chunk in VECTOR["page_scores"] for score in chunk]
    assert got == pytest.approx(want, abs=5e-5)


@pytest.mark.parametrize("case", VECTOR["retrieved_chronological"])
def test_two_stages_retrieve_what_the_official_code_does(case: str) -> None:
    index, units = hkv_index()
    stage1, k = (int(part.split("=")[1]) for part in case.split(","))
    index.set_prompt(2, np.mean(VECTOR["new_prompt_tokens"], axis=0))
    cosines = [float(index._prompts[2] @ index._prompts[epoch]) for epoch in (0, 1)]
    assert cosines == pytest.approx(VECTOR["prompt_cosine"], abs=1e-5)
    query = Query(keys=np.array(VECTOR["query"], dtype=np.float32), epoch=2)
    ranking = get_policy(f"prompt:stage1={stage1}").rank(index, query, range(9), k)
    pages = {unit: page for page, unit in units.items()}
    got = [list(pages[unit]) for unit in Selection.best(ranking, k).chunks]
    assert got == VECTOR["retrieved_chronological"][case]


@pytest.mark.parametrize("kind", ["mean", "bounds"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_page_looks_the_same_wherever_its_keys_were_rotated_to(kind: str, batch: int) -> None:
    spec = replace(reference_spec(batch=batch), dtype=torch.float32)
    k = torch.randn(batch, spec.tokens_per_chunk, 2, 64, generator=torch.Generator().manual_seed(0))
    assert spec.rope is not None
    rows = []
    for position in (0.0, 37.0, 5_000_000.0, 12.5):
        moved = k.clone()
        for frame in range(3):
            rotation = spec.rope.temporal_rotation(position + frame)
            if rotation is not None:
                rotation.apply_(moved[:, frame * 48 : (frame + 1) * 48])
        before = moved.clone()
        rows.append(row_of(page_row(spec, moved, position, kind)))  # type: ignore[arg-type]
        assert torch.equal(moved, before), "the cache is only looked at"
    flat = k.flatten(2).flatten(0, 1).numpy()
    if kind == "mean":
        want = flat.mean(0)
    else:
        most, least = flat.max(0), flat.min(0)
        want = np.concatenate([(most + least) / 2, (most - least) / 2])
    for row in rows:
        assert np.abs(row - want).max() < 2e-4 * np.abs(want).max()


def test_the_bound_is_at_least_any_tokens_product_and_is_quests_formula() -> None:
    spec = replace(reference_spec(), rope=None, dtype=torch.float32)
    k = torch.randn(1, spec.tokens_per_chunk, 2, 64, generator=torch.Generator().manual_seed(1))
    query = np.random.default_rng(0).standard_normal(128).astype(np.float32)
    row = row_of(page_row(spec, k, 0.0, "bounds"))
    got = float(row @ query_row(query, "bounds"))
    flat = k.flatten(2)[0].numpy()
    products = np.maximum(query * flat.min(0), query * flat.max(0))
    assert got == pytest.approx(products.sum(), rel=1e-3)
    assert got >= (flat @ query).max()


def test_nothing_is_taken_where_no_policy_asks() -> None:
    spec = reference_spec()
    assert page_row(spec, torch.zeros(1, 144, 2, 64), 0.0, "") is None


def test_a_mean_query_joins_heads() -> None:
    q = torch.arange(24.0).view(1, 3, 2, 4)
    assert mean_query(q).tolist() == q[0].mean(0).flatten().tolist()

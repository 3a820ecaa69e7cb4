"""The built-in model's queries, and retrieval by them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from worldpager.model_adapter.builtin import RolloutPipeline, load_model
from worldpager.model_adapter.builtin.queries import chunk_query
from worldpager.model_adapter.driving import RolloutConfig
from worldpager.model_adapter.rollout import run_rollout
from worldpager.prefetch.paths import make_path


def test_the_query_is_that_of_the_first_forward() -> None:
    model = load_model()
    seen: list[torch.Tensor] = []
    path = make_path("walk", 3, 3, seed=4)
    pipeline = RolloutPipeline(model, 4)
    pipeline.generate(0, path[0])
    query = chunk_query(pipeline, 1, path[1])
    norm = model.blocks[0].self_attn.norm_q
    hook = norm.register_forward_hook(lambda module, given, out: seen.append(out))
    pipeline.generate(1, path[1])
    hook.remove()
    assert query.shape == (128,)
    assert query == pytest.approx(seen[0].mean((0, 1)).flatten().numpy(), abs=1e-6)


@pytest.mark.parametrize(
    ("retrieval", "page_frames"), [("query", 1), ("hybrid:camera=1,attention=0.5", None)]
)
def test_rollouts_by_key_choose_early_chunks_and_run_to_the_end(
    tmp_path: Path, retrieval: str, page_frames: int | None
) -> None:
    config = RolloutConfig(
        chunks=30, path=make_path("walk", 30, 3), dram_bytes=2**20, store_dir=tmp_path / "store",
        out_dir=tmp_path, retrieval=retrieval, page_frames=page_frames,
    )  # fmt: skip
    metrics = list(run_rollout(config))
    pages = 1 if page_frames is None else 3
    assert all(len(m.wanted) == 3 * pages for m in metrics[6:])
    ages = [m.chunk - unit // pages for m in metrics[6:] for unit in m.wanted]
    assert min(ages) >= 2 and np.max(ages) > 5

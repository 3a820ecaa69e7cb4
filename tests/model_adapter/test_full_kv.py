"""The pager is invisible: with every evicted chunk brought back, the output is that of full KV."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from worldpager.model_adapter.builtin import RolloutPipeline, load_model
from worldpager.model_adapter.memory import WorldMemory
from worldpager.model_adapter.rollout import MemoryHook, RolloutConfig, builtin_spec
from worldpager.prefetch.paths import make_path

CHUNKS = 14


def paged(store: Path, codec: str, reopen_at: int | None = None) -> list[torch.Tensor]:
    """A rollout whose window is sink, all older chunks from the pager, recent."""
    model, path = load_model(), make_path("loop", CHUNKS, 3)
    spec = builtin_spec(model.config, CHUNKS, "test")
    rollout = RolloutConfig(
        chunks=CHUNKS, path=path, dram_bytes=32 << 20, store_dir=store, out_dir=store, codec=codec,
        positions="absolute", on_miss="wait",
    )  # fmt: skip
    memory = WorldMemory(rollout.memory(), spec)
    pipeline = RolloutPipeline(model, 7, retrieve_chunks=CHUNKS)
    frames = []
    for chunk in range(CHUNKS):
        if chunk == reopen_at:  # everything older comes from NVMe now
            memory.close()
            memory = WorldMemory(rollout.memory(), spec)
        pipeline.before_chunk = MemoryHook(memory, path)
        frames.append(pipeline.generate(chunk, path[chunk]))
    memory.close()
    return frames


@pytest.fixture(scope="module")
def full() -> list[torch.Tensor]:
    pipeline = RolloutPipeline.attend_everything(load_model(), CHUNKS, seed=7)
    path = make_path("loop", CHUNKS, 3)
    return [pipeline.generate(chunk, path[chunk]) for chunk in range(CHUNKS)]


def test_bf16_equals_the_models_own_full_kv_rollout_bit_for_bit(
    tmp_path: Path, full: list[torch.Tensor]
) -> None:
    for chunk, (ours, theirs) in enumerate(zip(paged(tmp_path / "s", "bf16"), full, strict=True)):
        assert torch.equal(ours, theirs), chunk


def test_the_same_through_a_restart(tmp_path: Path, full: list[torch.Tensor]) -> None:
    for chunk, (ours, theirs) in enumerate(
        zip(paged(tmp_path / "s", "bf16", reopen_at=9), full, strict=True)
    ):
        assert torch.equal(ours, theirs), chunk


def test_the_comparison_can_fail(tmp_path: Path, full: list[torch.Tensor]) -> None:
    ours = paged(tmp_path / "s", "int4")
    assert torch.equal(ours[2], full[2]), "nothing retrieved yet"
    assert not torch.equal(ours[-1], full[-1])

"""The frontend without a model: KV that looks like KV, and a memory that keeps it exactly."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from worldpager.errors import ConfigError
from worldpager.model_adapter import synthetic
from worldpager.model_adapter.driving import RolloutConfig, path_step
from worldpager.model_adapter.frontend import KVSpec
from worldpager.model_adapter.memory import WorldMemory
from worldpager.model_adapter.synthetic import (
    OUTLIERS,
    KVFields,
    SyntheticFrontend,
    run_synthetic,
)
from worldpager.prefetch.paths import make_path
from worldpager.quant.codec import get_codec
from worldpager.quant.rope import RopeLayout
from worldpager.quant.shard import ShardLayout

SPEC = KVSpec(
    model="synthetic", layers=5, heads=3, head_dim=64, tokens_per_frame=48, frames_per_chunk=3,
    sink_frames=0, recent_frames=3, retrieve_frames=9, rope=RopeLayout.wan(64),
)  # fmt: skip
KV = tuple[torch.Tensor, torch.Tensor]


def drawn(
    chunk: int,
    layer: int = 0,
    position: float = 0.0,
    seed: int = 0,
    spec: KVSpec = SPEC,
    fields: KVFields | None = None,
) -> KV:
    """K and V ``[batch, tokens, heads, head_dim]``."""
    shape = (spec.batch, spec.tokens_per_chunk, spec.heads, spec.head_dim)
    k, v = torch.empty(shape, dtype=spec.dtype), torch.empty(shape, dtype=spec.dtype)
    fields = fields or KVFields(spec, seed)
    fields.draw(chunk, position)
    fields.write(layer, k, v)
    return k, v


def config(folder: Path, chunks: int, pool_chunks: int, **options: object) -> RolloutConfig:
    codec = str(options.get("codec", "int4"))
    size = ShardLayout.for_chunk(get_codec(codec), [SPEC.block_shape] * SPEC.layers).nbytes
    return RolloutConfig(
        chunks=chunks, path=make_path("yaw-return", chunks, 3), dram_bytes=pool_chunks * size,
        store_dir=folder / "store", out_dir=folder, **options,  # type: ignore[arg-type]
    )  # fmt: skip


def test_the_same_seed_draws_the_same_and_nothing_else_does() -> None:
    first = drawn(3)
    assert all(torch.equal(a, b) for a, b in zip(first, drawn(3), strict=True))
    others = [drawn(4), drawn(3, seed=1), *(drawn(3, layer) for layer in range(1, SPEC.layers))]
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert not torch.equal(a, b)
            assert torch.isfinite(b.float()).all()


def test_keys_are_rms_normed_but_for_a_few_large_channels() -> None:
    k = drawn(3)[0][0].float()
    channels = k.square().mean(0).sqrt().sort(dim=1).values
    ordinary, large = channels[:, : SPEC.head_dim // 2], channels[:, -OUTLIERS:]
    assert ((ordinary > 0.3) & (ordinary < 2)).all()
    assert (large.mean(1) > 5).all()


def test_without_large_channels_all_keys_have_one_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "OUTLIERS", 0)
    for chunk in (0, 3, 700):
        norm = drawn(chunk, position=5.0)[0][0].float().flatten(1).norm(dim=1)
        assert torch.allclose(norm, norm.new_tensor(SPEC.heads * SPEC.head_dim).sqrt(), rtol=0.01)


def test_values_have_heavier_tails_than_a_gaussian() -> None:
    v = drawn(3)[1].float().flatten()
    assert v.square().square().mean() / v.square().mean() ** 2 > 5


def test_neighbouring_tokens_are_alike() -> None:
    for x in drawn(3):
        rows = x[0].float().flatten(1)[: SPEC.tokens_per_frame]
        far = torch.nn.functional.cosine_similarity(rows[:20], rows[20:40]).mean()
        near = torch.nn.functional.cosine_similarity(rows[:-1], rows[1:]).mean()
        assert near > far
        assert near > 0.4


def test_a_position_is_a_rotation_of_the_same_keys() -> None:
    there, here = drawn(3, position=7.0), drawn(3, position=0.0)
    rotation = SPEC.rope.temporal_rotation(7.0) if SPEC.rope else None
    assert rotation is not None
    turned = rotation.apply_(here[0].clone())
    assert torch.allclose(turned.float(), there[0].float(), rtol=0.02, atol=0.02)
    assert torch.equal(here[1], there[1])


def test_batch_items_differ() -> None:
    k, v = drawn(3, spec=replace(SPEC, batch=2))
    assert not torch.equal(k[0], k[1])
    assert not torch.equal(v[0], v[1])


def test_keys_cached_before_rotation_are_refused() -> None:
    with pytest.raises(ConfigError, match="rope"):
        SyntheticFrontend(replace(SPEC, rope=None))


def test_what_comes_back_from_disk_is_what_was_made(tmp_path: Path) -> None:
    chunks, seen = 36, 0
    made = config(tmp_path, chunks, 9, codec="bf16", on_miss="wait", positions="absolute")
    frontend, fields = SyntheticFrontend(SPEC), KVFields(SPEC)
    tokens = SPEC.tokens_per_chunk
    with closing(WorldMemory(made.memory(), SPEC)) as memory:
        for chunk in range(chunks):
            retrieved = memory.boundary(path_step(SPEC, made.path, chunk), frontend.cache)
            for index, other in enumerate(retrieved):
                for layer, cache in enumerate(frontend.kv_cache):
                    rows = slice(index * tokens, (index + 1) * tokens)
                    want = drawn(other, layer, other * SPEC.frames_per_chunk, fields=fields)
                    for name, tensor in zip("kv", want, strict=True):
                        assert torch.equal(cache[name][:, rows], tensor), (chunk, other, layer)
                seen += 1
            frontend.generate(chunk)
        assert memory.stats.reads > 0
    assert seen > 50


def test_a_rollout_spills_where_its_pool_ends(tmp_path: Path) -> None:
    rows = list(run_synthetic(config(tmp_path, 24, 12), SPEC))
    assert [row.chunk for row in rows] == list(range(24))
    assert rows[-1].spill_chunk == 13
    assert rows[-1].rss_bytes > 0
    assert {len(row.retrieved) for row in rows[6:]} == {3}


def test_closing_early_ends_the_rollout(tmp_path: Path) -> None:
    rollout = run_synthetic(config(tmp_path, 24, 12), SPEC)
    next(rollout)
    rollout.close()
    next(run_synthetic(config(tmp_path, 24, 12), SPEC))  # the store is free again


def test_positions_stay_inside_a_short_table(tmp_path: Path) -> None:
    spec = replace(SPEC, rope=RopeLayout.wan(64, table_len=40))
    made = config(tmp_path, 30, 12)
    frontend = SyntheticFrontend(spec)
    with closing(WorldMemory(made.memory(), spec)) as memory:
        for chunk in range(30):  # 90 frames
            memory.boundary(path_step(spec, made.path, chunk), frontend.cache)
            frontend.generate(chunk)
            assert chunk * 3 - frontend.base + 3 <= 40
            ends = {int(cache["local_end_index"]) for cache in frontend.kv_cache}
            assert len(ends) == 1
    assert frontend.base > 0


def test_without_prefetch_nothing_is_loaded_ahead(tmp_path: Path) -> None:
    rows = list(run_synthetic(config(tmp_path, 60, 9, prefetch=False), SPEC))
    assert rows[-1].chunk_reads_total == 0 or np.any([row.stale for row in rows])
    assert sum(row.hits["staged"] for row in rows) == 0

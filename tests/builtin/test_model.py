"""The model's cache: written, rolled and read as the Wan family does it, and exact."""

import numpy as np
import pytest
import torch

from worldpager.errors import WorldPagerError
from worldpager.model_adapter.builtin.contexts import CHUNKS, attention_masks
from worldpager.model_adapter.builtin.layers import Beside, rope_angles, rotate
from worldpager.model_adapter.builtin.model import (
    LayerCache,
    ModelConfig,
    PositionError,
    WorldModel,
    patchify,
    unpatchify,
)
from worldpager.model_adapter.builtin.pipeline import RolloutPipeline
from worldpager.model_adapter.builtin.recall import ExactMemory, moved_in_time, turning_path

TOKENS = ModelConfig().tokens_per_chunk


@pytest.fixture(scope="module")
def model() -> WorldModel:
    """Random weights, gates and output included, so that every path matters."""
    torch.manual_seed(0)
    model = WorldModel()
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    return model.eval().requires_grad_(False)


def inputs(chunk: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Frames, level 0 and poses of a chunk; equal for equal chunks."""
    generator = torch.Generator().manual_seed(chunk)
    frames = torch.randn(batch, 3, 3, 32, 32, generator=generator)
    poses = torch.from_numpy(turning_path(chunk + 1)[chunk]).float().expand(batch, -1, -1, -1)
    return frames, torch.zeros(batch), poses


def run(model: WorldModel, cache: list[LayerCache], chunk: int, batch: int = 1) -> torch.Tensor:
    return model(*inputs(chunk, batch), kv_cache=cache, current_start=chunk * TOKENS)


def ends(cache: list[LayerCache]) -> set[tuple[int, int]]:
    return {(int(c["global_end_index"]), int(c["local_end_index"])) for c in cache}


def test_shapes_are_those_of_the_wan_family() -> None:
    config = ModelConfig()
    assert (config.head_dim, config.tokens_per_frame, config.tokens_per_chunk) == (64, 16, 48)
    assert config.rope_split == (12, 10, 10)
    assert ModelConfig(width=128 * 12, heads=12).rope_split == (22, 21, 21)


def test_patches_round_trip() -> None:
    x = torch.randn(2, 3, 3, 32, 32)
    assert torch.equal(unpatchify(patchify(x, 8).flatten(1, 2), 8, 4), x)


def test_rotation_is_complex_multiplication_of_interleaved_pairs() -> None:
    x = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    angles = rope_angles(5, 4, 10000.0)
    expected = torch.view_as_complex(x.view(1, 5, 2, 4, 2)) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(-2)
    got = rotate(x, angles.cos(), angles.sin())
    torch.testing.assert_close(got, torch.view_as_real(expected).flatten(-2))


def test_repeated_forwards_of_a_chunk_use_the_same_slot(model: WorldModel) -> None:
    cache = model.new_cache(1, 3 * TOKENS)
    run(model, cache, 0)
    first = run(model, cache, 1)
    assert ends(cache) == {(2 * TOKENS, 2 * TOKENS)}
    rows = cache[-1]["k"].clone()
    assert torch.equal(run(model, cache, 1), first)
    assert ends(cache) == {(2 * TOKENS, 2 * TOKENS)}
    assert torch.equal(cache[-1]["k"], rows)


def test_a_full_ring_rolls_behind_the_sink(model: WorldModel) -> None:
    cache, whole = model.new_cache(1, 3 * TOKENS), model.new_cache(1, 5 * TOKENS)
    for chunk in range(3):
        run(model, cache, chunk)
        run(model, whole, chunk)
    before = [{n: c[n].clone() for n in ("k", "v")} for c in cache]
    run(model, cache, 3)
    for old, new in zip(before, cache, strict=True):
        for name in ("k", "v"):
            rows = new[name]
            assert torch.equal(rows[:, :TOKENS], old[name][:, :TOKENS])
            assert torch.equal(rows[:, TOKENS : 2 * TOKENS], old[name][:, 2 * TOKENS :])
            assert not torch.equal(rows[:, 2 * TOKENS :], old[name][:, 2 * TOKENS :])
    assert ends(cache) == {(4 * TOKENS, 3 * TOKENS)}
    run(model, cache, 3)
    assert ends(cache) == {(4 * TOKENS, 3 * TOKENS)}


def test_max_attention_size_cuts_the_oldest(model: WorldModel) -> None:
    whole, cut = model.new_cache(1, 3 * TOKENS), model.new_cache(1, 3 * TOKENS)
    for chunk in range(2):
        run(model, whole, chunk)
        run(model, cut, chunk)
    for cache in cut:  # without chunk 0 in the ring at all
        for name in ("k", "v"):
            cache[name][:, :TOKENS] = cache[name][:, TOKENS : 2 * TOKENS].clone()
        cache["local_end_index"].fill_(TOKENS)
    expected = run(model, cut, 2)
    sizes = [block.self_attn.max_attention_size for block in model.blocks]
    try:
        for block in model.blocks:
            block.self_attn.max_attention_size = 2 * TOKENS
        assert torch.equal(run(model, whole, 2), expected)
    finally:
        for block, size in zip(model.blocks, sizes, strict=True):
            block.self_attn.max_attention_size = size


@pytest.mark.parametrize("capacity", [3, 5, 40])
def test_a_window_gives_the_same_bits_in_any_ring(model: WorldModel, capacity: int) -> None:
    """Full KV against a ring laid by hand: same rows in the same order, same output bits."""
    full = model.new_cache(1, 3 * TOKENS)
    run(model, full, 0)
    run(model, full, 1)
    ring = model.new_cache(1, capacity * TOKENS)
    for source, target in zip(full, ring, strict=True):
        for name in ("k", "v"):
            target[name].fill_(torch.nan)  # nothing outside the window may be read
            target[name][:, : 2 * TOKENS] = source[name][:, : 2 * TOKENS]
        target["global_end_index"].fill_(2 * TOKENS)
        target["local_end_index"].fill_(2 * TOKENS)
    expected = run(model, full, 2)
    assert torch.equal(run(model, ring, 2), expected)
    for source, target in zip(full, ring, strict=True):
        assert torch.equal(source["k"][:, -TOKENS:], target["k"][:, 2 * TOKENS : 3 * TOKENS])


def test_batched_rows_do_not_mix(model: WorldModel) -> None:
    both = model.new_cache(2, 3 * TOKENS)
    for chunk in range(2):
        got = run(model, both, chunk, batch=2)
    for row in range(2):
        alone = model.new_cache(1, 3 * TOKENS)
        for chunk in range(2):
            frames, level, poses = inputs(chunk, 2)
            one = slice(row, row + 1)
            out = model(
                frames[one], level[one], poses[one],
                kv_cache=alone, current_start=chunk * TOKENS,
            )  # fmt: skip
        torch.testing.assert_close(out[0], got[row], atol=2e-2, rtol=0)


def test_positions_end_with_the_table(model: WorldModel) -> None:
    rows, per_frame = model.config.rope_rows, model.config.tokens_per_frame
    for frame, fits in ((rows - 3, True), (rows - 2, False), (-1, False)):
        cache = model.new_cache(1, TOKENS)
        start = frame * per_frame
        for layer in cache:
            layer["global_end_index"].fill_(start)
        if fits:
            assert model(*inputs(0), kv_cache=cache, current_start=start).isfinite().all()
            continue
        with pytest.raises(PositionError, match=r"1024 rows.*lower current_start") as caught:
            model(*inputs(0), kv_cache=cache, current_start=start)
        assert isinstance(caught.value, WorldPagerError)
        assert str(frame) in str(caught.value)


def test_shifting_all_positions_alike_changes_almost_nothing(model: WorldModel) -> None:
    """RoPE is relative: keys rotated back by what current_start is lowered by see the same."""
    near, far = model.new_cache(1, 2 * TOKENS), model.new_cache(1, 2 * TOKENS)
    base = 600
    run(model, near, 0)
    expected = run(model, near, 1)
    offset = base * model.config.tokens_per_frame
    for layer in far:
        layer["global_end_index"].fill_(offset)
    model(*inputs(0), kv_cache=far, current_start=offset)
    got = model(*inputs(1), kv_cache=far, current_start=offset + TOKENS)
    torch.testing.assert_close(got, expected, atol=3e-2, rtol=0)
    back = moved_in_time(far[0]["k"][:, :TOKENS], -base, model.config)
    torch.testing.assert_close(back, near[0]["k"][:, :TOKENS], atol=3e-2, rtol=0)


def test_a_misplaced_chunk_is_refused(model: WorldModel) -> None:
    cache = model.new_cache(1, 2 * TOKENS)
    run(model, cache, 0)
    run(model, cache, 1)
    with pytest.raises(ValueError, match="neither follows nor repeats"):
        run(model, cache, 0)
    small = model.new_cache(1, TOKENS)
    run(model, small, 0)
    with pytest.raises(ValueError, match="allocate more"):
        run(model, small, 1)


def test_training_attends_as_the_cache_does(model: WorldModel) -> None:
    """Chunks side by side under masks, and one after the other through the cache, agree."""
    seen, kept = np.tri(CHUNKS, k=-1, dtype=bool)[None], np.ones((1, CHUNKS, TOKENS), bool)
    parts = [inputs(chunk) for chunk in range(CHUNKS)]
    frames = torch.cat([part[0] for part in parts], 1)
    poses = torch.cat([part[2] for part in parts], 1)
    places = torch.arange(3 * CHUNKS)[None]
    beside = model.denoise_copies(
        frames.repeat(1, 2, 1, 1, 1),
        torch.zeros(1, 2 * CHUNKS),
        poses.repeat(1, 2, 1, 1),
        places.repeat(1, 2),
        Beside(attention_masks(seen, kept), torch.zeros(1, CHUNKS)),
    ).view(2, CHUNKS, 3, 3, 32, 32)
    cache = model.new_cache(1, CHUNKS * TOKENS)
    for chunk in range(CHUNKS):
        got = run(model, cache, chunk)[0]
        for copy in beside:
            torch.testing.assert_close(copy[chunk], got, atol=5e-2, rtol=0)


def test_memory_layout_of_the_exact_memory(model: WorldModel) -> None:
    poses = turning_path(8, lap=3)
    pipeline = RolloutPipeline(model, levels=(1.0,))
    memory = pipeline.before_chunk = ExactMemory(poses)
    for chunk in range(8):
        pipeline.generate(chunk, poses[chunk])
        assert ends(pipeline.kv_cache) == {((chunk + 1) * TOKENS, min(chunk + 1, 6) * TOKENS)}
    sink, retrieved = pipeline.kv_cache[0]["k"][:, :TOKENS], memory.chosen[-1]
    assert torch.equal(sink, memory.kept[0][0][0])
    assert retrieved == sorted(retrieved)
    assert len(retrieved) == 3
    assert set(retrieved) <= set(range(1, 6))
    first = pipeline.kv_cache[0]["k"][:, TOKENS : 2 * TOKENS]
    moved = (3 - retrieved[0]) * 3
    expected = moved_in_time(memory.kept[retrieved[0]][0][0], moved, model.config)
    assert torch.equal(first, expected)
    recent = pipeline.kv_cache[0]["k"][:, 4 * TOKENS : 5 * TOKENS]
    assert torch.equal(recent, memory.kept[6][0][0])


def test_rollouts_repeat_bit_for_bit_and_the_oracle_matches_a_short_one(
    model: WorldModel,
) -> None:
    poses = turning_path(4)
    runs = []
    for pipeline in (
        RolloutPipeline(model, seed=5),
        RolloutPipeline(model, seed=5),
        RolloutPipeline.attend_everything(model, chunks=50, seed=5),
        RolloutPipeline(model, seed=6),
    ):
        runs.append(torch.stack([pipeline.generate(c, poses[c]) for c in range(4)]))
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])  # nothing has been evicted yet
    assert not torch.equal(runs[0], runs[3])
    assert runs[0].shape == (4, 3, 32, 32, 3)
    assert float(runs[0].min()) >= 0.0
    assert float(runs[0].max()) <= 1.0


def test_clear_starts_over(model: WorldModel) -> None:
    poses = turning_path(3)
    pipeline = RolloutPipeline(model, seed=1)
    first = [pipeline.generate(c, poses[c]) for c in range(3)]
    pipeline.clear()
    again = [pipeline.generate(c, poses[c]) for c in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_observed_and_generated_frames_leave_the_same_memory(model: WorldModel) -> None:
    poses = turning_path(1)
    made, seen = RolloutPipeline(model), RolloutPipeline(model)
    frames = made.generate(0, poses[0])
    seen.observe(0, poses[0], np.asarray(frames))
    for a, b in zip(made.kv_cache, seen.kv_cache, strict=True):
        torch.testing.assert_close(a["v"], b["v"], atol=2e-2, rtol=0)

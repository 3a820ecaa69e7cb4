"""HSA: the reference numbers, what routing promises, and the branches against their definition."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worldpager.errors import ConfigError
from worldpager.model_adapter.attention.linear import CompressedTier, LinearWeights, attend_rows
from worldpager.model_adapter.attention.routing import (
    Selection,
    block_means,
    block_weights,
    choose_blocks,
    gini,
    route,
    thresholds,
)
from worldpager.model_adapter.attention.sparse import (
    attend_blocks,
    hsa_attention,
    sparse_attention,
    sparse_reference,
)

VECTOR = json.loads((Path(__file__).with_name("vectors") / "hsa.json").read_text())


def qkv(
    queries: int, keys: int, batch: int = 1, heads: int = 2, dim: int = 16, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(  # type: ignore[return-value]
        torch.randn(batch, n, heads, dim, generator=generator) for n in (queries, keys, keys)
    )


def weights(rank: int, length: int, dim: int, block: int, gate: float = 0.3) -> LinearWeights:
    generator = torch.Generator().manual_seed(1)
    shapes = ((rank, length), (rank, length), (dim, dim), (dim,))
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return LinearWeights(drawn[0], drawn[1], gate * drawn[2], gate * drawn[3], block=block)


# ---- the reference numbers -----------------------------------------------------------------------


def test_routing_vector() -> None:
    case = VECTOR["routing"][0]
    found = torch.tensor(case["block_attn_HQK"])[None]
    tau = thresholds(found, case["tau_min"], case["tau_max"])
    assert tau[0].tolist() == pytest.approx(case["thresholds"], abs=1e-4)
    chosen = choose_blocks(found, tau)
    assert chosen.count[0].tolist() == case["num"]
    assert chosen.order[0].tolist() == case["order"]
    assert chosen.mask[0].tolist() == case["mask"]


@pytest.mark.parametrize("case", VECTOR["routing"][1:], ids=lambda case: case["name"])
def test_single_rows(case: dict) -> None:
    row = torch.tensor(case["row"])[None, None, None]
    tau = thresholds(row)
    assert float(tau) == pytest.approx(case["threshold"], abs=1e-6)
    assert int(choose_blocks(row, tau).count) == case["num"]


def test_block_means_vector() -> None:
    case = VECTOR["block_mean_pool"]
    tokens = torch.tensor(case["tokens"]).float()[None, :, None, None]
    assert block_means(tokens, case["block"]).flatten().tolist() == case["expect"]


def vector_weights(case: dict, proj: str, gate: float) -> LinearWeights:
    projection = torch.tensor(case[proj])
    bias = torch.full((2,), gate)
    return LinearWeights(
        projection, projection, torch.zeros(2, 2), bias, block=case.get("block_size", 2)
    )


def test_compression_vector() -> None:
    case = VECTOR["compress_kv"]
    linear = vector_weights(case, "proj_rank_x_len", 0.0)
    rows = linear.compress(torch.tensor(case["keys"])[None, :, None], linear.proj_k)
    assert rows[0, :, 0].tolist() == case["expect"]


@pytest.mark.parametrize("expect, gate", [("out_gate_half", 0.0), ("out_sparse_only", -1e4)])
def test_fusion_vector(expect: str, gate: float) -> None:
    case = VECTOR["fused"]
    q, k, v = (torch.tensor(case[name])[None, :, None] for name in "qkv")
    linear = vector_weights(case, "proj", gate)
    low, high = case["tau"]
    out = hsa_attention(q, k, v, linear, segment=case["segment_len"], tau_min=low, tau_max=high)
    assert out[0, :, 0].tolist() == [
        pytest.approx(row, abs=case["tolerance"]) for row in case[expect]
    ]


# ---- routing -------------------------------------------------------------------------------------


def test_gini_of_uniform_and_of_one_hot() -> None:
    rows = torch.stack([torch.full((5,), 0.2), torch.eye(5)[3]])[None, :, None]
    assert gini(rows)[0].tolist() == pytest.approx([0.0, 4 / 5])


def test_an_items_choice_does_not_depend_on_the_batch() -> None:
    """WorldAttention's code averages over the batch; that form stays available to compare with."""
    q, k, _ = qkv(64, 128, batch=2)
    k[1] *= 20  # sharp weights
    q, k = q * 2, k * 2
    alone = [route(q[i : i + 1], k[i : i + 1], block=8) for i in range(2)]
    together, official = route(q, k, block=8), route(q, k, block=8, over_batch=True)
    for i in range(2):
        assert torch.equal(together.mask[i], alone[i].mask[0])
    assert not torch.equal(official.mask[0], alone[0].mask[0])
    assert gini(block_weights(q, k, 8), over_batch=True)[0].equal(
        gini(block_weights(q, k, 8), over_batch=True)[1]
    )


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=9).filter(any),
    st.floats(0.0, 1.0, width=32, allow_subnormal=False),
)
def test_the_fewest_blocks_that_reach_the_mass(sizes: list[int], tau: float) -> None:
    row = torch.tensor(sizes, dtype=torch.float32)
    row = row / row.sum()
    chosen = choose_blocks(row[None, None, None], torch.tensor([[tau]]))
    count, order = int(chosen.count), chosen.order.flatten().tolist()
    assert order == sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)), "ties by smaller id"
    mass = [float(row[order[:n]].sum()) for n in range(len(sizes) + 1)]
    assert count == 0 if tau == 0 else count >= 1
    assert count == len(sizes) or mass[count] >= tau - 1e-5
    assert count == 0 or mass[count - 1] < tau + 1e-5


@pytest.mark.parametrize("low, high", [(0.5, 0.4), (-0.1, 1.0), (0.2, 1.5)])
def test_senseless_thresholds_are_refused(low: float, high: float) -> None:
    with pytest.raises(ConfigError, match="tau_min"):
        thresholds(torch.ones(1, 1, 1, 4) / 4, low, high)


# ---- the sparse branch ---------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    st.integers(1, 40), st.integers(1, 60), st.integers(1, 2), st.integers(3, 16),
    st.floats(0.0, 1.0), st.integers(0, 9),
)  # fmt: skip
def test_only_chosen_blocks_count(
    queries: int, keys: int, batch: int, block: int, tau: float, seed: int
) -> None:
    q, k, v = qkv(queries, keys, batch, seed=seed)
    chosen = route(q * 4, k, block=block, tau_min=tau, tau_max=1.0)
    torch.testing.assert_close(
        attend_blocks(q, k, v, chosen), sparse_reference(q, k, v, chosen), atol=2e-5, rtol=1e-4
    )
    poisoned = k.clone()  # keys in blocks that nobody chose cannot matter
    unused = ~chosen.mask.any(2).any(1).repeat_interleave(block, -1)[:, :keys]
    poisoned[unused] = 1e3
    assert torch.equal(attend_blocks(q, poisoned, v, chosen), attend_blocks(q, k, v, chosen))


def test_all_blocks_is_dense_attention() -> None:
    q, k, v = qkv(50, 70)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v))
    ).transpose(1, 2)
    for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        cast = [x.to(dtype) for x in (q, k, v)]
        out = sparse_attention(*cast, block=16, tau_min=1.0)
        assert out.dtype == dtype and out.shape == q.shape
        torch.testing.assert_close(out.float(), dense, atol=error, rtol=error)


def test_a_block_without_a_choice_gives_zeros() -> None:
    q, k, v = qkv(32, 32)
    chosen = route(q, k, block=16)
    none = Selection(chosen.order, torch.zeros_like(chosen.count), 16)
    assert not attend_blocks(q, k, v, none).any()
    assert not sparse_reference(q, k, v, none).any()


def test_a_selection_for_other_lengths_is_refused() -> None:
    q, k, v = qkv(32, 64)
    with pytest.raises(ConfigError, match="selection"):
        attend_blocks(q, k[:, :32], v[:, :32], route(q, k, block=16))


# ---- the compressed branch -----------------------------------------------------------------------


def test_missing_weights_are_an_error() -> None:
    state = {"l.proj_k": torch.ones(2, 4), "l.gate.bias": torch.zeros(3)}
    with pytest.raises(ConfigError, match=r"l\.proj_v, l\.gate\.weight"):
        LinearWeights.load(state, "l.")
    state |= {"l.proj_v": torch.zeros(2, 4), "l.gate.weight": torch.zeros(3, 3)}
    with pytest.raises(ConfigError, match="all zero"):
        LinearWeights.load(state, "l.")
    state["l.proj_v"] = torch.ones(2, 4)
    assert LinearWeights.load(state, "l.", block=2).block == 2
    with pytest.raises(ConfigError, match="projections must both"):
        LinearWeights.load(state | {"l.proj_v": torch.ones(3, 4)}, "l.")


def test_segments_longer_than_the_projection_are_refused() -> None:
    linear = weights(2, 8, 4, block=4)
    with pytest.raises(ConfigError, match="do not fit"):
        linear.compress(torch.zeros(1, 9, 2, 4), linear.proj_k, segment=9)


def test_rows_that_average_blocks_attend_as_block_means_do() -> None:
    """The projection that training starts from: row r averages block r."""
    q, k, v = qkv(6, 12, dim=8)
    average = torch.zeros(3, 12)
    for row in range(3):
        average[row, 4 * row : 4 * row + 4] = 0.25
    linear = LinearWeights(average, average, torch.zeros(8, 8), torch.zeros(8), block=4)
    out = attend_rows(q, linear.compress(k, average), linear.compress(v, average))
    mixed = block_weights_of_tokens(q, k) @ block_means(v, 4).transpose(1, 2)
    torch.testing.assert_close(out, mixed.transpose(1, 2), atol=1e-5, rtol=1e-5)


def block_weights_of_tokens(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, block_means(k, 4)) * q.shape[-1] ** -0.5
    return scores.softmax(-1)


def test_the_compressed_tier_moves_with_the_cache() -> None:
    linear, frame = weights(3, 10, 4, block=4), 10
    _, k, v = qkv(1, 60, dim=4)
    tier = CompressedTier(linear, frame)
    tier.write(0, k[:, :20], v[:, :20])
    tier.write(20, k[:, 20:50], v[:, 20:50])
    tier.write(40, k[:, 50:], v[:, 50:])  # the last chunk's next denoising step
    tier.drop(10, 30)  # rolled behind a sink of one frame
    assert tier.tokens == 30
    kept = torch.cat([x[:, :10] for x in (k,)] + [k[:, 30:40], k[:, 50:]], 1)
    rows_k, rows_v = tier.rows()
    torch.testing.assert_close(rows_k, linear.compress(kept, linear.proj_k))
    assert rows_v.shape == rows_k.shape == (1, 9, 2, 4)


def test_a_window_may_bring_its_rows() -> None:
    linear = weights(3, 10, 4, block=4)
    q, k, v = qkv(10, 30, dim=4)
    tier = CompressedTier(linear, 10)
    tier.write(0, k, v)
    torch.testing.assert_close(
        hsa_attention(q, k, v, linear, rows=tier.rows()), hsa_attention(q, k, v, linear)
    )


def test_what_is_not_whole_frames_is_refused_and_changes_nothing() -> None:
    tier = CompressedTier(weights(3, 10, 4, block=4), 10)
    with pytest.raises(ConfigError, match="empty"):
        tier.rows()
    frames = torch.zeros(1, 20, 2, 4)
    tier.write(0, frames, frames)
    for start, length in ((5, 10), (20, 15), (30, 10)):
        part = torch.zeros(1, length, 2, 4)
        with pytest.raises(ConfigError):
            tier.write(start, part, part)
    for start, stop in ((0, 5), (10, 30), (20, 10)):
        with pytest.raises(ConfigError):
            tier.drop(start, stop)
    assert tier.tokens == 20

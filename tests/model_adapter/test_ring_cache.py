"""The Wan-form cache: after `open` and the slots are filled, the frontend just appends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from worldpager.errors import ConfigError
from worldpager.model_adapter.frontend import KVSpec
from worldpager.model_adapter.ring_cache import RingCache
from worldpager.quant.rope import RopeLayout

TOKENS = 12  # a chunk
SPEC = KVSpec(
    model="test", layers=2, heads=2, head_dim=12, tokens_per_frame=4, frames_per_chunk=3,
    sink_frames=3, recent_frames=3, retrieve_frames=6, rope=RopeLayout.wan(12),
)  # fmt: skip


def layers(chunks: list[int], capacity: int = 6) -> list[dict[str, Any]]:
    """A cache holding ``chunks``, every value of chunk n being n (V: -n)."""
    made = []
    for _ in range(SPEC.layers):
        k = torch.full((1, capacity * TOKENS, 2, 12), 99.0, dtype=torch.bfloat16)
        for i, chunk in enumerate(chunks):
            k[:, i * TOKENS : (i + 1) * TOKENS] = chunk
        made.append(
            {
                "k": k,
                "v": -k,
                "global_end_index": torch.tensor([40 * TOKENS]),
                "local_end_index": torch.tensor([len(chunks) * TOKENS]),
            }
        )
    return made


def contents(cache: dict[str, Any]) -> list[float]:
    end = int(cache["local_end_index"])
    assert torch.equal(cache["v"], -cache["k"])
    return [float(cache["k"][0, i, 0, 0]) for i in range(0, end, TOKENS)]


def ignore(frames: int) -> None: ...


@pytest.mark.parametrize(
    ("held", "retrieved", "after"),
    [
        ([], [], []),
        ([0], [], [0]),
        ([0, 1], [], [0, 1]),
        ([0, 1, 2], [], [0, 2]),
        ([0, 1, 2], [1], [0, 1, 2]),
        ([0, 5, 6, 38, 39], [7, 8], [0, 7, 8, 39]),
        ([0, 39], [7, 8], [0, 7, 8, 39]),
        ([0, 5, 6, 38, 39], [], [0, 39]),
    ],
)
def test_the_window_is_sink_retrieved_recent(
    held: list[int], retrieved: list[int], after: list[int]
) -> None:
    caches = layers(held)
    ring = RingCache(caches, SPEC, ignore)
    ring.open([TOKENS] * len(retrieved))
    for layer in range(SPEC.layers):
        for i, chunk in enumerate(retrieved):
            k, v = ring.slot(layer, i)
            assert k.shape == v.shape == (1, TOKENS, 2, 12)
            k.fill_(chunk)
            v.fill_(-chunk)
    assert [contents(cache) for cache in caches] == [after] * SPEC.layers
    assert all(int(cache["global_end_index"]) == 40 * TOKENS for cache in caches)


def test_read_gives_the_finished_chunk() -> None:
    k, v = RingCache(layers([0, 1, 7]), SPEC, ignore).read(1)
    assert k.shape == (1, TOKENS, 2, 12)
    assert bool((k == 7).all()) and bool((v == -7).all())


def test_a_window_too_long_is_refused_before_anything_moves() -> None:
    caches = layers([0, 1, 2], capacity=4)
    with pytest.raises(ConfigError, match=r"48 tokens.*cache of 48"):
        RingCache(caches, SPEC, ignore).open([TOKENS, TOKENS])
    assert contents(caches[0]) == [0, 1, 2]


def test_slots_of_pruned_chunks_may_be_shorter() -> None:
    caches = layers([0, 1, 2])
    ring = RingCache(caches, SPEC, ignore)
    ring.open([5, 7])
    assert [ring.slot(0, i)[0].shape[1] for i in (0, 1)] == [5, 7]
    assert int(caches[0]["local_end_index"]) == 3 * TOKENS


def test_rebase_moves_recent_keys_and_indices_but_not_the_sink() -> None:
    lowered: list[int] = []
    caches = layers([0, 0, 0])
    for cache in caches:
        cache["k"][:] = torch.randn(cache["k"].shape).to(torch.bfloat16)
    before = [cache["k"].clone() for cache in caches]
    RingCache(caches, SPEC, lowered.append).rebase(30)
    rotation = SPEC.rope.temporal_rotation(-30) if SPEC.rope else None
    assert rotation is not None and lowered == [30]
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache["k"][:, :TOKENS], old[:, :TOKENS])
        rotation.apply_(old[:, TOKENS : 3 * TOKENS])
        assert torch.equal(cache["k"], old)
        assert int(cache["global_end_index"]) == 40 * TOKENS - 30 * 4


def test_wrong_layer_count_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 layers"):
        RingCache(layers([]) + layers([])[:1], SPEC, ignore)

"""Guidance branches: several caches as one, refused where they do not belong together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.reliability.world import reference_spec
from worldpager.errors import ConfigError
from worldpager.model_adapter.branches import BranchedCache
from worldpager.model_adapter.frontend import KVSpec
from worldpager.model_adapter.opening import store_spec
from worldpager.model_adapter.ring_cache import RingCache
from worldpager.quant.codec import get_codec

SPEC = reference_spec()
PLAIN = 16474582167593740742  # computed before stores knew branches


def ring(spec: KVSpec, fill: float, lowered: list[int]) -> RingCache:
    shape = (spec.batch, 5 * spec.tokens_per_chunk, spec.heads, spec.head_dim)
    layers = [
        {
            "k": torch.full(shape, fill + layer, dtype=spec.dtype),
            "v": torch.full(shape, -fill - layer, dtype=spec.dtype),
            "global_end_index": torch.full((1,), 2 * spec.tokens_per_chunk),
            "local_end_index": torch.full((1,), 2 * spec.tokens_per_chunk),
        }
        for layer in range(spec.layers)
    ]
    return RingCache(layers, spec, lowered.append)


def test_layers_of_all_branches_follow_each_other() -> None:
    lowered: list[int] = []
    cache = BranchedCache([ring(SPEC, 10.0, lowered), ring(SPEC, 20.0, lowered)])
    assert (cache.spec.layers, cache.spec.branches) == (8, 2)
    assert [float(cache.read(layer)[0][0, 0, 0, 0]) for layer in range(8)] == [
        10, 11, 12, 13, 20, 21, 22, 23,
    ]  # fmt: skip
    cache.open([SPEC.tokens_per_chunk])
    for layer in range(8):
        k, v = cache.slot(layer, 0)
        k.fill_(100 + layer)
        v.fill_(-100 - layer)
    assert [float(cache.slot(layer, 0)[0].mean()) for layer in range(8)] == list(range(100, 108))
    cache.rebase(3)
    assert lowered == [3, 3]


def test_branches_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        BranchedCache([])
    other = replace(SPEC, model="another")
    with pytest.raises(ConfigError, match=r"KVSpec\.model is 'synthetic' for the first branch"):
        BranchedCache([ring(SPEC, 1.0, []), ring(other, 1.0, [])])
    with pytest.raises(ConfigError, match="branches already"):
        SPEC.branched(2).branched(2)
    for wrong in (0, 3):
        with pytest.raises(ConfigError, match=r"branches"):
            replace(SPEC, branches=wrong)


def test_a_store_of_one_branch_is_what_it_was_before_there_were_branches() -> None:
    plain, both = (
        store_spec(spec, "session", 0, get_codec("int4"), "moving")
        for spec in (SPEC, SPEC.branched(2))
    )
    assert plain.identity() == PLAIN
    assert both.identity() not in (plain.identity(), replace(both, branches=1).identity())

"""What is done to the cache lists of the Wan family: one a guidance branch, one dict a layer."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

Layers = Sequence[MutableMapping[str, Any]]
"""One dict a layer: ``k``, ``v`` ``[batch, capacity, heads, head_dim]``, how far it is filled."""


def unused(caches: Sequence[Layers]) -> bool:
    """Whether nothing has been written into any of these caches."""
    return all(int(layers[0]["global_end_index"]) == 0 for layers in caches)


def empty(caches: Sequence[Layers]) -> None:
    """Have them hold nothing."""
    for cache in (cache for layers in caches for cache in layers):
        cache["global_end_index"].zero_()
        cache["local_end_index"].zero_()


def resize(cache: MutableMapping[str, Any], capacity: int, sink: int) -> None:
    """Exchange a layer's tensors for such of ``capacity`` tokens; where not all fits, the sink's
    ``sink`` tokens and the most recent ones stay.
    """
    end = int(cache["local_end_index"])
    head, held = min(sink, end, capacity), min(end, capacity)
    for name in ("k", "v"):
        old = cache[name]
        new = old.new_zeros((old.shape[0], capacity, *old.shape[2:]))
        new[:, :head] = old[:, :head]
        new[:, head:held] = old[:, end - (held - head) : end]
        cache[name] = new
    cache["local_end_index"].fill_(held)


def kept(caches: Sequence[Layers], sink: int, recent: int) -> dict[str, torch.Tensor]:
    """The sink's tokens and the ``recent`` last ones of every layer, by ``k.BRANCH.LAYER``."""
    tokens = {}
    for branch, layers in enumerate(caches):
        for index, cache in enumerate(layers):
            end = int(cache["local_end_index"])
            head = min(sink, end)
            tail = max(head, end - recent)
            for name in ("k", "v"):
                parts = (cache[name][:, :head], cache[name][:, tail:end])
                tokens[f"{name}.{branch}.{index}"] = torch.cat(parts, dim=1)
    return tokens


def fill(tokens: Mapping[str, torch.Tensor], caches: Sequence[Layers], start: int) -> None:
    """Put what :func:`kept` gave into caches whose next chunk begins at token ``start``."""
    for branch, layers in enumerate(caches):
        for index, cache in enumerate(layers):
            for name in ("k", "v"):
                part = tokens[f"{name}.{branch}.{index}"]
                cache[name][:, : part.shape[1]] = part
            cache["local_end_index"].fill_(part.shape[1])
            cache["global_end_index"].fill_(start)

"""The cache of the Wan family: one dict a layer, keys cached after rotation.

Matrix-Game 2.0, Self-Forcing, LingBot-World, WorldKV and the built-in model all keep ``{"k", "v":
[batch, capacity, heads, head_dim], "global_end_index", "local_end_index": [1]}`` per layer. Between
two chunks the contents are ``[sink | retrieved | recent]`` up to ``local_end_index``; the model's
first forward of a chunk appends behind that, so re-laying the dicts is all that is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from worldpager.errors import ConfigError
from worldpager.model_adapter.attention.segments import PagedWindow
from worldpager.model_adapter.frontend import KVSpec


class RingCache:
    """:class:`FrontendCache` over the dicts of one cache list.

    ``lower``: called with the frames by which the frontend must lower the positions it computes
    (its ``current_start``) from now on. ``sink_frames``, ``recent_frames``: what the model attends
    to of its sink and recent chunks where that is less than whole chunks.
    """

    def __init__(
        self,
        layers: Sequence[Mapping[str, Any]],
        spec: KVSpec,
        lower: Callable[[int], None],
        *,
        sink_frames: int | None = None,
        recent_frames: int | None = None,
    ) -> None:
        if len(layers) != spec.layers:
            raise ConfigError(f"the cache has {len(layers)} layers, the spec says {spec.layers}")
        self.spec = spec
        self._layers = layers
        self._lower = lower
        tokens = spec.tokens_per_frame
        self._sink = (spec.sink_frames if sink_frames is None else sink_frames) * tokens
        self._recent = (spec.recent_frames if recent_frames is None else recent_frames) * tokens
        self._starts: list[int] = []

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        cache = self._layers[layer]
        end = int(cache["local_end_index"])
        start = end - self.spec.tokens_per_chunk
        if start < 0:
            raise ConfigError(f"layer {layer} holds {end} tokens, less than one chunk")
        return cache["k"][:, start:end], cache["v"][:, start:end]

    def open(self, tokens: Sequence[int]) -> None:
        sink, recent = self._sink, self._recent
        self._starts = [sink + sum(tokens[:i]) for i in range(len(tokens) + 1)]
        for cache in self._layers:
            end = int(cache["local_end_index"])
            kept = max(min(sink, end), end - recent)
            start = self._starts[-1] if end > sink else kept
            room = cache["k"].shape[1] - self.spec.tokens_per_chunk
            if start + end - kept > room:
                raise ConfigError(
                    f"a window of {start + end - kept} tokens and the current chunk do not fit a "
                    f"cache of {cache['k'].shape[1]} tokens; allocate more or retrieve less"
                )
            if start != kept:
                for name in ("k", "v"):
                    # the source may overlap the target, so it is copied out first
                    cache[name][:, start : start + end - kept] = cache[name][:, kept:end].clone()
            cache["local_end_index"].fill_(start + end - kept)

    def slot(self, layer: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = self._starts[index : index + 2]
        cache = self._layers[layer]
        return cache["k"][:, start:end], cache["v"][:, start:end]

    def shift(self, k: torch.Tensor, frames: float) -> None:
        raise NotImplementedError("the Wan family rotates a band of each head: spec.rope says how")

    def rebase(self, frames: int) -> None:
        rotation = self.spec.rope.temporal_rotation(-frames) if self.spec.rope else None
        sink = self._sink
        for cache in self._layers:
            if rotation is not None:
                rotation.apply_(cache["k"][:, sink : int(cache["local_end_index"])])
            cache["global_end_index"].sub_(frames * self.spec.tokens_per_frame)
        self._lower(frames)


class PagedRingCache(RingCache):
    """:class:`PagedCache` for a model that attends to a layer's ``"memory"`` besides its cache.

    The dicts hold ``[sink | recent]``, and under ``"memory"`` the retrieved chunks' blocks.
    """

    def attach(self, window: PagedWindow) -> None:
        self.open([])
        for layer, cache in enumerate(self._layers):
            cast(dict[str, Any], cache)["memory"] = window.layer(layer)

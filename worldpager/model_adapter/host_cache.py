"""A frontend's cache on an accelerator, for codecs that read and write host memory.

What is finished is copied to the host to be encoded; what is retrieved is decoded on the host, a
layer of a chunk at a time, and copied into its slot. A cache in host memory is passed through.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worldpager.model_adapter.frontend import FrontendCache, KVSpec


class HostCache:
    """:class:`FrontendCache` over another. After the boundary :meth:`deliver` must be called."""

    def __init__(self, cache: FrontendCache) -> None:
        self.spec: KVSpec = cache.spec
        self._cache = cache
        self._owed: list[tuple[torch.Tensor, torch.Tensor]] = []  # target, what is decoded for it

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self._cache.read(layer)
        return k.to("cpu"), v.to("cpu")

    def open(self, tokens: Sequence[int]) -> None:
        self._cache.open(tokens)

    def slot(self, layer: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """On the host; what was decoded into the slot before is delivered first."""
        self.deliver()
        k, v = self._cache.slot(layer, index)
        if in_host_memory(k):
            return k, v
        hosted = torch.empty_like(k, device="cpu"), torch.empty_like(v, device="cpu")
        self._owed = list(zip((k, v), hosted, strict=True))
        return hosted

    def shift(self, k: torch.Tensor, frames: float) -> None:
        self._cache.shift(k, frames)

    def rebase(self, frames: int) -> None:
        self._cache.rebase(frames)

    def deliver(self) -> None:
        """Copy what was decoded last into its slot."""
        for target, decoded in self._owed:
            target.copy_(decoded)
        self._owed = []


def in_host_memory(tensor: torch.Tensor) -> bool:
    """Whether codecs of the CPU can work in ``tensor`` itself."""
    return tensor.device.type == "cpu"

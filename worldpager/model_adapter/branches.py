"""Guidance branches: the conditional and the unconditional cache of one rollout, kept as one.

Both saw the same poses and stand at the same positions, so one choice of memory serves them. Their
layers follow each other in a chunk's image: block ``branch * layers + layer``. So the branches are
committed, evicted, read and served together, and no window ever holds one without the other. Each
block has its own scales, and no branch influences another's bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worldpager.errors import ConfigError
from worldpager.model_adapter.frontend import FrontendCache, KVSpec


class BranchedCache:
    """:class:`FrontendCache` over the caches of all branches of one rollout, in their order.

    The memory is opened with ``spec.branched(n)``; each branch's cache has the plain ``spec``.
    ``rebase`` reaches every branch: where they share one position counter, only one of them may
    lower it.
    """

    def __init__(self, branches: Sequence[FrontendCache]) -> None:
        """Raises :class:`ConfigError` for no branch, or naming the field in which their specs
        differ.
        """
        if not branches:
            raise ConfigError("a branched cache needs the caches of its branches; give at least 1")
        for branch in branches[1:]:
            branches[0].spec.check_same(branch.spec, "the first branch", "another")
        self.spec: KVSpec = branches[0].spec.branched(len(branches))
        self._branches = tuple(branches)
        self._layers = branches[0].spec.layers

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one branch's layer, of the chunk just finished."""
        return self._branches[layer // self._layers].read(layer % self._layers)

    def open(self, tokens: Sequence[int]) -> None:
        """Lay all branches out anew, alike."""
        for branch in self._branches:
            branch.open(tokens)

    def slot(self, layer: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Writable K and V of one branch's layer."""
        return self._branches[layer // self._layers].slot(layer % self._layers, index)

    def shift(self, k: torch.Tensor, frames: float) -> None:
        """As the branches do it, which are all of one kind."""
        self._branches[0].shift(k, frames)

    def rebase(self, frames: int) -> None:
        """Lower the positions of every branch."""
        for branch in self._branches:
            branch.rebase(frames)

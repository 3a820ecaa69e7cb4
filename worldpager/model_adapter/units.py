"""What is stored, read and placed as one: whole chunks, or their pages.

With pages, each run of ``page_frames`` frames of a chunk is a unit of storage of its own: pool,
spill, prefetch, checks and windows work on pages as they do on chunks, and only what was chosen is
read, decoded and placed. Unit ``c * pages + i`` is page ``i`` of chunk ``c``.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from worldpager.errors import ConfigError
from worldpager.model_adapter.frontend import FrontendCache, KVSpec


def unit_spec(spec: KVSpec, page_frames: int | None) -> KVSpec:
    """``spec`` with units in the place of chunks: whole chunks for ``None``.

    Raises :class:`ConfigError` for pages that do not divide a chunk.
    """
    if page_frames is None:
        return spec
    if not 0 < page_frames <= spec.frames_per_chunk or spec.frames_per_chunk % page_frames:
        raise ConfigError(
            f"pages of {page_frames} frames do not divide a chunk of {spec.frames_per_chunk}"
        )
    return replace(spec, frames_per_chunk=page_frames)


class FinishedPage:
    """One page of the chunk that a cache ends with: all that storing it needs to see of a cache."""

    def __init__(self, cache: FrontendCache, unit: KVSpec, page: int) -> None:
        self.spec = unit
        self._cache = cache
        self._rows = slice(page * unit.tokens_per_chunk, (page + 1) * unit.tokens_per_chunk)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the page, views ``[batch, tokens, heads, head_dim]``."""
        k, v = self._cache.read(layer)
        return k[:, self._rows], v[:, self._rows]

"""Which clean chunk leaves the DRAM pool.

A policy is asked for one victim among the pages that may leave (clean, not pinned). Policies are
pure, so the same pages and the same path give the same victim. Geometry comes in through
:class:`Nearness`, one for each stream; the pager itself knows nothing of cameras.

In measurements on real camera paths the furthest chunk from the path ahead is the best simple
choice for small pools; large ones gain most by not keeping two copies of one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from worldpager.errors import ConfigError
from worldpager.pager.events import ChunkKey

Floats = npt.NDArray[np.float64]

LARGE_POOL = 40
"""Evictable chunks of a stream from which redundancy matters more than distance."""

MOST_COMPARED = 256
"""Chunks compared pairwise at most: about 1 ms a decision."""


class Evictable(Protocol):
    """What a policy sees of a page."""

    @property
    def key(self) -> ChunkKey: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def last_used(self) -> int:
        """Logical time of the last commit, load or use."""


class Nearness(Protocol):
    """Distances among the chunks of one stream, on any scale; equal places give equal values."""

    def to_path(self, chunks: Sequence[int]) -> Floats:
        """Distance `[n]` of each chunk to where the camera is and will be; infinite for a chunk
        that retrieval can never ask for.
        """

    def between(self, chunks: Sequence[int]) -> Floats:
        """Distance `[n, n]` between chunks, a fresh array."""


NearnessOf = Callable[[int], Nearness | None]
"""The nearness of a stream, or None where it has no poses."""

P = TypeVar("P", bound=Evictable)


class EvictionPolicy(Protocol):
    """Chooses a victim."""

    name: str

    def victim(self, pages: Sequence[P]) -> P:
        """One of ``pages``, of which there is at least one."""


class Lru:
    """The page that was not used for longest; among equals the smaller key."""

    name = "lru"

    def victim(self, pages: Sequence[P]) -> P:
        return min(pages, key=lambda page: (page.last_used, page.key))


class Furthest:
    """The chunk furthest from the path ahead; among equals the least recently used.

    Distances of different streams do not compare, so the least recently used page of all decides
    which stream gives one up; a stream without nearness gives up that very page.
    """

    name = "furthest"

    def __init__(self, nearness: NearnessOf) -> None:
        self._nearness = nearness

    def victim(self, pages: Sequence[P]) -> P:
        oldest = Lru().victim(pages)
        stream = oldest.key.stream
        nearness = self._nearness(stream)
        if nearness is None:
            return oldest
        own = [page for page in pages if page.key.stream == stream]
        distances = nearness.to_path([page.key.chunk for page in own])
        ages = np.array([page.last_used for page in own])
        chunks = np.array([page.key.chunk for page in own])
        order = np.lexsort((chunks, ages, -distances))
        rows: list[int] = order.tolist()
        return self._among([own[row] for row in rows], distances[order], nearness)

    def _among(self, pages: Sequence[P], distances: Floats, nearness: Nearness) -> P:
        """The victim among one stream's pages, furthest first."""
        return pages[0]


class Redundant(Furthest):
    """In a large pool, the newer of the two closest chunks among the furthest half.

    Below :data:`LARGE_POOL` pages, and while some chunk can never be asked for, as
    :class:`Furthest`. Among equally close pairs the one with the newest chunk goes first, so that
    of a path walked again and again the first lap stays whole; any other order breaks it up and
    reads up to twice as much.
    """

    name = "redundant"

    def _among(self, pages: Sequence[P], distances: Floats, nearness: Nearness) -> P:
        if len(pages) < LARGE_POOL or not np.isfinite(distances[0]):
            return pages[0]
        half = sorted(pages[: min(len(pages) // 2, MOST_COMPARED)], key=_chunk, reverse=True)
        apart = nearness.between([page.key.chunk for page in half])
        np.fill_diagonal(apart, np.inf)
        first, second = divmod(int(np.argmin(apart)), len(half))
        return max(half[first], half[second], key=_chunk)


def _chunk(page: Evictable) -> int:
    return page.key.chunk


def eviction_names() -> list[str]:
    """Names of all eviction policies; the first is the default where poses exist."""
    return [Redundant.name, Furthest.name, Lru.name]


def get_eviction(name: str, nearness: NearnessOf) -> EvictionPolicy:
    """The eviction policy called ``name``. Raises :class:`ConfigError` listing the known names."""
    if name == Lru.name:
        return Lru()
    for policy in (Redundant, Furthest):
        if name == policy.name:
            return policy(nearness)
    raise ConfigError(f"no eviction policy {name!r}; known are {', '.join(eviction_names())}")

"""What a retrieval policy is asked and what it answers.

A policy ranks *units*: what is stored, read and placed as one. That is a chunk, or one of its
pages where retrieval is by page; page ``i`` of chunk ``c`` is then unit ``c * pages + i``, and
whatever is said of chunks here holds for units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, overload

import numpy as np

from worldpager.errors import ConfigError
from worldpager.prefetch.distance import DECIMALS
from worldpager.prefetch.index import Ids, PlaceIndex, View
from worldpager.prefetch.keys import KeyKind, Vector
from worldpager.prefetch.poses import Floats


@dataclass(frozen=True, slots=True)
class Query:
    """What is known of the chunk that retrieves.

    ``place``: `[12]`, None without a camera. ``keys``: mean query of layer 0 before its rotation,
    heads joined, float32 `[heads * head_dim]`, None while it is not known. ``epoch``: the prompt it
    is made under.
    """

    place: Floats | None = None
    keys: Vector | None = None
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Ranking:
    """Candidates, best first: ids int64 `[n]` and their distances float64 `[n]`, ascending."""

    ids: Ids
    distances: Floats

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Selection:
    """A retrieval set.

    ``chunks``: in time order, as a window is laid out. ``best_first``: the same chunks by distance,
    ``distances`` beside them.
    """

    chunks: tuple[int, ...]
    best_first: tuple[int, ...]
    distances: tuple[float, ...]

    @classmethod
    def best(cls, ranking: Ranking, k: int) -> Selection:
        """The first k of a ranking, or all where there are fewer."""
        ids = tuple(ranking.ids[:k].tolist())
        return cls(tuple(sorted(ids)), ids, tuple(ranking.distances[:k].tolist()))


class Candidates(Sequence[int]):
    """All candidates, best first, of which only ``first`` are ranked until somebody looks further.

    A window that has what it wants needs no more, and ordering 10,000 takes longer than finding the
    best of them.
    """

    def __init__(self, first: tuple[int, ...], every: Callable[[], Sequence[int]]) -> None:
        """``every``: ranks all of them; called once, where the others are looked at."""
        self.first = first
        self._rank = every
        self._every: Sequence[int] | None = None

    def _all(self) -> Sequence[int]:
        if self._every is None:
            self._every = self._rank()
        return self._every

    def __len__(self) -> int:
        return len(self._all())

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        return self._all()[at]

    def __iter__(self) -> Iterator[int]:
        return iter(self._all())


class RetrievalPolicy(Protocol):
    """Ranks candidates for a chunk. Pure: equal arguments give equal rankings."""

    @property
    def name(self) -> str: ...
    @property
    def needs_poses(self) -> bool:
        """Whether ``query.place`` must be given."""

    def rank(
        self,
        index: PlaceIndex,
        query: Query,
        candidates: range,
        count: int | None = None,
        resident: Iterable[int] = (),
    ) -> Ranking:
        """The best ``count`` of the chunks in ``index`` whose ids are in ``candidates``, or all.

        ``resident``: ids of the chunks in the DRAM pool, for policies that prefer them. Equal
        chunks stand in the order of their ids.
        """


def key_kind(policy: RetrievalPolicy) -> KeyKind:
    """What ``policy`` needs of each page's keys; nothing where it does not say."""
    kind: KeyKind = getattr(policy, "keys", "")
    return kind


def needs_query(policy: RetrievalPolicy) -> bool:
    """Whether ``policy`` cannot choose without the chunk's mean query."""
    return bool(getattr(policy, "needs_query", False))


def ranks_ahead(policy: RetrievalPolicy) -> bool:
    """Whether ``policy`` can rank while the query is not known yet."""
    return bool(getattr(policy, "ranks_ahead", not needs_query(policy)))


def prefers_resident(policy: RetrievalPolicy) -> bool:
    """Whether ``policy`` looks at what is in the DRAM pool."""
    return bool(getattr(policy, "prefer_resident", False))


def candidate_range(chunk: int, sink: int, recent: int) -> range:
    """Ids that ``chunk`` may retrieve: all that its window does not show anyway.

    ``sink``: chunks at the start that stay in the window; ``recent``: finished chunks just before
    ``chunk`` that are still in it. WorldKV's code leaves one further chunk out, which is then seen
    nowhere; this closes that gap. The range also names chunks not yet stored: a policy takes from
    it only what the index holds.
    """
    return range(sink, max(sink, chunk - recent))


@dataclass(frozen=True)
class Scored:
    """A policy that gives every candidate a distance in [0, 1].

    ``prefer_resident``: rank by ``0.8 d - 0.002`` for chunks in the DRAM pool, which saves reads
    where near-duplicates exist but makes the set depend on timing; off unless asked for.
    ``other_prompt``: added to the distance of chunks made under another prompt than the current
    one; infinity leaves them out.
    """

    name: ClassVar[str]
    needs_poses: ClassVar[bool] = False
    keys: ClassVar[KeyKind] = ""
    needs_query: ClassVar[bool] = False

    prefer_resident: bool = False
    other_prompt: float = 0.0

    def __post_init__(self) -> None:
        if not self.other_prompt >= 0:
            raise ConfigError(f"other_prompt cannot be {self.other_prompt}; give 0 to infinity")

    def distances(self, view: View, query: Query) -> Floats:
        """Distances `[n]` of the candidates, rounded; infinite for what cannot be retrieved."""
        raise NotImplementedError

    def rank(
        self,
        index: PlaceIndex,
        query: Query,
        candidates: range,
        count: int | None = None,
        resident: Iterable[int] = (),
    ) -> Ranking:
        view = index.view(candidates)
        found = self.distances(view, query)
        if self.other_prompt:
            other = view.epochs != query.epoch
            found[other] += self.other_prompt
        if self.prefer_resident:
            held = np.isin(view.ids, np.fromiter(resident, dtype=np.int64))
            found[held] = np.round(0.8 * found[held] - 0.002, DECIMALS)
        rows = smallest(found, len(found) if count is None else count)
        rows = rows[np.isfinite(found[rows])]
        return Ranking(view.ids[rows], found[rows])


def nearness_of(scores: Floats) -> Floats:
    """Distances in [0, 1] from scores: 0 for the largest, 1 for the smallest; rounded. What scores
    ``-inf`` is infinitely far.
    """
    finite = np.isfinite(scores)
    if not finite.any():
        return np.full(len(scores), np.inf)
    most, least = scores.max(), scores[finite].min()
    near: Floats = np.round((most - scores) / ((most - least) or 1.0), DECIMALS)
    return near


def smallest(distances: Floats, count: int) -> Ids:
    """Rows of the ``count`` smallest distances, ascending, the smaller row first among equals.

    Distances are rounded to :data:`DECIMALS`; so one integer holds a distance and its row, and any
    sort of these is stable.
    """
    if count <= 0 or not len(distances):
        return np.empty(0, dtype=np.int64)
    rows = np.arange(len(distances))
    if count < len(distances):
        # A partition picks any of several equal values at its edge, so take all up to the edge.
        edge = np.partition(distances, count - 1)[count - 1]
        rows = np.flatnonzero(distances <= edge)
    near = np.minimum(distances[rows], _FURTHEST)
    packed = np.rint(near * 10**DECIMALS).astype(np.int64) * _ROWS + rows
    packed.sort()
    best: Ids = (packed % _ROWS)[:count]
    return best


_ROWS = 2**26
"""More rows than an index can have (chunk ids below it take 6 GB of places)."""
_FURTHEST = 100.0
"""Where distances, infinite ones included, are cut: above all that a policy gives."""

"""One stream's sense of place: what a chunk should retrieve, and what to load for the next ones.

Holds the places of the stream's chunks and puts the retrieval policy and the planner to work on
them. Pure but for that index: the runtime and the simulator use the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from worldpager.prefetch.index import PlaceIndex
from worldpager.prefetch.keys import StoredRow, Vector
from worldpager.prefetch.planner import EXTRA, PrefetchPlanner
from worldpager.prefetch.poses import Floats, place_of
from worldpager.prefetch.ranking import (
    Candidates,
    Query,
    RetrievalPolicy,
    candidate_range,
    needs_query,
    prefers_resident,
)

NOWHERE = (0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
"""The place noted for a chunk without a pose, for policies that look at no place."""


class Retriever:
    """Chooses ``k`` units a window. ``sink``, ``recent``: finished chunks that every window shows
    anyway. ``pages``: units that a chunk is stored in. ``resident``: asked for the units in the
    DRAM pool where the policy prefers them.

    :meth:`plan` may run on another thread than the rest.
    """

    def __init__(
        self,
        policy: RetrievalPolicy,
        *,
        k: int,
        sink: int,
        recent: int,
        pages: int = 1,
        resident: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self.index = PlaceIndex()
        self.preferred: tuple[int, ...] = ()
        """The resident units that the last choice preferred: with the query all it depended on."""
        self._policy = policy
        self._k, self._pages = k, pages
        self._sink, self._recent = sink * pages, recent * pages
        self._resident = resident
        self._planner = PrefetchPlanner(
            policy, k=k, sink=self._sink, recent=self._recent, extra=EXTRA * pages, pages=pages
        )

    @property
    def needs_poses(self) -> bool:
        """Whether :meth:`choose` must be given poses."""
        return self._policy.needs_poses and self._k > 0

    @property
    def needs_query(self) -> bool:
        """Whether :meth:`choose` must be given a mean query."""
        return needs_query(self._policy) and self._k > 0

    def note(
        self, chunk: int, place: Sequence[float], epoch: int = 0, keys: StoredRow | None = None
    ) -> None:
        """A chunk is stored; ``place``: twelve numbers, NaN without a pose; ``epoch`` and ``keys``
        as :meth:`PlaceIndex.add` takes them.
        """
        if np.isfinite(place).all():
            self.index.add(chunk, place, epoch=epoch, keys=keys)
        elif not self._policy.needs_poses:
            self.index.add(chunk, NOWHERE, epoch=epoch, keys=keys)

    def forget(self, chunk: int) -> None:
        """A chunk is in no tier any more."""
        self.index.remove(chunk)

    def choose(
        self,
        chunk: int,
        poses: Floats | None,
        keys: Vector | None = None,
        epoch: int = 0,
    ) -> tuple[tuple[int, ...], Candidates]:
        """The retrieval set of ``chunk`` in time order, and its candidates, best first.

        ``poses``: ``[frames, 4, 4]`` of the chunk, or ``None`` without a camera; ``keys``: its mean
        query; ``epoch``: that of its prompt.
        """
        if self._k == 0:
            return (), Candidates((), tuple)
        query = Query(None if poses is None else place_of(poses), keys, epoch)
        candidates = candidate_range(chunk * self._pages, self._sink, self._recent)
        held = self.preferred = tuple(sorted(self._held()))

        def rank(count: int | None) -> tuple[int, ...]:
            found = self._policy.rank(self.index, query, candidates, count, held)
            return tuple(found.ids.tolist())

        best = rank(self._k)
        return tuple(sorted(best)), Candidates(best, lambda: rank(None))

    def plan(
        self,
        chunk: int,
        poses: Floats | None,
        previous: Floats | None,
        known: Sequence[Floats] | Floats,
        keys: Sequence[Vector] = (),
        epoch: int = 0,
        branches: Sequence[Floats] = (),
    ) -> tuple[int, ...]:
        """What to have resident after ``chunk``, most urgent first, and note the path ahead for
        eviction. ``previous``: poses of the chunk before; ``known``: of those after, as far as the
        control input is known; ``keys``, ``epoch``, ``branches``: as in
        :meth:`PrefetchPlanner.plan`.
        """
        if self._k == 0:
            return ()
        made = self._planner.plan(
            self.index,
            chunk,
            poses,
            previous=previous,
            known=list(known),
            resident=self._held(),
            keys=keys,
            epoch=epoch,
            branches=branches,
        )
        self.index.set_path(made.path)
        return made.chunks

    def _held(self) -> Iterable[int]:
        return self._resident() if prefers_resident(self._policy) else ()

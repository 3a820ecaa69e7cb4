"""One stream's sense of place: what a chunk should retrieve, and what to load for the next ones.

Holds the places of the stream's chunks and puts the retrieval policy and the planner to work on
them. Pure but for that index: the runtime and the simulator use the same object.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from worldpager.prefetch.index import PlaceIndex
from worldpager.prefetch.planner import PrefetchPlanner
from worldpager.prefetch.poses import Floats, place_of
from worldpager.prefetch.retrieval import RetrievalPolicy, Selection, candidate_range

NOWHERE = (0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
"""The place noted for a chunk without a pose, for policies that look at no place."""


class Retriever:
    """Chooses ``k`` chunks a window. ``sink``, ``recent``: finished chunks that every window shows
    anyway. ``rank_all``: hand out all candidates in order, for a fallback that needs them.

    :meth:`plan` may run on another thread than the rest.
    """

    def __init__(
        self, policy: RetrievalPolicy, *, k: int, sink: int, recent: int, rank_all: bool = False
    ) -> None:
        self.index = PlaceIndex()
        self._policy = policy
        self._k, self._sink, self._recent = k, sink, recent
        self._count = None if rank_all else k
        self._planner = PrefetchPlanner(policy, k=k, sink=sink, recent=recent)

    @property
    def needs_poses(self) -> bool:
        """Whether :meth:`choose` must be given poses."""
        return self._policy.needs_poses and self._k > 0

    def note(self, chunk: int, place: Sequence[float]) -> None:
        """A chunk is stored; ``place``: twelve numbers, NaN without a pose."""
        if np.isfinite(place).all():
            self.index.add(chunk, place)
        elif not self._policy.needs_poses:
            self.index.add(chunk, NOWHERE)

    def forget(self, chunk: int) -> None:
        """A chunk is in no tier any more."""
        self.index.remove(chunk)

    def choose(self, chunk: int, poses: Floats | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The retrieval set of ``chunk`` in time order, and its candidates, best first.

        ``poses``: ``[frames, 4, 4]`` of the chunk, or ``None`` without a camera.
        """
        if self._k == 0:
            return (), ()
        query = None if poses is None else place_of(poses)
        candidates = candidate_range(chunk, self._sink, self._recent)
        ranking = self._policy.rank(self.index, query, candidates, self._count)
        return Selection.best(ranking, self._k).chunks, tuple(ranking.ids.tolist())

    def plan(
        self,
        chunk: int,
        poses: Floats | None,
        previous: Floats | None,
        known: Sequence[Floats] | Floats,
    ) -> tuple[int, ...]:
        """What to have resident after ``chunk``, most urgent first, and note the path ahead for
        eviction. ``previous``: poses of the chunk before; ``known``: of those after, as far as the
        control input is known.
        """
        if self._k == 0:
            return ()
        made = self._planner.plan(self.index, chunk, poses, previous=previous, known=list(known))
        self.index.set_path(made.path)
        return made.chunks

"""What to load while a chunk is being computed.

While chunk c is denoised its poses are known, and those of c+1 and c+2 are known or extrapolated.
For each the retrieval policy ranks the chunks that will then be candidates. The load list is: the
predicted set of c+1 best first, then a few further ranks in case the prediction is a little off,
then the same for c+2, which uses whatever channel time is left.

Errors of prediction sit where the player's action changes, which no extrapolation can know. Where
the frontend has controls, the sets of the likeliest next actions come first, in order of
likelihood, and the further ranks after them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from worldpager.errors import ConfigError
from worldpager.prefetch.extrapolate import ConstantVelocity, Extrapolator, poses_ahead
from worldpager.prefetch.index import PlaceIndex
from worldpager.prefetch.keys import Vector
from worldpager.prefetch.poses import Floats, place_of
from worldpager.prefetch.ranking import (
    Query,
    Ranking,
    RetrievalPolicy,
    Selection,
    candidate_range,
    ranks_ahead,
)

PATH_AHEAD = (1, 2, 4, 8)
"""Chunks ahead whose places make up the path that eviction measures distance to (and now)."""


EXTRA = 3
"""Further ranks loaded for each chunk ahead."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One chunk of the load list.

    ``ahead``: 1 for c+1, 2 for c+2. ``required``: a member of the predicted set itself; otherwise
    one of the further ranks.
    """

    chunk: int
    ahead: int
    required: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What is expected to be needed after the chunk at hand.

    ``wanted``: the load list, most urgent first, no chunk twice. ``sets``: the predicted retrieval
    set of each chunk ahead, c+1 first. ``path``: places float64 `[n, 12]` of the camera now and
    ahead, for :meth:`PlaceIndex.set_path`; empty where the planner was given no poses.
    """

    wanted: tuple[Wanted, ...]
    sets: tuple[Selection, ...]
    path: Floats

    @property
    def chunks(self) -> tuple[int, ...]:
        """The load list as chunk ids."""
        return tuple(item.chunk for item in self.wanted)


class PrefetchPlanner:
    """Plans loads for the chunks ahead; holds no state between calls.

    ``k``: chunks a retrieval set has. ``sink``, ``recent``: finished chunks that every window shows
    at its start and just before the current chunk. ``extra``: further ranks loaded per chunk ahead.
    ``horizon``: chunks looked ahead. ``project_so3``: as in :func:`place_of`. ``pages``: units that
    a chunk is stored in; ``k``, ``sink``, ``recent`` and ``extra`` count units.
    """

    def __init__(
        self,
        policy: RetrievalPolicy,
        *,
        k: int,
        sink: int = 1,
        recent: int = 1,
        extra: int = EXTRA,
        horizon: int = 2,
        extrapolator: Extrapolator | None = None,
        project_so3: bool = False,
        pages: int = 1,
    ) -> None:
        for name, value in (("k", k), ("sink", sink), ("recent", recent), ("extra", extra)):
            if value < 0:
                raise ConfigError(f"{name} must not be negative, as {value} is")
        if horizon < 1:
            raise ConfigError(f"the prefetch horizon must be at least 1 chunk, not {horizon}")
        self.policy = policy
        self.k = k
        self.sink = sink
        self.recent = recent
        self.extra = extra
        self.horizon = horizon
        self.extrapolator: Extrapolator = extrapolator or ConstantVelocity()
        self.project_so3 = project_so3
        self.pages = pages

    def plan(
        self,
        index: PlaceIndex,
        chunk: int,
        poses: Floats | None,
        *,
        previous: Floats | None = None,
        known: Sequence[Floats] = (),
        resident: Iterable[int] = (),
        keys: Sequence[Vector] = (),
        epoch: int = 0,
        branches: Sequence[Floats] = (),
    ) -> Plan:
        """The plan while ``chunk`` is generated.

        ``index``: chunks stored so far, at most ``chunk - 1``; what is not finished cannot be
        listed. ``poses``: latent poses `[F, 4, 4]` of ``chunk``, ``previous`` of the one before,
        ``known`` of those after it as far as the frontend knows them. ``resident``: passed on to
        the policy. ``keys``: mean queries of the chunks ahead, the last one known standing in for
        what follows; ``epoch``: that of the prompt. ``branches``: poses `[F, 4, 4]` that c+1 may
        have where they are not known, the likeliest first. Without what the policy needs nothing is
        planned, but for the path where there are poses.
        """
        if poses is None:
            if self.policy.needs_poses:
                return Plan((), (), np.empty((0, 12)))
            places, path = None, np.empty((0, 12))
        else:
            reach = max(self.horizon, *PATH_AHEAD)
            ahead = poses_ahead(self.extrapolator, poses, previous, reach, known)
            places = place_of(ahead, project_so3=self.project_so3)
            now = place_of(poses, project_so3=self.project_so3)
            path = np.stack([now, *(places[step - 1] for step in PATH_AHEAD)])

        if not keys and not ranks_ahead(self.policy):
            return Plan((), (), path)
        held = frozenset(resident)
        wanted: dict[int, Wanted] = {}

        def rank(step: int, place: Floats | None, count: int) -> Ranking:
            candidates = candidate_range((chunk + step) * self.pages, self.sink, self.recent)
            vector = keys[min(step, len(keys)) - 1] if keys else None
            return self.policy.rank(index, Query(place, vector, epoch), candidates, count, held)

        if not known:
            for branch in branches:
                place = place_of(branch, project_so3=self.project_so3)
                for other in rank(1, place, self.k).ids.tolist():
                    wanted.setdefault(other, Wanted(other, 1, True))
        sets = []
        for step in range(1, self.horizon + 1):
            ranking = rank(step, None if places is None else places[step - 1], self.k + self.extra)
            sets.append(Selection.best(ranking, self.k))
            for place_in_list, other in enumerate(ranking.ids.tolist()):
                wanted.setdefault(other, Wanted(other, step, place_in_list < self.k))
        return Plan(tuple(wanted.values()), tuple(sets), path)

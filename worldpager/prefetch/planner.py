"""What to load while a chunk is being computed.

While chunk c is denoised its poses are known, and those of c+1 and c+2 are known or extrapolated.
For each the retrieval policy ranks the chunks that will then be candidates. The load list is: the
predicted set of c+1 best first, then a few further ranks in case the prediction is a little off,
then the same for c+2, which uses whatever channel time is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from worldpager.errors import ConfigError
from worldpager.prefetch.extrapolate import ConstantVelocity, Extrapolator, poses_ahead
from worldpager.prefetch.index import PlaceIndex
from worldpager.prefetch.poses import Floats, place_of
from worldpager.prefetch.retrieval import RetrievalPolicy, Selection, candidate_range

PATH_AHEAD = (1, 2, 4, 8)
"""Chunks ahead whose places make up the path that eviction measures distance to (and now)."""


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
    ``horizon``: chunks looked ahead. ``project_so3``: as in :func:`place_of`.
    """

    def __init__(
        self,
        policy: RetrievalPolicy,
        *,
        k: int,
        sink: int = 1,
        recent: int = 1,
        extra: int = 3,
        horizon: int = 2,
        extrapolator: Extrapolator | None = None,
        project_so3: bool = False,
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

    def plan(
        self,
        index: PlaceIndex,
        chunk: int,
        poses: Floats | None,
        *,
        previous: Floats | None = None,
        known: Sequence[Floats] = (),
        resident: Iterable[int] = (),
    ) -> Plan:
        """The plan while ``chunk`` is generated.

        ``index``: chunks stored so far, at most ``chunk - 1``; what is not finished cannot be
        listed. ``poses``: latent poses `[F, 4, 4]` of ``chunk``, ``previous`` of the one before,
        ``known`` of those after it as far as the frontend knows them. ``resident``: passed on to
        the policy. Without poses only a policy that needs none plans anything.
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

        held = frozenset(resident)
        wanted: dict[int, Wanted] = {}
        sets = []
        for step in range(1, self.horizon + 1):
            candidates = candidate_range(chunk + step, self.sink, self.recent)
            query = None if places is None else places[step - 1]
            ranking = self.policy.rank(index, query, candidates, self.k + self.extra, held)
            sets.append(Selection.best(ranking, self.k))
            for rank, other in enumerate(ranking.ids.tolist()):
                wanted.setdefault(other, Wanted(other, step, rank < self.k))
        return Plan(tuple(wanted.values()), tuple(sets), path)

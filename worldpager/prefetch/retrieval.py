"""Which old chunks a new one should see.

A retrieval policy ranks the candidates of a chunk, best first; the first k are its retrieval set.
Policies are pure and found by name: those below, and whatever the ``worldpager.retrieval`` entry
points add.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Protocol

import numpy as np

from worldpager.errors import ConfigError
from worldpager.prefetch.distance import DECIMALS, camera_distances
from worldpager.prefetch.index import Ids, PlaceIndex
from worldpager.prefetch.poses import Floats


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


class RetrievalPolicy(Protocol):
    """Ranks candidates for a chunk. Pure: equal arguments give equal rankings."""

    name: str
    needs_poses: bool
    """Whether ``query`` must be given."""

    def rank(
        self,
        index: PlaceIndex,
        query: Floats | None,
        candidates: range,
        count: int | None = None,
        resident: Iterable[int] = (),
    ) -> Ranking:
        """The best ``count`` of the chunks in ``index`` whose ids are in ``candidates``, or all.

        ``query``: the place `[12]` of the chunk that retrieves. ``resident``: ids of the chunks in
        the DRAM pool, for policies that prefer them. Equal chunks stand in the order of their ids.
        """


def candidate_range(chunk: int, sink: int, recent: int) -> range:
    """Ids that ``chunk`` may retrieve: all that its window does not show anyway.

    ``sink``: chunks at the start that stay in the window; ``recent``: finished chunks just before
    ``chunk`` that are still in it. WorldKV's code leaves one further chunk out, which is then seen
    nowhere; this closes that gap. The range also names chunks not yet stored: a policy takes from
    it only what the index holds.
    """
    return range(sink, max(sink, chunk - recent))


class CameraDistance:
    """Nearest cameras first: the distance of :mod:`worldpager.prefetch.distance`.

    ``prefer_resident``: rank by ``0.8 d - 0.002`` for chunks in the DRAM pool, which saves reads
    where near-duplicates exist but makes the set depend on timing; off unless asked for.
    """

    name = "camera"
    needs_poses = True

    def __init__(self, *, prefer_resident: bool = False) -> None:
        self.prefer_resident = prefer_resident

    def rank(
        self,
        index: PlaceIndex,
        query: Floats | None,
        candidates: range,
        count: int | None = None,
        resident: Iterable[int] = (),
    ) -> Ranking:
        if query is None:
            raise ConfigError("retrieval by camera needs poses; give them or choose another policy")
        ids, places = index.within(candidates)
        distances = camera_distances(places, query)
        if self.prefer_resident:
            held = np.isin(ids, np.fromiter(resident, dtype=np.int64))
            distances[held] = np.round(0.8 * distances[held] - 0.002, DECIMALS)
        best = _smallest(distances, len(ids) if count is None else count)
        return Ranking(ids[best], distances[best])


class Recent:
    """The newest candidates first: a longer recent window, whatever the camera does."""

    name = "recent"
    needs_poses = False

    def rank(
        self,
        index: PlaceIndex,
        query: Floats | None,
        candidates: range,
        count: int | None = None,
        resident: Iterable[int] = (),
    ) -> Ranking:
        ids = index.within(candidates)[0][::-1][:count].copy()
        return Ranking(ids, np.arange(len(ids), dtype=np.float64))


class Nothing:
    """Retrieves nothing: sink and recent only, the baseline without memory."""

    name = "none"
    needs_poses = False

    def rank(
        self,
        index: PlaceIndex,
        query: Floats | None,
        candidates: range,
        count: int | None = None,
        resident: Iterable[int] = (),
    ) -> Ranking:
        return Ranking(np.empty(0, dtype=np.int64), np.empty(0))


def _smallest(distances: Floats, count: int) -> Ids:
    """Rows of the ``count`` smallest distances, ascending, the smaller row first among equals."""
    if count >= len(distances):
        return np.argsort(distances, kind="stable")
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    # A partition picks any of several equal values at its edge, so take all up to the edge first.
    edge = np.partition(distances, count - 1)[count - 1]
    rows = np.flatnonzero(distances <= edge)
    return rows[np.argsort(distances[rows], kind="stable")][:count]


@cache
def _policies() -> dict[str, type[RetrievalPolicy]]:
    found: dict[str, type[RetrievalPolicy]] = {
        policy.name: policy for policy in (CameraDistance, Recent, Nothing)
    }
    for entry in entry_points(group="worldpager.retrieval"):
        policy = entry.load()
        if policy.name in found:
            raise ConfigError(
                f"retrieval policy {policy.name!r} from {entry.value!r} takes a name that is "
                "already in use; give it another or uninstall its package"
            )
        found[policy.name] = policy
    return found


def policy_names() -> list[str]:
    """Names of all retrieval policies, built in and from ``worldpager.retrieval`` entry points."""
    return list(_policies())


def get_policy(name: str) -> RetrievalPolicy:
    """The retrieval policy called ``name``. Raises :class:`ConfigError` listing the known names."""
    try:
        return _policies()[name]()
    except KeyError:
        raise ConfigError(
            f"no retrieval policy {name!r}; known are {', '.join(policy_names())}"
        ) from None

"""Several policies at once, each with a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import numpy as np

from worldpager.errors import ConfigError
from worldpager.prefetch.distance import DECIMALS
from worldpager.prefetch.index import View
from worldpager.prefetch.keys import SHORTLIST, KeyKind
from worldpager.prefetch.poses import Floats
from worldpager.prefetch.ranking import Query, Scored, smallest

By = Literal["scores", "ranks"]


@dataclass(frozen=True)
class Hybrid(Scored):
    """The weighted mean of several policies' distances, or of their ranks.

    ``parts``: policies and their weights. ``by``: ``scores`` takes the distances, each in [0, 1];
    ``ranks`` the places in the first :data:`SHORTLIST`, all further ones being equally far, which
    does not care on what scale a policy measures. What one part leaves out is left out.
    """

    name: ClassVar[str] = "hybrid"

    parts: Mapping[Scored, float] = field(default_factory=dict)
    by: By = "scores"

    def __post_init__(self) -> None:
        Scored.__post_init__(self)
        if self.by not in get_args(By):
            raise ConfigError(f"a hybrid goes by scores or ranks, not by {self.by!r}")
        if not self.parts or not all(0 < weight < np.inf for weight in self.parts.values()):
            raise ConfigError(
                "a hybrid needs policies with positive weights, such as hybrid:camera=1,query=0.5"
            )
        if len({part.keys for part in self.parts} - {""}) > 1:
            raise ConfigError("a hybrid cannot combine mean keys with bounds; choose one of them")

    @property
    def needs_poses(self) -> bool:  # type: ignore[override]
        return any(part.needs_poses for part in self.parts)

    @property
    def keys(self) -> KeyKind:  # type: ignore[override]
        return max((part.keys for part in self.parts), default="")

    @property
    def needs_query(self) -> bool:  # type: ignore[override]
        return any(part.needs_query for part in self.parts)

    @property
    def ranks_ahead(self) -> bool:
        return not all(part.needs_query for part in self.parts)

    def distances(self, view: View, query: Query) -> Floats:
        total, weights = np.zeros(len(view.ids)), 0.0
        for part, weight in self.parts.items():
            if query.keys is None and part.needs_query:
                continue  # for a chunk ahead the other parts must do
            found = part.distances(view, query)
            total += weight * (_ranks(found) if self.by == "ranks" else found)
            weights += weight
        return np.round(total / weights, DECIMALS)


def _ranks(distances: Floats) -> Floats:
    """Places among the first :data:`SHORTLIST` over their number, equal ones sharing the better;
    1 beyond, infinity where infinite.
    """
    out = np.where(np.isfinite(distances), 1.0, np.inf)
    best = smallest(distances, SHORTLIST)
    best = best[np.isfinite(distances[best])]
    values = distances[best]
    out[best] = np.searchsorted(values, values) / SHORTLIST
    return out

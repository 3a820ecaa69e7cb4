"""Which tokens to keep, as a question with one rule for ties: the smaller id first."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from worldpager.errors import ConfigError

Ids = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]

ALWAYS = -1
"""Group of the tokens that are kept whatever their score."""


def highest(scores: npt.ArrayLike, count: int) -> Ids:
    """Indices of the ``count`` highest of ``scores`` ``[n]``, ascending; among equals the smaller.

    NaN counts as highest: what cannot be judged is not thrown away. Raises :class:`ConfigError`
    where ``count`` is not between 0 and n.
    """
    values = np.asarray(scores, dtype=np.float64)
    if not 0 <= count <= len(values):
        raise ConfigError(f"{count} of {len(values)} tokens cannot be kept")
    order = np.argsort(-np.where(np.isnan(values), np.inf, values), kind="stable")
    return np.sort(order[:count]).astype(np.int64)


def random_order(count: int, seed: int, first: int = 0) -> Scores:
    """Scores ``[count]`` by which ids ``first`` and on are kept in a random but fixed order.

    Source: DeCoPrune's random control ranks tokens by SHA-256 of ``cmbench-random-v1:seed:id``.
    """
    digests = [
        hashlib.sha256(f"cmbench-random-v1:{seed}:{i}".encode()).digest()
        for i in range(first, first + count)
    ]
    scores = np.empty(count)
    scores[sorted(range(count), key=digests.__getitem__)] = -np.arange(count)
    return scores


@dataclass(frozen=True, slots=True, eq=False)
class Preference:
    """What one layer of a chunk would keep.

    ``scores`` float64 ``[tokens]``: the higher, the sooner kept. ``groups`` int64 ``[tokens]``: the
    group in which a token competes, or ``ALWAYS``. ``keep``: how many each group keeps.
    """

    scores: Scores
    groups: Ids
    keep: tuple[int, ...]

    def ids(self) -> Ids:
        """The kept tokens, ascending int64."""
        kept = [np.flatnonzero(self.groups == ALWAYS)]
        for group, count in enumerate(self.keep):
            members = np.flatnonzero(self.groups == group)
            kept.append(members[highest(self.scores[members], count)])
        return np.sort(np.concatenate(kept)).astype(np.int64)

    def reordered(self, scores: Scores) -> Preference:
        """The same groups and counts, by other scores: a control at equal rate."""
        return replace(self, scores=scores)

"""How far places are from each other: WorldKV's camera distance.

Between places i and c: ``a = |t_i - t_c|^2``, ``b = acos((trace(M_i^T M_c) - 1) / 2)``, and
``d = 0.5 a / max a + 0.5 b / max b`` with the maxima over the candidates (a term whose maximum is 0
stays 0). Distances are rounded before anyone compares them, and differences that are only floating
point noise are set to 0 before the division could make them large, so equal places tie exactly.
"""

from __future__ import annotations

import numpy as np

from worldpager.prefetch.poses import Floats

DECIMALS = 9
"""Decimals of a distance in [0, 1]; rounding noise is about 1e-15, so ties are found."""

_SAME_TURN = 1e-12
"""``1 - |cos|`` below this (1.4e-6 rad) is rounding of the trace, which acos magnifies."""

_SAME_POINT = 1e-12
"""Squared translation in units^2 below this is rounding of coordinates."""


def separations(places: Floats, queries: Floats) -> tuple[Floats, Floats]:
    """Squared translation `[n, q]` and rotation angle in radians `[n, q]` between `[n, 12]` and
    `[q, 12]` places.
    """
    squared = np.zeros((len(places), len(queries)))
    for axis in range(3):  # three passes over [n, q] beat one reduction over [n, q, 3] fourfold
        offset = np.subtract.outer(places[:, axis], queries[:, axis])
        squared += offset * offset
    squared *= squared >= _SAME_POINT
    # trace(M_i^T M_c) is the dot product of the two matrices read as vectors. Not `@`: on arrays
    # this small BLAS threads cost milliseconds where other threads are busy.
    cosine = np.einsum("ni,qi->nq", places[:, 3:], queries[:, 3:])
    cosine -= 1.0
    cosine *= 0.5
    straight = np.abs(cosine) > 1.0 - _SAME_TURN
    return squared, np.arccos(np.where(straight, np.sign(cosine), cosine))


def combine(squared: Floats, angle: Floats) -> Floats:
    """The distances of :func:`separations`, each term over its maximum within a query, rounded."""
    total = _over_maximum(squared)
    total += _over_maximum(angle)
    total *= 0.5
    return np.round(total, DECIMALS)


def camera_distances(places: Floats, query: Floats) -> Floats:
    """Distances `[n]` of candidate places `[n, 12]` from the query place `[12]`, rounded."""
    return combine(*separations(places, query[None]))[:, 0]


def _over_maximum(term: Floats) -> Floats:
    """Each column over its own maximum; columns of zeros stay zero."""
    most = term.max(axis=0, initial=0.0)
    return term / np.where(most > 0.0, most, 1.0)

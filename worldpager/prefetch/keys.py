"""What the pages' keys look like on the whole, and which of them a query would attend to.

A page is represented by one row: the mean of its keys over tokens, or, for Quest's bound, their
minimum and maximum channel by channel. The bound ``sum_i max(q_i min_i, q_i max_i)`` is written as
a dot product, ``q . mid + |q| . radius`` with ``mid = (max + min) / 2`` and ``radius = (max - min)
/ 2``, so both kinds are searched alike: for the row that has the largest product with the query.

Rows are kept as int16 with one scale each, which is also how they are stored, so that a choice does
not depend on whether the process was restarted. Rows wider than :data:`SKETCH` are searched in two
steps, since reading all of a wide index takes longer than a choice may: a fixed random projection
to :data:`SKETCH` numbers finds :data:`SHORTLIST` rows, and these are scored in full. What all rows
have in common does not disturb the first step: a projection moves it alike for all.

Sources: WorldAttention (HKV), mean keys and queries; Quest, the bound.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from worldpager.errors import ConfigError
from worldpager.prefetch.poses import Floats

Vector = npt.NDArray[np.float32]
Row = npt.NDArray[np.int16]

KeyKind = Literal["", "mean", "bounds"]
"""What an index must hold of a page's keys: nothing, their mean, their range."""

SKETCH = 128
SHORTLIST = 128


class StoredRow(NamedTuple):
    """A row as kept: int16 `[width]`, worth ``scale`` each."""

    values: Row
    scale: float


class KeyRows(NamedTuple):
    """Rows of n pages. ``sketch``: float32 `[n, min(width, SKETCH)]`, NaN where a page has no row;
    ``values`` int16 `[n, width]` and ``scales`` float32 `[n]`, without columns for narrow rows.
    """

    sketch: npt.NDArray[np.float32]
    values: Row
    scales: Vector


def no_rows(count: int, width: int) -> KeyRows:
    """What ``count`` pages without rows look like to a query of ``width``."""
    return KeyRows(
        np.full((count, min(width, SKETCH)), np.nan, dtype=np.float32),
        np.zeros((count, width if width > SKETCH else 0), dtype=np.int16),
        np.zeros(count, dtype=np.float32),
    )


def stored_row(row: npt.ArrayLike) -> StoredRow:
    """A row rounded to what is kept. Raises :class:`ConfigError` unless it is finite and flat."""
    given = np.asarray(row, dtype=np.float32)
    if given.ndim != 1 or not len(given) or not np.isfinite(given).all():
        raise ConfigError(f"a page's keys must be finite numbers [width], not {given.shape}")
    scale = float(np.abs(given).max()) / 32767 or 1.0
    return StoredRow(np.round(given / scale).astype(np.int16), float(np.float32(scale)))


def bounds_row(least: npt.ArrayLike, most: npt.ArrayLike) -> Vector:
    """The row of a range: middle and radius `[2 * width]` of channels in ``[least, most]``."""
    low, high = np.asarray(least, dtype=np.float32), np.asarray(most, dtype=np.float32)
    return np.concatenate([(high + low) / 2, (high - low) / 2])


def query_row(query: npt.ArrayLike, kind: KeyKind) -> Vector:
    """What rows of ``kind`` are multiplied with for a mean query `[width]`."""
    given = np.asarray(query, dtype=np.float32)
    if given.ndim != 1 or not len(given) or not np.isfinite(given).all():
        raise ConfigError(f"a mean query must be finite numbers [width], not {given.shape}")
    return np.concatenate([given, np.abs(given)]) if kind == "bounds" else given


def sketch_of(row: StoredRow) -> Vector:
    """A row's float32 sketch: the row itself where it is narrow."""
    return project(row.values.astype(np.float32) * np.float32(row.scale))


def project(row: Vector) -> Vector:
    """``row`` `[width]` as `[min(width, SKETCH)]`; products are kept on average."""
    if len(row) <= SKETCH:
        return row
    sketch: Vector = np.einsum("d,ds->s", row, _projection(len(row)))
    return sketch


@cache
def _projection(width: int) -> npt.NDArray[np.float32]:
    drawn = np.random.default_rng(width).standard_normal((width, SKETCH), dtype=np.float32)
    return drawn / np.float32(np.sqrt(SKETCH))


def check_width(query: Vector, rows: KeyRows) -> None:
    """Raise :class:`ConfigError` where the query is not as wide as the rows."""
    width = rows.values.shape[1] or rows.sketch.shape[1]
    if len(query) != width:
        raise ConfigError(
            f"the query makes a row of {len(query)} numbers but the pages' keys have {width}; both "
            "are of layer 0, heads joined"
        )


def scores(rows: KeyRows, query: Vector) -> Floats:
    """Products `[n]` of every row with ``query`` (from :func:`query_row`), the larger the better.

    Exact for narrow rows and for the shortlist; the rest is estimated, and never above it. Pages
    without a row score ``-inf``.
    """
    check_width(query, rows)
    found: Floats = np.einsum("nd,d->n", rows.sketch, project(query)).astype(np.float64)
    np.copyto(found, -np.inf, where=np.isnan(found))
    if rows.values.shape[1]:
        best = shortlist(rows, found)
        values = rows.values[best].astype(np.float32)
        exact = np.einsum("nd,d->n", values, query) * rows.scales[best]
        _override(found, best, exact.astype(np.float64))
    return found


def head_scores(
    rows: KeyRows, query: Vector, heads: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Rows and their products head by head: int64 `[m]` and float32 `[heads, m]`. All rows that
    there are, or the shortlist of a wide index.
    """
    check_width(query, rows)
    if len(query) % heads:
        raise ConfigError(f"{heads} heads do not divide a query of {len(query)} numbers")
    by_head = query.reshape(heads, -1)
    if rows.values.shape[1] == 0:
        best, values = np.flatnonzero(~np.isnan(rows.sketch[:, 0])), rows.sketch
        values = values if len(best) == len(values) else values[best]
        scale = np.ones(1, dtype=np.float32)
    else:
        estimate = np.einsum("nd,d->n", rows.sketch, project(query)).astype(np.float64)
        np.copyto(estimate, -np.inf, where=np.isnan(estimate))
        best = shortlist(rows, estimate)
        values, scale = rows.values[best].astype(np.float32), rows.scales[best]
    products = np.empty((heads, len(values)), dtype=np.float32)
    split = values.reshape(len(values), *by_head.shape)
    for head in range(heads):
        np.einsum("nd,d->n", split[:, head], by_head[head], out=products[head])
    return best, products * scale


def shortlist(rows: KeyRows, estimate: Floats) -> npt.NDArray[np.int64]:
    """Rows of a wide index that are worth scoring in full, ascending."""
    if len(estimate) > SHORTLIST:
        best = np.sort(np.argpartition(-estimate, SHORTLIST)[:SHORTLIST])
    else:
        best = np.arange(len(estimate))
    return best[np.isfinite(estimate[best])]


def _override(found: Floats, best: npt.NDArray[np.int64], exact: Floats) -> None:
    """Put the exact scores in, and everything else at or below the least of them."""
    if len(best):
        np.minimum(found, exact.min(), out=found)
        found[best] = exact

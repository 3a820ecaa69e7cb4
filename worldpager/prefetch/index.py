"""The places of one stream's chunks, and how near chunks are to the path ahead.

Two parallel arrays, chunk ids in ascending order and places, grown by doubling: 104 bytes a chunk,
so 100,000 chunks take about 13 MB. Chunks without a pose are not in it and are never retrieved by
camera.

One thread changes an index at a time; any thread may read meanwhile and sees a whole earlier state:
a change either fills rows that no reader looks at yet or works on copies, and then replaces the
state in one assignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from worldpager.errors import ConfigError
from worldpager.prefetch.distance import combine, separations
from worldpager.prefetch.poses import PLACE, Floats

Ids = npt.NDArray[np.int64]

_FIRST_CAPACITY = 64


class _Rows(NamedTuple):
    """Arrays with room for more; the first ``used`` rows are in use and never change."""

    ids: Ids
    places: Floats
    used: int

    def row(self, chunk: int) -> int:
        """Row of the first chunk with an id of at least ``chunk``."""
        if self.used == 0 or chunk > self.ids[self.used - 1]:
            return self.used
        return int(np.searchsorted(self.ids[: self.used], chunk))

    def has(self, chunk: int) -> bool:
        row = self.row(chunk)
        return row < self.used and bool(self.ids[row] == chunk)

    def resized(self, capacity: int) -> _Rows:
        """A copy with room for ``capacity`` rows."""
        ids, places = np.empty(capacity, dtype=np.int64), np.empty((capacity, PLACE))
        ids[: self.used], places[: self.used] = self.ids[: self.used], self.places[: self.used]
        return _Rows(ids, places, self.used)


class PlaceIndex:
    """Places by chunk id; implements the ``Nearness`` that eviction asks."""

    def __init__(self) -> None:
        self._rows = _Rows(np.empty(0, dtype=np.int64), np.empty((0, PLACE)), 0)
        self._path: Floats = np.empty((0, PLACE))

    def __len__(self) -> int:
        return self._rows.used

    def __contains__(self, chunk: int) -> bool:
        return self._rows.has(chunk)

    @property
    def nbytes(self) -> int:
        """Bytes held, room for growth included."""
        return self._rows.ids.nbytes + self._rows.places.nbytes

    @property
    def ids(self) -> Ids:
        """Ids of all chunks, ascending int64 `[n]`; a view that later changes do not touch."""
        rows = self._rows
        return rows.ids[: rows.used]

    def add(self, chunk: int, place: npt.ArrayLike) -> None:
        """Note the place `[12]` of a chunk; a chunk that is there already gets the new place.

        Amortised O(1) for growing ids, else O(n). Raises :class:`ConfigError` for a negative id or
        a place that is not 12 finite numbers.
        """
        values = np.asarray(place, dtype=np.float64)
        if values.shape != (PLACE,) or not np.isfinite(values).all():
            raise ConfigError(f"chunk {chunk}'s place must be {PLACE} finite numbers, not {values}")
        if chunk < 0:
            raise ConfigError(f"a chunk id must not be negative, as {chunk} is")
        rows = self._rows
        row, end = rows.row(chunk), rows.used
        known = rows.has(chunk)
        if end == len(rows.ids) and not known:
            rows = rows.resized(max(2 * end, _FIRST_CAPACITY))
        elif row < end:
            rows = rows.resized(len(rows.ids))
        if not known:
            rows.ids[row + 1 : end + 1] = rows.ids[row:end]
            rows.places[row + 1 : end + 1] = rows.places[row:end]
            end += 1
        rows.ids[row] = chunk
        rows.places[row] = values
        self._rows = rows._replace(used=end)

    def remove(self, chunk: int) -> None:
        """Forget a chunk, O(n); nothing happens where it is not known."""
        if chunk in self:
            rows = self._rows.resized(len(self._rows.ids))
            row, end = rows.row(chunk), rows.used
            rows.ids[row : end - 1] = rows.ids[row + 1 : end]
            rows.places[row : end - 1] = rows.places[row + 1 : end]
            self._rows = rows._replace(used=end - 1)

    def place(self, chunk: int) -> Floats:
        """A copy of the chunk's place `[12]`. Raises :class:`KeyError` where it is not known."""
        rows = self._rows
        if not rows.has(chunk):
            raise KeyError(chunk)
        return np.array(rows.places[rows.row(chunk)])

    def within(self, candidates: range) -> tuple[Ids, Floats]:
        """Ids `[n]`, ascending, and places `[n, 12]` of the chunks in ``candidates`` (step 1).

        Views that later changes do not touch; not to be written to.
        """
        rows = self._rows
        first = rows.row(candidates.start)
        part = slice(first, max(first, rows.row(candidates.stop)))
        return rows.ids[part], rows.places[part]

    def set_path(self, places: npt.ArrayLike) -> None:
        """The places `[n, 12]` where the camera is and will be, for :meth:`to_path`."""
        path = np.array(places, dtype=np.float64).reshape(-1, PLACE)
        if not np.isfinite(path).all():
            raise ConfigError("the path ahead holds NaN or infinity; check the poses it came from")
        self._path = path

    def to_path(self, chunks: Sequence[int]) -> Floats:
        """Distance `[n]` of each chunk to the nearest place of the path.

        The camera distance, normalised over ``chunks`` for each place of the path. Chunks without a
        place are infinitely far (the camera can never ask for them); before a path is set all
        others are at distance 0.
        """
        known, places = self._known(chunks)
        path = self._path
        out = np.full(len(chunks), np.inf)
        out[known] = combine(*separations(places, path)).min(axis=1) if len(path) else 0.0
        return out

    def between(self, chunks: Sequence[int]) -> Floats:
        """Camera distance `[n, n]` between chunks, normalised over all pairs of them.

        Infinite for pairs with a chunk that has no place.
        """
        known, places = self._known(chunks)
        squared, angle = separations(places, places)
        distances = combine(squared.reshape(-1, 1), angle.reshape(-1, 1))
        out = np.full((len(chunks), len(chunks)), np.inf)
        out[np.ix_(known, known)] = distances.reshape(squared.shape)
        return out

    def _known(self, chunks: Sequence[int]) -> tuple[npt.NDArray[np.bool_], Floats]:
        """Which of ``chunks`` have a place, bool `[n]`, and the places of those."""
        rows = self._rows
        asked = np.asarray(chunks, dtype=np.int64)
        if rows.used == 0:
            return np.zeros(len(asked), dtype=np.bool_), np.empty((0, PLACE))
        at = np.minimum(np.searchsorted(rows.ids[: rows.used], asked), rows.used - 1)
        known = rows.ids[at] == asked
        return known, rows.places[at[known]]

"""The places of one stream's chunks, and how near chunks are to the path ahead.

Parallel arrays, chunk ids in ascending order, places and prompt epochs, grown by doubling: 108
bytes a chunk, so 100,000 chunks take about 14 MB; and, where a policy asks for them, what the
chunks' keys look like. Chunks without a pose are not in it and are never retrieved by camera.

One thread changes an index at a time; any thread may read meanwhile and sees a whole earlier state:
a change either fills rows that no reader looks at yet or works on copies, and then replaces the
state in one assignment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from worldpager.errors import ConfigError
from worldpager.prefetch.distance import combine, separations
from worldpager.prefetch.keys import SKETCH, KeyRows, StoredRow, Vector, no_rows, sketch_of
from worldpager.prefetch.poses import PLACE, Floats

Ids = npt.NDArray[np.int64]

_FIRST_CAPACITY = 64


class View(NamedTuple):
    """Chunks of an index, by ascending id: int64 `[n]`, places `[n, 12]`, the epochs of the prompts
    they were made under int32 `[n]`, their keys (None where no chunk has any), and the prompts of
    all epochs: unit vectors by epoch. Not to be written to; later changes do not touch it.
    """

    ids: Ids
    places: Floats
    epochs: npt.NDArray[np.int32]
    keys: KeyRows | None
    prompts: Mapping[int, Vector]


class _Rows(NamedTuple):
    """Arrays with room for more; the first ``used`` rows are in use and never change.

    ``columns``: places and epochs, and with keys their sketches, values and scales.
    """

    ids: Ids
    columns: tuple[npt.NDArray[Any], ...]
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
        ids, *columns = (
            np.empty((capacity, *old.shape[1:]), dtype=old.dtype)
            for old in (self.ids, *self.columns)
        )
        for new, old in zip((ids, *columns), (self.ids, *self.columns), strict=True):
            new[: self.used] = old[: self.used]
        return _Rows(ids, tuple(columns), self.used)

    def with_keys(self, width: int) -> _Rows:
        """The same with columns for keys, which no row has yet."""
        return self._replace(columns=(*self.columns, *no_rows(len(self.ids), width)))

    @property
    def width(self) -> int:
        """Width of the keys' rows; 0 without any."""
        if len(self.columns) == 2:
            return 0
        return int(self.columns[3].shape[1] or self.columns[2].shape[1])


class PlaceIndex:
    """Places by chunk id; implements the ``Nearness`` that eviction asks."""

    def __init__(self) -> None:
        places, epochs = np.empty((0, PLACE)), np.empty(0, dtype=np.int32)
        self._rows = _Rows(np.empty(0, dtype=np.int64), (places, epochs), 0)
        self._path: Floats = np.empty((0, PLACE))
        self._prompts: dict[int, Vector] = {}

    def __len__(self) -> int:
        return self._rows.used

    def __contains__(self, chunk: int) -> bool:
        return self._rows.has(chunk)

    @property
    def nbytes(self) -> int:
        """Bytes held, room for growth included."""
        return self._rows.ids.nbytes + sum(column.nbytes for column in self._rows.columns)

    @property
    def ids(self) -> Ids:
        """Ids of all chunks, ascending int64 `[n]`; a view that later changes do not touch."""
        rows = self._rows
        return rows.ids[: rows.used]

    def add(
        self, chunk: int, place: npt.ArrayLike, *, epoch: int = 0, keys: StoredRow | None = None
    ) -> None:
        """Note the place `[12]` of a chunk; a chunk that is there already gets the new place.

        ``epoch``: of the prompt it was made under; ``keys``: what its keys look like. Amortised
        O(1) for growing ids, else O(n). Raises :class:`ConfigError` for a negative id, a place that
        is not 12 finite numbers, and keys of another width than those before.
        """
        values = np.asarray(place, dtype=np.float64)
        if values.shape != (PLACE,) or not np.isfinite(values).all():
            raise ConfigError(f"chunk {chunk}'s place must be {PLACE} finite numbers, not {values}")
        if chunk < 0:
            raise ConfigError(f"a chunk id must not be negative, as {chunk} is")
        rows = self._rows
        if keys is not None and not rows.width:
            rows = rows.with_keys(len(keys.values))
        if keys is not None and len(keys.values) != rows.width:
            raise ConfigError(
                f"chunk {chunk}'s keys are {len(keys.values)} numbers wide, those before it "
                f"{rows.width}"
            )
        row, end = rows.row(chunk), rows.used
        known = rows.has(chunk)
        if end == len(rows.ids) and not known:
            rows = rows.resized(max(2 * end, _FIRST_CAPACITY))
        elif row < end:
            rows = rows.resized(len(rows.ids))
        if not known:
            for column in (rows.ids, *rows.columns):
                column[row + 1 : end + 1] = column[row:end].copy()
            end += 1
        fields: list[Any] = [chunk, values, epoch]
        if rows.width:
            fields += [np.nan, 0, 0] if keys is None else [sketch_of(keys), *keys]
            if rows.width <= SKETCH:
                fields[4] = 0
        for column, field in zip((rows.ids, *rows.columns), fields, strict=True):
            column[row] = field
        self._rows = rows._replace(used=end)

    def remove(self, chunk: int) -> None:
        """Forget a chunk, O(n); nothing happens where it is not known."""
        if chunk in self:
            rows = self._rows.resized(len(self._rows.ids))
            row, end = rows.row(chunk), rows.used
            for column in (rows.ids, *rows.columns):
                column[row : end - 1] = column[row + 1 : end].copy()
            self._rows = rows._replace(used=end - 1)

    def set_prompt(self, epoch: int, prompt: npt.ArrayLike | None) -> None:
        """Note the embedding of an epoch's prompt `[dim]`, kept as a unit vector; None for none.

        Raises :class:`ConfigError` for one that is not finite or has no direction.
        """
        if prompt is None:
            self._prompts = {e: unit for e, unit in self._prompts.items() if e != epoch}
            return
        given = np.asarray(prompt, dtype=np.float32)
        norm = float(np.linalg.norm(given)) if given.ndim == 1 else 0.0
        if not np.isfinite(norm) or norm == 0:
            raise ConfigError(f"a prompt's embedding must be [dim], finite and not 0, not {given}")
        self._prompts = {**self._prompts, epoch: given / np.float32(norm)}

    def place(self, chunk: int) -> Floats:
        """A copy of the chunk's place `[12]`. Raises :class:`KeyError` where it is not known."""
        rows = self._rows
        if not rows.has(chunk):
            raise KeyError(chunk)
        return np.array(rows.columns[0][rows.row(chunk)])

    def view(self, candidates: range) -> View:
        """The chunks of ``candidates`` (step 1)."""
        rows = self._rows
        first = rows.row(candidates.start)
        part = slice(first, max(first, rows.row(candidates.stop)))
        places, epochs, *keys = (column[part] for column in rows.columns)
        return View(rows.ids[part], places, epochs, KeyRows(*keys) if keys else None, self._prompts)

    def within(self, candidates: range) -> tuple[Ids, Floats]:
        """Ids `[n]`, ascending, and places `[n, 12]` of the chunks in ``candidates`` (step 1).

        Views that later changes do not touch; not to be written to.
        """
        return self.view(candidates)[:2]

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
        return known, rows.columns[0][at[known]]

"""Which bytes of the pool belong to whom: extents of whole pages, best fit with coalescing.

Pure bookkeeping, no memory inside. A chunk takes one extent, all its blocks in a row, so that one
direct read or write moves it. Chunks of a rollout are nearly all of one size, and best fit then
behaves like a list of slots; odd sizes (a short last chunk, another codec) go into the smallest gap
that holds them and give it back whole, because a freed extent joins its free neighbours at once.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from worldpager.errors import ConfigError, WorldPagerError

PAGE = 4096
"""Granularity of extents in bytes: what direct I/O wants of addresses, lengths and file offsets."""


def page_ceil(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class ExtentAllocator:
    """Hands out page-aligned extents of ``[0, capacity)``; ``capacity`` is rounded down to pages.

    Deterministic: the same calls give the same offsets. Not thread-safe; one thread owns it. A call
    costs O(log n) comparisons in the number of free extents, never in that of allocated ones.
    """

    def __init__(self, capacity: int) -> None:
        """Raises :class:`ConfigError` where not one page fits."""
        if capacity < PAGE:
            raise ConfigError(
                f"a pool of {capacity} bytes holds no page; give at least {PAGE} bytes"
            )
        self.capacity = capacity // PAGE * PAGE
        self.used = 0
        self._taken: dict[int, int] = {}  # offset -> length
        self._starts: dict[int, int] = {}  # free extents: offset -> length
        self._ends: dict[int, int] = {}  # free extents: end -> offset
        self._by_size: list[tuple[int, int]] = []  # free extents: (length, offset), sorted
        self._add_free(0, self.capacity)

    def __len__(self) -> int:
        """Number of extents handed out."""
        return len(self._taken)

    @property
    def free_bytes(self) -> int:
        """Bytes not handed out, in however many pieces."""
        return self.capacity - self.used

    @property
    def largest_free(self) -> int:
        """The largest request that :meth:`allocate` would grant now; 0 where the pool is full."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def free_extents(self) -> int:
        """Number of pieces that the free bytes are in; 1 is an unfragmented pool."""
        return len(self._by_size)

    def size_of(self, offset: int) -> int:
        """Bytes of the extent at ``offset``, whole pages. Raises as :meth:`free` does."""
        try:
            return self._taken[offset]
        except KeyError:
            raise WorldPagerError(
                f"no extent is allocated at {offset}: it was freed before or never handed out"
            ) from None

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a new extent of ``nbytes`` rounded up to pages, or None where no gap holds it.

        The smallest gap that fits is used, and of equal ones the first. Raises
        :class:`ConfigError` unless ``nbytes`` is positive.
        """
        if nbytes <= 0:
            raise ConfigError(f"an extent must have at least one byte, not {nbytes}")
        length = page_ceil(nbytes)
        at = bisect_left(self._by_size, (length, 0))
        if at == len(self._by_size):
            return None
        gap, offset = self._by_size[at]
        self._drop_free(offset)
        if gap > length:
            self._add_free(offset + length, gap - length)
        self._taken[offset] = length
        self.used += length
        return offset

    def free(self, offset: int) -> None:
        """Give back the extent at ``offset``, joining it with the free ones on either side.

        Raises :class:`WorldPagerError` for an offset that is not allocated (a double free).
        """
        length = self.size_of(offset)
        del self._taken[offset]
        self.used -= length
        start, end = offset, offset + length
        if (before := self._ends.get(start)) is not None:
            self._drop_free(before)
            start = before
        if (after := self._starts.get(end)) is not None:
            self._drop_free(end)
            end += after
        self._add_free(start, end - start)

    def _add_free(self, offset: int, length: int) -> None:
        self._starts[offset] = length
        self._ends[offset + length] = offset
        insort(self._by_size, (length, offset))

    def _drop_free(self, offset: int) -> None:
        length = self._starts.pop(offset)
        del self._ends[offset + length]
        del self._by_size[bisect_left(self._by_size, (length, offset))]

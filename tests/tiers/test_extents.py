from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from worldpager.errors import ConfigError, WorldPagerError
from worldpager.tiers.extents import PAGE, ExtentAllocator

CAPACITY = 32 * PAGE


class AgainstNaiveModel(RuleBasedStateMachine):
    """The model is one owner per page."""

    extents = Bundle("extents")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = ExtentAllocator(CAPACITY + 100)
        self.pages: list[int | None] = [None] * 32

    def gaps(self) -> list[tuple[int, int]]:
        """(length in pages, first page) of each run of free pages."""
        found, start = [], None
        for page, owner in enumerate([*self.pages, -1]):
            if owner is None and start is None:
                start = page
            elif owner is not None and start is not None:
                found.append((page - start, start))
                start = None
        return found

    @rule(target=extents, nbytes=st.integers(1, CAPACITY + PAGE))
    def allocate(self, nbytes: int) -> int | None:
        need = -(-nbytes // PAGE)
        fitting = [gap for gap in self.gaps() if gap[0] >= need]
        offset = self.allocator.allocate(nbytes)
        if not fitting:
            assert offset is None
            return None
        assert offset == min(fitting)[1] * PAGE
        for page in range(offset // PAGE, offset // PAGE + need):
            self.pages[page] = offset
        assert self.allocator.size_of(offset) == need * PAGE
        return offset

    @rule(offset=consumes(extents))
    def free(self, offset: int | None) -> None:
        if offset is None:
            return
        self.allocator.free(offset)
        self.pages = [None if owner == offset else owner for owner in self.pages]
        with pytest.raises(WorldPagerError, match=f"no extent is allocated at {offset}"):
            self.allocator.free(offset)

    @invariant()
    def agrees(self) -> None:
        taken = [owner for owner in self.pages if owner is not None]
        gaps = self.gaps()
        assert self.allocator.capacity == CAPACITY
        assert self.allocator.used == len(taken) * PAGE
        assert self.allocator.free_bytes == CAPACITY - len(taken) * PAGE
        assert self.allocator.largest_free == max(gaps, default=(0, 0))[0] * PAGE
        assert self.allocator.free_extents == len(gaps)
        assert len(self.allocator) == len(set(taken))

    def teardown(self) -> None:
        for offset in {owner for owner in self.pages if owner is not None}:
            self.allocator.free(offset)
        assert self.allocator.free_extents == 1
        assert self.allocator.largest_free == CAPACITY


TestAgainstNaiveModel = AgainstNaiveModel.TestCase


@given(st.lists(st.integers(1, 9), min_size=1), st.randoms(use_true_random=False))
def test_equal_chunks_fill_the_pool_whatever_was_freed_before(sizes: list[int], random) -> None:
    allocator = ExtentAllocator(64 * PAGE)
    held = [offset for size in sizes if (offset := allocator.allocate(size * PAGE)) is not None]
    random.shuffle(held)
    for offset in held:
        allocator.free(offset)
    assert [allocator.allocate(8 * PAGE) for _ in range(9)] == [
        *range(0, 64 * PAGE, 8 * PAGE),
        None,
    ]


def test_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match="holds no page"):
        ExtentAllocator(PAGE - 1)
    with pytest.raises(ConfigError, match="at least one byte, not 0"):
        ExtentAllocator(PAGE).allocate(0)
    with pytest.raises(WorldPagerError, match="no extent is allocated at 0"):
        ExtentAllocator(PAGE).free(0)

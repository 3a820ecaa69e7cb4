"""Belady's rule: what eviction could do if it knew the future. A bound, not a policy for use."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

from worldpager.pager.eviction import Evictable

P = TypeVar("P", bound=Evictable)


class Belady:
    """Gives up the chunk whose next use lies furthest ahead; among equals the least recently used.

    ``demands``: for each chunk of the rollout the chunks that its window will ask for. Where every
    miss costs one read and nothing is loaded ahead, no other rule reads less (L. A. Belady, "A
    study of replacement algorithms for a virtual-storage computer", 1966). Knows one stream.
    """

    name = "belady"

    def __init__(self, demands: Sequence[Sequence[int]]) -> None:
        self._uses: defaultdict[int, list[int]] = defaultdict(list)
        for step, wanted in enumerate(demands):
            for chunk in wanted:
                self._uses[chunk].append(step)
        self._step = 0

    def begin(self, step: int) -> None:
        """From now on the windows from ``step`` on are the future."""
        self._step = step

    def victim(self, pages: Sequence[P]) -> P:
        return max(pages, key=lambda page: (self._next_use(page.key.chunk), -page.last_used))

    def _next_use(self, chunk: int) -> float:
        uses = self._uses[chunk]
        at = bisect_left(uses, self._step)
        return uses[at] if at < len(uses) else math.inf

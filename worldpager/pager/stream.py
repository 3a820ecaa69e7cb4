"""What the core keeps of one stream: the window it holds, and what it may load for the next."""

from __future__ import annotations

from worldpager.pager.events import ChunkKey
from worldpager.pager.pace import Pace
from worldpager.pager.states import Page
from worldpager.pager.stats import Counted


class Stream:
    """What the core remembers of one stream between two windows."""

    __slots__ = (
        "ahead", "awaited", "before", "counted", "further", "gathering", "pace", "pinned", "urgent",
        "width",
    )  # fmt: skip

    def __init__(self) -> None:
        self.pinned: list[Page] = []  # the window served last
        self.before: list[Page] = []  # the one before it, no longer pinned
        self.counted = Counted({}, False)  # what the window served last added to the statistics
        self.width = 1  # chunks a window wants
        self.ahead: tuple[ChunkKey, ...] = ()
        self.urgent: tuple[ChunkKey, ...] = ()  # of these, what may be loaded in this step
        self.further: tuple[ChunkKey, ...] = ()  # and after that
        self.pace = Pace()
        self.awaited: set[ChunkKey] = set()  # what the next window waits for
        self.gathering: set[ChunkKey] = set()  # all of that window: none of it may leave meanwhile

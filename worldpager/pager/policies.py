"""The questions the core asks its policies. Policies are small, pure and deterministic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from worldpager.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Choice:
    """What a window gets when not all it wants is resident.

    ``chunks``: in time order, all resident. ``wait``: serve nothing yet, read first.
    """

    chunks: tuple[int, ...]
    reason: str
    wait: bool = False


class FallbackPolicy(Protocol):
    """Chooses what to serve on a miss."""

    def choose(
        self,
        wanted: tuple[int, ...],
        ranking: Sequence[int],
        resident: Callable[[int], bool],
        previous: tuple[int, ...],
    ) -> Choice:
        """``wanted``: what the window should hold, at least one of it not resident. ``ranking``:
        all candidates, nearest first. ``previous``: the stream's last served set, all resident.
        """


@dataclass(frozen=True, slots=True)
class WriteBack:
    """When dirty chunks are written: fractions of the pool that are dirty.

    Above ``start`` write-back runs whenever no read is under way, so that eviction finds clean
    victims; above ``urgent`` it no longer yields to reads. Nor does it while there is room for
    fewer than ``spare`` chunks that nobody needs: what is pinned and being read may fill a small
    pool long before its dirty part is large, and the next commit would have to wait.
    """

    start: float = 0.5
    urgent: float = 0.8
    spare: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.urgent <= 1 or self.spare < 0:
            raise ConfigError(
                f"write-back marks must satisfy 0 <= start <= urgent <= 1 and spare >= 0, not "
                f"{self.start} and {self.urgent}, {self.spare}"
            )


Pressure = Literal["block", "drop"]
"""What a commit does in a pool full of dirty chunks: wait for a write or drop the coldest."""

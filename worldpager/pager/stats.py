"""Counters of everything the core decides and learns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Counted:
    """What one window adds to the statistics: hits by source, and whether it was stale."""

    hits: Mapping[str, int]
    stale: bool


@dataclass(slots=True)
class Stats:
    """Running totals since the pager was opened; bytes are whole shard images.

    ``hits`` counts each wanted chunk of each window once, so its values add up to all that was
    wanted: ``staged`` (served, brought near the compute device ahead of time), ``dram`` (served,
    resident but not foreseen), ``nvme`` (served after the window waited for the read), ``stale``
    (not served, another chunk stood in its place) and ``empty`` (not served, nothing in its place).
    ``fetched`` counts served chunks that had come back from NVMe since
    they were last served.
    """

    commits: int = 0
    evictions: int = 0
    backpressure: int = 0
    reads: int = 0
    writes: int = 0
    deletes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    windows: int = 0
    stale_windows: int = 0
    spoiled: int = 0
    """Resident chunks whose bytes were found changed when a window was to be served them."""
    fetched: int = 0
    spill_chunk: int | None = None
    """The commit (counted from 1) that first found no free room in the pool."""
    first_write_chunk: int | None = None
    """Commits made when the first write-back began."""
    first_read_chunk: int | None = None
    """The chunk (counted from 1) that was being generated when the first read from NVMe began."""
    hits: Counter[str] = field(
        default_factory=lambda: Counter(staged=0, dram=0, nvme=0, stale=0, empty=0)
    )
    dropped: Counter[str] = field(default_factory=Counter)
    """Chunks lost from every tier, by reason."""
    read_failures: Counter[str] = field(default_factory=Counter)
    write_failures: Counter[str] = field(default_factory=Counter)

    def count(self, window: Counted) -> None:
        """A window was served."""
        self.hits.update(window.hits)
        self.windows += 1
        self.stale_windows += window.stale

    def take_back(self, window: Counted) -> None:
        """A window that was counted was not served after all."""
        self.hits.subtract(window.hits)
        self.windows -= 1
        self.stale_windows -= window.stale

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and dictionaries, ready for JSON."""
        return {k: dict(v) if isinstance(v, dict) else v for k, v in asdict(self).items()}

"""How a memory is: where its bytes are, what went wrong, and why things are done as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from worldpager.model_adapter.pruning import ChunkPruning
from worldpager.pager.room import SPOILED
from worldpager.pager.session import Session


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Bytes: resident in the pool, of these not yet on NVMe, of chunks on NVMe, of all files."""

    resident: int
    dirty: int
    stored: int
    disk: int


@dataclass(frozen=True, slots=True)
class Status:
    """A memory at one moment. Counts are since it was opened, by reason.

    ``problems``: one sentence each, empty while all is well. ``lost``: chunks that left every tier.
    ``damaged``: chunks, stored or in memory, that were found not to be what was
    written. ``rejected``: chunks that were never stored. ``stale``: windows served with an older
    or nearer set.
    """

    problems: tuple[str, ...]
    pool: int
    """Bytes of the DRAM pool."""
    occupancy: Occupancy
    pinned: int
    """Bytes of the pool that are page-locked for a GPU."""
    pin_reason: str
    """Why nothing is page-locked; empty where it is."""
    io_method: str
    """How files are read and written, and why if it is not the preferred way."""
    disk_limit: int | None
    lost: Mapping[str, int]
    damaged: Mapping[str, int]
    rejected: Mapping[str, int]
    read_failures: Mapping[str, int]
    write_failures: Mapping[str, int]
    stale: Mapping[str, int]
    pruning_ratio: float = 0.0
    """Share of the past that windows did not show because its tokens were pruned."""
    background_error: str = ""
    """What the last flush, or closing, could not make durable; empty once one could."""

    @property
    def ok(self) -> bool:
        """Whether nothing was lost or damaged, writing works, and the pool is as asked for."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, texts and dictionaries, ready for JSON."""
        return {"ok": self.ok, **asdict(self)}


def occupancy_of(session: Session) -> Occupancy:
    """Bytes in each tier at this moment."""
    table = session.pager.core.table
    return Occupancy(table.extents.used, table.dirty_bytes, table.stored_bytes, session.disk_bytes)


def status_of(
    session: Session,
    rejected: Mapping[str, int],
    stale: Mapping[str, int],
    pruning: ChunkPruning,
) -> Status:
    """The status of ``session``; the rest as counted by its memory."""
    pager, stats = session.pager, session.pager.core.stats
    # Copied in one step each, for other threads may count on.
    lost, damaged, rejected = dict(stats.dropped), dict(session.damaged), dict(rejected)
    if stats.spoiled:
        damaged[SPOILED] = stats.spoiled
    problems = [*_problems(pager.core.trouble, lost, damaged, rejected)]
    if pager.failure:
        problems.append(pager.failure)
    if pager.arena.pin_failed:
        problems.append(f"the pool is not page-locked as was asked: {pager.arena.pin_reason}")
    return Status(
        problems=tuple(problems),
        pool=pager.core.capacity,
        occupancy=occupancy_of(session),
        pinned=pager.arena.pinned_bytes,
        pin_reason=pager.arena.pin_reason,
        io_method=session.method,
        disk_limit=session.disk_limit,
        lost=lost,
        damaged=damaged,
        rejected=rejected,
        read_failures=dict(stats.read_failures),
        write_failures=dict(stats.write_failures),
        stale=dict(stale),
        pruning_ratio=pruning.ratio,
        background_error=pager.failure,
    )


def _problems(
    trouble: str, lost: dict[str, int], damaged: dict[str, int], rejected: dict[str, int]
) -> Iterator[str]:
    if trouble:
        yield f"writing to disk fails: {trouble}"
    for counts, text in (
        (lost, "chunks were lost"),
        (damaged, "chunks were found damaged"),
        (rejected, "chunks were not stored"),
    ):
        if total := sum(counts.values()):
            reasons = ", ".join(f"{reason}: {count}" for reason, count in counts.items())
            yield f"{total} {text} ({reasons})"

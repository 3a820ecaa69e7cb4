"""``worldpager status DIR``: how a store and the run that writes it are, without disturbing it."""

from __future__ import annotations

import json as jsonlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from worldpager.cli.inspect import open_rollouts
from worldpager.cli.options import Json, StoreDirectory
from worldpager.units import format_duration, format_size

if TYPE_CHECKING:
    from worldpager.model_adapter.record import Record
    from worldpager.tiers.lock import Owner
    from worldpager.tiers.recovery import DamagedChunk

TROUBLE_FOUND = 1
"""Exit status where the health is bad."""


def status(directory: StoreDirectory, json: Json = False) -> None:
    """Show how a store and its run are; exit 1 where something is wrong. Changes nothing."""
    health = _look(directory)
    if json:
        typer.echo(jsonlib.dumps(health.as_dict(), indent=2))
    else:
        for line in health.lines():
            # The store may come from anyone: its text is shown, not obeyed.
            typer.echo("".join(c if c.isprintable() else "?" for c in line))
    if health.problems:
        raise typer.Exit(TROUBLE_FOUND)


@dataclass(slots=True)
class _Rollout:
    name: str
    chunks: int
    nbytes: int
    largest: int
    """Bytes of its largest chunk."""
    damaged: Counter[str]
    leftovers: list[str]
    """Temporary files, of a run that lives or of one that was killed."""
    owner: Owner | None
    """Who holds its lock."""
    record: Record | None


@dataclass(slots=True)
class _Health:
    rollouts: list[_Rollout]
    free: int
    """Bytes free on the file system."""
    problems: list[str] = field(default_factory=list)

    @property
    def owner(self) -> Owner | None:
        """Who writes, or else who did when it died."""
        owners = [r.owner for r in self.rollouts if r.owner]
        return max(owners, key=lambda owner: owner.may_live(), default=None)

    @property
    def live(self) -> bool:
        return self.owner is not None and self.owner.may_live()

    @property
    def record(self) -> Record | None:
        """What the run that lives said last, or the newest one; clocks may have been set back."""
        records = [r.record for r in self.rollouts if r.record]
        return max(records, key=lambda r: (r.owner.may_live(), r.recorded), default=None)

    def as_dict(self) -> dict[str, Any]:
        record = self.record
        return {
            "ok": not self.problems,
            "problems": self.problems,
            "live": self.live,
            "pid": self.owner.pid if self.owner else None,
            "recorded": record.recorded if record else None,
            "closed": record.closed if record else None,
            "status": record.status if record else None,
            "free_bytes": self.free,
            "rollouts": [
                {
                    "rollout": r.name, "chunks": r.chunks, "bytes": r.nbytes,
                    "damaged": dict(r.damaged), "leftovers": r.leftovers,
                }
                for r in self.rollouts
            ],
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        yield f"{len(self.problems)} problems" if self.problems else "healthy"
        for problem in self.problems:
            yield f"problem: {problem}"
        yield f"run: {self._run()}"
        for name, value in (self.record.status if self.record else {}).items():
            if name not in ("ok", "problems"):
                yield f"{name}: {_text(value)}"
        for rollout in self.rollouts:
            yield f"{rollout.name}: {rollout.chunks} chunks, {format_size(rollout.nbytes)}"
        yield f"disk: {format_size(self.free)} free"

    def _run(self) -> str:
        owner, record = self.owner, self.record
        said = "has recorded no status"
        if record is not None:
            said = f"spoke {format_duration(max(0.0, time.time() - record.recorded))} ago"
        if owner is not None:
            state = "writes" if self.live else "is gone"
            return f"process {owner.pid} on {owner.host} {state}, {said}"
        return f"none, the last one {said}" if record else "none"


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items()) or "none"
    return str(value) if value not in ("", None) else "none"


def _look(directory: Path) -> _Health:
    import shutil

    rollouts = [_Rollout(**fields) for fields in _rollouts(directory)]
    health = _Health(rollouts, shutil.disk_usage(directory).free)
    health.problems += _problems(health)
    return health


def _rollouts(directory: Path) -> Iterator[dict[str, Any]]:
    """What the folder says of each rollout."""
    from worldpager.model_adapter.record import read_record
    from worldpager.tiers import documents, lock
    from worldpager.tiers.io_backend import SystemIO
    from worldpager.tiers.metadata import rollout_files

    io = SystemIO()
    for store in open_rollouts(directory):
        root = directory / store.spec.rollout
        folder = root / store.spec.streams[0]
        owner = lock.owner_of(folder)
        files = [file.name for file, _ in rollout_files(io, root)]
        chunks, damaged = store.contents(), store.damaged
        if damaged and owner is not None and owner.may_live():
            damaged = _still(directory, store.spec.rollout, damaged)
        yield {
            "name": store.spec.rollout,
            "chunks": len(chunks),
            "nbytes": store.bytes_used,
            "largest": max((chunk.nbytes for chunk in chunks), default=0),
            "damaged": Counter(chunk.reason for chunk in damaged),
            "leftovers": sorted(name for name in files if documents.is_temporary(name)),
            "owner": owner,
            "record": read_record(io, folder),
        }  # fmt: skip


def _still(
    directory: Path, rollout: str, damaged: tuple[DamagedChunk, ...]
) -> tuple[DamagedChunk, ...]:
    """Those that look the same again: the run may have replaced or removed the others meanwhile."""
    from worldpager.tiers.store import ChunkStore

    again = ChunkStore.inspect(directory, rollout)
    try:
        again.contents()
        return tuple(chunk for chunk in damaged if chunk in again.damaged)
    finally:
        again.close()


def _problems(health: _Health) -> Iterator[str]:
    record = health.record
    if record is not None:
        yield from record.problems
    elif health.live:
        yield "the run has recorded no status; perhaps its disk takes no more files"
    for rollout in health.rollouts:
        if rollout.damaged:
            reasons = ", ".join(f"{reason}: {n}" for reason, n in rollout.damaged.items())
            yield (
                f"{rollout.damaged.total()} chunks of {rollout.name} are damaged ({reasons}); "
                "worldpager verify lists them"
            )
        if rollout.leftovers and not health.live:
            yield (
                f"{len(rollout.leftovers)} files of writes that never ended lie in {rollout.name}; "
                "opening the store removes them"
            )
    ended_badly = record is not None and not record.closed and not record.owner.may_live()
    if (health.owner is not None and not health.live) or ended_badly:
        lost = record.unwritten if record is not None and not record.closed else 0
        yield (
            "the last run ended without closing; "
            f"{format_size(lost)} that it had not written yet are lost"
        )
    largest = max((rollout.largest for rollout in health.rollouts), default=0)
    if health.live and health.free < largest:
        yield (
            f"the disk is full: {format_size(health.free)} are free, a chunk takes "
            f"{format_size(largest)}"
        )

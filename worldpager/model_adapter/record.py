"""The status of a memory on disk, beside its store: what ``worldpager status`` says of a run.

Written in the background, so that no boundary waits for a disk; at once where the problems change,
otherwise once a second at most; and a last time on closing. Its loss costs nothing, so it is not
synced. The store keeps room for it under the disk cap, so it is never larger than was promised.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from worldpager.errors import ForeignDirectoryError
from worldpager.model_adapter.pruning import ChunkPruning
from worldpager.model_adapter.status import Status, status_of
from worldpager.pager.session import Session
from worldpager.tiers import documents
from worldpager.tiers.io_backend import IOBackend
from worldpager.tiers.lock import Owner

log = logging.getLogger("worldpager")

RECORD_SECONDS = 1.0
"""Between two records of a run, at least, while its problems stay the same."""


class Record(BaseModel):
    """What a run said last, parsed strictly: nobody vouches for a file."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    recorded: float = Field(allow_inf_nan=False)
    """Seconds since the epoch."""
    owner: Owner
    closed: bool
    """Whether the run ended with this."""
    status: dict[str, Any]
    """:meth:`Status.as_dict`; its values are to be shown, not relied on."""

    @property
    def problems(self) -> list[str]:
        """The problems named in the status."""
        problems = self.status.get("problems")
        return [str(problem) for problem in problems] if isinstance(problems, list) else []

    @property
    def unwritten(self) -> int:
        """Bytes that were in DRAM only."""
        occupancy = self.status.get("occupancy")
        dirty = occupancy.get("dirty") if isinstance(occupancy, dict) else 0
        return dirty if isinstance(dirty, int) else 0


def read_record(io: IOBackend, folder: Path) -> Record | None:
    """The record in ``folder``; None where there is none, or none that can be read as one."""
    with suppress(ForeignDirectoryError, ValidationError, RecursionError):
        content = documents.read_document(io, folder / documents.STATUS)
        return None if content is None else Record.model_validate_json(content)
    return None


class Recorder:
    """Keeps one memory's record up to date. Knows the session only, so a memory can be dropped."""

    def __init__(
        self,
        session: Session,
        rejected: Mapping[str, int],
        stale: Mapping[str, int],
        pruning: ChunkPruning,
    ) -> None:
        """Begin to record ``session``; the counts as in :func:`status_of`, counted on elsewhere."""
        self._session, self._counts = session, (rejected, stale, pruning)
        self._lock = threading.Lock()  # held while the file is written
        self._owner = Owner.current().model_dump()
        self._due = -float("inf")
        self._problems: tuple[str, ...] = ()
        self._pending = False
        self._ended = False
        self._failing = False
        session.on_close = self._end
        self.note()

    def note(self) -> None:
        """Record how it is, soon, if it is time to. Never blocks."""
        now, problems = time.monotonic(), self._status().problems
        if self._pending or (now < self._due and problems == self._problems):
            return
        self._due, self._problems, self._pending = now + RECORD_SECONDS, problems, True
        self._session.pool.writers.submit(self._record)

    def _status(self) -> Status:
        return status_of(self._session, *self._counts)

    def _record(self) -> None:
        try:
            with self._lock:
                if not self._ended:
                    self._write(closed=False)
        finally:
            self._pending = False

    def _end(self) -> None:
        """Record how it ended. Blocks on the disk."""
        self._ended = True
        with self._lock:
            self._write(closed=True)

    def _write(self, *, closed: bool) -> None:
        content = self._content(self._status().as_dict(), closed)
        path = self._session.folder / documents.STATUS
        try:
            try:
                _replace(path, content)
            except OSError:
                # The old record would say that all is well, and its room may do for this one.
                path.unlink(missing_ok=True)
                _replace(path, content)
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.warning("the status cannot be recorded at %s: %s", path, error)
            self._failing = True

    def _content(self, status: dict[str, Any], closed: bool) -> bytes:
        """The record, its texts and then its counters cut where it would become too large."""
        for cut in (status, _shortened(status), {"ok": status["ok"], "problems": [_TOO_LARGE]}):
            record = {
                "recorded": time.time(), "owner": self._owner, "closed": closed, "status": cut,
            }  # fmt: skip
            content = json.dumps(record, indent=1).encode()
            if len(content) <= documents.STATUS_BYTES:
                break
        return content


_TOO_LARGE = "there is more to tell than a record holds; see WorldMemory.status()"
_TEXT = 60  # characters of a problem that remain where the record is too large


def _shortened(status: dict[str, Any]) -> dict[str, Any]:
    problems = [text[:_TEXT] + "…" * (len(text) > _TEXT) for text in status["problems"]]
    return status | {"problems": problems, "background_error": "", "pin_reason": ""}


def _replace(path: Path, content: bytes) -> None:
    """Put ``content`` in the place of ``path`` in one step; no temporary file is left."""
    temp = documents.temporary(path)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(temp, flags, 0o600)
        with open(fd, "wb") as file:
            file.write(content)
        os.rename(temp, path)
    except BaseException:
        with suppress(OSError):
            temp.unlink()
        raise

"""Prefetching: plans what to load next while the model computes.

The model thread hands over one job per chunk and goes on at once. A job that was not begun when the
next one arrives is dropped: only the newest poses matter.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger("worldpager")


class Prefetcher:
    """Runs the newest job, one at a time, on a thread that others may use in between."""

    def __init__(self, start: Callable[[Callable[[], None]], None]) -> None:
        """``start`` has what it is given called on a thread in the background, soon."""
        self._start = start
        self._changed = threading.Condition()
        self._job: Callable[[], None] | None = None
        self._busy = False  # a thread works for us, or will
        self._closed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` soon, in place of any job not begun yet. Returns at once."""
        with self._changed:
            if self._closed:
                return
            self._job, begin = job, not self._busy
            self._busy = True
        if begin:
            self._start(self._work)

    def settle(self) -> None:
        """Return when no job is waiting or running."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._busy)

    def close(self) -> None:
        """Finish the running job, drop the waiting one and take no more."""
        with self._changed:
            self._closed = True
            self._job = None
            self._changed.wait_for(lambda: not self._busy)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:
                # Without a plan the next window is served by the fallback; the reason must show.
                log.exception("the plan for the next chunk failed; nothing is prefetched for it")

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            job, self._job = self._job, None
            if job is None:
                self._busy = False
                self._changed.notify_all()
            return job

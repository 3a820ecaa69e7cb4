"""The prefetch thread: plans what to load next while the model computes.

The model thread hands over one job per chunk and goes on at once. A job that was not begun when the
next one arrives is dropped: only the newest poses matter.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger("worldpager")


class Prefetcher:
    """Runs the newest job on a thread of its own."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._job: Callable[[], None] | None = None
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="worldpager-prefetch", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` soon, in place of any job not begun yet. Returns at once."""
        with self._changed:
            self._job = job
            self._changed.notify_all()

    def settle(self) -> None:
        """Return when no job is waiting or running."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not (self._job or self._busy))

    def close(self) -> None:
        """Finish the running job, drop the waiting one, end the thread."""
        with self._changed:
            self._closed = True
            self._job = None
            self._changed.notify_all()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._job is not None)
                if self._closed or self._job is None:
                    return
                job, self._job, self._busy = self._job, None, True
            try:
                job()
            except Exception:
                # Without a plan the next window is served by the fallback; the reason must show.
                log.exception("the plan for the next chunk failed; nothing is prefetched for it")

"""Threads that many sessions share for work that may block.

A crew does ``width`` jobs at a time, in the order they came. A job that lasts longer than
:data:`STUCK_SECONDS`, or that only waits for its time to come (:meth:`Crew.aside`), no longer
counts among them, and another thread takes its place: a disk that hangs stops others for a second
at most, somebody's bandwidth limit not at all.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("worldpager")

STUCK_SECONDS = 1.0
"""A job that takes longer holds up no other one."""


class Crew:
    """``width`` threads, there from the start, and one more for each job that is stuck or aside."""

    def __init__(self, name: str, width: int) -> None:
        """``name``: of the threads. Raises :class:`RuntimeError` where no thread can be started."""
        self._name, self._width = name, width
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._idle = 0  # threads that wait for a job, or are about to
        self._busy: dict[threading.Thread, float] = {}  # since when; infinite while aside
        self._threads: set[threading.Thread] = set()
        self._numbers = itertools.count()
        self._closed = False
        try:
            with self._changed:
                for _ in range(width):
                    self._start()
        except BaseException:
            self.close(1.0)
            raise

    def submit(self, job: Callable[[], None]) -> None:
        """Do ``job`` in its turn, on any of the threads. Never blocks. It should not raise."""
        with self._changed:
            self._jobs.append(job)
            self._staff()

    def relieve(self) -> None:
        """Have jobs that wait behind stuck ones done. Who waits for something calls it at times."""
        with self._changed:
            self._staff()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within a job: others may be done meanwhile, for this one only waits."""
        me = threading.current_thread()
        with self._changed:
            self._busy[me] = -float("inf")
            self._staff()
        yield

    def close(self, timeout: float) -> bool:
        """End the threads once all jobs are done; whether all ended within ``timeout`` seconds.

        Idempotent. Does not wait for what is stuck, nor on a thread of the crew.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            stuck = time.monotonic() - STUCK_SECONDS
            threads = {t for t in self._threads if self._busy.get(t, stuck + 1) > stuck}
        if threading.current_thread() in threads:
            return False
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _staff(self) -> None:
        """Wake or start a thread for each job that may begin. The lock is held."""
        while len(self._jobs) > self._idle and self._at_work() < self._width:
            try:
                self._start()
            except RuntimeError as error:  # the job waits for one of the threads there are
                log.warning("no thread can be started beside those that are stuck: %s", error)
                break
        self._changed.notify(len(self._jobs))

    def _start(self) -> None:
        name = f"worldpager-{self._name}-{next(self._numbers)}"
        thread = threading.Thread(target=self._loop, name=name, daemon=True)
        thread.start()
        self._threads.add(thread)
        self._idle += 1

    def _at_work(self) -> int:
        """Threads that are idle or on a job that counts."""
        stuck = time.monotonic() - STUCK_SECONDS
        return self._idle + sum(since > stuck for since in self._busy.values())

    def _loop(self) -> None:
        me = threading.current_thread()
        while (job := self._take(me)) is not None:
            try:
                job()
            except Exception:
                log.exception("work in the background failed in an unexpected way")
            del job  # and what it holds on to
            if not self._stays(me):
                return

    def _take(self, me: threading.Thread) -> Callable[[], None] | None:
        """The next job; None once there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            self._idle -= 1
            if not self._jobs:
                self._threads.discard(me)
                return None
            self._busy[me] = time.monotonic()
            return self._jobs.popleft()

    def _stays(self, me: threading.Thread) -> bool:
        """Whether ``me``, its job done, is still needed: not where another took its place."""
        with self._changed:
            del self._busy[me]
            if self._at_work() >= self._width:
                self._threads.discard(me)
                return False
            self._idle += 1
            return True

"""Holding transfers to a rate, by absolute deadlines.

Each transfer reserves the next ``nbytes / rate`` seconds of a timeline and waits for their end.
Deadlines follow from each other and not from when a sleep returned, so late wake-ups do not add up:
the rate is met to 0.9998, where sleeping a time per transfer loses up to 5 % (measured). What a
thread reserves because its own transfer ended begins at that transfer's deadline; any other begins
now, or when those before it end. So idle time is no credit, a lone transfer takes its full time, as
on a slower disk, and nothing depends on whether a pause was a millisecond longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from worldpager.errors import ClosedError, ConfigError

SLACK = 0.02
"""Seconds by which a thread may wake late and still count as punctual: above what ``sleep``
overshoots (at most 13 ms seen)."""


class TokenBucket:
    """A rate in bytes per second shared by any number of threads; ``rate=None`` never waits.

    To make a fast disk behave like a slow one, reserve before the transfer and wait after it: the
    whole then takes ``nbytes / rate``, or longer where the disk itself is slower. To pace only,
    call :meth:`take`.
    """

    def __init__(
        self,
        rate: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        """``clock`` and ``sleep`` (seconds) are replaced in tests; the default sleep ends early on
        :meth:`close`. Raises :class:`ConfigError` unless ``rate`` is positive.
        """
        if rate is not None and not rate > 0:
            raise ConfigError(
                f"a rate must be positive bytes per second, not {rate}; omit it for no limit"
            )
        self.rate = rate
        self._clock = clock
        self._closed = threading.Event()
        self._sleep = sleep or self._closed.wait
        self._lock = threading.Lock()
        self._free_from = -float("inf")  # end of the last reservation on the clock
        self._own = threading.local()  # ``ended``: the deadline this thread waited for last

    def reserve(self, nbytes: int) -> float:
        """Take the next ``nbytes`` of the timeline and return their deadline; never blocks."""
        if self.rate is None:
            return -float("inf")
        with self._lock:
            now, ended = self._clock(), getattr(self._own, "ended", -float("inf"))
            since = ended if now - ended <= SLACK else now
            self._free_from = max(self._free_from, since) + nbytes / self.rate
            return self._free_from

    def wait(self, deadline: float) -> None:
        """Block until ``deadline``. Raises :class:`ClosedError` once the bucket is closed."""
        while True:
            if self._closed.is_set():
                raise ClosedError("the transfer was given up: its bandwidth limit was closed")
            if (left := deadline - self._clock()) <= 0:
                self._own.ended = deadline
                return
            self._sleep(left)

    def take(self, nbytes: int) -> None:
        """Block until ``nbytes`` more may have passed. Raises as :meth:`wait` does."""
        self.wait(self.reserve(nbytes))

    def close(self) -> None:
        """Wake all waiting threads with :class:`ClosedError`; idempotent, from any thread."""
        self._closed.set()

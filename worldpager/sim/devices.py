"""Modelled time: a virtual clock, a disk whose bandwidth is shared, worker threads with limits.

The disk is a fluid: at every moment the transfers of one direction share that direction's
bandwidth equally, and where both directions are active together they share what the path gives to
both. A transfer is latency, then bytes. The limits are the product's own :class:`TokenBucket` on
the virtual clock: a limited transfer is held back until its deadline, exactly as in the runtime.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from worldpager.errors import ConfigError
from worldpager.tiers.bandwidth import TokenBucket

Direction = Literal["read", "write"]
Done = Callable[[], None]


class VirtualClock:
    """Seconds that pass only when told to, and what happens on the way. Equal times happen in the
    order in which they were planned.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, int, Done]] = []
        self._count = 0

    def after(self, seconds: float, happen: Done) -> None:
        """Plan ``happen`` for ``seconds`` from now."""
        self._count += 1
        heapq.heappush(self._planned, (self.now + max(0.0, seconds), self._count, happen))

    def step(self, until: float = math.inf) -> bool:
        """Go to the next planned thing and let it happen; False where none is due by ``until``."""
        if not self._planned or self._planned[0][0] > until:
            return False
        time, _, happen = heapq.heappop(self._planned)
        self.now = max(self.now, time)
        happen()
        return True

    def run(self, seconds: float) -> None:
        """Let ``seconds`` pass, and at least everything happen that is due now."""
        end = self.now + max(0.0, seconds)
        while self.step(end):
            pass
        self.now = end


@dataclass(frozen=True, slots=True)
class DiskModel:
    """What a disk does. Bandwidths in bytes per second, latencies in seconds per request.

    ``shared_bandwidth``: of reads and writes together while both are active; None where they do not
    disturb each other. ``request_bandwidth``: what one request alone reaches, below the disk's own
    where it takes several at once (queue depth) to saturate it. ``jitter``: relative standard
    deviation of a transfer's time, lognormal around the mean.
    """

    read_bandwidth: float = math.inf
    write_bandwidth: float = math.inf
    read_latency: float = 0.0
    write_latency: float = 0.0
    shared_bandwidth: float | None = None
    request_bandwidth: float = math.inf
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for name in ("read_bandwidth", "write_bandwidth", "request_bandwidth", "shared_bandwidth"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"a disk's {name} must be positive bytes per second, not {value}")
        for name in ("read_latency", "write_latency", "jitter"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"a disk's {name} cannot be {getattr(self, name)}")


class _Transfer:
    __slots__ = ("done", "left", "reads")

    def __init__(self, reads: bool, left: float, done: Done) -> None:
        self.reads, self.left, self.done = reads, left, done


_UNBOUNDED = 1e30
"""Bytes per second for "without bound": finite, so that no time becomes 0/0."""


class Disk:
    """A :class:`DiskModel` at work on a clock. ``seed`` draws the jitter."""

    def __init__(self, clock: VirtualClock, model: DiskModel, seed: int = 0) -> None:
        self._clock = clock
        self._model = model
        self._rng = np.random.default_rng(seed)
        self._active: list[_Transfer] = []
        self._rates = (0.0, 0.0)  # of each read, of each write
        self._since = 0.0
        self._epoch = 0

    def transfer(self, direction: Direction, nbytes: int, done: Done) -> None:
        """Move ``nbytes`` and call ``done`` when they have arrived."""
        model, reads = self._model, direction == "read"
        job = _Transfer(reads, nbytes * self._luck(), done)
        latency = model.read_latency if reads else model.write_latency

        def begin() -> None:
            self._advance()
            self._active.append(job)
            self._replan()

        if latency:
            self._clock.after(latency, begin)
        else:
            begin()

    def _luck(self) -> float:
        if not self._model.jitter:
            return 1.0
        sigma = math.sqrt(math.log1p(self._model.jitter**2))
        return float(self._rng.lognormal(-sigma * sigma / 2, sigma))

    def _advance(self) -> None:
        """Move the active transfers on to the present."""
        passed = self._clock.now - self._since
        self._since = self._clock.now
        for job in self._active:
            job.left -= passed * self._rates[not job.reads]

    def _replan(self) -> None:
        """Share the bandwidth anew and plan the next arrival."""
        self._epoch += 1
        if not self._active:
            return
        model, reads = self._model, sum(job.reads for job in self._active)
        writes = len(self._active) - reads
        alone = model.request_bandwidth
        read = min(model.read_bandwidth, reads * alone, _UNBOUNDED)
        write = min(model.write_bandwidth, writes * alone, _UNBOUNDED)
        if reads and writes and model.shared_bandwidth is not None:
            scale = min(1.0, model.shared_bandwidth / (read + write))
            read, write = read * scale, write * scale
        self._rates = (read / max(reads, 1), write / max(writes, 1))
        epoch = self._epoch
        next_one = min(self._active, key=self._seconds_left)
        self._clock.after(self._seconds_left(next_one), lambda: self._arrive(epoch, next_one))

    def _seconds_left(self, job: _Transfer) -> float:
        return job.left / self._rates[not job.reads]

    def _arrive(self, epoch: int, job: _Transfer) -> None:
        if epoch != self._epoch:
            return  # the shares have changed since
        self._advance()
        self._active.remove(job)
        self._replan()
        job.done()


class Workers:
    """A pool of threads with one queue: what the runtime's reader and writer threads are.

    ``limit``: bytes per second that the threads are held to together.
    """

    def __init__(
        self, clock: VirtualClock, disk: Disk, direction: Direction, threads: int, limit: int | None
    ) -> None:
        self._clock = clock
        self._disk = disk
        self._direction: Direction = direction
        self._free = threads
        self._waiting: deque[tuple[int, Done]] = deque()
        self._bucket = TokenBucket(limit, clock=lambda: clock.now)

    def submit(self, nbytes: int, done: Done) -> None:
        """Transfer ``nbytes`` as soon as a thread is free, then call ``done``."""
        self._waiting.append((nbytes, done))
        self._begin()

    def _begin(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            nbytes, done = self._waiting.popleft()
            self._work(nbytes, done)

    def _work(self, nbytes: int, done: Done) -> None:
        deadline = self._bucket.reserve(nbytes)

        def report() -> None:
            self._free += 1
            done()
            self._begin()

        def arrived() -> None:
            left = deadline - self._clock.now
            if left > 0:
                self._clock.after(left, report)
            else:
                report()

        self._disk.transfer(self._direction, nbytes, arrived)

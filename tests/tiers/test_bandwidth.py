from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldpager.errors import ClosedError, ConfigError
from worldpager.tiers.bandwidth import SLACK, TokenBucket


class Clock:
    """Time that only passes when somebody sleeps, and a little too long then."""

    def __init__(self, overshoot: float = 0.0) -> None:
        self.now, self.overshoot = 100.0, overshoot

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.overshoot


def test_late_wake_ups_do_not_add_up() -> None:
    clock = Clock(overshoot=0.01)
    bucket = TokenBucket(1_000_000, clock=clock, sleep=clock.sleep)
    for _ in range(1000):
        bucket.take(100_000)
    assert clock.now == pytest.approx(100.0 + 100.0 + 0.01)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 3), st.floats(0, 0.015)), min_size=1))
def test_never_faster_than_the_rate_and_never_slower_than_needed(
    transfers: list[tuple[int, float, float]],
) -> None:
    clock, rate = Clock(), 250_000
    bucket = TokenBucket(rate, clock=clock, sleep=clock.sleep)
    start, moved, free_from = clock.now, 0, clock.now
    for nbytes, pause, overshoot in transfers:
        clock.now += pause
        clock.overshoot = overshoot
        free_from = max(free_from, clock.now) + nbytes / rate
        bucket.take(nbytes)
        moved += nbytes
        assert clock.now >= start + moved / rate - 1e-6
        assert clock.now <= free_from + overshoot + 1e-6
        free_from = max(free_from, clock.now - overshoot)


def test_a_reservation_covers_the_transfer_itself() -> None:
    clock = Clock()
    bucket = TokenBucket(1000, clock=clock, sleep=clock.sleep)
    deadline = bucket.reserve(500)
    clock.now += 0.2  # the disk at work
    bucket.wait(deadline)
    assert clock.now == pytest.approx(100.5)
    deadline = bucket.reserve(500)
    clock.now += 0.9  # slower than the rate
    bucket.wait(deadline)
    assert clock.now == pytest.approx(101.4)


def test_idle_time_is_no_credit() -> None:
    clock = Clock()
    bucket = TokenBucket(1000, clock=clock, sleep=clock.sleep)
    bucket.take(100)
    clock.now += 50
    bucket.take(100)
    assert clock.now == pytest.approx(100.1 + 50 + 0.1)
    clock.now += SLACK / 2
    bucket.take(100)
    assert clock.now == pytest.approx(150.3)


def test_no_limit_never_waits() -> None:
    bucket = TokenBucket(None, clock=lambda: 0.0, sleep=lambda left: pytest.fail("slept"))
    bucket.take(10**15)


def test_rates_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="positive bytes per second, not 0"):
        TokenBucket(0)


def test_close_wakes_sleepers() -> None:
    bucket = TokenBucket(1)
    outcome: list[BaseException | None] = []

    def wait_for_an_hour() -> None:
        try:
            bucket.take(3600)
        except ClosedError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait_for_an_hour)
    thread.start()
    bucket.close()
    bucket.close()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert isinstance(outcome[0], ClosedError)


def test_threads_share_one_rate() -> None:
    bucket = TokenBucket(1000, clock=lambda: 7.0, sleep=lambda left: None)
    deadlines: list[float] = []
    threads = [
        threading.Thread(target=lambda: deadlines.extend(bucket.reserve(10) for _ in range(100)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(deadlines) == pytest.approx([7.0 + 0.01 * n for n in range(1, 401)])

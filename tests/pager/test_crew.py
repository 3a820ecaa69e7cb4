"""The threads that sessions share: bounded, in order, and never all lost to one disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from worldpager.pager import crew as crew_module
from worldpager.pager.crew import Crew

WAIT = 20.0


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew("test", 2)
    yield made
    assert made.close(WAIT)


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("worldpager-test")]


def done_soon(event: threading.Event, crew: Crew) -> bool:
    """Whether ``event`` comes, with somebody who waits and says so from time to time."""
    for _ in range(200):
        if event.wait(WAIT / 200):
            return True
        crew.relieve()
    return False


def test_jobs_are_begun_in_the_order_they_came_by_so_many_threads(crew: Crew) -> None:
    lock, begun, at_once, most = threading.Lock(), [], 0, 0
    left = threading.Semaphore(0)

    def job(number: int) -> Callable[[], None]:
        def do() -> None:
            nonlocal at_once, most
            with lock:
                begun.append(number)
                at_once += 1
                most = max(most, at_once)
            with lock:
                at_once -= 1
            left.release()

        return do

    for number in range(200):
        crew.submit(job(number))
    for _ in range(200):
        assert left.acquire(timeout=WAIT)
    # two threads may take neighbours in either order, and no more than that
    assert all(abs(number - at) <= 1 for at, number in enumerate(begun))
    assert most <= 2 and len(threads()) == 2


def test_what_is_stuck_holds_nobody_up_and_leaves_no_thread_behind(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew_module, "STUCK_SECONDS", 0.05)
    go_on, ended = threading.Event(), threading.Semaphore(0)

    def stuck() -> None:
        go_on.wait(WAIT)
        ended.release()

    for _ in range(6):
        crew.submit(stuck)
    reached = threading.Event()
    crew.submit(reached.set)
    assert done_soon(reached, crew), "six stuck jobs before it, on two threads"
    assert len(threads()) <= 8
    go_on.set()
    for _ in range(6):
        assert ended.acquire(timeout=WAIT)
    again = threading.Event()
    crew.submit(again.set)
    assert again.wait(WAIT)
    for thread in threads()[:]:
        thread.join(0.2)
    assert len(threads()) == 2


def test_what_only_waits_for_its_time_gives_way_at_once(crew: Crew) -> None:
    go_on, aside = threading.Event(), threading.Semaphore(0)

    def wait() -> None:
        with crew.aside():
            aside.release()
            go_on.wait(WAIT)

    for _ in range(4):
        crew.submit(wait)
    for _ in range(4):
        assert aside.acquire(timeout=WAIT), "none waits for the others"
    reached = threading.Event()
    crew.submit(reached.set)
    assert reached.wait(WAIT)
    go_on.set()


def test_a_job_that_raises_costs_no_thread(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(4):
        crew.submit(lambda: 1 // 0)  # type: ignore[arg-type]
    reached = threading.Event()
    crew.submit(reached.set)
    assert reached.wait(WAIT)
    assert "unexpected" in caplog.text


def test_close_does_what_was_asked_for_and_ends_the_threads() -> None:
    crew, done = Crew("test", 2), []
    for number in range(50):
        crew.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    assert crew.close(WAIT)
    assert sorted(done) == list(range(50)) and threads() == []
    assert crew.close(WAIT)


def test_threads_that_cannot_be_started_leave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):
        Crew("test", 2)
    assert threads() == []

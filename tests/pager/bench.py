"""A core on the bench: events in, actions out, transfers end when a test says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from worldpager.pager import events as ev
from worldpager.pager.core import Core
from worldpager.pager.events import Action, ChunkKey, Event
from worldpager.pager.eviction import Lru
from worldpager.pager.policies import Pressure, WriteBack
from worldpager.pager.states import State
from worldpager.prefetch.fallback import get_fallback
from worldpager.tiers.extents import PAGE

A = TypeVar("A", bound=Action)


def key(chunk: int, stream: int = 0) -> ChunkKey:
    return ChunkKey(stream, chunk)


class Bench:
    """A core with room for ``room`` chunks of one page."""

    def __init__(
        self,
        room: int,
        fallback: str = "stale",
        pressure: Pressure = "block",
        write_back: WriteBack | None = None,
        **slots: int,
    ) -> None:
        self.core = Core(
            room * PAGE,
            eviction=Lru(),
            fallback=get_fallback(fallback),
            pressure=pressure,
            write_back=write_back or WriteBack(1, 1, spare=0),
            **slots,
        )
        self.actions: list[Action] = []
        self.under_way: list[ev.Read | ev.Write | ev.Delete] = []

    def send(self, event: Event) -> None:
        self.actions = self.core.handle(event)
        transfers = (ev.Read, ev.Write, ev.Delete)
        self.under_way += [a for a in self.actions if isinstance(a, transfers)]

    def got(self, kind: type[A]) -> list[A]:
        """Actions of that kind after the last event."""
        return [action for action in self.actions if isinstance(action, kind)]

    def reserve(self, chunk: int, pages: int = 1, insist: bool = False) -> ev.Granted | None:
        self.send(ev.Reserve(key(chunk), pages * PAGE, insist))
        granted = self.got(ev.Granted)
        return granted[0] if granted else None

    def commit(self, *chunks: int) -> None:
        for chunk in chunks:
            granted = self.reserve(chunk)
            assert granted is not None, f"no room for {chunk}"
            self.send(ev.Commit(granted.key, granted.generation))

    def done(self) -> None:
        """The oldest transfer under way succeeds."""
        match self.under_way.pop(0):
            case ev.Read(k, generation):
                self.send(ev.ReadDone(k, generation))
            case ev.Write(k, generation):
                self.send(ev.WriteDone(k, generation))
            case ev.Delete(k, generation):
                self.send(ev.DeleteDone(k, generation))

    def fail(self, damaged: bool = False) -> None:
        """The oldest transfer under way fails."""
        match self.under_way.pop(0):
            case ev.Read(k, generation):
                self.send(ev.ReadFailed(k, generation, "I/O error", damaged))
            case ev.Write(k, generation):
                self.send(ev.WriteFailed(k, generation, "no space"))
            case ev.Delete(k, generation):
                self.send(ev.DeleteFailed(k, generation, "I/O error"))

    def flush(self) -> None:
        """Everything becomes clean."""
        self.send(ev.Flush())
        while self.under_way:
            self.done()

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.send(ev.Tick())

    def boundary(self, *wanted: int, ranking: Sequence[int] = ()) -> ev.Serve | None:
        self.send(ev.Boundary(0, 0, wanted, ranking))
        served = self.got(ev.Serve)
        return served[0] if served else None

    def state(self, chunk: int) -> State:
        page = self.core.table.pages.get(key(chunk))
        return State.ABSENT if page is None else page.state

    @property
    def reading(self) -> list[int]:
        return [a.key.chunk for a in self.under_way if isinstance(a, ev.Read)]

    @property
    def writing(self) -> list[int]:
        return [a.key.chunk for a in self.under_way if isinstance(a, ev.Write)]


def spilled(room: int, chunks: int, fallback: str = "stale", **slots: int) -> Bench:
    """All of ``chunks`` committed and written, the oldest of them evicted, nothing pinned."""
    bench = Bench(room, fallback, **slots)
    for chunk in range(chunks):
        bench.commit(chunk)
        bench.flush()
    return bench


def chunks(served: ev.Serve | None) -> list[int]:
    assert served is not None
    return [s.chunk for s in served.chunks]

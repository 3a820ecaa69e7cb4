"""Deterministic simulation of the pager's core: one seed, one history, the same every time.

A seed gives a setup (pool, streams, policies, slots), what the disk holds at first, and a list of
steps. A step is a name and a number; what it does depends on the state it meets, and where it makes
no sense it does nothing. So any part of the list is a valid history too, which is what lets
:func:`shrink` drop steps until only the reason of a failure is left.

Replay a failure alone, shrunk::

    python -m tests.pager.simulation --seed 17 --steps 500
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from tests.pager.model import Faults, File, Setup, Thread, Violation, tokens
from tests.pager.world import World
from worldpager.pager import events as ev
from worldpager.pager.events import ChunkKey
from worldpager.pager.eviction import Floats, Furthest, Lru
from worldpager.pager.policies import WriteBack
from worldpager.pager.spill import LONGEST_BACKOFF
from worldpager.pager.states import State
from worldpager.prefetch.fallback import get_fallback
from worldpager.tiers.extents import PAGE, page_ceil

Step = tuple[str, int]

STEPS = 500
"""Steps of one history where nothing else is asked for."""

DRAIN_ROUNDS = 120
"""Rounds (all transfers done, one tick) within which everything must have settled."""

TRANSFERS_A_CHUNK = 8
"""Transfers, a chunk, after which a core that nobody asks anything is in a storm."""

WEIGHTS = {
    "effect": 30, "report": 30, "tick": 7, "reserve": 24, "commit": 20, "abandon": 1,
    "boundary": 12, "ahead": 8, "resume": 10, "flush": 1, "faults": 1, "damage": 0.2, "crash": 0.2,
    "pause": 0.5,
}  # fmt: skip


class _Line:
    """A made-up geometry: the chunks of a stream stand along a line, the camera at its start."""

    def __init__(self, stream: int) -> None:
        self._stride = 5 + 2 * stream

    def to_path(self, chunks: Sequence[int]) -> Floats:
        return np.array([chunk * self._stride % 17 for chunk in chunks], float)

    def between(self, chunks: Sequence[int]) -> Floats:
        places = self.to_path(chunks)
        return np.abs(places[:, None] - places)


def make_setup(random: Random) -> Setup:
    """Small pools, so that everything is always short; now and then too small for the windows."""
    streams, largest = random.choice([1, 1, 2, 3]), random.choice([1, 1, 2, 4])
    window = random.choice([0, 1, 1, 2, 2, 3, 4])
    pinned = streams * (2 * window + 1)
    enough = pinned + 1 if largest == 1 else (2 * pinned + 1) * largest
    tight = random.random() < 0.25
    pool = max(largest, enough // 3) if tight else enough + random.randint(0, 4)
    start = random.choice([0.0, 0.3, 0.5, 0.9])
    return Setup(
        pool=pool,
        streams=streams,
        chunks=4 + int(random.uniform(0.5, 4) * pool / (streams * largest)),
        largest=largest,
        window=window,
        eviction=random.choice([Lru(), Furthest(_Line)]),
        fallback=get_fallback(random.choice(["stale", "nearest", "wait"])),
        pressure=random.choice(["block", "block", "drop"]),
        write_back=WriteBack(start, random.uniform(start, 1)),
        read_slots=random.randint(1, 3),
        write_slots=random.randint(1, 2),
    )


def make_disk(setup: Setup, random: Random) -> dict[ChunkKey, File]:
    """What an earlier run left: nothing, or some chunks of each stream."""
    disk = {}
    for generation in range(1, random.choice([1, random.randint(1, 20)])):
        key = ChunkKey(random.randrange(setup.streams), random.randrange(setup.chunks))
        nbytes = random_size(setup, random)
        disk[key] = File(generation, nbytes, tokens(key, generation, nbytes))
    return disk


def random_size(setup: Setup, random: Random) -> int:
    return random.randint(1, setup.largest) * PAGE - random.choice([0, 0, 1, 777])


class Simulation:
    """One history."""

    def __init__(self, seed: int) -> None:
        random = Random(seed)
        self.setup = make_setup(random)
        self.world = World(self.setup, make_disk(self.setup, random))
        self._random = random  # of the step being carried out, or of the drain
        self.handled = 0

    def run(self, steps: Sequence[Step]) -> None:
        """Carry the steps out, then end all faults and see everything come to rest."""
        for name, number in steps:
            self._random = Random(number)
            getattr(self, f"_{name}")()
            self.world.check()
        self._random = Random(len(steps))
        self._come_to_rest()

    # ---- steps -----------------------------------------------------------------------------------

    def _thread(self, fit: Callable[[Thread], bool]) -> Thread | None:
        fitting = [thread for thread in self.world.threads if fit(thread)]
        return self._random.choice(fitting) if fitting else None

    def _effect(self) -> None:
        waiting = [t for t in self.world.transfers if t.answer is None]
        if waiting:
            self.world.take_effect(self._random.choice(waiting), self._random.random())

    def _report(self) -> None:
        ready = [t for t in self.world.transfers if t.answer is not None]
        if ready:
            self.world.report(self._random.choice(ready))

    def _tick(self) -> None:
        self.world.time_passes()

    def _reserve(self) -> None:
        if thread := self._thread(lambda t: not t.busy):
            key = ChunkKey(thread.stream, self._random.randrange(self.setup.chunks))
            insist = self._random.random() < 0.05
            self.world.reserve(ev.Reserve(key, random_size(self.setup, self._random), insist))

    def _commit(self) -> None:
        if thread := self._thread(lambda t: t.granted is not None):
            self.world.commit(thread)

    def _abandon(self) -> None:
        if thread := self._thread(lambda t: t.granted is not None):
            self.world.abandon(thread)

    def _boundary(self) -> None:
        if thread := self._thread(lambda t: not t.busy):
            ranking = self._some_chunks(thread.stream)
            size = self._random.choice([self.setup.window, self._random.randint(0, 4)])
            wanted = tuple(sorted(ranking[: min(size, self.setup.window)]))
            self.world.boundary(ev.Boundary(thread.stream, thread.step, wanted, ranking))

    def _ahead(self) -> None:
        stream = self._random.randrange(self.setup.streams)
        chunks = self._some_chunks(stream)[: self._random.randint(0, 6)]
        self.world.send(ev.Ahead(stream, tuple(chunks)))

    def _some_chunks(self, stream: int) -> list[int]:
        """Chunks of the stream in any order, now and then with some that do not exist."""
        chunks = [key.chunk for key in self.world.oracle.newest if key.stream == stream]
        if self._random.random() < 0.1:
            chunks = list(range(self.setup.chunks + 1))
        return self._random.sample(chunks, len(chunks))

    def _resume(self) -> None:
        if thread := self._thread(lambda t: t.waiting is not None and t.may_resume):
            self._ask_again(thread, insist=self._random.random() < 0.1)

    def _ask_again(self, thread: Thread, insist: bool = False) -> None:
        event = thread.waiting
        if isinstance(event, ev.Reserve):
            self.world.reserve(ev.Reserve(event.key, event.nbytes, insist))
        elif event is not None:
            self.world.boundary(event)

    def _flush(self) -> None:
        self.world.flush()

    def _faults(self) -> None:
        self.world.faults = self._random.choice([
            Faults(), Faults(), Faults(read=0.5), Faults(read=1.0), Faults(write=0.5),
            Faults(delete=0.7), Faults(full=True), Faults(0.3, 0.3, 0.3), Faults(1.0, 1.0, 1.0),
        ])  # fmt: skip

    def _damage(self) -> None:
        if files := sorted(self.world.disk):
            self.world.disk[self._random.choice(files)].damaged = True

    def _crash(self) -> None:
        self.world.crash(self._random)

    def _pause(self) -> None:
        """The model threads do nothing for a while; the disk goes on as well or ill as it does."""
        for _ in range(30):
            for transfer in list(self.world.transfers):
                if transfer.answer is None:
                    self.world.take_effect(transfer, self._random.random())
                self.world.report(transfer)
            self.world.time_passes()
            self.world.check()

    # ---- the end ---------------------------------------------------------------------------------

    def _come_to_rest(self) -> None:
        """Faults end. Waiters are answered, dirty chunks flushed, every chunk comes back exact."""
        world = self.world
        world.faults = Faults()
        self._drain()
        world.flush()
        for _ in range(LONGEST_BACKOFF):
            self._drain()
        self._must_be_clean()
        for thread in world.threads:
            self._release(thread)
        for thread in world.threads:
            for chunk in range(self.setup.chunks):
                world.send(ev.Ahead(thread.stream, (chunk,)))
                self._drain()
                self._comes_back(thread, chunk)
                self._release(thread)
        world.check()

    def _drain(self) -> None:
        """Let everything finish; nobody asks for anything new."""
        world = self.world
        for _ in range(DRAIN_ROUNDS):
            for _ in range(TRANSFERS_A_CHUNK * self.setup.chunks * self.setup.streams):
                if not world.transfers:
                    break
                transfer = self._random.choice(world.transfers)
                if transfer.answer is None:
                    world.take_effect(transfer, 1.0)
                world.report(transfer)
                world.check()
            else:
                raise Violation(f"transfer storm: {world.transfers}")
            for thread in world.threads:
                if thread.granted is not None:
                    world.commit(thread)
                elif thread.waiting is not None and thread.may_resume:
                    self._ask_again(thread)
            world.time_passes()
            world.check()
            waiting = [t for t in world.threads if t.busy]
            if not (world.transfers or waiting or world.oracle.flushing is not None):
                return
            self._give_up_where_nothing_fits(waiting)
        raise Violation(f"progress: {world.transfers} {waiting} {world.oracle.flushing}")

    def _give_up_where_nothing_fits(self, waiting: list[Thread]) -> None:
        """A pool too small for its windows may refuse a commit for ever; the caller closes then."""
        if self.world.transfers or any(t.granted for t in waiting):
            return
        gathering = any(isinstance(t.waiting, ev.Boundary) for t in waiting)
        for thread in waiting:
            event = thread.waiting
            if isinstance(event, ev.Reserve) and not gathering and not self._fits(event.nbytes):
                thread.waiting = None

    def _fits(self, nbytes: int) -> bool:
        """Whether the windows leave a gap of ``nbytes``."""
        pinned = {(s.offset, s.nbytes) for t in self.world.threads for s in t.served}
        end, gaps = 0, []
        for offset, size in sorted(pinned):
            gaps.append(offset - end)
            end = offset + page_ceil(size)
        return max([*gaps, self.setup.pool * PAGE - end]) >= page_ceil(nbytes)

    def _must_be_clean(self) -> None:
        """Nothing dirty, nothing superseded on the disk, and the sums agree with the files."""
        world, oracle = self.world, self.world.oracle
        dirty = [p for p in world.core.table.pages.values() if p.state is State.DIRTY]
        if dirty:
            raise Violation(f"dirty after a flush: {dirty}")
        for key, file in world.disk.items():
            if oracle.committed.get(key) != file.generation:
                raise Violation(f"superseded file left: {key} {file.generation}")
        stored = sum(f.nbytes for key, f in world.disk.items() if key in oracle.newest)
        if stored != world.core.table.stored_bytes:
            raise Violation(f"stored bytes and files: {stored} {world.core.table.stored_bytes}")

    def _window(self, thread: Thread, wanted: tuple[int, ...]) -> None:
        self.world.boundary(ev.Boundary(thread.stream, thread.step, wanted, wanted))
        self._drain()

    def _release(self, thread: Thread) -> None:
        self.world.send(ev.Ahead(thread.stream, ()))
        self._window(thread, ())

    def _comes_back(self, thread: Thread, chunk: int) -> None:
        key, world = ChunkKey(thread.stream, chunk), self.world
        if key in world.oracle.newest:
            self._window(thread, (chunk,))
            if [s.chunk for s in thread.served] != [chunk]:
                raise Violation(f"does not come back: {key} {world.core.table.pages.get(key)}")
        elif key in world.disk and not world.disk[key].damaged and not world.oracle.failures[key]:
            raise Violation(f"on disk but unknown: {key}")


# ---- running, shrinking --------------------------------------------------------------------------


def make_steps(seed: int, steps: int) -> list[Step]:
    """The first ``steps`` steps of the seed's history."""
    random = Random(f"steps {seed}")
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    return [(random.choices(names, weights)[0], random.getrandbits(32)) for _ in range(steps)]


def run(seed: int, steps: Sequence[Step]) -> tuple[Exception | None, list[str]]:
    """Why the history fails, or None, and what happened in it."""
    history: list[str] = []
    try:
        simulation = Simulation(seed)
        history = simulation.world.history
        simulation.run(steps)
    except Exception as error:  # whatever the core raises is a finding
        return error, history
    return None, history


def fails(seed: int, steps: int) -> str:
    """Empty where the seed's history keeps every promise, else what to print."""
    error, _ = run(seed, make_steps(seed, steps))
    if error is None:
        return ""
    return (
        f"{type(error).__name__}: {error}\n"
        f"replay: python -m tests.pager.simulation --seed {seed} --steps {steps}"
    )


def promise(error: Exception | None) -> str:
    """What was broken, without the particulars."""
    return f"{type(error).__name__} {str(error).partition(':')[0]}"


def shrink(seed: int, steps: list[Step], seconds: float = 20.0) -> list[Step]:
    """Fewer steps that break the same promise."""
    broken = promise(run(seed, steps)[0])
    deadline, size = time.monotonic() + seconds, len(steps) // 2
    while size and time.monotonic() < deadline:
        at = 0
        while at < len(steps) and time.monotonic() < deadline:
            fewer = steps[:at] + steps[at + size :]
            if promise(run(seed, fewer)[0]) == broken:
                steps = fewer
            else:
                at += size
        size = min(size // 2, len(steps))
    return steps


def main() -> int:
    parser = argparse.ArgumentParser(description="Replay one seed of the core's simulation.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=1, help="as many seeds, from --seed on")
    options = parser.parse_args()
    for seed in range(options.seed, options.seed + options.seeds):
        steps = make_steps(seed, options.steps)
        error, _ = run(seed, steps)
        if error is None:
            continue
        short = shrink(seed, steps)
        error, history = run(seed, short)
        setup = Simulation(seed).setup
        print(f"seed {seed}, shrunk from {len(steps)} to {len(short)} steps\n{setup}")
        print(*history, sep="\n")
        print(f"{type(error).__name__}: {error}")
        return 1
    print(f"every promise kept in {options.seeds} × {options.steps} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The simulator: the product's core, policies and retriever on a virtual clock.

What decides is what the runtime runs: one :class:`Core`, the eviction and fallback policies, one
:class:`Retriever` with its place index and planner. What is modelled is only what takes time: the
disk, the worker threads and their limits, and the model thread's compute, encode and decode.

The loop follows ``WorldMemory.boundary`` step by step: commit the finished chunk (waiting for room
where the core says so), tick, forget what was lost, choose, acquire (waiting where the fallback
says so), decode, hand the plan for the next chunks to the prefetch thread; then the chunk is
computed. Waiting is the runtime's too: until something progresses, or a tick has passed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from worldpager.errors import ConfigError
from worldpager.pager import events as ev
from worldpager.pager.core import Core
from worldpager.pager.events import Action, ChunkKey, Event
from worldpager.pager.eviction import EvictionPolicy, Nearness, get_eviction
from worldpager.pager.policies import Pressure, WriteBack
from worldpager.pager.runtime import TICK_SECONDS
from worldpager.pager.stats import Stats
from worldpager.pager.workers import READERS
from worldpager.prefetch.fallback import get_fallback
from worldpager.prefetch.planner import PATH_AHEAD
from worldpager.prefetch.poses import Floats, place_of
from worldpager.prefetch.retrieval import get_policy
from worldpager.prefetch.retriever import Retriever
from worldpager.sim.belady import Belady
from worldpager.sim.devices import Disk, DiskModel, VirtualClock, Workers

STREAM = 0
WRITERS = 1
"""Writer threads of the runtime."""
PATIENCE_SECONDS = 2.0
"""How long the runtime's commit waits for room before it insists; after twice that it gives up."""


@dataclass(frozen=True, slots=True)
class HostModel:
    """What the memory's work costs the machine's threads, in seconds: encoding and decoding a chunk
    on the model thread, making a plan on the prefetch thread, waking a thread that waited.
    """

    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    plan_seconds: float = 0.0
    wake_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SimConfig:
    """What is simulated; sizes in bytes, rates in bytes per second, times in seconds.

    ``chunk_bytes``: a stored chunk; the first ``sink_chunks`` take ``sink_chunk_bytes`` each.
    ``recent_chunks``: finished chunks that every window shows besides the sink.
    ``compute_seconds``: one for all chunks, or one for each. ``known_ahead``: chunks whose poses
    are known before they begin; 0 in a live session. ``eviction``: a policy's name or the policy.
    ``prefetch``: as in the memory's own configuration. ``load_ahead``: off for comparisons, where
    plans are to tell eviction where the camera will be but nothing is loaded after them.
    """

    pool_bytes: int
    chunk_bytes: int
    compute_seconds: float | Sequence[float]
    retrieve: int = 3
    sink_chunks: int = 0
    sink_chunk_bytes: int = 0
    recent_chunks: int = 1
    retrieval: str = "camera"
    eviction: str | EvictionPolicy = "redundant"
    on_miss: str = "nearest"
    pressure: Pressure = "block"
    write_back: WriteBack | None = None
    read_limit: int | None = None
    write_limit: int | None = None
    known_ahead: int = max(PATH_AHEAD)
    prefetch: bool = True
    load_ahead: bool = True
    disk: DiskModel = field(default_factory=DiskModel)
    host: HostModel = field(default_factory=HostModel)
    seed: int = 0

    def bytes_of(self, chunk: int) -> int:
        """Stored bytes of ``chunk``."""
        return self.sink_chunk_bytes if chunk < self.sink_chunks else self.chunk_bytes

    def seconds_of(self, chunk: int) -> float:
        """Compute time of ``chunk``."""
        times = self.compute_seconds
        return times if isinstance(times, (int, float)) else times[chunk]


@dataclass(frozen=True, slots=True)
class SimChunk:
    """One simulated chunk: the fields of a rollout's ``metrics.jsonl`` that exist here."""

    chunk: int
    wall_ms: float
    model_ms: float
    boundary_ms: float
    stall_ms: float
    decode_ms: float
    encode_ms: float
    stale: bool
    stale_reason: str
    retrieved: list[int]
    hits: dict[str, int]
    resident_bytes: int
    dirty_bytes: int
    stored_bytes: int
    chunk_reads_total: int
    bytes_read_total: int
    bytes_written_total: int
    from_nvme_total: int
    spill_chunk: int | None
    first_read_chunk: int | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class _Report:
    """What a boundary did, in seconds of virtual time."""

    stall: float = 0.0
    encode: float = 0.0
    decode: float = 0.0


class Simulator:
    """One rollout along ``path`` (latent poses ``[chunks, frames, 4, 4]``), chunk by chunk."""

    def __init__(self, config: SimConfig, path: Floats) -> None:
        """Raises :class:`ConfigError` for unknown policies and for fewer compute times than chunks,
        :class:`BudgetError` from the core for a pool that no chunk fits.
        """
        times = config.compute_seconds
        if not isinstance(times, (int, float)) and len(times) < len(path):
            raise ConfigError(f"{len(times)} compute times are not enough for {len(path)} chunks")
        self.config = config
        self.path = path
        self.clock = VirtualClock()
        self.retriever = Retriever(
            get_policy(config.retrieval),
            k=config.retrieve,
            sink=config.sink_chunks,
            recent=config.recent_chunks,
            resident=lambda: [page.key.chunk for page in self.core.table.resident()],
        )
        self._policy = (
            get_eviction(config.eviction, self._nearness)
            if isinstance(config.eviction, str)
            else config.eviction
        )
        self.core = Core(
            config.pool_bytes,
            eviction=self._policy,
            fallback=get_fallback(config.on_miss),
            pressure=config.pressure,
            write_back=config.write_back,
            read_slots=READERS,
        )
        disk = Disk(self.clock, config.disk, config.seed)
        self._readers = Workers(self.clock, disk, "read", READERS, config.read_limit)
        self._writer = Workers(self.clock, disk, "write", WRITERS, config.write_limit)
        self._planning = False
        self._next_plan: int | None = None
        self._progress = False
        self._lost: list[int] = []

    def run(self) -> Iterator[SimChunk]:
        """Simulate, yielding after each chunk's compute time."""
        for chunk in range(len(self.path)):
            began = self.clock.now
            report, serve, wanted = self._boundary(chunk)
            boundary = self.clock.now - began
            self.clock.run(self.config.seconds_of(chunk))
            yield self._metrics(serve, wanted, report, boundary, self.clock.now - began)

    @property
    def stats(self) -> Stats:
        """The core's counters."""
        return self.core.stats

    # ---- one boundary, as WorldMemory has it -----------------------------------------------------

    def _boundary(self, chunk: int) -> tuple[_Report, ev.Serve, tuple[int, ...]]:
        report = _Report()
        if isinstance(self._policy, Belady):
            self._policy.begin(chunk)
        if chunk:
            self._commit(chunk - 1, report)
        self._handle(ev.Tick())
        for lost in self._lost:
            self.retriever.forget(lost)
        self._lost.clear()
        wanted, ranking = self.retriever.choose(chunk, self.path[chunk])
        serve = self._acquire(ev.Boundary(STREAM, chunk, wanted, ranking), report)
        if isinstance(self._policy, Belady):
            self._policy.begin(chunk + 1)
        report.decode = len(serve.chunks) * self.config.host.decode_seconds
        self.clock.run(report.decode)
        if self.config.prefetch:
            self._submit_plan(chunk)
        return report, serve, wanted

    def _commit(self, chunk: int, report: _Report) -> None:
        key, nbytes = ChunkKey(STREAM, chunk), self.config.bytes_of(chunk)
        grant, report.stall = self._reserve(key, nbytes)
        report.encode = self.config.host.encode_seconds
        self.clock.run(report.encode)
        if grant is not None:
            self._handle(ev.Commit(key, grant.generation))
        self.retriever.note(chunk, place_of(self.path[chunk]).tolist())

    def _reserve(self, key: ChunkKey, nbytes: int) -> tuple[ev.Granted | None, float]:
        began, waited = self.clock.now, 0.0
        while True:
            for action in self._handle(ev.Reserve(key, nbytes, insist=waited > PATIENCE_SECONDS)):
                if isinstance(action, ev.Granted):
                    return action, waited
            if waited > 2 * PATIENCE_SECONDS:
                self._handle(ev.Forgo(key))
                return None, waited
            self._wait()
            waited = self.clock.now - began

    def _acquire(self, event: ev.Boundary, report: _Report) -> ev.Serve:
        began, waited = self.clock.now, 0.0
        while True:
            for action in self._handle(event):
                if isinstance(action, ev.Serve):
                    report.stall += waited
                    return action
            self._wait()
            waited = self.clock.now - began

    def _wait(self) -> None:
        """Until something progresses; time that passes without any is a tick."""
        deadline = self.clock.now + TICK_SECONDS
        self._progress = False
        while self.clock.step(deadline):
            if self._progress:
                self.clock.run(self.config.host.wake_seconds)
                return
        self.clock.run(deadline - self.clock.now)
        self._handle(ev.Tick())

    # ---- the prefetch thread -----------------------------------------------------------------

    def _submit_plan(self, chunk: int) -> None:
        """Only the newest plan matters: one not begun when the next arrives is dropped."""
        self._next_plan = chunk
        if not self._planning:
            self._begin_plan()

    def _begin_plan(self) -> None:
        chunk, self._next_plan = self._next_plan, None
        if chunk is None:
            return
        self._planning = True

        def finish() -> None:
            path, known = self.path, self.config.known_ahead
            previous = path[chunk - 1] if chunk else None
            ahead = self.retriever.plan(
                chunk, path[chunk], previous, path[chunk + 1 : chunk + 1 + known]
            )
            if self.config.load_ahead:
                self._handle(ev.Ahead(STREAM, ahead))
            self._planning = False
            self._begin_plan()

        self.clock.after(self.config.host.plan_seconds, finish)

    # ---- carrying out ----------------------------------------------------------------------------

    def _nearness(self, stream: int) -> Nearness | None:
        return self.retriever.index if len(self.retriever.index) else None

    def _handle(self, event: Event) -> list[Action]:
        """Let the core decide, and the modelled threads begin what it asks for."""
        actions = self.core.handle(event)
        for action in actions:
            match action:
                case ev.Read(key, generation, _, nbytes):
                    self._transfer(self._readers, nbytes, ev.ReadDone(key, generation))
                case ev.Write(key, generation, _, nbytes):
                    self._transfer(self._writer, nbytes, ev.WriteDone(key, generation))
                case ev.Delete(key, generation):
                    self._transfer(self._writer, 0, ev.DeleteDone(key, generation))
                case ev.Lost(key, _):
                    self._lost.append(key.chunk)
                case ev.Progress():
                    self._progress = True
        return actions

    def _transfer(self, workers: Workers, nbytes: int, outcome: Event) -> None:
        workers.submit(nbytes, lambda: self._report(outcome))

    def _report(self, outcome: Event) -> None:
        self._handle(outcome)

    def _metrics(
        self,
        serve: ev.Serve,
        wanted: tuple[int, ...],
        report: _Report,
        boundary: float,
        wall: float,
    ) -> SimChunk:
        stats, table = self.core.stats, self.core.table
        hits = Counter(chunk.source for chunk in serve.chunks)
        counts = {name: hits[name] for name in stats.hits}  # type: ignore[index]
        counts["empty"] = max(0, len(wanted) - len(serve.chunks))
        return SimChunk(
            chunk=serve.step,
            wall_ms=wall * 1e3,
            model_ms=(wall - boundary) * 1e3,
            boundary_ms=boundary * 1e3,
            stall_ms=report.stall * 1e3,
            decode_ms=report.decode * 1e3,
            encode_ms=report.encode * 1e3,
            stale=serve.stale,
            stale_reason=serve.reason,
            retrieved=[chunk.chunk for chunk in serve.chunks],
            hits=counts,
            resident_bytes=table.extents.used,
            dirty_bytes=table.dirty_bytes,
            stored_bytes=table.stored_bytes,
            chunk_reads_total=stats.reads,
            bytes_read_total=stats.bytes_read,
            bytes_written_total=stats.bytes_written,
            from_nvme_total=stats.fetched,
            spill_chunk=stats.spill_chunk,
            first_read_chunk=stats.first_read_chunk,
        )


def simulate(config: SimConfig, path: Floats) -> list[SimChunk]:
    """A whole rollout."""
    return list(Simulator(config, path).run())


def demands(config: SimConfig, path: Floats) -> list[tuple[int, ...]]:
    """The set that each chunk's window asks for, whatever is resident: the offline demand sequence
    that an eviction with foresight looks at. Retrieval that prefers resident chunks has none.
    """
    retriever = Retriever(
        get_policy(config.retrieval),
        k=config.retrieve,
        sink=config.sink_chunks,
        recent=config.recent_chunks,
    )
    out = []
    for chunk, poses in enumerate(path):
        if chunk:
            retriever.note(chunk - 1, place_of(path[chunk - 1]).tolist())
        out.append(retriever.choose(chunk, poses)[0])
    return out


def reads_on_demand(config: SimConfig, path: Floats, eviction: str | EvictionPolicy) -> int:
    """Reads of one eviction policy where every policy sees the same demands: nothing is loaded
    ahead, every window waits for what it lacks, and transfers take no time.

    The least any policy can do here is :class:`Belady`'s.
    """
    instant = replace(
        config,
        eviction=eviction,
        on_miss="wait",
        prefetch=True,
        load_ahead=False,
        compute_seconds=1.0,
        read_limit=None,
        write_limit=None,
        write_back=WriteBack(0.0, 0.0),  # all clean at once, so that all may leave
        disk=DiskModel(),
        host=HostModel(),
    )
    simulator = Simulator(instant, path)
    for _ in simulator.run():
        pass
    return simulator.stats.reads

"""WorldMemory: the one object a frontend talks to, and the one call it makes per chunk.

``boundary(step, cache)`` takes the finished chunk, chooses the memory for the one about to begin,
and fills the frontend's slots by decoding straight into them. What it costs the model thread is one
encode, one choice and one decode per retrieved chunk; all else happens on other threads.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from worldpager.errors import BudgetError, ConfigError, NonFiniteError
from worldpager.model_adapter.frontend import ChunkStep, FrontendCache, KVSpec
from worldpager.model_adapter.images import (
    ChunkImage,
    StoredImage,
    milliseconds_since,
    warm_up,
)
from worldpager.model_adapter.window import positions
from worldpager.pager.core import Core
from worldpager.pager.eviction import Nearness, get_eviction
from worldpager.pager.policies import Pressure
from worldpager.pager.runtime import READERS, Window
from worldpager.pager.session import Session
from worldpager.pager.stats import Stats
from worldpager.prefetch.fallback import get_fallback
from worldpager.prefetch.poses import place_of
from worldpager.prefetch.prefetcher import Prefetcher
from worldpager.prefetch.retrieval import get_policy
from worldpager.prefetch.retriever import Retriever
from worldpager.quant.codec import Bytes, Codec, get_codec
from worldpager.quant.shard import ChunkRecord, ShardLayout
from worldpager.tiers.budget import default_dram_budget
from worldpager.tiers.spec import StoreSpec
from worldpager.tiers.store import ChunkStore
from worldpager.units import format_size

log = logging.getLogger("worldpager")

SINK_CODEC = "bf16"
"""Chunks of the sink stay in 16 bits: their keys are unlike all others, every window has them."""


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """How a world's memory is kept. Sizes in bytes, rates in bytes per second.

    ``dram``: the pool, or ``None`` for the default budget. ``disk``: most the store may take.
    ``retrieval``, ``eviction``, ``on_miss``, ``positions``: policies by name. ``pressure``: what a
    commit does when writes cannot keep up, ``block`` or ``drop``.
    """

    store: Path
    dram: int | None = None
    disk: int | None = None
    codec: str = "int4"
    retrieval: str = "camera"
    eviction: str = "redundant"
    on_miss: str = "stale"
    positions: str = "moving"
    pressure: Pressure = "block"
    read_limit: int | None = None
    write_limit: int | None = None
    session: str = "session"
    """Name of the session, part of its blocks' identity."""


@dataclass(slots=True)
class BoundaryReport:
    """What one boundary did: chunk ids in time order, times in milliseconds on the model thread.

    ``stall_ms``: waited for data or for room; ``encode_ms`` and ``decode_ms``: codec work;
    ``boundary_ms``: all of it.
    """

    chunk: int
    retrieved: tuple[int, ...] = ()
    hits: Counter[str] = field(default_factory=Counter)
    stale: bool = False
    stale_reason: str = ""
    encode_ms: float = 0.0
    decode_ms: float = 0.0
    stall_ms: float = 0.0
    boundary_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Bytes: resident in the pool, of these not yet on NVMe, of chunks on NVMe, of all files."""

    resident: int
    dirty: int
    stored: int
    disk: int


class WorldMemory:
    """The memory of one stream of chunks. Not thread-safe: call it from the model thread."""

    def __init__(self, config: MemoryConfig, spec: KVSpec) -> None:
        """Open (or reopen) the store and allocate the pool.

        Raises :class:`BudgetError` for a pool that cannot hold two windows and the chunks in
        transfer, :class:`ConfigError` for an unknown policy, and as :class:`Session`.
        """
        self.spec = spec
        self.config = config
        self.rejected: Counter[str] = Counter()
        """Chunks that were not stored at all, by reason."""
        self.last = BoundaryReport(-1)
        self._codec = get_codec(config.codec)
        for codec in (self._codec, get_codec(SINK_CODEC)):
            warm_up(codec, spec)
        self._policy = get_policy(config.retrieval)
        self._positions = positions(config.positions, spec)
        self._retrievers: dict[int, Retriever] = {}  # by stream
        self._told: set[str] = set()  # reasons of loss that were warned about
        self._base = 0  # frames by which the frontend's positions are lowered
        self._step: ChunkStep | None = None  # the chunk being generated
        core = Core(
            pool_bytes(config.dram, self._codec, spec),
            eviction=get_eviction(config.eviction, self._nearness),
            fallback=get_fallback(config.on_miss),
            pressure=config.pressure,
            read_slots=READERS,
        )
        self._rollouts = _latest_rollout(config.store)
        self._session = Session(
            config.store,
            self._store_spec(config.session),
            core,
            disk_cap=config.disk,
            read_limit=config.read_limit,
            write_limit=config.write_limit,
        )
        self._retriever = self._adopt()
        self._prefetcher = Prefetcher()

    def boundary(self, step: ChunkStep, cache: FrontendCache) -> tuple[int, ...]:
        """Do a chunk's memory work, before its first forward; the retrieved ids in time order.

        Never blocks on storage, except in ``wait`` mode and for room under ``block``. Raises,
        before anything changed, :class:`PositionError` where the chunk has no temporal position and
        :class:`ConfigError` for a step out of order or without the poses that retrieval needs. What
        was done is in :attr:`last`.
        """
        began = time.perf_counter()
        self._check(step)
        rise = self._positions.rebase(step.start_frame, self._base)
        report = BoundaryReport(step.chunk)
        if step.finished is None:
            self._start_over()
            rise = 0
        else:
            self._take(step, cache, report)
        window = self._choose(step, report)
        if rise:
            cache.rebase(rise)
            self._base += rise
        self._fill(step, cache, window, report)
        self._prefetch(step)
        self._step = step
        report.boundary_ms = milliseconds_since(began)
        self.last = report
        return report.retrieved

    def flush(self, timeout: float | None = None) -> None:
        """Return when every finished chunk is durable; raises as :meth:`Pager.flush`."""
        self._session.flush(timeout)

    def settle(self) -> None:
        """Wait until the plan for the next chunk is made and no transfer is under way."""
        self._prefetcher.settle()
        self._session.pager.settle()

    def close(self, timeout: float = 5.0) -> None:
        """Flush, end all threads, free the pool, unlock the store. May be called twice.

        Raises :class:`BackgroundError` where finished chunks could not be made durable.
        """
        self._prefetcher.close()
        self._session.close(timeout)

    def __enter__(self) -> WorldMemory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def stats(self) -> Stats:
        """The pager's counters."""
        return self._session.pager.core.stats

    @property
    def occupancy(self) -> Occupancy:
        """Bytes in each tier at this moment."""
        table = self._session.pager.core.table
        return Occupancy(
            table.extents.used, table.dirty_bytes, table.stored_bytes, self._session.disk_bytes
        )

    # ---- the parts of a boundary ---------------------------------------------------------------

    def _check(self, step: ChunkStep) -> None:
        before = self._step
        if step.finished is not None and before is not None and step.finished != before.chunk:
            raise ConfigError(
                f"chunk {step.chunk} says that chunk {step.finished} was finished, but the last "
                f"one begun was {before.chunk}; call boundary() once for every chunk, in order"
            )
        if step.poses is None and self._retriever.needs_poses:
            raise ConfigError(
                f"retrieval by {self._policy.name!r} needs the poses of chunk {step.chunk}; "
                "give them or choose retrieval='recent'"
            )

    def _start_over(self) -> None:
        """A new rollout begins: nothing of an earlier one may be retrieved."""
        if self._step is not None or len(self._retriever.index) > 0:
            self._rollouts += 1
            self._session.begin_rollout(_rollout_name(self._rollouts))
            self._retriever = self._adopt()
        self._base = 0
        self._step = None

    def _adopt(self) -> Retriever:
        """The retriever of the current rollout, knowing what was found on disk."""
        retriever = Retriever(
            self._policy,
            k=self.spec.retrieve_chunks,
            sink=self.spec.sink_chunks,
            recent=self.spec.recent_chunks,
            rank_all=self.config.on_miss == "nearest",
        )
        for record in self._session.rollout.found:
            retriever.note(record.chunk, record.place)
        self._retrievers[self._session.rollout.stream] = retriever
        return retriever

    def _nearness(self, stream: int) -> Nearness | None:
        retriever = self._retrievers.get(stream)
        return retriever.index if retriever is not None and len(retriever.index) else None

    def _take(self, step: ChunkStep, cache: FrontendCache, report: BoundaryReport) -> None:
        """Commit the finished chunk."""
        assert step.finished is not None
        rollout, began = self._session.rollout, time.perf_counter()
        codec = self._codec if step.finished >= self.spec.sink_chunks else get_codec(SINK_CODEC)
        image = ChunkImage(cache, codec)
        record = self._record(step, step.finished)

        def fill(extent: Bytes, generation: int) -> None:
            image.write(extent, replace(record, generation=generation))

        try:
            waited = self._session.pager.commit(
                rollout.stream, step.finished, image.layout.nbytes, fill
            )
        except NonFiniteError as error:
            self.rejected["non-finite"] += 1
            log.warning("chunk %d is not stored: %s", step.finished, error)
            return
        self._retriever.note(record.chunk, record.place)
        report.stall_ms += waited * 1e3
        report.encode_ms = milliseconds_since(began) - waited * 1e3

    def _record(self, step: ChunkStep, chunk: int) -> ChunkRecord:
        """What the finished chunk is."""
        before, frames = self._step, self.spec.frames_per_chunk
        start = step.start_frame - frames if before is None else before.start_frame
        poses = step.finished_poses if before is None else before.poses
        record = ChunkRecord(
            chunk=chunk,
            generation=0,
            layers=self.spec.layers,
            frames=frames,
            start_frame=start,
            position=float(start - self._base),
            created=time.time(),
            identity=self._session.rollout.identity,
        )
        return record if poses is None else replace(record, place=tuple(place_of(poses)))

    def _choose(self, step: ChunkStep, report: BoundaryReport) -> Window:
        """Pick the chunks for this window and pin them."""
        pager, stream = self._session.pager, self._session.rollout.stream
        pager.tick()
        for chunk, reason in pager.take_lost(stream):
            if reason not in self._told:  # each further one is counted in stats.dropped
                log.warning("chunk %d is lost (%s); it will not be retrieved", chunk, reason)
                self._told.add(reason)
            self._retriever.forget(chunk)
        wanted, ranking = self._retriever.choose(step.chunk, step.poses)
        window = pager.acquire(stream, step.chunk, wanted, ranking)
        report.stall_ms += window.waited * 1e3
        report.stale, report.stale_reason = window.stale, window.reason
        report.retrieved = tuple(c.chunk for c in window.chunks)
        report.hits = Counter(c.source for c in window.chunks)
        report.hits["empty"] = max(0, len(wanted) - len(window.chunks))
        return window

    def _fill(
        self, step: ChunkStep, cache: FrontendCache, window: Window, report: BoundaryReport
    ) -> None:
        """Lay the window out and decode the retrieved chunks into it."""
        images = [StoredImage(chunk.image, self.spec) for chunk in window.chunks]
        stored = [image.record.position for image in images]
        placed = self._positions.place(step.start_frame, self._base, stored)
        cache.open([image.tokens for image in images])
        began = time.perf_counter()
        for slot, (image, position) in enumerate(zip(images, placed, strict=True)):
            image.decode(cache, slot, position - image.record.position)
        report.decode_ms = milliseconds_since(began)

    def _prefetch(self, step: ChunkStep) -> None:
        """Have the next chunks' memory loaded while this one is computed."""
        pager, stream, retriever = (
            self._session.pager,
            self._session.rollout.stream,
            self._retriever,
        )
        previous = self._step.poses if self._step else None

        def plan() -> None:
            chunks = retriever.plan(step.chunk, step.poses, previous, step.poses_ahead)
            pager.ahead(stream, chunks)

        self._prefetcher.submit(plan)

    def _store_spec(self, session: str) -> StoreSpec:
        spec, shape = self.spec, self.spec.block_shape
        return StoreSpec(
            session=session,
            rollout=_rollout_name(self._rollouts),
            model=spec.model,
            layers=spec.layers,
            tokens=shape.tokens,
            heads=shape.heads,
            head_dim=shape.head_dim,
            frames=spec.frames_per_chunk,
            dtype=str(spec.dtype).removeprefix("torch."),
            codecs=(self._codec.name,),
            positions=self._positions.name if spec.rope is None else repr(spec.rope),
        )


def pool_bytes(dram: int | None, codec: Codec, spec: KVSpec) -> int:
    """The pool's size: ``dram``, or the default budget.

    Raises :class:`BudgetError` where it holds less than two windows (the last one stays pinned
    until the next is complete), the chunk being committed and one being read.
    """
    budget = default_dram_budget() if dram is None else dram
    chunk, sink = (
        ShardLayout.for_chunk(c, [spec.block_shape] * spec.layers).nbytes
        for c in (codec, get_codec(SINK_CODEC))
    )
    least = (2 * spec.retrieve_chunks + 1) * chunk + (
        max(chunk, sink) if spec.sink_chunks else chunk
    )
    if budget < least:
        raise BudgetError(
            f"a DRAM pool of {format_size(budget)} is too small: two windows of "
            f"{spec.retrieve_chunks} chunks, one being committed and one being read take "
            f"{format_size(least)}; give more DRAM or retrieve fewer chunks"
        )
    return budget


def _rollout_name(number: int) -> str:
    return f"rollout-{number}"


def _latest_rollout(directory: Path) -> int:
    """Number of the newest rollout stored in ``directory``, 0 where there is none."""
    number = 0
    while ChunkStore.exists(directory, _rollout_name(number + 1)):
        number += 1
    return number

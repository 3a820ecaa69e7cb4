"""WorldMemory: the one object a frontend talks to, and the one call it makes per chunk.

``boundary(step, cache)`` takes the finished chunk, chooses the memory for the one about to begin,
and fills the frontend's slots by decoding straight into them. What it costs the model thread is one
encode, one choice and one decode per retrieved chunk; all else happens on other threads.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from worldpager.errors import ConfigError, DamagedBlockError, NonFiniteError, WorldPagerError
from worldpager.model_adapter.frontend import ChunkStep, FrontendCache, KVSpec
from worldpager.model_adapter.images import (
    ChunkImage,
    StoredImage,
    milliseconds_since,
    warm_up,
)
from worldpager.model_adapter.opening import latest_rollout, pool_bytes, rollout_name, store_spec
from worldpager.model_adapter.pruning import ChunkPruning
from worldpager.model_adapter.record import Recorder
from worldpager.model_adapter.status import Occupancy, Status, occupancy_of, status_of
from worldpager.model_adapter.window import Piece, check_walls, horizon, positions
from worldpager.pager.core import Core
from worldpager.pager.eviction import Nearness, get_eviction
from worldpager.pager.policies import Pressure, WriteBack
from worldpager.pager.pool import MemoryPool
from worldpager.pager.room import SPOILED
from worldpager.pager.runtime import Window
from worldpager.pager.session import Session
from worldpager.pager.stats import Stats
from worldpager.pager.workers import READERS
from worldpager.prefetch.fallback import get_fallback
from worldpager.prefetch.poses import place_of
from worldpager.prefetch.prefetcher import Prefetcher
from worldpager.prefetch.retrieval import get_policy
from worldpager.prefetch.retriever import Retriever
from worldpager.quant.codec import Bytes, get_codec
from worldpager.quant.shard import ChunkRecord
from worldpager.tiers.io_backend import IOBackend

log = logging.getLogger("worldpager")

SINK_CODEC = "bf16"
"""Chunks of the sink stay in 16 bits: their keys are unlike all others, every window has them."""


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """How a world's memory is kept. Sizes in bytes, rates in bytes per second.

    ``dram``: the pool, or ``None`` for the default budget; the quota where a pool is shared.
    ``disk``: most the store may take.
    ``retrieval``, ``eviction``, ``on_miss``, ``positions``, ``pruning``: policies by name.
    ``pressure``: what a commit does when writes cannot keep up, ``block`` or ``drop``.
    ``write_back``: when dirty chunks are written. ``prefetch``: without it nothing is loaded ahead,
    to compare with.
    """

    store: Path
    dram: int | None = None
    disk: int | None = None
    codec: str = "int4"
    retrieval: str = "camera"
    eviction: str = "redundant"
    on_miss: str = "stale"
    positions: str = "moving"
    pruning: str = "none"
    pressure: Pressure = "block"
    write_back: WriteBack = field(default_factory=WriteBack)
    prefetch: bool = True
    read_limit: int | None = None
    write_limit: int | None = None
    session: str = "session"
    """Name of the session, part of its blocks' identity."""


@dataclass(slots=True)
class BoundaryReport:
    """What one boundary did: chunk ids in time order, times in milliseconds on the model thread.

    ``stall_ms``: waited for data or for room; ``encode_ms`` and ``decode_ms``: codec work;
    ``boundary_ms``: all of it. ``stored_bytes``, ``stored_tokens``: of the finished chunk as it was
    committed, 0 where none was; ``active_tokens``, ``dense_tokens``: of the past in this window,
    and what they would be unpruned.
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
    stored_bytes: int = 0
    stored_tokens: int = 0
    active_tokens: int = 0
    dense_tokens: int = 0


class WorldMemory:
    """The memory of one stream of chunks, for one thread, the model's. ``flush``, ``close`` and
    ``status`` may be called from any.
    """

    def __init__(
        self,
        config: MemoryConfig,
        spec: KVSpec,
        *,
        pool: MemoryPool | None = None,
        io: IOBackend | None = None,
    ) -> None:
        """Open (or reopen) the store and allocate the pool, or lease ``config.dram`` of ``pool``.

        ``io``: the system calls on files, to be replaced where they are to fail; ``None`` for the
        system's own. Raises :class:`BudgetError` for a pool that cannot hold two windows and the
        chunks in transfer, :class:`ConfigError` for an unknown policy, and as :class:`Session`.
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
        self._pruning = ChunkPruning(config.pruning, spec)
        self._retrievers: dict[int, Retriever] = {}  # by stream
        self._told: set[str] = set()  # reasons of loss that were warned about
        self._base = 0  # frames by which the frontend's positions are lowered
        self._step: ChunkStep | None = None  # the chunk being generated
        self._stale: Counter[str] = Counter()
        core = Core(
            pool_bytes(
                config.dram,
                self._codec,
                get_codec(SINK_CODEC),
                spec,
                self._pruning.most_tokens,
                shared=pool is not None,
            ),
            eviction=get_eviction(config.eviction, _nearness_of(self._retrievers)),
            fallback=get_fallback(config.on_miss),
            pressure=config.pressure,
            write_back=config.write_back,
            read_slots=READERS,
        )
        self._rollouts = latest_rollout(config.store, io)
        self._session = Session(
            config.store,
            store_spec(spec, config.session, self._rollouts, self._codec, self._positions.name),
            core,
            pool=pool,
            disk_cap=config.disk,
            read_limit=config.read_limit,
            write_limit=config.write_limit,
            io=io,
        )
        try:
            self._retriever = self._adopt()
        except BaseException:
            self._session.close()
            raise
        self._prefetcher = Prefetcher(self._session.pool.planners.submit)
        self._recorder = Recorder(self._session, self.rejected, self._stale, self._pruning)
        weakref.finalize(self, _close_dropped, self._prefetcher, self._session).atexit = False

    def boundary(self, step: ChunkStep, cache: FrontendCache) -> tuple[int, ...]:
        """Do a chunk's memory work, before its first forward; the retrieved ids in time order.

        Never blocks on storage, except in ``wait`` mode and for room under ``block``. Raises,
        before anything changed, :class:`PositionError` where the chunk has no temporal position,
        :class:`ConfigError` for a step out of order or without the poses that retrieval needs, and
        :class:`ConcurrencyError` while another thread is in here. What was done is in :attr:`last`.
        """
        with self._session.pager.turn():
            return self._boundary(step, cache)

    def _boundary(self, step: ChunkStep, cache: FrontendCache) -> tuple[int, ...]:
        began = time.perf_counter()
        self.spec.check_same(cache.spec, "the memory", "the cache")
        self._check(step)
        check_walls(self.spec, step.start_frame)
        rise = self._positions.rebase(step.start_frame, self._base)
        report = BoundaryReport(step.chunk)
        if step.finished is None:
            self._start_over()
            rise = 0
        else:
            self._take(step, cache, report)
        images, ranking = self._choose(step, report)
        if rise:
            cache.rebase(rise)
            self._base += rise
        self._fill(step, cache, images, ranking, report)
        self._prefetch(step)
        self._step = step
        report.boundary_ms = milliseconds_since(began)
        self.last = report
        self._recorder.note()
        return report.retrieved

    def flush(self, timeout: float | None = None) -> None:
        """Return when every finished chunk is durable; raises as :meth:`Pager.flush`."""
        self._session.flush(timeout)

    def settle(self) -> None:
        """Wait until the plan for the next chunk is made and no transfer is under way."""
        self._prefetcher.settle()
        self._session.pager.settle()

    def close(self, timeout: float = 5.0) -> None:
        """Flush, end all threads, free the pool, unlock the store, in about ``timeout`` seconds.

        May be called twice and from any thread; all is closed even where it raises. Raises
        :class:`BackgroundError` where finished chunks could not be made durable, or were lost since
        the last flush because writing failed.
        """
        if not self._session.pager.closed:
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
    def horizon(self) -> tuple[str, int] | None:
        """The table of the model at which this rollout will end, and after how many chunks.

        ``None`` where nothing that the spec declares is in its way. The chunk after the last is
        refused by :meth:`boundary` with a :class:`PositionError`.
        """
        return horizon(self.spec, self._positions)

    @property
    def occupancy(self) -> Occupancy:
        """Bytes in each tier at this moment."""
        return occupancy_of(self._session)

    def status(self) -> Status:
        """Health, bytes by tier, counters by reason, and the methods in use. Never blocks on I/O,
        and may be called from any thread, also after :meth:`close`.
        """
        return status_of(self._session, self.rejected, self._stale, self._pruning)

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
        if before is not None and step.finished is not None:
            self._pruning.check(step)

    def _start_over(self) -> None:
        """A new rollout begins: nothing of an earlier one may be retrieved."""
        if self._step is not None or len(self._retriever.index) > 0:
            self._rollouts += 1
            self._session.begin_rollout(rollout_name(self._rollouts))
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

    def _take(self, step: ChunkStep, cache: FrontendCache, report: BoundaryReport) -> None:
        """Commit the finished chunk."""
        assert step.finished is not None
        rollout, began = self._session.rollout, time.perf_counter()
        codec = self._codec if step.finished >= self.spec.sink_chunks else get_codec(SINK_CODEC)
        image = ChunkImage(cache, codec, self._pruning.select(step))
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
        report.stored_bytes, report.stored_tokens = image.layout.nbytes, image.tokens
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

    def _choose(
        self, step: ChunkStep, report: BoundaryReport
    ) -> tuple[list[StoredImage], tuple[int, ...]]:
        """Pick the chunks for this window and pin them; also the candidates, best first."""
        pager, stream = self._session.pager, self._session.rollout.stream
        pager.tick()
        for chunk, reason in pager.take_lost(stream):
            if reason not in self._told:  # each further one is counted in stats.dropped
                log.warning("chunk %d is lost (%s); it will not be retrieved", chunk, reason)
                self._told.add(reason)
            self._retriever.forget(chunk)
        wanted, ranking = self._retriever.choose(step.chunk, step.poses)
        window, images = self._acquire(step.chunk, wanted, ranking)
        report.stall_ms += window.waited * 1e3
        report.stale, report.stale_reason = window.stale, window.reason
        if window.stale:
            self._stale[window.reason] += 1
        report.retrieved = tuple(c.chunk for c in window.chunks)
        report.hits = Counter(c.source for c in window.chunks)
        report.hits["empty"] = max(0, len(wanted) - len(window.chunks))
        return images, ranking

    def _acquire(
        self, step: int, wanted: tuple[int, ...], ranking: tuple[int, ...]
    ) -> tuple[Window, list[StoredImage]]:
        """A window and its images, all checked; a chunk whose bytes changed in memory is a miss."""
        pager, stream = self._session.pager, self._session.rollout.stream
        reason = ""
        while True:
            window = pager.acquire(stream, step, wanted, ranking)
            images, spoiled = [], []
            for chunk in window.chunks:
                try:
                    images.append(StoredImage(chunk.image, self.spec))
                except DamagedBlockError as error:
                    spoiled.append(chunk.chunk)
                    if SPOILED not in self._told:
                        self._told.add(SPOILED)
                        log.warning("chunk %d %s: %s", chunk.chunk, SPOILED, error)
            if not spoiled:
                return replace(window, reason=reason or window.reason), images
            reason = SPOILED
            pager.spoiled(stream, tuple(spoiled))

    def _fill(
        self,
        step: ChunkStep,
        cache: FrontendCache,
        images: list[StoredImage],
        ranking: tuple[int, ...],
        report: BoundaryReport,
    ) -> None:
        """Lay the window out and decode the retrieved chunks into it."""
        pieces = [_piece(image.record, ranking) for image in images]
        placed = self._positions.place(step.start_frame, self._base, pieces)
        tokens = [image.tokens for image in images]
        cache.open(tokens)
        report.active_tokens, report.dense_tokens = self._pruning.account(step, tokens)
        began = time.perf_counter()
        for slot, (image, moves) in enumerate(zip(images, placed, strict=True)):
            image.decode(cache, slot, moves, self._positions.pairs)
        report.decode_ms = milliseconds_since(began)

    def _prefetch(self, step: ChunkStep) -> None:
        """Have the next chunks' memory loaded while this one is computed."""
        if not self.config.prefetch:
            return
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


def _piece(record: ChunkRecord, ranking: tuple[int, ...]) -> Piece:
    """A chunk of a window; one that stands in for a missed chunk ranks last."""
    rank = ranking.index(record.chunk) if record.chunk in ranking else len(ranking)
    return Piece(record.start_frame, record.frames, record.position, rank)


def _nearness_of(retrievers: dict[int, Retriever]) -> Callable[[int], Nearness | None]:
    """What eviction asks about each stream. Knows no memory, so that one can be dropped."""

    def nearness(stream: int) -> Nearness | None:
        retriever = retrievers.get(stream)
        return retriever.index if retriever is not None and len(retriever.index) else None

    return nearness


def _close_dropped(prefetcher: Prefetcher, session: Session) -> None:
    """A memory was dropped without ``close``: close it, on a thread that may wait for locks."""
    if session.pager.closed:
        return

    def close() -> None:
        prefetcher.close()
        try:
            session.close()
        except WorldPagerError as error:
            log.warning("closing a memory that was dropped without close() failed: %s", error)

    log.warning("a memory was dropped without close(); it is closed in the background")
    threading.Thread(target=close, name="worldpager-close", daemon=True).start()

"""WorldMemory: the one object a frontend talks to, and the one call it makes per chunk.

``boundary(step, cache)`` takes the finished chunk, chooses the memory for the one about to begin,
and fills the frontend's slots by decoding straight into them. What it costs the model thread is one
encode, one choice and one decode per retrieved chunk; all else happens on other threads.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from dataclasses import replace

import numpy.typing as npt

from worldpager.errors import ConfigError, NonFiniteError
from worldpager.model_adapter.bookmark import Bookmark
from worldpager.model_adapter.config import SINK_CODEC, BoundaryReport, MemoryConfig
from worldpager.model_adapter.frontend import ChunkStep, FrontendCache, KVSpec, PagedCache, Poses
from worldpager.model_adapter.images import (
    ChunkImage,
    StoredImage,
    acquire,
    milliseconds_since,
    paged_window,
    warm_up,
)
from worldpager.model_adapter.opening import (
    close_dropped,
    latest_rollout,
    pool_bytes,
    rollout_name,
    store_spec,
)
from worldpager.model_adapter.pruning import ChunkPruning
from worldpager.model_adapter.recollection import Recollection
from worldpager.model_adapter.record import Recorder
from worldpager.model_adapter.status import Occupancy, Status, occupancy_of, status_of
from worldpager.model_adapter.units import FinishedPage, unit_spec
from worldpager.model_adapter.window import check_walls, horizon, piece_of, positions
from worldpager.pager.core import Core
from worldpager.pager.eviction import get_eviction
from worldpager.pager.pool import MemoryPool
from worldpager.pager.session import Session
from worldpager.pager.stats import Stats
from worldpager.pager.workers import READERS
from worldpager.prefetch.fallback import get_fallback
from worldpager.prefetch.poses import place_of
from worldpager.prefetch.prefetcher import Prefetcher
from worldpager.quant.codec import Bytes, get_codec
from worldpager.quant.shard import ChunkRecord
from worldpager.tiers.io_backend import IOBackend

log = logging.getLogger("worldpager")


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
        self._unit = unit_spec(spec, config.page_frames)
        self._codec = get_codec(config.codec)
        for codec in (self._codec, get_codec(SINK_CODEC)):
            warm_up(codec, spec)
        self._recollection = Recollection(config.retrieval, spec, self._unit)
        self._positions = positions(config.positions, spec)
        self._pruning = ChunkPruning(config.pruning, spec, self._unit)
        self._told: set[str] = set()  # reasons of loss that were warned about
        self._base = 0  # frames by which the frontend's positions are lowered
        self._step: ChunkStep | None = None  # the chunk being generated
        self._before: Poses | None = None  # of the chunk before that
        self._stale: Counter[str] = Counter()
        core = Core(
            pool_bytes(
                config.dram,
                self._codec,
                get_codec(SINK_CODEC),
                self._unit,
                self._pruning.most_tokens,
                shared=pool is not None,
            ),
            eviction=get_eviction(config.eviction, self._recollection.nearness),
            fallback=get_fallback(config.on_miss),
            pressure=config.pressure,
            write_back=config.write_back,
            read_slots=READERS,
        )
        self._rollouts = latest_rollout(config.store, io)
        self._session = Session(
            config.store,
            store_spec(
                self._unit, config.session, self._rollouts, self._codec, self._positions.name
            ),
            core,
            pool=pool,
            disk_cap=config.disk,
            read_limit=config.read_limit,
            write_limit=config.write_limit,
            io=io,
        )
        try:
            self._adopt()
            self._prefetcher = Prefetcher(self._session.pool.planners.submit)
            self._recorder = Recorder(self._session, self.rejected, self._stale, self._pruning)
        except BaseException:
            self._session.close()
            raise
        weakref.finalize(self, close_dropped, self._prefetcher, self._session).atexit = False

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
            step = self._recollection.walked(step)
        else:
            step = self._recollection.walked(step)
            self._take(step, cache, report)
        self._recollection.turn_page()
        images, best = self._choose(step, report)
        if rise:
            cache.rebase(rise)
            self._base += rise
        self._fill(step, cache, images, best, report)
        self._before = self._step.poses if self._step else None
        self._prefetch(step, self._before)
        self._step = step
        report.boundary_ms = milliseconds_since(began)
        self.last = report
        self._recorder.note()
        return report.retrieved

    def switch_prompt(self, embedding: npt.ArrayLike | None = None) -> int:
        """Another prompt holds from the next chunk on; the number of its epoch.

        ``embedding``: of the prompt, ``[tokens, dim]`` or ``[dim]``, for policies that compare
        prompts. Everything made under the old prompt stays archived under it, the chunk now being
        generated included; its sink and recent chunks stay in the window. The next boundary
        installs what the policy chooses for the new prompt, and loading of what it probably will be
        begins at once. Before the first chunk this only says what the first prompt is. Raises
        :class:`ConfigError` for an embedding that is not finite or 0.
        """
        found = self._session.rollout.found
        begun = self._step is not None or len(found) > 0
        epoch = self._recollection.switch_prompt(embedding, begun=begun)
        if self._step is not None:
            self._prefetch(self._step, self._before)
        return epoch

    def bookmark(self, *, begun: bool = False) -> Bookmark:
        """Where the rollout stands after the chunk generated last; where ``begun``, the one that
        the last boundary began does not count as generated. Raises :class:`ConfigError` where no
        chunk was.
        """
        step = self._step
        if step is None or step.chunk < begun:
            raise ConfigError("no chunk was generated yet, so there is nothing to go on from")
        return Bookmark(
            rollout=self._rollouts,
            chunk=step.chunk - begun,
            start_frame=step.start_frame - begun * self.spec.frames_per_chunk,
            base=self._base,
            poses=self._before if begun else step.poses,
            **self._recollection.standing(begun=begun),
        )

    def go_on(self, bookmark: Bookmark) -> None:
        """The next boundary is that of the chunk after ``bookmark``, which the cache ends with.

        What was stored of the rollout after it is overwritten as the rollout goes on. Raises
        :class:`ConfigError` where the store's newest rollout is another.
        """
        if bookmark.rollout != self._rollouts:
            raise ConfigError(
                f"the bookmark is of rollout {bookmark.rollout}, but the newest in the store is "
                f"{self._rollouts}; rollouts before the newest cannot go on"
            )
        self._base, self._before = bookmark.base, None
        self._step = ChunkStep(
            bookmark.chunk, bookmark.start_frame, bookmark.chunk - 1, poses=bookmark.poses
        )
        self._recollection.stand(bookmark)

    @property
    def wants_query(self) -> bool:
        """Whether the policy looks at keys, so that steps should carry ``query``."""
        return self._recollection.wants_query

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
        self._recollection.check(step)
        if before is not None and step.finished is not None:
            self._pruning.check(step)

    def _start_over(self) -> None:
        """A new rollout begins: nothing of an earlier one may be retrieved."""
        if self._step is not None or len(self._recollection.retriever.index) > 0:
            self._rollouts += 1
            self._session.begin_rollout(rollout_name(self._rollouts))
            self._adopt()
        self._base = 0
        self._step = None

    def _adopt(self) -> None:
        """Know what of the current rollout was found on disk."""
        rollout, pager = self._session.rollout, self._session.pager
        self._recollection.begin(rollout, lambda: pager.resident(rollout.stream))

    def _take(self, step: ChunkStep, cache: FrontendCache, report: BoundaryReport) -> None:
        """Commit the finished chunk, page by page where retrieval is by page."""
        assert step.finished is not None
        began, waited = time.perf_counter(), 0.0
        pages = self._recollection.pages
        for page in range(pages):
            part = cache if pages == 1 else FinishedPage(cache, self._unit, page)
            waited += self._commit(step, part, self._record(step, step.finished, page), report)
        report.stall_ms += waited * 1e3
        report.encode_ms = milliseconds_since(began) - waited * 1e3

    def _commit(
        self,
        step: ChunkStep,
        part: FrontendCache | FinishedPage,
        record: ChunkRecord,
        report: BoundaryReport,
    ) -> float:
        """Store one unit; the seconds waited for room."""
        codec = self._codec if record.chunk >= self._unit.sink_chunks else get_codec(SINK_CODEC)
        try:
            annex = self._recollection.annex(part.read(0)[0], record.position)
            image = ChunkImage(part, codec, self._pruning.select(step), annex=annex.pack())

            def fill(extent: Bytes, generation: int) -> None:
                image.write(extent, replace(record, generation=generation))

            stream = self._session.rollout.stream
            waited = self._session.pager.commit(stream, record.chunk, image.layout.nbytes, fill)
        except NonFiniteError as error:
            self.rejected["non-finite"] += 1
            log.warning("chunk %d is not stored: %s", record.chunk, error)
            return 0.0
        self._recollection.note(record, annex)
        report.stored_bytes += image.layout.nbytes
        report.stored_tokens += image.tokens
        return waited

    def _record(self, step: ChunkStep, chunk: int, page: int) -> ChunkRecord:
        """What a page of the finished chunk is; each has the place of the whole chunk."""
        before, frames = self._step, self.spec.frames_per_chunk
        start = step.start_frame - frames if before is None else before.start_frame
        start += page * self._unit.frames_per_chunk
        poses = step.finished_poses if before is None else before.poses
        record = ChunkRecord(
            chunk=chunk * self._recollection.pages + page,
            generation=0,
            layers=self.spec.layers,
            frames=self._unit.frames_per_chunk,
            start_frame=start,
            position=float(start - self._base),
            created=time.time(),
            identity=self._session.rollout.identity,
            epoch=self._recollection.epoch,
        )
        return record if poses is None else replace(record, place=tuple(place_of(poses)))

    def _choose(
        self, step: ChunkStep, report: BoundaryReport
    ) -> tuple[list[StoredImage], tuple[int, ...]]:
        """Pick the chunks for this window and pin them; also those it wanted, best first."""
        pager, stream = self._session.pager, self._session.rollout.stream
        pager.tick()
        for chunk, reason in pager.take_lost(stream):
            if reason not in self._told:  # each further one is counted in stats.dropped
                log.warning("chunk %d is lost (%s); it will not be retrieved", chunk, reason)
                self._told.add(reason)
            self._recollection.retriever.forget(chunk)
        wanted, ranking = self._recollection.choose(step)
        report.wanted, report.epoch = wanted, self._recollection.epoch
        report.preferred = self._recollection.retriever.preferred
        window, images = acquire(pager, stream, self._unit, step.chunk, wanted, ranking, self._told)
        report.stall_ms += window.waited * 1e3
        report.stale, report.stale_reason = window.stale, window.reason
        if window.stale:
            self._stale[window.reason] += 1
        report.retrieved = tuple(c.chunk for c in window.chunks)
        report.hits = Counter(c.source for c in window.chunks)
        report.hits["empty"] = max(0, len(wanted) - len(window.chunks))
        return images, ranking.first

    def _fill(
        self,
        step: ChunkStep,
        cache: FrontendCache,
        images: list[StoredImage],
        best: tuple[int, ...],
        report: BoundaryReport,
    ) -> None:
        """Lay the window out and decode the retrieved chunks into it."""
        pieces = [piece_of(image.record, best) for image in images]
        placed = self._positions.place(step.start_frame, self._base, pieces)
        tokens = [image.tokens for image in images]
        report.active_tokens, report.dense_tokens = self._pruning.account(step, tokens)
        if isinstance(cache, PagedCache):
            cache.attach(paged_window(images, placed, self._positions.pairs))
            return
        cache.open(tokens)
        began = time.perf_counter()
        for slot, (image, moves) in enumerate(zip(images, placed, strict=True)):
            image.decode(cache, slot, moves, self._positions.pairs)
        report.decode_ms = milliseconds_since(began)

    def _prefetch(self, step: ChunkStep, previous: Poses | None) -> None:
        """Have the next chunks' memory loaded while this one is computed."""
        if not self.config.prefetch:
            return
        pager, stream = self._session.pager, self._session.rollout.stream
        plan = self._recollection.plan(step, previous)
        self._prefetcher.submit(lambda: pager.ahead(stream, plan()))

"""A memory that does everything in the model's way: the design that write-back is held against.

Chunks are encoded into a pool; where it is full the least recently used one is written on the
model thread, where a window's chunk is not there it is read on the model thread. The same codec,
images, retrieval and disk engine as the pager's.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path

from worldpager.model_adapter.frontend import ChunkStep, FrontendCache, KVSpec
from worldpager.model_adapter.images import ChunkImage, StoredImage, warm_up
from worldpager.model_adapter.opening import store_spec
from worldpager.model_adapter.window import Piece, positions
from worldpager.prefetch.poses import place_of
from worldpager.prefetch.retrieval import get_policy
from worldpager.prefetch.retriever import Retriever
from worldpager.quant.codec import Bytes, get_codec
from worldpager.quant.shard import ChunkRecord, ShardLayout
from worldpager.tiers.arena import Arena
from worldpager.tiers.bandwidth import TokenBucket
from worldpager.tiers.store import ChunkStore


class SynchronousMemory:
    """Takes the place of :class:`WorldMemory` in a loop. No sink, one stream, positions up to the
    table's end.
    """

    def __init__(
        self,
        spec: KVSpec,
        codec: str,
        folder: Path,
        pool: int,
        read_limit: int | None,
        write_limit: int | None,
    ) -> None:
        self._spec = spec
        self._codec = get_codec(codec)
        warm_up(self._codec, spec)
        self._nbytes = ShardLayout.for_chunk(self._codec, [spec.block_shape] * spec.layers).nbytes
        self._arena = Arena(pool)
        self._free = list(range(pool // self._nbytes))
        self._held: OrderedDict[int, int] = OrderedDict()  # chunk: slot, coldest first
        self._clean: set[int] = set()
        self._positions = positions("moving", spec)
        self._store = ChunkStore.create(
            folder, store_spec(spec, "session", 1, self._codec, self._positions.name)
        )
        self._limits = TokenBucket(read_limit), TokenBucket(write_limit)
        self._retriever = Retriever(
            get_policy("camera"), k=spec.retrieve_chunks, sink=0, recent=spec.recent_chunks
        )
        self._before: ChunkStep | None = None

    def boundary(self, step: ChunkStep, cache: FrontendCache) -> float:
        """As :meth:`WorldMemory.boundary`; the seconds spent on the disk."""
        waited = 0.0
        if self._before is not None:
            image = ChunkImage(cache, self._codec)
            slot, waited = self._slot(())
            image.write(self._view(slot), self._record(self._before))
            self._held[self._before.chunk] = slot
        wanted, _ = self._retriever.choose(step.chunk, step.poses)
        for chunk in wanted:
            if chunk not in self._held:
                slot, written = self._slot(wanted)
                waited += written + self._read(chunk, slot)
            self._held.move_to_end(chunk)
        window = [StoredImage(self._view(self._held[chunk]), self._spec) for chunk in wanted]
        pieces = [Piece(r.start_frame, r.frames, r.position) for r in (w.record for w in window)]
        placed = self._positions.place(step.start_frame, 0, pieces)
        cache.open([stored.tokens for stored in window])
        for index, (stored, moves) in enumerate(zip(window, placed, strict=True)):
            stored.decode(cache, index, moves)
        self._before = step
        return waited

    def _record(self, step: ChunkStep) -> ChunkRecord:
        assert step.poses is not None
        place = tuple(place_of(step.poses).tolist())
        self._retriever.note(step.chunk, place)
        return ChunkRecord(
            chunk=step.chunk,
            generation=1,
            layers=self._spec.layers,
            frames=self._spec.frames_per_chunk,
            start_frame=step.start_frame,
            position=float(step.start_frame),
            created=0.0,
            identity=self._store.spec.identity(),
            place=place,
        )

    def _view(self, slot: int) -> Bytes:
        return self._arena.view(slot * self._nbytes, self._nbytes)

    def _slot(self, wanted: tuple[int, ...]) -> tuple[int, float]:
        """A free slot and the seconds it took: clean chunks leave first, then the coldest."""
        if self._free:
            return self._free.pop(), 0.0
        spare = [chunk for chunk in self._held if chunk not in wanted]
        victim = next((chunk for chunk in spare if chunk in self._clean), spare[0])
        slot, waited = self._held.pop(victim), 0.0
        if victim not in self._clean:
            began = time.perf_counter()
            deadline = self._limits[1].reserve(self._nbytes)
            self._store.write(victim, self._view(slot))
            self._limits[1].wait(deadline)
            waited = time.perf_counter() - began
            self._clean.add(victim)
        return slot, waited

    def _read(self, chunk: int, slot: int) -> float:
        began = time.perf_counter()
        deadline = self._limits[0].reserve(self._nbytes)
        self._store.read(chunk, self._view(slot))
        self._limits[0].wait(deadline)
        self._held[chunk] = slot
        return time.perf_counter() - began

    def close(self) -> None:
        """Unlock the store; what is in the pool is lost."""
        self._store.close()
        self._arena.close()

"""A real WorldMemory whose transfers end in the order in which the core asked for them, and only
between two boundaries. All else is real: threads, arena, files, bytes. With that the one thing that
a disk decides by chance is fixed, and a simulation must agree on every figure.
"""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from tests.model_adapter.synthetic import SyntheticFrontend, chunk_bytes
from worldpager.model_adapter.frontend import KVSpec
from worldpager.pager import events as ev
from worldpager.pager.events import Action, ChunkKey, Event
from worldpager.pager.session import StreamFiles
from worldpager.sim.devices import DiskModel
from worldpager.sim.simulator import HostModel, SimConfig

TRANSFERS = {ev.Read: "read", ev.Write: "write"}
ENDINGS = {ev.ReadDone: "read", ev.WriteDone: "write"}


class Turnstile:
    """Lets transfers return one at a time, in the order in which the core began them."""

    def __init__(self) -> None:
        self._order: deque[tuple[str, ChunkKey]] = deque()
        self._changed = threading.Condition()
        self.is_open = True

    def watch(self, core: Any) -> None:
        handle = core.handle

        def watched(event: Event) -> list[Action]:
            actions: list[Action] = handle(event)
            with self._changed:
                if type(event) in ENDINGS:
                    ended = self._order.popleft()
                    assert ended == (ENDINGS[type(event)], event.key)  # type: ignore[union-attr]
                self._order += [
                    (TRANSFERS[type(a)], a.key)  # type: ignore[union-attr]
                    for a in actions
                    if type(a) in TRANSFERS
                ]
                self._changed.notify_all()
            return actions

        core.handle = watched

    def pass_through(self, kind: str, chunk: int) -> None:
        turn = (kind, ChunkKey(0, chunk))
        with self._changed:
            assert self._changed.wait_for(
                lambda: self.is_open and bool(self._order) and self._order[0] == turn, timeout=30
            )

    def set_open(self, is_open: bool) -> None:
        with self._changed:
            self.is_open = is_open
            self._changed.notify_all()


def run_real(
    folder: Path,
    spec: KVSpec,
    monkeypatch: pytest.MonkeyPatch,
    *,
    chunks: int,
    ahead: int,
    **options: Any,
) -> tuple[SyntheticFrontend, list[dict[str, Any]]]:
    """The figures of every chunk once its transfers have ended."""
    turnstile = Turnstile()

    def gated(kind: str) -> Any:
        original = getattr(StreamFiles, kind)

        def transfer(self: StreamFiles, chunk: int, *rest: Any) -> None:
            original(self, chunk, *rest)
            turnstile.pass_through(kind, chunk)

        return transfer

    monkeypatch.setattr(StreamFiles, "read", gated("read"))
    monkeypatch.setattr(StreamFiles, "write", gated("write"))
    frontend = SyntheticFrontend(folder, spec, chunks=chunks, **options)
    memory = frontend.memory
    pager = memory._session.pager
    turnstile.watch(pager.core)
    rows = []
    for chunk in range(chunks):
        turnstile.set_open(False)
        frontend.boundary(chunk, ahead)
        frontend.append(chunk)
        memory._prefetcher.settle()
        turnstile.set_open(True)
        memory.settle()
        rows.append(figures(memory))
    memory.close(60)
    return frontend, rows


def figures(memory: Any) -> dict[str, Any]:
    """What a line of metrics says, as far as no clock is in it."""
    report, stats, occupancy = memory.last, memory.stats, memory.occupancy
    return {
        "chunk": report.chunk,
        "stale": report.stale,
        "stale_reason": report.stale_reason,
        "retrieved": list(report.retrieved),
        "hits": {name: report.hits[name] for name in stats.hits},
        "resident_bytes": occupancy.resident,
        "dirty_bytes": occupancy.dirty,
        "stored_bytes": occupancy.stored,
        "chunk_reads_total": stats.reads,
        "bytes_read_total": stats.bytes_read,
        "bytes_written_total": stats.bytes_written,
        "from_nvme_total": stats.fetched,
        "spill_chunk": stats.spill_chunk,
        "first_read_chunk": stats.first_read_chunk,
    }


def config_of(
    spec: KVSpec, *, chunks_in_dram: float, codec: str, ahead: int, **options: Any
) -> SimConfig:
    """The same for the simulator: a transfer outlasts every boundary and ends before the next."""
    size = chunk_bytes(spec, codec)
    return SimConfig(
        pool_bytes=int(chunks_in_dram * size),
        chunk_bytes=size,
        compute_seconds=1000.0,
        retrieve=spec.retrieve_chunks,
        sink_chunks=spec.sink_chunks,
        sink_chunk_bytes=chunk_bytes(spec, "bf16"),
        recent_chunks=spec.recent_chunks,
        known_ahead=ahead,
        disk=DiskModel(read_latency=1.0, write_latency=1.0),
        host=HostModel(encode_seconds=0.01, decode_seconds=0.01, plan_seconds=0.01),
        **options,
    )

"""What a person sees while a rollout runs, on standard error."""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from worldpager.units import format_size

if TYPE_CHECKING:
    from worldpager.model_adapter.rollout import ChunkMetrics

_CELLS = 10


class RolloutProgress:
    """A live line on a terminal; elsewhere a plain line every tenth of the way."""

    def __init__(self, label: str, chunks: int, dram_bytes: int) -> None:
        self._label, self._chunks, self._dram_bytes = label, chunks, dram_bytes
        self._console = Console(stderr=True)
        self._live = self._console.is_terminal
        self._hits: Counter[str] = Counter()
        self._stale = 0
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tiers]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            refresh_per_second=4,
            transient=True,
            disable=not self._live,
        )
        self._task = self._bars.add_task(label, total=chunks, tiers="")

    def update(self, metrics: ChunkMetrics) -> None:
        """Show the state after one more chunk."""
        self._hits.update(metrics.hits)
        self._stale += metrics.stale
        done = metrics.chunk + 1
        if self._live:
            self._bars.update(self._task, completed=done, tiers=self._tiers(metrics))
        elif done * 10 // self._chunks > (done - 1) * 10 // self._chunks:
            self._console.print(
                f"{self._label} {done}/{self._chunks}  {self._tiers(metrics)}",
                highlight=False,
                soft_wrap=True,
                markup=False,
            )

    def _tiers(self, metrics: ChunkMetrics) -> str:
        filled = round(_CELLS * metrics.resident_bytes / self._dram_bytes)
        dirty = min(filled, round(_CELLS * metrics.dirty_bytes / self._dram_bytes))
        bar = "█" * dirty + "▓" * (filled - dirty) + "░" * (_CELLS - filled)
        sources = " ".join(f"{name} {count}" for name, count in self._hits.items() if count)
        return (
            f"DRAM {bar} {format_size(metrics.resident_bytes)}  "
            f"NVMe {format_size(metrics.stored_bytes)}  "
            f"{metrics.wall_ms:.0f} ms, stall {metrics.stall_ms:.1f} ms  {sources}  "
            f"stale windows {self._stale}"
        )

    def __enter__(self) -> RolloutProgress:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

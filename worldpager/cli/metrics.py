"""``metrics.jsonl``: one line per chunk, written as it happens and read back for the summary.

Nothing is kept in memory between chunks: a rollout of any length costs the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]
METRICS = "metrics.jsonl"
_NUMBERS = (
    "chunk", "wall_ms", "model_ms", "boundary_ms", "stall_ms", "encode_ms", "decode_ms", "stale",
    "bytes_read_total", "bytes_written_total",
)  # fmt: skip


class MetricsLog:
    """Appends lines to a new ``metrics.jsonl``, each flushed before the next chunk begins."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, line: Mapping[str, object]) -> None:
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def read_metrics(path: Path) -> dict[str, Column]:
    """The columns of a ``metrics.jsonl``, one entry per chunk; ``hits`` becomes ``hits.staged`` ...

    A last line cut short by a crash is left out. Columns of text or lists are object arrays.
    """
    rows: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                break
            row = json.loads(line)
            row |= {f"hits.{name}": count for name, count in row.pop("hits").items()}
            rows.append(row)
    return {name: _column([row[name] for row in rows]) for name in (rows[0] if rows else ())}


def check_metrics(metrics: Mapping[str, Column]) -> None:
    """Raise :class:`ValueError` unless columns read from a file are what a rollout writes: those
    that are computed with hold finite numbers, those of chunks hold chunks or nothing.
    """
    if not metrics:
        return
    for name in _NUMBERS:
        column = metrics[name]
        if column.dtype.kind not in "biuf" or not np.isfinite(column).all():
            raise ValueError(f"{METRICS}: {name} is not always a number")
    for name in ("spill_chunk", "first_read_chunk"):
        if not all(value is None or isinstance(value, int) for value in metrics[name].tolist()):
            raise ValueError(f"{METRICS}: {name} is not always a chunk or null")
    if not all(isinstance(value, list) for value in metrics["retrieved"]):
        raise ValueError(f"{METRICS}: retrieved is not always a list")


def _column(values: list[Any]) -> Column:
    if all(isinstance(value, (int, float)) for value in values):
        return np.array(values)
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column

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


def _column(values: list[Any]) -> Column:
    if all(isinstance(value, (int, float)) for value in values):
        return np.array(values)
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column

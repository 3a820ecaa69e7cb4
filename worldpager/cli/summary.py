"""``summary.json``: what a rollout did, in one small object."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from worldpager.cli.metrics import Column

Status = Literal["complete", "interrupted", "failed"]


class Quantiles(BaseModel):
    """Median, 99th percentile and maximum over chunks."""

    p50: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> Quantiles:
        if not len(values):
            return cls()
        p50, p99 = np.percentile(values, [50, 99])
        return cls(p50=_ms(p50), p99=_ms(p99), max=_ms(values.max()))


class Hits(BaseModel):
    """Retrieved chunks by where they were: staged ahead, in DRAM, waited for from NVMe, replaced
    by something older (stale), or absent (empty).
    """

    staged: int = 0
    dram: int = 0
    nvme: int = 0
    stale: int = 0
    empty: int = 0


class ResidentMemory(BaseModel):
    """Resident set of the process in bytes, after the first and after the last chunk."""

    start: int = 0
    end: int = 0


class Revisit(BaseModel):
    """PSNR in dB of revisited views against their first visit, with memory and without."""

    pairs: int = 0
    psnr: float | None = None
    psnr_without_memory: float | None = None


class Summary(BaseModel):
    """The outcome of ``worldpager rollout``. Chunk numbers count from 1.

    ``started``: when, ISO 8601. ``stall_ms`` is what the boundary waited for data, ``decode_ms``
    and ``encode_ms`` lie apart. ``spill_chunk`` is the first chunk for which the pool had no room.
    ``rss_growth_per_chunk`` is the least-squares slope of resident memory in bytes per chunk from
    there on. ``hits`` says where retrieved chunks were when they were asked for;
    ``retrieved_from_nvme`` how many of them had been read back from NVMe, mostly ahead of time,
    since they were last served. ``chunk_bytes`` is a whole chunk's stored size, what chunks took
    once pruned is ``median_chunk_bytes``. ``tokens_kept`` is the share of tokens that was stored of
    all chunks but the first, ``pruning_ratio`` that of the past that windows did not show because
    it was pruned.
    """

    status: Status
    error: str | None = None
    started: str | None = None
    options: dict[str, Any] = {}
    chunks: int = 0
    video_seconds: float = 0.0
    wall_seconds: float = 0.0
    chunk_ms: Quantiles = Quantiles()
    model_ms: Quantiles = Quantiles()
    stall_ms: Quantiles = Quantiles()
    decode_ms: Quantiles = Quantiles()
    encode_ms: Quantiles = Quantiles()
    stale_chunks: int = 0
    stale_reasons: dict[str, int] = {}
    spill_chunk: int | None = None
    first_read_chunk: int | None = None
    chunk_bytes: int = 0
    median_chunk_bytes: int = 0
    tokens_kept: float = 1.0
    pruning_ratio: float = 0.0
    bytes_written: int = 0
    bytes_read: int = 0
    chunk_reads: int = 0
    retrieved_chunks: int = 0
    retrieved_from_nvme: int = 0
    hits: Hits = Hits()
    rss_bytes: ResidentMemory = ResidentMemory()
    rss_growth_per_chunk: float | None = None
    revisit: Revisit = Revisit()


def summarise(
    metrics: Mapping[str, Column],
    *,
    status: Status,
    chunk_bytes: int,
    video_seconds_per_chunk: float,
    wall_seconds: float,
    revisit: Revisit,
    options: Mapping[str, Any],
    error: str | None = None,
    started: str | None = None,
) -> Summary:
    """Fold the columns of ``metrics.jsonl`` into a summary. Pure."""
    facts: dict[str, Any] = {
        "status": status,
        "error": error,
        "started": started,
        "options": dict(options),
        "chunk_bytes": chunk_bytes,
        "wall_seconds": wall_seconds,
        "revisit": revisit,
    }
    if not metrics:
        return Summary(**facts)
    chunks, rss = len(metrics["chunk"]), metrics["rss_bytes"]
    spill = _last(metrics["spill_chunk"])
    stale = metrics["stale"].astype(bool)
    committed, dense = metrics["commit_bytes"], int(metrics["dense_tokens"].sum())
    tokens = metrics["commit_tokens"][metrics["commit_tokens"] > 0]  # the first chunk's is whole
    return Summary(
        **facts,
        chunks=chunks,
        video_seconds=chunks * video_seconds_per_chunk,
        chunk_ms=Quantiles.of(metrics["wall_ms"]),
        model_ms=Quantiles.of(metrics["model_ms"]),
        stall_ms=Quantiles.of(metrics["stall_ms"]),
        decode_ms=Quantiles.of(metrics["decode_ms"]),
        encode_ms=Quantiles.of(metrics["encode_ms"]),
        stale_chunks=int(stale.sum()),
        stale_reasons=dict(Counter(metrics["stale_reason"][stale].tolist())),
        spill_chunk=spill,
        first_read_chunk=_last(metrics["first_read_chunk"]),
        median_chunk_bytes=int(np.median(committed[committed > 0])) if committed.any() else 0,
        tokens_kept=float(tokens[1:].mean() / tokens[0]) if len(tokens) > 1 else 1.0,
        pruning_ratio=1 - int(metrics["active_tokens"].sum()) / dense if dense else 0.0,
        bytes_written=int(metrics["bytes_written_total"][-1]),
        bytes_read=int(metrics["bytes_read_total"][-1]),
        chunk_reads=int(metrics["chunk_reads_total"][-1]),
        retrieved_chunks=sum(len(chunks) for chunks in metrics["retrieved"]),
        retrieved_from_nvme=int(metrics["from_nvme_total"][-1]),
        hits=Hits(**{n: int(metrics[f"hits.{n}"].sum()) for n in Hits.model_fields}),
        rss_bytes=ResidentMemory(start=int(rss[0]), end=int(rss[-1])),
        rss_growth_per_chunk=growth_per_chunk(rss, spill),
    )


def growth_per_chunk(rss: npt.NDArray[Any], spill_chunk: int | None) -> float | None:
    """Least-squares slope of ``rss`` (bytes, one value per chunk) from ``spill_chunk`` on.

    None where the pool never filled, or so late that a slope means nothing.
    """
    if spill_chunk is None or len(rss) - spill_chunk < 10:
        return None
    after = rss[spill_chunk - 1 :].astype(np.float64)
    return float(np.polyfit(np.arange(len(after)), after, 1)[0])


def write_summary(summary: Summary, path: Path) -> None:
    """Write ``path`` whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(summary.model_dump_json(indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _last(column: Column) -> int | None:
    return None if column[-1] is None else int(column[-1])


def _ms(value: float) -> float:
    return round(float(value), 3)  # microseconds: what lies below is noise

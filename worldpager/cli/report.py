"""``report.html``: one file that shows what a rollout did, without anything from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from worldpager.cli.figures import Metrics, charts
from worldpager.cli.pictures import Comparison
from worldpager.cli.summary import Summary
from worldpager.units import format_duration, format_size

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } .lead { color: #555; margin-top: 0; }
dl { display: grid; gap: .6rem 1.5rem; }
dl { grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); }
dt { color: #666; font-size: 13px; } dd { margin: 0; font-size: 1.15rem; font-weight: 600; }
figure { margin: 1.5rem 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
table { border-collapse: collapse; }
td, th { padding: .3rem .8rem .3rem 0; text-align: left; vertical-align: top; }
td, th { font-size: 13px; }
td img { width: 100%; display: block; image-rendering: pixelated; } .warn { color: #a40000; }
"""


def write_report(
    summary: Summary,
    metrics: Metrics,
    with_memory: Sequence[Comparison],
    without_memory: Sequence[Comparison],
    path: Path,
) -> None:
    """Write the report of one rollout to ``path``; pictures may be empty."""
    page = _page(summary, metrics, with_memory, without_memory)
    path.write_text("\n".join(page) + "\n", encoding="utf-8")


def _page(
    summary: Summary,
    metrics: Metrics,
    with_memory: Sequence[Comparison],
    without_memory: Sequence[Comparison],
) -> Iterator[str]:
    yield "<!DOCTYPE html>"
    yield '<html lang="en"><head><meta charset="utf-8"><title>WorldPager rollout</title>'
    yield f"<style>{_STYLE}</style></head><body>"
    yield "<h1>WorldPager rollout</h1>"
    yield f'<p class="lead">{escape(headline(summary))}</p>'
    if summary.error:
        yield f'<p class="warn">{escape(summary.error)}</p>'
    yield "<dl>"
    for term, value in facts(summary):
        yield f"<div><dt>{escape(term)}</dt><dd>{escape(value)}</dd></div>"
    yield "</dl>"
    yield from _pictures(with_memory, "First visit against revisit")
    yield from _pictures(without_memory, "The same without memory")
    if metrics:
        for title, svg in charts(metrics, summary):
            yield f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"
    yield "<h2>Options</h2><table>"
    for name, value in summary.options.items():
        yield f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
    yield "</table></body></html>"


def headline(summary: Summary) -> str:
    """What was run, in one sentence."""
    return (
        f"{summary.chunks} chunks, {format_duration(summary.video_seconds)} of video in "
        f"{format_duration(summary.wall_seconds)}; {summary.status}."
    )


def facts(summary: Summary) -> Iterator[tuple[str, str]]:
    """Names and values of what a reader looks for first."""
    yield "chunk, median / P99", f"{summary.chunk_ms.p50:.0f} / {summary.chunk_ms.p99:.0f} ms"
    yield "stall, P99 / worst", f"{summary.stall_ms.p99:.2f} / {summary.stall_ms.max:.2f} ms"
    yield "decode, median / P99", f"{summary.decode_ms.p50:.2f} / {summary.decode_ms.p99:.2f} ms"
    yield "stale windows", str(summary.stale_chunks)
    yield (
        "first spill, first read",
        f"{_chunk(summary.spill_chunk)}, {_chunk(summary.first_read_chunk)}",
    )
    yield "chunk size", format_size(summary.chunk_bytes)
    if summary.pruning_ratio:
        yield "pruned, median", format_size(summary.median_chunk_bytes)
        yield "pruning ratio", f"{100 * summary.pruning_ratio:.1f} %"
    yield "written", format_size(summary.bytes_written)
    yield "read back", f"{format_size(summary.bytes_read)}, {summary.chunk_reads} chunks"
    growth = summary.rss_growth_per_chunk
    yield "memory growth per chunk", "too short to say" if growth is None else f"{growth:.0f} B"
    yield "revisits compared", str(summary.revisit.pairs)
    yield "PSNR with memory", _decibels(summary.revisit.psnr)
    yield "PSNR without memory", _decibels(summary.revisit.psnr_without_memory)
    yield "chunks retrieved", str(summary.retrieved_chunks)
    yield "of them read back from NVMe", str(summary.retrieved_from_nvme)
    hits = summary.hits.model_dump()
    yield "found where", ", ".join(f"{n} {count}" for n, count in hits.items() if count) or "-"


def _pictures(comparisons: Sequence[Comparison], title: str) -> Iterator[str]:
    if not comparisons:
        return
    yield f"<h2>{title}</h2><table>"
    yield _row("first visit", [_cell(c.first, f"frame {c.first_frame}") for c in comparisons])
    yield _row(
        "revisit",
        [_cell(c.again, f"frame {c.again_frame}: {c.psnr:.1f} dB") for c in comparisons],
    )
    yield "</table>"


def _row(name: str, cells: Sequence[str]) -> str:
    return f"<tr><th>{name}</th>{''.join(cells)}</tr>"


def _cell(picture: str, caption: str) -> str:
    return f'<td><img alt="" src="{picture}">{caption}</td>'


def _chunk(number: int | None) -> str:
    return "none" if number is None else f"chunk {number}"


def _decibels(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} dB"

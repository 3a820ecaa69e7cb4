"""The report's charts: matplotlib in, SVG text out."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from worldpager.cli.metrics import Column
from worldpager.cli.summary import Summary

Metrics = Mapping[str, Column]
_MIB = 2**20


def charts(metrics: Metrics, summary: Summary) -> Iterator[tuple[str, str]]:
    """Pairs of a chart's title and its SVG."""
    for title, draw in _CHARTS:
        with _axes() as (figure, axes):
            draw(axes, metrics)
            for chunk, label, style in (
                (summary.spill_chunk, "first spill", ":"),
                (summary.first_read_chunk, "first read", "--"),
            ):
                if chunk is not None:
                    axes.axvline(chunk, color="0.4", linestyle=style, label=label)
            axes.set_xlabel("chunk")
            axes.set_xlim(1, max(2, len(metrics["chunk"])))
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
            yield title, _svg(figure)


def _times(axes: Axes, metrics: Metrics) -> None:
    chunk = metrics["chunk"] + 1
    axes.plot(chunk, metrics["wall_ms"], label="whole chunk")
    axes.plot(chunk, metrics["model_ms"], label="model")
    axes.plot(chunk, metrics["encode_ms"], label="encode")
    axes.plot(chunk, metrics["decode_ms"], label="decode")
    axes.set_ylabel("ms")
    axes.set_yscale("log")


def _stalls(axes: Axes, metrics: Metrics) -> None:
    chunk, stale = metrics["chunk"] + 1, metrics["stale"].astype(bool)
    axes.plot(chunk, metrics["stall_ms"], label="stall")
    axes.plot(chunk[stale], metrics["stall_ms"][stale], "rx", label="stale window", clip_on=False)
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0, top=max(1.0, 1.1 * float(metrics["stall_ms"].max())))


def _memory(axes: Axes, metrics: Metrics) -> None:
    resident = metrics["rss_bytes"] / _MIB
    axes.plot(metrics["chunk"] + 1, resident, label="resident memory")
    axes.set_ylabel("MiB")
    axes.set_ylim(bottom=0, top=1.1 * float(resident.max()))


def _tiers(axes: Axes, metrics: Metrics) -> None:
    chunk = metrics["chunk"] + 1
    axes.plot(chunk, metrics["stored_bytes"] / _MIB, label="on NVMe")
    axes.plot(chunk, metrics["resident_bytes"] / _MIB, label="in DRAM")
    axes.plot(chunk, metrics["dirty_bytes"] / _MIB, label="of it not yet on NVMe")
    axes.set_ylabel("MiB")
    axes.set_ylim(bottom=0)


def _traffic(axes: Axes, metrics: Metrics) -> None:
    chunk = metrics["chunk"] + 1
    axes.plot(chunk, metrics["bytes_written_total"] / _MIB, label="written")
    axes.plot(chunk, metrics["bytes_read_total"] / _MIB, label="read")
    axes.set_ylabel("MiB in all")
    axes.set_ylim(bottom=0)


def _sources(axes: Axes, metrics: Metrics) -> None:
    names = ("staged", "dram", "nvme", "stale", "empty")
    totals = [metrics[f"hits.{name}"].cumsum() for name in names]
    axes.stackplot(metrics["chunk"] + 1, *totals, labels=names)
    axes.set_ylabel("retrieved chunks in all")


_CHARTS: tuple[tuple[str, Callable[[Axes, Metrics], None]], ...] = (
    ("Time per chunk", _times),
    ("Stalls", _stalls),
    ("Host memory", _memory),
    ("Tier occupancy", _tiers),
    ("Reads and writes", _traffic),
    ("Where retrieved chunks came from", _sources),
)


@contextmanager
def _axes() -> Iterator[tuple[Figure, Axes]]:
    with mpl.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "worldpager",  # the same run draws the same bytes
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "lines.linewidth": 1.0,
            "legend.frameon": False,
        }
    ):
        figure = Figure(figsize=(7.2, 2.6), layout="constrained")
        yield figure, figure.subplots()


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]  # without the XML prologue, to stand inside HTML

"""A reproduction's figure as PNG, and its table as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from worldpager.cli.reproduction.base import Chart, Reproduction, Row, Value

_BARS = 24
_DENSE = 40


def draw(made: Reproduction, path: Path) -> None:
    """Write the figure: its charts, else bars of the table's numbers."""
    count = max(1, len(made.charts))
    with mpl.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(8.0, 3.8 * count), layout="constrained")
        axes = figure.subplots(count, squeeze=False)[:, 0]
        for place, chart in zip(axes, made.charts, strict=False):
            _lines(place, chart)
        if not made.charts:
            _bars(axes[0], made.rows)
        figure.suptitle(made.title)
        figure.savefig(path, dpi=120, metadata={"Software": None})


def _lines(axes: Axes, chart: Chart) -> None:
    """One colour for all that a label says before its colon, one style for each kind after it."""
    groups = list(dict.fromkeys(series.label.split(":")[0] for series in chart.series))
    kinds = list(dict.fromkeys(series.label.partition(":")[2] for series in chart.series))
    for series in chart.series:
        group, _, kind = series.label.partition(":")
        index = kinds.index(kind)
        axes.plot(
            series.x,
            series.y,
            label=series.label,
            color=f"C{groups.index(group)}",
            linestyle="none" if series.marks else ("-", "--", ":", "-.")[index % 4],
            marker="none" if len(series.x) > _DENSE else "oxs^d+"[index % 6],
            markerfacecolor="none",
            linewidth=1.0 if len(series.x) > _DENSE else 1.5,
        )
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    if chart.log_x:
        axes.set_xscale("log")
    if chart.floor is not None:
        axes.set_yscale("symlog", linthresh=chart.floor)
        axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)


def _bars(axes: Axes, rows: list[Row]) -> None:
    shown = [row for row in rows if isinstance(row.paper, (int, float))][:_BARS]
    for offset, how in enumerate(("paper", "simulated", "measured")):
        points = [
            (index + 0.27 * (offset - 1), value)
            for index, row in enumerate(shown)
            if isinstance(value := getattr(row, how), (int, float))
        ]
        axes.barh([y for y, _ in points], [x for _, x in points], height=0.25, label=how)
    axes.set_yticks(range(len(shown)), [f"{row.what}, {row.unit}" for row in shown], fontsize=7)
    axes.invert_yaxis()
    axes.legend(fontsize=7)


def markdown(made: Reproduction) -> Iterator[str]:
    """Lines of the table with its settings and notes."""
    yield f"### {made.title}"
    yield ""
    yield "| what | unit | paper | simulated | measured |"
    yield "| --- | --- | --- | --- | --- |"
    for row in made.rows:
        cells = (row.what, row.unit, text(row.paper), text(row.simulated), text(row.measured))
        yield "| " + " | ".join(cells) + " |"
    yield ""
    settings = "; ".join(f"{name}: {text(value)}" for name, value in made.settings.items())
    yield f"Source: {made.source}. Settings: {settings}."
    yield ""
    for note in made.notes:
        yield f"- {note}"


def text(value: Value) -> str:
    """A cell: nothing for None, at most five significant digits."""
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)

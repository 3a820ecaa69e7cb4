"""The tables of ``worldpager recall`` as Markdown, and its figure as PNG."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from worldpager.cli.recall_episodes import KINDS
from worldpager.cli.recall_methods import CODECS, METHODS, Method
from worldpager.cli.recall_paths import GAPS
from worldpager.cli.recall_results import Estimate, Results, change, mean_of, score

KIND_TITLES = {"observed": "Observed context", "generated": "Self-generated"}


def rows_of(results: Results) -> list[tuple[Method, str]]:
    """The methods and codecs of which anything is known, in the order of their lists."""
    known = {(e.method, e.codec) for e in results.outcomes}
    return [(m, codec) for m in METHODS.values() for codec in CODECS if (m.name, codec) in known]


def report(results: Results, note: str) -> str:
    """All tables. ``note``: what the scorer had to say."""
    parts = [*(_scores(results, kind) for kind in KINDS), _against(results), _codecs(results)]
    parts.append(_expected(results))
    return "\n\n".join([*parts, note] if note else parts) + "\n"


def _scores(results: Results, kind: str) -> str:
    """What each method and codec reaches."""
    gaps = [f"PSNR {gap}" for gap in GAPS]
    head = [
        "method",
        "codec",
        "worlds",
        "tokens",
        "bytes a chunk",
        "ms a chunk, of it memory",
        *gaps,
        "SSIM",
    ]
    lines = []
    for method, codec in rows_of(results):
        rows = results.of(method.name, codec, kind)
        if not rows:
            continue
        chunk_ms, boundary_ms = (
            mean_of(rows.values(), name) for name in ("chunk_ms", "boundary_ms")
        )
        quality = [_said(score(rows, gap, "psnr"), 2) for gap in GAPS]
        others = [_said(score(rows, "all", name), 3) for name in ("ssim", "lpips")]
        lines.append([
            method.title, codec, str(len(rows)),
            f"{mean_of(rows.values(), 'window_tokens'):.0f}",
            f"{mean_of(rows.values(), 'chunk_bytes'):,.0f}",
            f"{chunk_ms:.0f}, {boundary_ms:.1f}",
            *quality, *others,
        ])  # fmt: skip
    with_lpips = any(line[-1] for line in lines)
    if not with_lpips:
        lines = [line[:-1] for line in lines]
    return f"### {KIND_TITLES[kind]}\n\n" + _table([*head, "LPIPS"] if with_lpips else head, lines)


def _against(results: Results) -> str:
    """Each method against the one it is held to, in the same codec."""
    lines = []
    for method, codec in rows_of(results):
        if method.against is None:
            continue
        for kind in KINDS:
            rows = results.of(method.name, codec, kind)
            other = results.of(method.against, codec, kind)
            changes = [_signed(change(rows, other, gap, "psnr")) for gap in (*GAPS, "all")]
            if any(changes):
                against = METHODS[method.against].title
                lines.append([method.title, against, codec, kind, *changes])
    head = ["method", "against", "codec", "context", *GAPS, "all"]
    return "### Methods, world by world\n\n" + _table(head, lines)


def _codecs(results: Results) -> str:
    """Each codec against 16 bits, in the same method."""
    lines = []
    for method, codec in rows_of(results):
        for kind in KINDS:
            rows = results.of(method.name, codec, kind)
            exact = results.of(method.name, "bf16", kind)
            changes = [_signed(change(rows, exact, gap, "psnr")) for gap in (*GAPS, "all")]
            if any(changes) and codec != "bf16":
                lines.append([codec, method.title, kind, *changes])
    head = ["codec", "method", "context", *GAPS, "all"]
    return "### Codecs against bf16, world by world\n\n" + _table(head, lines)


Test = Callable[[Estimate], bool]


def _claims() -> Iterator[tuple[str, tuple[str, str], tuple[str, str], Test]]:
    """What is expected: a sentence, the two rows compared, and the test of their difference."""
    three, exact = "retrieval", "bf16"
    yield (
        "retrieval within 0.5 dB of full KV",
        (three, exact), ("full", exact), lambda d: d.mean >= -0.5,
    )  # fmt: skip
    yield (
        "retrieval at least 6 dB above the sliding window",
        (three, exact), ("sliding", exact), lambda d: d.mean >= 6.0,
    )  # fmt: skip
    yield (
        "6 chunks in the room of 3 no worse than 3",
        ("six-in-three", exact), (three, exact), lambda d: d.high >= 0.0,
    )  # fmt: skip
    yield (
        "DeCoPrune above random",
        ("decoprune", exact), ("random", exact), lambda d: d.low > 0.0,
    )  # fmt: skip
    yield (
        "random above the reversed criterion",
        ("random", exact), ("reversed", exact), lambda d: d.low > 0.0,
    )  # fmt: skip
    yield (
        "int4 within 0.1 dB of bf16",
        (three, "int4"), (three, exact), lambda d: abs(d.mean) <= 0.1,
    )  # fmt: skip
    yield (
        "int4 against bf16: interval includes zero",
        (three, "int4"), (three, exact), lambda d: d.low <= 0.0 <= d.high,
    )  # fmt: skip
    yield (
        "int3 within 0.2 dB of bf16",
        (three, "int3"), (three, exact), lambda d: abs(d.mean) <= 0.2,
    )  # fmt: skip


def _expected(results: Results) -> str:
    """Whether what is expected holds, by context and gap."""
    lines = []
    for sentence, (method, codec), (other, other_codec), test in _claims():
        for kind in KINDS:
            rows = results.of(method, codec, kind)
            reference = results.of(other, other_codec, kind)
            cells = []
            for gap in (*GAPS, "all"):
                found = change(rows, reference, gap, "psnr")
                verdict = "" if found is None else "yes" if test(found) else "**no**"
                cells.append(f"{verdict} {_signed(found)}".strip())
            if any(cells):
                lines.append([sentence, kind, *cells])
    return "### What was expected\n\n" + _table(["", "context", *GAPS, "all"], lines)


def _said(found: Estimate | None, digits: int) -> str:
    if found is None:
        return ""
    return f"{found.mean:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def _signed(found: Estimate | None) -> str:
    if found is None:
        return ""
    return f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"


def _table(head: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def draw(results: Results, path: Path) -> None:
    """PSNR by gap class, a panel for each kind of context, a colour for each method."""
    with mpl.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(9.0, 4.2), layout="constrained")
        panels = figure.subplots(1, len(KINDS), sharey=True)
        for axes, kind in zip(panels, KINDS, strict=True):
            _panel(axes, results, kind)
        panels[0].set_ylabel("PSNR of revisits, dB")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", fontsize=7)
        figure.savefig(path, dpi=120, metadata={"Software": None})


def _panel(axes: Axes, results: Results, kind: str) -> None:
    names = list(dict.fromkeys(method.name for method, _ in rows_of(results)))
    rows = [row for row in rows_of(results) if results.of(row[0].name, row[1], kind)]
    for place, (method, codec) in enumerate(rows):
        found = [score(results.of(method.name, codec, kind), gap, "psnr") for gap in GAPS]
        shown = [(i, f) for i, f in enumerate(found) if f is not None]
        shift = 0.7 * (place / max(1, len(rows) - 1) - 0.5)
        axes.errorbar(
            [i + shift for i, _ in shown],
            [f.mean for _, f in shown],
            [[f.mean - f.low for _, f in shown], [f.high - f.mean for _, f in shown]],
            fmt="osd^"[CODECS.index(codec)],
            color=mpl.colormaps["tab20"](names.index(method.name) % 20),
            markersize=4,
            label=f"{method.title}, {codec}",
        )
    axes.set_xticks(range(len(GAPS)), [f"{gap} gap" for gap in GAPS])
    axes.set_title(KIND_TITLES[kind])

"""``worldpager recall``: how much of a world comes back, by method and codec."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from worldpager.cli.options import duration
from worldpager.errors import ConfigError

if TYPE_CHECKING:
    from worldpager.cli.recall_episodes import Episode, Outcome
    from worldpager.cli.recall_scores import Scorer


def recall(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Results, table and figure go here.")
    ],
    methods: Annotated[
        str, typer.Option(metavar="NAMES", help="Methods, separated by commas; default: all.")
    ] = "",
    codecs: Annotated[
        str, typer.Option(metavar="NAMES", help="Codecs, separated by commas.")
    ] = "bf16,int4",
    worlds: Annotated[int, typer.Option(help="Worlds for each path.")] = 4,
    chunks: Annotated[int, typer.Option(help="Length of each path, half of it out.")] = 144,
    limit: Annotated[
        float | None,
        typer.Option(
            parser=duration, metavar="TIME", help="Stop after this long; run again to go on."
        ),
    ] = None,
) -> None:
    """Generate worlds, come back to them, and say how like they are; resumes what was begun."""
    from worldpager.cli.recall_methods import METHODS, get_method
    from worldpager.cli.recall_report import draw, report
    from worldpager.cli.recall_results import Results
    from worldpager.cli.recall_scores import Scorer

    if worlds < 1 or chunks < 48 or chunks % 2:
        raise ConfigError(
            f"recall needs a world and an even path of 48 chunks, not {worlds} and {chunks}"
        )
    chosen = {name: get_method(name) for name in methods.split(",") if name} or METHODS
    out.mkdir(parents=True, exist_ok=True)
    results, scorer = Results(out / "recall.jsonl"), Scorer()
    wanted = list(_episodes(list(chosen), codecs.split(","), worlds, chunks))
    left = [episode for episode in wanted if episode not in results.outcomes]
    for outcome in _outcomes(left, scorer, out, limit):
        results.add(outcome)
    text = report(results, scorer.note)
    (out / "recall.md").write_text(text)
    draw(results, out / "recall.png")
    typer.echo(text)
    missing = sum(episode not in results.outcomes for episode in wanted)
    if missing:
        typer.echo(f"{missing} episodes are left; run the same command to go on", err=True)


def _outcomes(
    episodes: list[Episode], scorer: Scorer, out: Path, limit: float | None
) -> Iterator[Outcome]:
    """Run episodes, one after the other, and begin none after ``limit`` seconds."""
    from worldpager.cli.recall_episodes import run_episode
    from worldpager.cli.recall_methods import get_method
    from worldpager.model_adapter.builtin import load_model
    from worldpager.model_adapter.driving import one_thread

    began, model = time.monotonic(), load_model()
    with one_thread():
        for episode in episodes:
            if limit is not None and time.monotonic() - began > limit:
                return
            yield run_episode(model, get_method(episode.method), episode, scorer, out)


def _episodes(methods: list[str], codecs: list[str], worlds: int, chunks: int) -> Iterator[Episode]:
    """All episodes, world by world, so that what was done at any time can be compared."""
    from worldpager.cli.recall_episodes import KINDS, Episode
    from worldpager.cli.recall_paths import PATHS

    for seed in range(worlds):
        for path in PATHS:
            for kind in KINDS:
                for method in methods:
                    for codec in codecs:
                        yield Episode(method, codec, kind, path, seed, chunks)

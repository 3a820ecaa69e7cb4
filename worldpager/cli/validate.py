"""``worldpager validate``: a rollout against the prediction that was made of it."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from worldpager.cli.options import Json
from worldpager.errors import ConfigError

if TYPE_CHECKING:
    from worldpager.cli.runs import Run
    from worldpager.sim.predictions import Prediction

NOT_MET = 1
"""Exit status where a criterion is not met."""


def validate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the rollout's results.")],
    prediction: Annotated[
        Path, typer.Argument(metavar="PREDICTION", help="File that `predict` wrote before.")
    ],
    json: Json = False,
) -> None:
    """Hold a run against its prediction, criterion by criterion; exit 1 where one is not met."""
    from worldpager.cli.runs import read_run
    from worldpager.sim.predictions import Outcome, read_prediction

    said_before, ran = read_prediction(prediction), read_run(run)
    check_held_out(said_before, ran)
    verdicts = said_before.judge(Outcome.of(ran.metrics))
    met = sum(verdict.met for verdict in verdicts)
    if json:
        typer.echo(
            jsonlib.dumps(
                {
                    "run": str(run),
                    "prediction": str(prediction),
                    "hash": said_before.hash,
                    "predicted_at": said_before.created.isoformat(),
                    "run_started": ran.started.isoformat(),
                    "start_is_estimate": ran.started_is_estimate,
                    "late_chunks": ran.late_chunks,
                    "met": met,
                    "criteria": [verdict.model_dump(mode="json") for verdict in verdicts],
                },
                indent=2,
            )
        )
    else:
        _show(said_before, ran, run)
    if met < len(verdicts):
        raise typer.Exit(NOT_MET)


def check_held_out(prediction: Prediction, run: Run) -> None:
    """Raise :class:`ConfigError` unless the prediction is of this run and older than it."""
    if run.status != "complete" or run.chunks != run.inputs.chunks:
        raise ConfigError(
            f"{run.folder} is not a whole run: {run.chunks} of {run.inputs.chunks} chunks, "
            f"status {run.status or 'unknown'}; a prediction is of all of them"
        )
    assumed = {}  # a run may be held to the machine's bandwidths, where no limit was given
    if prediction.machine is not None:
        limits = prediction.machine.disk.limits
        assumed = dict(zip(("read_limit", "write_limit"), limits, strict=True))
    differs = [
        f"{name}: predicted for {was!r}, run with {now!r}"
        for name in type(prediction.inputs).model_fields
        # the poses say it better than path and seed; what is kept only a run can tell
        if name not in ("path", "seed", "tokens_kept")
        if (now := getattr(run.inputs, name)) != (was := getattr(prediction.inputs, name))
        and not (was is None and now == assumed.get(name))
    ]
    if differs:
        raise ConfigError(f"the prediction is of another run; {'; '.join(differs)}")
    if prediction.created >= run.started:
        raise ConfigError(
            f"the prediction was made at {prediction.created.isoformat()}, but the run began at "
            f"{run.started.isoformat()}; predict first, then run"
        )


def _show(prediction: Prediction, run: Run, folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from worldpager.cli.predict import room, said, title
    from worldpager.sim.predictions import Outcome

    verdicts = prediction.judge(Outcome.of(run.metrics))
    table = Table(title=f"{folder}: {sum(v.met for v in verdicts)} of {len(verdicts)} met")
    for name in ("criterion", "predicted", "observed", "tolerance", "met"):
        table.add_column(name, justify="left" if name == "criterion" else "right")
    for v in verdicts:
        table.add_row(
            title(v.name), said(v.name, v.predicted), said(v.name, v.observed),
            room(v.name, v.tolerance.bound(v.predicted)), "yes" if v.met else "NO",
        )  # fmt: skip
    console = Console()
    console.print(table)
    if run.late_chunks:
        console.print(
            f"{run.late_chunks} chunks took longer than the chunk time that was predicted with, "
            f"{run.inputs.chunk_time:g} s; `replay` takes their real times.",
            style="yellow", highlight=False,
        )  # fmt: skip
    about = " at the latest, by its files" if run.started_is_estimate else ""
    console.print(
        f"predicted {prediction.created:%Y-%m-%d %H:%M:%S}, run began "
        f"{run.started:%Y-%m-%d %H:%M:%S} UTC{about}; hash {prediction.hash[:16]}",
        style="dim", highlight=False,
    )  # fmt: skip

"""``worldpager reproduce NAME``: published tables and figures beside our own."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from worldpager.cli.options import duration
from worldpager.errors import ConfigError

if TYPE_CHECKING:
    from worldpager.cli.reproduction.base import Lab, Reproduction

NAMES = {
    "stops": "where designs stop",
    "costs": "cost per design",
    "bandwidth": "stall against read bandwidth, 0.1 to 5 GB/s",
    "write-back": "write-back against synchronous eviction",
    "session": "the 3,000-chunk session",
    "lingbot": "LingBot-World's read path",
    "sata": "SATA class, 2,000 chunks",
    "held-out": "predictions registered before their runs",
}


def reproduce(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help=f"list, all, or one of {', '.join(NAMES)}.")
    ],
    only: Annotated[
        bool | None,
        typer.Option(
            "--measured/--simulated",
            help="Only run on this machine, or only simulate the published one; default: both.",
        ),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(metavar="FRACTION", help="Share of the published bytes to make here."),
    ] = "1/600",
    chunk_time: Annotated[
        float,
        typer.Option(
            parser=duration, metavar="TIME", help="Compute time of a measured chunk, at most."
        ),
    ] = 0.1,
    out: Annotated[
        Path, typer.Option(help="Folder for tables, figures and data; stores lie there meanwhile.")
    ] = Path("reproduction"),
) -> None:
    """Reproduce a published table or figure: paper, simulated, measured side by side.

    Writes NAME.json (the data), NAME.md (the table) and NAME.png (the figure).
    """
    if name == "list":
        for known, what in NAMES.items():
            typer.echo(f"{known:<12}{what}")
        return
    if name != "all" and name not in NAMES:
        raise ConfigError(f"nothing called {name!r} to reproduce; known are {', '.join(NAMES)}")
    if chunk_time <= 0:
        raise ConfigError("--chunk-time must be positive")
    from worldpager.cli.reproduction.base import Lab
    from worldpager.sim.presets import get_preset, parse_scale

    fraction = parse_scale(scale)
    get_preset("matrix-game-2").scaled(fraction)  # refuses what cannot be
    lab = Lab(
        simulated=only is not True,
        measured=only is not False,
        scale=fraction,
        chunk_time=chunk_time,
        folder=out,
        say=lambda line: typer.echo(line, err=True),
    )
    out.mkdir(parents=True, exist_ok=True)
    for each in NAMES if name == "all" else [name]:
        made = experiment(each)(lab)
        save(made, out)
        show(made)


def experiment(name: str) -> Callable[[Lab], Reproduction]:
    """What reproduces ``name``."""
    module = import_module(f"worldpager.cli.reproduction.{name.replace('-', '_')}")
    run: Callable[[Lab], Reproduction] = module.reproduce
    return run


def save(made: Reproduction, out: Path) -> None:
    """Write the data, the table and the figure."""
    from worldpager.cli.reproduction.drawing import draw, markdown

    (out / f"{made.name}.json").write_text(made.model_dump_json(indent=1) + "\n", encoding="utf-8")
    (out / f"{made.name}.md").write_text("\n".join(markdown(made)) + "\n", encoding="utf-8")
    draw(made, out / f"{made.name}.png")


def show(made: Reproduction) -> None:
    """The table on a terminal."""
    from rich.console import Console
    from rich.table import Table

    from worldpager.cli.reproduction.drawing import text

    table = Table(title=made.title, title_justify="left")
    table.add_column("what")
    table.add_column("unit", style="dim")
    for how in ("paper", "simulated", "measured"):
        table.add_column(how, justify="right", style="bold" if how == "measured" else "")
    for row in made.rows:
        table.add_row(row.what, row.unit, text(row.paper), text(row.simulated), text(row.measured))
    console = Console()
    console.print(table)
    for note in made.notes:
        console.print(f"- {note}", style="dim", markup=False, highlight=False)

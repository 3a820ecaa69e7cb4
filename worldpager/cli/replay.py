"""``worldpager replay``: a finished rollout with another pool, policy or disk."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from worldpager.cli.options import Json, Machine, rate, size

if TYPE_CHECKING:
    from worldpager.sim.predictions import Outcome
    from worldpager.sim.traces import PolicyResult


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the rollout's results.")],
    dram: Annotated[
        int | None, typer.Option(parser=size, metavar="SIZE", help="Another pool.")
    ] = None,
    codec: Annotated[str | None, typer.Option(help="Another codec.")] = None,
    retrieve: Annotated[int | None, typer.Option(help="Another number of chunks.")] = None,
    eviction: Annotated[str | None, typer.Option(help="redundant, furthest or lru.")] = None,
    on_miss: Annotated[str | None, typer.Option(help="nearest, stale or wait.")] = None,
    read_limit: Annotated[
        int | None, typer.Option(parser=rate, metavar="RATE", help="Another cap on reads.")
    ] = None,
    write_limit: Annotated[
        int | None, typer.Option(parser=rate, metavar="RATE", help="Another cap on writes.")
    ] = None,
    unlimited: Annotated[
        bool, typer.Option("--unlimited", help="Drop the run's own caps first.")
    ] = False,
    live: Annotated[
        bool, typer.Option("--live", help="Poses ahead are unknown, as in a live session.")
    ] = False,
    prefetch: Annotated[bool, typer.Option(help="Whether anything is loaded ahead.")] = True,
    machine: Machine = None,
    policies: Annotated[
        bool, typer.Option(help="Compare eviction policies, with Belady's optimum as the bound.")
    ] = True,
    json: Json = False,
) -> None:
    """Replay a rollout's camera path and compute times through the simulator, with changes."""
    from dataclasses import replace

    from worldpager.cli.runs import check_pool, read_run
    from worldpager.sim.machines import load_machine
    from worldpager.sim.predictions import Inputs
    from worldpager.sim.traces import Trace, compare_policies

    ran = read_run(run)
    trace = Trace.of(ran.inputs, ran.path, ran.metrics)
    changes: dict[str, object] = {"read_limit": None, "write_limit": None} if unlimited else {}
    given = {
        "dram_bytes": dram, "codec": codec, "retrieve": retrieve, "eviction": eviction,
        "on_miss": on_miss, "read_limit": read_limit, "write_limit": write_limit,
    }  # fmt: skip
    changes |= {name: value for name, value in given.items() if value is not None}
    changes |= {"known_ahead": 0} if live else {}
    changes |= {} if prefetch else {"prefetch": False}
    other = replace(trace, inputs=Inputs(**{**dict(trace.inputs), **changes}))
    check_pool(other.inputs)
    known = None if machine is None else load_machine(machine)
    config = other.config(known)
    outcomes = {
        "as it ran": trace.outcome,
        "the same, simulated": trace.replay(trace.config(known)),
    }
    if changes:
        outcomes["what if"] = other.replay(config)
    compared = compare_policies(config, other.path) if policies else []
    if json:
        typer.echo(
            jsonlib.dumps(
                {
                    "changes": changes,
                    "outcomes": {n: o.model_dump() for n, o in outcomes.items()},
                    "policies": [
                        {
                            "name": result.name,
                            "reads_on_demand": result.reads,
                            "above_bound": result.above_bound,
                            "outcome": result.outcome.model_dump(),
                        }
                        for result in compared
                    ],
                },
                indent=2,
            )
        )
    else:
        _show(outcomes, compared, changes)


def _show(
    outcomes: dict[str, Outcome], compared: list[PolicyResult], changes: dict[str, object]
) -> None:
    from rich.console import Console
    from rich.table import Table

    from worldpager.cli.predict import TITLES, said, title

    console = Console()
    if changes:
        what = ", ".join(f"{name} = {value}" for name, value in changes.items())
        console.print(f"what if {what}", highlight=False)
    table = Table()
    table.add_column("figure")
    for name in outcomes:
        table.add_column(name, justify="right")
    for name in TITLES:
        table.add_row(title(name), *(said(name, getattr(o, name)) for o in outcomes.values()))
    console.print(table)
    if not compared:
        return
    table = Table(title="eviction policies", title_justify="left")
    table.add_column("policy")
    for name in ("reads on demand", "above the bound", "bytes read", "stale windows", "stall"):
        table.add_column(name, justify="right")
    for result in compared:
        above, outcome = result.above_bound, result.outcome
        table.add_row(
            result.name,
            str(result.reads),
            "-" if above is None else f"{above:+.0%}",
            said("bytes_read", outcome.bytes_read),
            said("stale_windows", outcome.stale_windows),
            said("stall_ms", outcome.stall_ms),
        )
    console.print(table)
    console.print(
        "Reads on demand: nothing is loaded ahead and every policy sees the same demands, so "
        "belady is the least possible. The rest is the whole pipeline as configured.",
        style="dim", soft_wrap=True,
    )  # fmt: skip

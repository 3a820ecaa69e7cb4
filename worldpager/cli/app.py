"""``worldpager``: the commands, and one line for everything that goes wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, cast

import typer

from worldpager.cli.doctor import doctor
from worldpager.cli.inspect import inspect
from worldpager.cli.messages import one_line
from worldpager.cli.plan import plan
from worldpager.cli.predict import predict
from worldpager.cli.recall import recall
from worldpager.cli.replay import replay
from worldpager.cli.reproduce import reproduce
from worldpager.cli.rollout import rollout
from worldpager.cli.status import status
from worldpager.cli.validate import validate
from worldpager.cli.verify import verify
from worldpager.errors import WorldPagerError

FAILED = 1
"""Exit status of a check that found something, and of a reader that went away."""
MISUSED = 2
"""Exit status where an option, file or directory cannot be used, or the run failed."""
INTERRUPTED = 130

# Click's own base of them, wherever this version of typer keeps it.
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__bases__[0])

app = typer.Typer(
    help="Tiered KV memory for interactive world models.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    doctor,
    plan,
    predict,
    rollout,
    validate,
    replay,
    recall,
    reproduce,
    inspect,
    verify,
    status,
):
    app.command()(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"worldpager {version('worldpager')}")
        raise typer.Exit


@app.callback()
def _common(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; errors become one line on standard error."""
    try:
        code = app(args=arguments, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except _UsageError as error:
        return _fail(" ".join(error.format_message().split()))
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return FAILED
    except (WorldPagerError, OSError) as error:
        return _fail(one_line(error))


def _fail(message: str) -> int:
    print(f"worldpager: {message}", file=sys.stderr)
    return MISUSED


def main() -> None:
    """Entry point of the ``worldpager`` script."""
    sys.exit(run())

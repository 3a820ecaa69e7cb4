"""Option types that several commands share.

The command modules import what is heavy (torch, numba, matplotlib) inside their functions, so that
``--help`` and a mistyped option answer at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from worldpager.errors import ConfigError
from worldpager.units import parse_duration, parse_rate, parse_size

T = TypeVar("T")


def _reader(parse: Callable[[str], T]) -> Callable[[str], T]:
    """``parse`` with its :class:`ConfigError` turned into the option's error."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from None

    return read


size = _reader(parse_size)
rate = _reader(parse_rate)
duration = _reader(parse_duration)

Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
StoreDirectory = Annotated[
    Path, typer.Argument(metavar="DIR", help="A rollout's store, as `rollout --store` made it.")
]
Machine = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="A machine preset (rtx4090-32gib, rtx4090-64gib, sata, nvme-pcie3, -pcie4, -pcie5) "
        "or a profile that `doctor --out` wrote.",
    ),
]

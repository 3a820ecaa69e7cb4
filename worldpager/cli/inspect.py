"""``worldpager inspect DIR``: what a store holds."""

from __future__ import annotations

import json as jsonlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from worldpager.cli.options import Json, StoreDirectory
from worldpager.units import format_size

if TYPE_CHECKING:
    from worldpager.tiers.store import ChunkStore


def inspect(directory: StoreDirectory, json: Json = False) -> None:
    """Show the identity, chunks, sizes and damage of each rollout in a store; changes nothing."""
    rollouts = []
    for store in open_rollouts(directory):
        rollouts.append(_describe(store))
        if not json:
            _show(rollouts[-1])
    if json:
        typer.echo(jsonlib.dumps({"rollouts": rollouts}, indent=2))


def open_rollouts(directory: Path) -> Iterator[ChunkStore]:
    """Each rollout stored at ``directory``, open to look only, one at a time.

    Raises :class:`ForeignDirectoryError` where there is none.
    """
    from worldpager.errors import ForeignDirectoryError
    from worldpager.tiers.io_backend import SystemIO
    from worldpager.tiers.layout import rollout_names
    from worldpager.tiers.store import ChunkStore

    names = rollout_names(SystemIO(), directory)
    if not names:
        raise ForeignDirectoryError(
            f"no rollout is stored at {directory}; name the folder that --store named"
        )
    for name in names:
        store = ChunkStore.inspect(directory, name)
        try:
            yield store
        finally:
            store.close()


def _describe(store: ChunkStore) -> dict[str, Any]:
    chunks = store.contents()
    sizes = sorted(chunk.nbytes for chunk in chunks)
    return {
        **store.spec.document(),
        "chunks": len(chunks),
        "chunk_ranges": _ranges([chunk.chunk for chunk in chunks if chunk.stream == 0]),
        "with_pose": sum(not math.isnan(chunk.record.place[0]) for chunk in chunks),
        "bytes_used": store.bytes_used,
        "chunk_bytes": {
            "min": sizes[0] if sizes else 0,
            "median": sizes[len(sizes) // 2] if sizes else 0,
            "max": sizes[-1] if sizes else 0,
        },
        "damaged": [
            {"stream": store.spec.streams[c.stream], "chunk": c.chunk, "reason": c.reason}
            for c in store.damaged
        ],
    }


def _ranges(numbers: list[int]) -> list[list[int]]:
    """``[0, 1, 2, 5]`` as ``[[0, 2], [5, 5]]``."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges


def _show(rollout: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    title = f"{rollout['session']}/{rollout['rollout']}"
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column()
    table.add_column(style="bold")
    for name, value in _rows(rollout):
        # The store may come from anyone: its text is shown, not obeyed.
        table.add_row(name, Text("".join(c if c.isprintable() else "?" for c in value)))
    Console().print(table)


def _rows(rollout: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "model", rollout["model"]
    yield (
        "geometry",
        f"{rollout['layers']} layers of {rollout['branches']} branches, "
        f"{rollout['tokens']} tokens, {rollout['heads']} heads x {rollout['head_dim']}, "
        f"{rollout['frames']} frames a chunk",
    )
    yield "cache type, positions", f"{rollout['dtype']}, {rollout['positions']}"
    yield "codecs", ", ".join(rollout["codecs"])
    yield "streams", ", ".join(rollout["streams"])
    ranges = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in rollout["chunk_ranges"])
    yield "chunks", f"{rollout['chunks']} ({ranges or 'none'})"
    yield "with a pose", str(rollout["with_pose"])
    sizes = rollout["chunk_bytes"]
    yield (
        "chunk size",
        f"{format_size(sizes['min'])} to {format_size(sizes['max'])}, "
        f"median {format_size(sizes['median'])}",
    )
    yield "on disk", format_size(rollout["bytes_used"])
    damaged = [f"{c['stream']}/{c['chunk']} ({c['reason']})" for c in rollout["damaged"]]
    yield "damaged, by their tails", ", ".join(damaged) or "none"

"""``worldpager verify DIR``: read every shard, check every block."""

from __future__ import annotations

import json as jsonlib

import typer

from worldpager.cli.inspect import open_rollouts
from worldpager.cli.options import Json, StoreDirectory

DAMAGE_FOUND = 1
"""Exit status where a chunk is not what was written."""


def verify(directory: StoreDirectory, json: Json = False) -> None:
    """Read all of a store and check every block; exit 1 with a list where something is damaged."""
    chunks, damaged = 0, []
    for store in open_rollouts(directory):
        found = store.verify()
        chunks += len(store.contents()) + len(store.damaged)
        damaged += [
            {
                "chunk": f"{store.spec.rollout}/{store.spec.streams[chunk.stream]}/{chunk.chunk}",
                "reason": chunk.reason,
                "message": chunk.message,
            }
            for chunk in found
        ]
    if json:
        typer.echo(jsonlib.dumps({"chunks": chunks, "damaged": damaged}, indent=2))
    else:
        for entry in damaged:
            typer.echo(f"{entry['chunk']}: {entry['reason']}: {entry['message']}")
        typer.echo(f"{chunks} chunks read, {len(damaged)} damaged")
    if damaged:
        raise typer.Exit(DAMAGE_FOUND)

"""``worldpager predict``: write down what a rollout will do, before it runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from worldpager.cli.options import Json, Machine, duration, rate, size
from worldpager.units import format_size

if TYPE_CHECKING:
    from worldpager.sim.predictions import Prediction, Value


def predict(
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Prediction file; never overwritten.")
    ],
    dram: Annotated[int, typer.Option(parser=size, metavar="SIZE", help="The rollout's pool.")],
    chunks: Annotated[int, typer.Option(help="Length of the rollout.")] = 300,
    path: Annotated[
        str, typer.Option(metavar="NAME", help="yaw-return, loop, walk, or FILE.npy.")
    ] = "yaw-return",
    seed: Annotated[int, typer.Option(help="The rollout's seed.")] = 0,
    model: Annotated[str, typer.Option(help="A model that `plan` knows.")] = "builtin",
    machine: Machine = None,
    codec: Annotated[str, typer.Option(help="Codec of the stored chunks.")] = "int4",
    retrieve: Annotated[int, typer.Option(help="Chunks brought back for each window.")] = 3,
    prune: Annotated[
        str, typer.Option(metavar="NAME[:VALUE]", help="The rollout's pruning.")
    ] = "none",
    tokens_kept: Annotated[
        float | None,
        typer.Option(
            metavar="FRACTION",
            help="Share of a chunk's tokens that it keeps on average; default: most that it can.",
        ),
    ] = None,
    eviction: Annotated[str, typer.Option(help="redundant, furthest or lru.")] = "redundant",
    on_miss: Annotated[str, typer.Option(help="nearest, stale or wait.")] = "nearest",
    read_limit: Annotated[
        int | None,
        typer.Option(parser=rate, metavar="RATE", help="Cap on reads from NVMe, e.g. 0.25GB/s."),
    ] = None,
    write_limit: Annotated[
        int | None, typer.Option(parser=rate, metavar="RATE", help="Cap on writes to NVMe.")
    ] = None,
    chunk_time: Annotated[
        float | None,
        typer.Option(
            parser=duration,
            metavar="TIME",
            help="Compute time per chunk; default: as published for the model, else real time.",
        ),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Poses ahead are unknown, as in a live session.")
    ] = False,
    prefetch: Annotated[bool, typer.Option(help="Whether anything is loaded ahead.")] = True,
    encode_time: Annotated[
        float | None,
        typer.Option(
            parser=duration,
            metavar="TIME",
            help="Encoding a chunk, and --decode-time; default: by the machine's profile.",
        ),
    ] = None,
    decode_time: Annotated[
        float | None, typer.Option(parser=duration, metavar="TIME", help="Decoding a chunk.")
    ] = None,
    json: Json = False,
) -> None:
    """Simulate a rollout with the product's own core and write the prediction down, with a hash."""
    from worldpager.cli.runs import check_pool
    from worldpager.errors import ConfigError
    from worldpager.prefetch.paths import make_path
    from worldpager.quant.pruning import get_pruning
    from worldpager.sim.machines import load_machine
    from worldpager.sim.predictions import Inputs, poses_hash, predict, write_prediction
    from worldpager.sim.presets import get_preset
    from worldpager.sim.simulator import HostModel

    if out.exists():
        raise ConfigError(f"{out} exists, and a prediction is never overwritten")
    if retrieve < 0:
        raise ConfigError(f"--retrieve cannot be {retrieve}; 0 switches memory off")
    geometry, policy = get_preset(model), get_pruning(prune)
    if tokens_kept is None:
        most = geometry.frames_per_chunk, geometry.tokens_per_frame
        tokens_kept = 1.0 if policy is None else policy.most_tokens(*most) / math.prod(most)
    poses = make_path(path, chunks, geometry.frames_per_chunk, seed)
    inputs = Inputs(
        model=model,
        codec=codec,
        chunks=chunks,
        path=path,
        seed=seed,
        poses=poses_hash(poses),
        dram_bytes=dram,
        retrieve=retrieve,
        pruning=prune,
        tokens_kept=tokens_kept,
        eviction=eviction,
        on_miss=on_miss,
        read_limit=read_limit,
        write_limit=write_limit,
        chunk_time=chunk_time,
        prefetch=prefetch,
        **({"known_ahead": 0} if live else {}),
    )
    check_pool(inputs)
    prediction = predict(
        inputs,
        poses,
        None if machine is None else load_machine(machine),
        None
        if encode_time is None and decode_time is None
        else HostModel(encode_seconds=encode_time or 0.0, decode_seconds=decode_time or 0.0),
    )
    write_prediction(prediction, out)
    if json:
        typer.echo(prediction.model_dump_json(indent=2))
    else:
        _show(prediction, out)


def _show(prediction: Prediction, out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from worldpager.sim.plan import horizons
    from worldpager.sim.presets import get_preset

    table = Table(title=f"prediction of {prediction.created:%Y-%m-%d %H:%M:%S} UTC")
    table.add_column("criterion")
    table.add_column("predicted", justify="right", style="bold")
    table.add_column("tolerance", justify="right")
    for criterion in prediction.criteria:
        name, tolerance = criterion.name, criterion.tolerance
        table.add_row(
            title(name),
            said(name, criterion.predicted),
            room(name, tolerance.bound(criterion.predicted)),
        )
    console = Console()
    console.print(table)
    for wall in horizons(get_preset(prediction.inputs.model)):
        if prediction.inputs.chunks > wall.chunks:
            remedy = "positions move on by themselves" if wall.ours else "see to it in the frontend"
            console.print(
                f"Goes beyond the model's {wall.name} ({wall.rows} rows, {wall.chunks} chunks): "
                f"{remedy}.",
                markup=False, highlight=False, soft_wrap=True,
            )  # fmt: skip
    console.print(
        f"Written to {out}. Run it, then: worldpager validate RUN {out}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip


TITLES = {
    "spill_chunk": "first spill",
    "first_read_chunk": "first read from NVMe",
    "stalled": "stalls at all",
    "stall_ms": "stall, all chunks together",
    "bytes_read": "bytes read",
    "bytes_written": "bytes written",
    "stale_windows": "stale windows",
}


def title(name: str) -> str:
    """A criterion for people."""
    return TITLES.get(name, name)


def said(name: str, value: Value) -> str:
    """A criterion's value for people."""
    if value is None:
        return "never"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_chunk"):
        return f"chunk {value}"
    if name.endswith("_ms"):
        return f"{value:.1f} ms"
    return f"{format_size(value)} ({value})" if name.startswith("bytes_") else f"{value:g}"


def room(name: str, bound: float) -> str:
    """A tolerance for people."""
    if not bound:
        return "exact"
    return f"± {bound:.1f} ms" if name.endswith("_ms") else f"± {bound:g}"

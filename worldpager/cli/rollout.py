"""``worldpager rollout``: a world model with a memory larger than its pool.

The built-in model by default; any other preset runs as a synthetic frontend: its geometry, its
compute time and real bytes, but no pictures.
"""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from worldpager.cli.options import Json, duration, rate, size
from worldpager.errors import ConfigError
from worldpager.units import format_size

if TYPE_CHECKING:
    from worldpager.cli.summary import Summary
    from worldpager.sim.presets import ModelGeometry

DEFAULT_CHUNKS = 300
DEFAULT_DRAM = 2**20
_MOST_MINUTES = 1e6


class OnMiss(StrEnum):
    """What a window gets when what it wants is not resident."""

    NEAREST = "nearest"
    STALE = "stale"
    WAIT = "wait"


class Attention(StrEnum):
    """How the built-in model attends to its window."""

    DENSE = "dense"
    SPARSE = "sparse"
    INT4 = "int4"


def rollout(
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="builtin, or a model that `plan` knows: then real KV of its size, no pictures.",
        ),
    ] = "builtin",
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="FRACTION", help="Share of that model's KV to make, e.g. 1/30: fewer layers."
        ),
    ] = None,
    chunks: Annotated[
        int | None, typer.Option(help=f"Length of the rollout; default {DEFAULT_CHUNKS}.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Length of the rollout in minutes of video.")
    ] = None,
    path: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="yaw-return, loop, walk, or FILE.npy: camera-to-world [frames, 4, 4].",
        ),
    ] = "yaw-return",
    dram: Annotated[
        int | None,
        typer.Option(
            parser=size,
            metavar="SIZE",
            help=f"Size of the DRAM pool; default {format_size(DEFAULT_DRAM)} for builtin, some 27 "
            "chunks, and as many chunks for other models.",
        ),
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Folder of the NVMe tier; default OUT/store.")
    ] = None,
    disk: Annotated[
        int | None,
        typer.Option(parser=size, metavar="SIZE", help="Most that the NVMe tier may take."),
    ] = None,
    codec: Annotated[str, typer.Option(help="Codec of the stored chunks.")] = "int4",
    retrieve: Annotated[
        int, typer.Option(help="Chunks brought back for each window; 0 switches memory off.")
    ] = 3,
    prune: Annotated[
        str,
        typer.Option(
            metavar="NAME[:VALUE]",
            help="Drop tokens before they are stored, e.g. worldkv:0.25 or decoprune:0.0007; "
            "docs/pruning.md lists them.",
        ),
    ] = "none",
    retrieval: Annotated[
        str,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...]",
            help="Which chunks: camera, fov, action, query, bound, attention, prompt, hybrid, "
            "recent or none; e.g. fov:horizontal=75,far=12 or hybrid:camera=1,query=0.5.",
        ),
    ] = "camera",
    page_frames: Annotated[
        int | None,
        typer.Option(help="Retrieve by pages of so many latent frames, not by whole chunks."),
    ] = None,
    on_miss: Annotated[
        OnMiss, typer.Option(help="What a window gets that cannot have what it wants in time.")
    ] = OnMiss.NEAREST,
    attention: Annotated[
        Attention,
        typer.Option(
            help="How the model attends: to everything, to chosen frames, or to stored blocks "
            "without decoding them."
        ),
    ] = Attention.DENSE,
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
            help="Pad the model's compute per chunk to this, e.g. 1.2s.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the room and of the noise.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("rollout"),
    compare: Annotated[
        bool,
        typer.Option(
            help="Also run the rollout with retrieval switched off, to compare the pictures."
        ),
    ] = True,
    json: Json = False,
) -> None:
    """Run the built-in model and write metrics.jsonl, summary.json, report.html and video.gif."""
    from worldpager.cli.frontends import synthetic_rollout
    from worldpager.cli.recording import Recording, claimed
    from worldpager.model_adapter.rollout import RolloutConfig
    from worldpager.prefetch.paths import make_path
    from worldpager.quant.codec import get_codec
    from worldpager.quant.pruning import get_pruning
    from worldpager.sim.presets import get_preset

    geometry = get_preset(model if scale is None else f"{model}@{scale}")
    synthetic = geometry.name != "builtin"
    length = _length(chunks, minutes, geometry.video_seconds_per_chunk)
    if retrieve < 0:
        raise ConfigError(f"--retrieve cannot be {retrieve}; 0 switches memory off")
    if synthetic and attention is not Attention.DENSE:
        raise ConfigError(f"{geometry.name} runs without a model; --attention is for builtin")
    get_codec(codec)  # an unknown one is refused before anything is written
    policy = get_pruning(prune)
    if synthetic and policy is not None and policy.needs_predictions:
        raise ConfigError(
            f"--prune {prune} scores what a sampler predicts, and a synthetic frontend samples "
            "nothing; choose another policy or the built-in model"
        )
    _check_retrieval(retrieval, synthetic)
    config = RolloutConfig(
        chunks=length,
        path=make_path(path, length, geometry.frames_per_chunk, seed),
        dram_bytes=dram or (_default_pool(geometry, codec) if synthetic else DEFAULT_DRAM),
        store_dir=out / "store" if store is None else store,
        disk_bytes=disk,
        codec=codec,
        retrieve=retrieve,
        pruning=prune,
        retrieval=retrieval,
        page_frames=page_frames,
        on_miss=on_miss.value,
        attention=attention.value,
        read_limit=read_limit,
        write_limit=write_limit,
        chunk_time=geometry.compute_seconds if synthetic and chunk_time is None else chunk_time,
        seed=seed,
        out_dir=out,
    )
    runner = synthetic_rollout(geometry, retrieve) if synthetic else None
    if synthetic and not json:
        typer.echo(f"synthetic {geometry.name}: {geometry.note}", err=True)
    with claimed(out):
        recording = Recording(config, path, geometry, runner)
        summary = recording.run(compare=compare and retrieve > 0 and not synthetic)
    if json:
        typer.echo(summary.model_dump_json(indent=2))
    else:
        _show(summary, out)
    if summary.status == "interrupted":
        raise KeyboardInterrupt


def _check_retrieval(retrieval: str, synthetic: bool) -> None:
    """Refuse, before anything is written, a policy that a rollout cannot feed."""
    from worldpager.prefetch.geometric import ActionDistance
    from worldpager.prefetch.ranking import needs_query
    from worldpager.prefetch.retrieval import get_policy

    policy = get_policy(retrieval)
    if isinstance(policy, ActionDistance):
        raise ConfigError(
            "--retrieval action is for models driven by keys; here paths are of poses"
        )
    if synthetic and needs_query(policy):
        raise ConfigError(f"--retrieval {policy.name} needs a model's queries; use --model builtin")


def _default_pool(geometry: ModelGeometry, codec: str) -> int:
    """Some 27 chunks."""
    from worldpager.model_adapter.config import SINK_CODEC
    from worldpager.quant.codec import get_codec
    from worldpager.sim.closed_form import chunk_bytes

    sink = chunk_bytes(geometry, get_codec(SINK_CODEC)).stored
    return 27 * chunk_bytes(geometry, get_codec(codec)).stored + geometry.sink_chunks * sink


def _length(chunks: int | None, minutes: float | None, seconds_per_chunk: float) -> int:
    if chunks is not None and minutes is not None:
        raise ConfigError("--chunks and --minutes both set the length; give one of them")
    if minutes is not None:
        if not 0 < minutes < _MOST_MINUTES:
            raise ConfigError(f"--minutes cannot be {minutes}")
        return math.ceil(minutes * 60 / seconds_per_chunk)
    length = DEFAULT_CHUNKS if chunks is None else chunks
    if length < 1:
        raise ConfigError(f"--chunks cannot be {length}")
    return length


def _show(summary: Summary, out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from worldpager.cli.report import facts, headline

    table = Table(title=headline(summary), show_header=False, title_justify="left")
    table.add_column()
    table.add_column(style="bold", justify="right")
    for name, value in facts(summary):
        table.add_row(name, value)
    console = Console()
    console.print(table)
    console.print(f"Look at {out / 'report.html'}", markup=False, highlight=False, soft_wrap=True)

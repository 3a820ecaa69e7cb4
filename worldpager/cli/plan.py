"""``worldpager plan``: where a rollout will spill and which bandwidth keeps it free of stalls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from worldpager.cli.options import Json, Machine, duration, rate, size
from worldpager.errors import ConfigError
from worldpager.units import format_duration, format_rate, format_size

if TYPE_CHECKING:
    from worldpager.sim.plan import Plan


def plan(
    model: Annotated[
        str,
        typer.Option(
            help="matrix-game-2, self-forcing, lingbot-world, lingbot-world-1.3b, longlive "
            "or builtin."
        ),
    ] = "builtin",
    codec: Annotated[str, typer.Option(help="Codec of the stored chunks.")] = "int4",
    host_memory: Annotated[
        int | None,
        typer.Option(
            parser=size,
            metavar="SIZE",
            help="The host's memory; default: what this process may use.",
        ),
    ] = None,
    reserve: Annotated[
        int | None,
        typer.Option(
            parser=size, metavar="SIZE", help="Host memory that is not the pool; default 4.85GiB."
        ),
    ] = None,
    dram: Annotated[
        int | None,
        typer.Option(
            parser=size,
            metavar="SIZE",
            help="The pool itself, instead of host memory less reserve.",
        ),
    ] = None,
    chunks: Annotated[int, typer.Option(help="Length of the session.")] = 3000,
    retrieve: Annotated[
        int, typer.Option(help="Chunks each window newly needs from NVMe, at worst.")
    ] = 3,
    tokens_kept: Annotated[
        float,
        typer.Option(
            metavar="FRACTION", help="Share of a chunk's tokens that pruning keeps, e.g. 0.5."
        ),
    ] = 1.0,
    chunk_time: Annotated[
        float | None,
        typer.Option(
            parser=duration,
            metavar="TIME",
            help="Compute time per chunk; default: as published for the model, else real time.",
        ),
    ] = None,
    read_bandwidth: Annotated[
        int | None,
        typer.Option(
            parser=rate, metavar="RATE", help="Say how long windows wait at this bandwidth."
        ),
    ] = None,
    write_bandwidth: Annotated[
        int | None,
        typer.Option(parser=rate, metavar="RATE", help="Say whether write-back keeps up with it."),
    ] = None,
    machine: Machine = None,
    endurance: Annotated[
        int | None,
        typer.Option(
            parser=size, metavar="SIZE", help="Rated endurance of the drive (TBW), e.g. 600TB."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Say before a run where its memory spills and what keeps it free of stalls."""
    from worldpager.quant.codec import get_codec
    from worldpager.sim.closed_form import DEFAULT_RESERVE_BYTES, pool_bytes
    from worldpager.sim.machines import load_machine
    from worldpager.sim.plan import make_plan
    from worldpager.sim.presets import get_preset
    from worldpager.tiers.budget import memory_limit

    if dram is not None and (host_memory is not None or reserve is not None):
        raise ConfigError("--dram is the pool itself; leave --host-memory and --reserve out")
    known = None if machine is None else load_machine(machine)
    if known is not None:
        host_memory = host_memory or known.usable_bytes
        reserve = known.reserve_bytes if reserve is None else reserve
        read_bandwidth = read_bandwidth or round(known.disk.read_bandwidth)
        write_bandwidth = write_bandwidth or round(known.disk.write_bandwidth)
    if dram is None:
        dram = pool_bytes(
            memory_limit().limit if host_memory is None else host_memory,
            DEFAULT_RESERVE_BYTES if reserve is None else reserve,
        )
    answer = make_plan(
        get_preset(model),
        get_codec(codec),
        dram,
        chunks=chunks,
        retrieve=retrieve,
        chunk_seconds=chunk_time,
        read_bandwidth=read_bandwidth,
        write_bandwidth=write_bandwidth,
        rated_bytes=endurance or (None if known is None else known.disk.rated_bytes),
        tokens_kept=tokens_kept,
    )
    if json:
        typer.echo(answer.model_dump_json(indent=2))
    else:
        _show(answer)


def _show(plan: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{plan.model}, {plan.codec}, pool P = {format_size(plan.pool_bytes)}")
    table.add_column("question")
    table.add_column("answer", justify="right", style="bold")
    table.add_column("payload only", justify="right")
    table.add_column("formula", style="dim")
    for row in _rows(plan):
        table.add_row(*row)
    console = Console()
    console.print(table)
    console.print(
        "Answers count headers, padding and 16-bit sink chunks as stored; "
        "'payload only' counts every chunk alike, as papers do.",
        style="dim",
    )


def _rows(plan: Plan) -> list[tuple[str, str, str, str]]:
    seconds, spill = format_duration(plan.chunk_seconds), f"chunk {plan.spill_chunk}"
    rows = [
        (
            "chunk size B",
            format_size(plan.chunk_bytes),
            format_size(plan.payload_chunk_bytes),
            f"{plan.payload_bits_per_element:.4g} bits per element",
        ),
        ("first spill", spill, f"chunk {plan.payload_spill_chunk}", "1 + floor(P / B)"),
        ("first spill, in video", format_duration(plan.spill_seconds), "", f"after {spill}"),
        (
            "first read, there and back",
            "none" if plan.first_read_chunk is None else f"chunk {plan.first_read_chunk}",
            "",
            f"({plan.chunks} - 1 + spill) / 2",
        ),
        (
            "read bandwidth for zero stall",
            format_rate(plan.zero_stall_read_bandwidth),
            format_rate(plan.payload_zero_stall_read_bandwidth),
            f"{plan.retrieve} B / T, T = {seconds}",
        ),
        (
            "write bandwidth to keep up",
            format_rate(plan.required_write_bandwidth),
            format_rate(plan.payload_required_write_bandwidth),
            "B / T",
        ),
        (
            f"session of {plan.chunks} chunks",
            f"{plan.session_bytes / 1e9:.4g} GB",
            f"{plan.payload_session_bytes / 1e9:.4g} GB",
            f"chunks x B; {format_duration(plan.session_video_seconds)} of video",
        ),
        *(
            (
                f"horizon, {horizon.name}",
                f"{horizon.chunks} chunks",
                "",
                f"{horizon.rows} rows / frames; {format_duration(horizon.seconds)}, "
                + ("not ours to hit" if horizon.ours else "the frontend's to handle"),
            )
            for horizon in plan.horizons
        ),
        (
            "speed",
            f"{plan.real_time_factor:.3g} x real time",
            "",
            f"video / T; {plan.frames_per_second:.2f} frames a second",
        ),
        (
            "window, staging on the device",
            f"{format_size(plan.window_bytes)}, {format_size(plan.staging_bytes)}",
            "",
            f"16-bit chunks in attention; 2 x {plan.retrieve} B",
        ),
        (
            "written per hour, per day",
            f"{plan.written_per_hour / 1e9:.4g} GB, {plan.written_per_day / 1e12:.3g} TB",
            "",
            "B / T, generating all the time",
        ),
    ]
    if plan.read_bandwidth is not None:
        at = f"at {format_rate(plan.read_bandwidth)}"
        prefetched, on_demand = plan.stall_prefetched_seconds, plan.stall_on_demand_seconds
        rows.append((f"stall, prefetched, {at}", _wait(prefetched), "", "max(0, r / B_R - T)"))
        rows.append((f"stall, on demand, {at}", _wait(on_demand), "", "r / B_R"))
    if plan.write_bandwidth is not None:
        at = f"at {format_rate(plan.write_bandwidth)}"
        rows.append(
            (f"writes keep up {at}", "yes" if plan.writes_keep_up else "no", "", "B_W >= B / T")
        )
    if plan.disk_life_hours is not None and plan.rated_bytes is not None:
        hours, rated = plan.disk_life_hours, plan.rated_bytes / 1e12
        rows.append(
            (
                f"disk life, rated {rated:.4g} TB",
                f"{hours:.0f} h",
                "",
                f"rated / (B / T); {hours / 24:.3g} days",
            )
        )
    return rows


def _wait(seconds: float | None) -> str:
    return format_duration(seconds or 0.0)

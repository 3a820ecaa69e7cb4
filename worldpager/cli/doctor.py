"""``worldpager doctor``: what this machine has, and a profile of it for predictions."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from worldpager.cli.options import Json, size
from worldpager.units import format_duration, format_rate, format_size

if TYPE_CHECKING:
    from worldpager.sim.machines import GpuProfile, MachineProfile, Spread

_CAP_IPC_LOCK = 14
OPTIONAL = {
    "av": "video.mp4 beside video.gif",
    "kvikio": "for the GPU path, not in this version",
    "triton": "for the GPU path, not in this version",
}
"""Optional libraries and what they are for."""


def doctor(
    folder: Annotated[
        Path, typer.Option(help="Folder whose disk is measured: where stores will be.")
    ] = Path("."),
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the machine's profile here.")
    ] = None,
    endurance: Annotated[
        int | None,
        typer.Option(
            parser=size,
            metavar="SIZE",
            help="Bytes the disk is rated to take in its life (TBW), e.g. 600TB; to tell its life.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Measure this machine: memory and its limits, GPU, and the disk of a folder (about 1 GiB is
    written there and removed)."""
    profile = examine(folder, endurance)
    if out is not None:
        profile.save(out)
    if json:
        typer.echo(profile.model_dump_json(indent=2))
    else:
        _show(profile, out)


def examine(folder: Path, rated_bytes: int | None = None) -> MachineProfile:
    """Measure the machine and the disk of ``folder``; raises as :func:`measure_disk`."""
    import psutil

    from worldpager.cli.measuring import measure_codec, measure_disk
    from worldpager.sim.machines import HostProfile, MachineProfile
    from worldpager.tiers.budget import memory_limit

    bound = memory_limit()
    return MachineProfile(
        name=platform.node() or "this machine",
        memory_bytes=psutil.virtual_memory().total,
        limit_bytes=bound.limit,
        limit_source=bound.source,
        available_bytes=bound.available,
        lock_bytes=page_lock_limit(),
        host=HostProfile(cpus=psutil.cpu_count(), **measure_codec()),
        gpu=find_gpu(),
        disk=measure_disk(folder, rated_bytes=rated_bytes),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        how="worldpager doctor: medians of repeats through the product's own engine, data read "
        "soon after it was written",
    )


def page_lock_limit(status: Path = Path("/proc/self/status")) -> int | None:
    """Bytes that this process may lock into memory; None for no limit."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return limit
    capabilities = [int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")]
    return None if any(mask >> _CAP_IPC_LOCK & 1 for mask in capabilities) else limit


def find_gpu() -> GpuProfile | None:
    """The CUDA device in use, with its copy bandwidth from page-locked memory; None without one."""
    import torch

    from worldpager.sim.machines import GpuProfile

    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    best = 0.0
    for _ in range(5):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        there.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        best = max(best, host.nbytes / (begin.elapsed_time(end) / 1e3))
    return GpuProfile(
        name=properties.name, memory_bytes=properties.total_memory, copy_bandwidth=best
    )


def _show(profile: MachineProfile, out: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{profile.name}, {profile.date}", title_justify="left")
    table.add_column("what")
    table.add_column("median", justify="right", style="bold")
    table.add_column("least .. greatest, of how many")
    for row in _rows(profile):
        table.add_row(*row)
    console = Console()
    console.print(table)
    for remark in remarks(profile):
        console.print(remark, style="yellow", highlight=False)
    if out is None:
        console.print("Add --out FILE.json to use it: worldpager plan --machine FILE.json")
    else:
        console.print(f"Use it: worldpager plan --machine {out}", markup=False, highlight=False)


def _rows(profile: MachineProfile) -> Iterator[tuple[str, str, str]]:
    disk, gpu = profile.disk, profile.gpu
    yield "memory", format_size(profile.memory_bytes), ""
    yield "memory that may be used", format_size(profile.limit_bytes), profile.limit_source
    if profile.available_bytes is not None:
        yield "of it free now", format_size(profile.available_bytes), ""
    lock = profile.lock_bytes
    yield "may be page-locked", "any" if lock is None else format_size(lock), ""
    for name, rate in (
        ("encode", profile.host.encode_bandwidth),
        ("decode", profile.host.decode_bandwidth),
    ):
        if rate is not None:
            yield f"{name} int4", format_rate(rate), "16-bit KV on this thread"
    if gpu is None:
        yield "GPU", "none", ""
    else:
        yield "GPU", format_size(gpu.memory_bytes), gpu.name
        if gpu.copy_bandwidth is not None:
            yield "copies to it", format_rate(gpu.copy_bandwidth), "from page-locked memory"
    for library, use in OPTIONAL.items():
        yield library, "installed" if find_spec(library) else "not installed", use
    yield "folder", disk.file_system or "-", disk.folder or ""
    yield "method", disk.method, ""
    for name, spread in (
        ("read, sequential", disk.read_sequential),
        ("read, block by block", disk.read_block),
        ("write, sequential", disk.write_sequential),
        ("write, block by block", disk.write_block),
        ("read and write together", disk.shared),
    ):
        if spread is not None:
            yield name, format_rate(spread.median), _spread(spread, format_rate)
    for name, seconds in (
        ("durable write of the smallest chunk", disk.durable_write_seconds),
        ("read of the smallest chunk", disk.read_seconds),
    ):
        yield name, format_duration(seconds.median), _spread(seconds, format_duration)
    if disk.rated_bytes is not None:
        yield "rated to take", f"{disk.rated_bytes / 1e12:.4g} TB", "of writes in its life"


def _spread(spread: Spread, text: Callable[[float], str]) -> str:
    return f"{text(spread.low)} .. {text(spread.high)}, {spread.repeats}"


def remarks(profile: MachineProfile) -> Iterator[str]:
    """What a user should know before trusting the figures, or could improve."""
    disk = profile.disk
    if (disk.file_system or "").startswith(("tmpfs", "ramfs")):
        yield "This folder lies in memory, not on a disk; name another with --folder."
    if disk.method.startswith("buffered"):
        yield f"No direct I/O here ({disk.method}); transfers cost more time, CPU and page cache."
    if profile.gpu is not None and profile.lock_bytes is not None:
        yield (
            f"Only {format_size(profile.lock_bytes)} may be page-locked (ulimit -l); copies to the "
            "GPU are slower from a larger pool."
        )
    if profile.limit_bytes < profile.memory_bytes:
        yield (
            f"{profile.limit_source} holds this process to {format_size(profile.limit_bytes)} of "
            f"{format_size(profile.memory_bytes)}."
        )

"""Machines: what a prediction needs to know of a host, its GPU and its disk.

``worldpager doctor`` measures one and writes it down; the presets stand for those nobody here has.
A disk's two bandwidths differ by the size of a call: *sequential* moves :data:`SEQUENTIAL_BYTES` a
call, *block* one layer's block; what a small call adds is ``latency``. So a transfer of ``n`` bytes
takes about ``latency + n / sequential``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from worldpager.errors import ConfigError
from worldpager.sim.closed_form import DEFAULT_RESERVE_BYTES, pool_bytes
from worldpager.sim.devices import DiskModel
from worldpager.sim.presets import ModelGeometry
from worldpager.sim.simulator import HostModel

SEQUENTIAL_BYTES = 64 << 20
"""Bytes of one call in a sequential measurement."""
BLOCK_BYTES = 1050 * 4096
"""Bytes of one call in a block measurement: a layer's int4 block of Matrix-Game 2.0."""

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Text = Annotated[str, Field(max_length=1000)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Spread(_Strict):
    """A figure with the least and greatest of its repeats; all three alike where it was not
    measured.
    """

    median: _NotNegative
    low: _NotNegative
    high: _NotNegative
    repeats: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low <= self.median <= self.high:
            raise ValueError("a spread needs low <= median <= high")
        return self

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Median, least and greatest of measured ``values``."""
        ordered = sorted(values)
        middle = len(ordered) // 2
        median = (ordered[middle] + ordered[~middle]) / 2
        return cls(median=median, low=ordered[0], high=ordered[-1], repeats=len(ordered))

    @classmethod
    def rated(cls, value: float) -> Spread:
        """A figure taken from a data sheet or a paper."""
        return cls(median=value, low=value, high=value)


class GpuProfile(_Strict):
    """A GPU. ``reserve_bytes``: its memory that is not KV (weights, activations, a VAE), where
    known; ``copy_bandwidth``: from page-locked host memory, in bytes per second.
    """

    name: _Text
    memory_bytes: Annotated[int, Field(gt=0)]
    reserve_bytes: Annotated[int, Field(ge=0)] | None = None
    copy_bandwidth: _Positive | None = None


class DiskProfile(_Strict):
    """A folder's disk as the product's own engine uses it. Bytes per second and seconds.

    ``shared``: of reads and writes together while both are active. ``durable_write_seconds``: to
    publish the smallest chunk: write, sync, rename, sync of the folder. ``read_seconds``: to open
    and read it. ``rated_bytes``: what the maker warrants to be written over its life (TBW).
    """

    folder: _Text | None = None
    file_system: _Text | None = None
    method: _Text
    read_sequential: Spread
    read_block: Spread
    write_sequential: Spread
    write_block: Spread
    shared: Spread | None = None
    durable_write_seconds: Spread
    read_seconds: Spread
    capacity_bytes: Annotated[int, Field(gt=0)] | None = None
    rated_bytes: Annotated[int, Field(gt=0)] | None = None

    @property
    def read_bandwidth(self) -> float:
        """Bytes per second of large reads."""
        return self.read_sequential.median

    @property
    def write_bandwidth(self) -> float:
        """Bytes per second of large durable writes."""
        return self.write_sequential.median

    @property
    def limits(self) -> tuple[int, int]:
        """Bytes per second of large reads and writes, as limits that make a faster disk like it."""
        return round(self.read_bandwidth), round(self.write_bandwidth)


class HostProfile(_Strict):
    """What the memory's own work costs the processor. ``encode_bandwidth``, ``decode_bandwidth``:
    bytes of 16-bit KV per second on the model thread, int4 codec. ``plan_seconds``: one plan of the
    prefetch thread. ``wake_seconds``: until a thread that waited runs again.
    """

    cpus: Annotated[int, Field(gt=0)] | None = None
    encode_bandwidth: _Positive | None = None
    decode_bandwidth: _Positive | None = None
    plan_seconds: _NotNegative = 0.0
    wake_seconds: _NotNegative = 0.0


class MachineProfile(_Strict):
    """One machine. Sizes in bytes.

    ``limit_bytes``: what this process may use of ``memory_bytes``, by the bound that
    ``limit_source`` names. ``reserve_bytes``: host memory that is not the pool; None takes the
    published models' 4.85 GiB. ``lock_bytes``: page-lock limit, None for no limit. ``date``: of the
    measurement, ISO 8601. ``how``: where the figures come from.
    """

    kind: Literal["machine"] = "machine"
    format_version: Literal[1] = 1
    name: _Text
    memory_bytes: Annotated[int, Field(gt=0)]
    limit_bytes: Annotated[int, Field(gt=0)]
    limit_source: _Text
    available_bytes: Annotated[int, Field(ge=0)] | None = None
    reserve_bytes: Annotated[int, Field(ge=0)] | None = None
    lock_bytes: Annotated[int, Field(ge=0)] | None = None
    host: HostProfile = HostProfile()
    gpu: GpuProfile | None = None
    disk: DiskProfile
    date: _Text
    how: _Text

    @property
    def usable_bytes(self) -> int:
        """Host memory within all bounds."""
        return min(self.memory_bytes, self.limit_bytes)

    @property
    def pool_bytes(self) -> int:
        """The pool that the machine has room for. Raises :class:`ConfigError` where it has none."""
        reserve = DEFAULT_RESERVE_BYTES if self.reserve_bytes is None else self.reserve_bytes
        return pool_bytes(self.usable_bytes, reserve)

    @property
    def gpu_kv_bytes(self) -> int | None:
        """GPU memory that KV may take; None where it is not known."""
        if self.gpu is None or self.gpu.reserve_bytes is None:
            return None
        return self.gpu.memory_bytes - self.gpu.reserve_bytes

    def disk_model(self) -> DiskModel:
        """The disk for the simulator; its jitter is left at 0, so that it repeats itself."""
        disk = self.disk
        return DiskModel(
            read_bandwidth=disk.read_bandwidth,
            write_bandwidth=disk.write_bandwidth,
            read_latency=disk.read_seconds.median,
            write_latency=disk.durable_write_seconds.median,
            shared_bandwidth=None if disk.shared is None else disk.shared.median,
        )

    def host_model(self, geometry: ModelGeometry) -> HostModel:
        """What the memory's work costs for chunks of ``geometry``, for the simulator."""
        kv_bytes, host = 2 * geometry.kv_elements_per_chunk, self.host
        return HostModel(
            encode_seconds=kv_bytes / (host.encode_bandwidth or math.inf),
            decode_seconds=kv_bytes / (host.decode_bandwidth or math.inf),
            plan_seconds=host.plan_seconds,
            wake_seconds=host.wake_seconds,
        )

    def save(self, path: Path) -> None:
        """Write the profile as JSON."""
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


_MOST_JSON = 1 << 20


def load_machine(name: str) -> MachineProfile:
    """The preset called ``name``, or the profile in the file of that name.

    A file is what holds a path separator or ends in ``.json``. Raises :class:`ConfigError` naming
    the known presets, or the field that does not fit.
    """
    if name in MACHINES:
        return MACHINES[name]
    path = Path(name)
    if path.suffix != ".json" and len(path.parts) == 1:
        raise ConfigError(
            f"no machine {name!r}; known are {', '.join(MACHINES)}, or name a file that "
            "`worldpager doctor --out` wrote"
        )
    try:
        with path.open(encoding="utf-8") as file:
            return MachineProfile.model_validate_json(file.read(_MOST_JSON))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(
            f"{path} is no machine profile: {where}: {first['msg']}; write one with "
            "`worldpager doctor --out`"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"cannot read the machine profile {path}: {reason}") from None


# ---- presets -------------------------------------------------------------------------------------

_GIB = 2**30
_TB = 10**12


def _disk(
    read: float, write: float, *, latency: float, durable: float, rated: float, method: str
) -> DiskProfile:
    """A disk by its rated bandwidths; blocks follow from the latencies."""

    def block(bandwidth: float, latency: float) -> Spread:
        return Spread.rated(BLOCK_BYTES / (latency + BLOCK_BYTES / bandwidth))

    return DiskProfile(
        method=method,
        read_sequential=Spread.rated(read),
        read_block=block(read, latency),
        write_sequential=Spread.rated(write),
        write_block=block(write, durable),
        durable_write_seconds=Spread.rated(durable),
        read_seconds=Spread.rated(latency),
        rated_bytes=round(rated),
    )


_RATED = "direct I/O, rated"
_CLASS = "sequential bandwidths and endurance of the class (1 TB drives), latencies typical"
_PUBLISHED_DISK = _disk(
    3.82e9, 1.267e9, latency=0, durable=0, rated=600 * _TB, method="direct I/O, inferred"
)
_RTX4090 = GpuProfile(
    name="NVIDIA GeForce RTX 4090",
    memory_bytes=24 * _GIB,
    reserve_bytes=round(14.7 * _GIB),
    copy_bandwidth=24.8e9,
)


def _preset(name: str, host_gib: int, disk: DiskProfile, how: str) -> MachineProfile:
    return MachineProfile(
        name=name,
        memory_bytes=host_gib * _GIB,
        limit_bytes=host_gib * _GIB,
        limit_source="host memory",
        gpu=_RTX4090,
        disk=disk,
        date="2026-11-30",
        how=how,
    )


_PUBLISHED = (
    "the WorldPager paper's machine, PCIe 4.0; its disk is not described: write 1.267 GB/s is one "
    "chunk in Table V's +102.0 ms, read 3.82 GB/s one in the further 33.8 ms; GPU memory for KV "
    "(9.3 GiB) follows from exhaustion at chunk 21, 24.8 GB/s from the synchronous stalls"
)
MACHINES: dict[str, MachineProfile] = {
    machine.name: machine
    for machine in (
        _preset("rtx4090-32gib", 32, _PUBLISHED_DISK, _PUBLISHED),
        _preset("rtx4090-64gib", 64, _PUBLISHED_DISK, _PUBLISHED),
        _preset(
            "sata",
            32,
            _disk(0.5e9, 0.5e9, latency=1e-4, durable=2e-3, rated=600 * _TB, method=_RATED),
            f"the published host with a SATA SSD; {_CLASS}",
        ),
        _preset(
            "nvme-pcie3",
            32,
            _disk(3.5e9, 3.0e9, latency=8e-5, durable=1e-3, rated=600 * _TB, method=_RATED),
            f"the published host with a PCIe 3.0 NVMe drive; {_CLASS}",
        ),
        _preset(
            "nvme-pcie4",
            32,
            _disk(7.0e9, 5.0e9, latency=6e-5, durable=1e-3, rated=600 * _TB, method=_RATED),
            f"the published host with a PCIe 4.0 NVMe drive; {_CLASS}",
        ),
        _preset(
            "nvme-pcie5",
            32,
            _disk(14.0e9, 12.0e9, latency=5e-5, durable=1e-3, rated=600 * _TB, method=_RATED),
            f"the published host with a PCIe 5.0 NVMe drive; {_CLASS}",
        ),
    )
}
"""Machines known by name."""

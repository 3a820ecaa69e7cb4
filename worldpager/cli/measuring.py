"""Measures a folder's disk as the product uses it: whole chunks through :class:`ChunkStore`, from
and to an :class:`Arena`, each checked as the pager's readers check it.

Writes at most 1 GiB and takes a few seconds; everything is removed afterwards.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch

from worldpager.errors import ConfigError
from worldpager.pager.session import StreamFiles
from worldpager.quant.block import BlockLabel, write_block
from worldpager.quant.codec import BlockShape, Bytes, get_codec
from worldpager.quant.rope import RopeLayout
from worldpager.quant.shard import ChunkRecord, ShardLayout, write_tail
from worldpager.sim.machines import BLOCK_BYTES, SEQUENTIAL_BYTES, DiskProfile, Spread
from worldpager.tiers.arena import Arena
from worldpager.tiers.spec import StoreSpec
from worldpager.tiers.store import ChunkStore
from worldpager.units import format_size

SEQUENTIAL, BLOCKS, SMALL, MIXED = 5, 48, 32, 3
"""Repeats: large files, blocks, smallest chunks, rounds of reading and writing together."""
_HEADS, _HEAD_DIM = 12, 128
_TOKEN_BYTES = 2 * _HEADS * _HEAD_DIM * 2  # K and V in bf16


def measure_disk(
    folder: Path, *, seconds: float = 1.5, rated_bytes: int | None = None
) -> DiskProfile:
    """Measure the disk that holds ``folder``; each kind of transfer gets about ``seconds``.

    A read comes soon after its write, so a cache below the file system (a drive's or a virtual
    machine host's) counts in. Raises :class:`ConfigError` where the folder is none or has less than
    2 GiB free, :class:`StoreError` where the disk fails.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; name one on the disk to measure")
    usage = shutil.disk_usage(folder)
    if usage.free < 2 << 30:
        raise ConfigError(
            f"{folder} has {format_size(usage.free)} free, and measuring wants 2GiB; make room or "
            "name another folder"
        )
    with _scratch(folder) as scratch, ExitStack() as stack:
        large = stack.enter_context(_Files(scratch, "sequential", SEQUENTIAL_BYTES))
        block = stack.enter_context(_Files(scratch, "block", BLOCK_BYTES))
        small = stack.enter_context(_Files(scratch, "small", _TOKEN_BYTES))
        write_large = large.times(large.write, SEQUENTIAL, seconds)
        write_block = block.times(block.write, BLOCKS, seconds)
        write_small = small.times(small.write, SMALL, seconds)
        return DiskProfile(
            folder=str(folder.resolve()),
            file_system=file_system(folder),
            method=large.method,
            read_sequential=large.rate(large.times(large.read, 3 * len(write_large), seconds)),
            read_block=block.rate(block.times(block.read, 2 * len(write_block), seconds)),
            write_sequential=large.rate(write_large),
            write_block=block.rate(write_block),
            shared=_together(large, block, seconds),
            durable_write_seconds=Spread.of(write_small),
            read_seconds=Spread.of(small.times(small.read, 2 * len(write_small), seconds)),
            capacity_bytes=usage.total,
            rated_bytes=rated_bytes,
        )


class _Files:
    """Chunks of about ``nbytes`` in a rollout of their own, written and read one at a time."""

    def __init__(self, folder: Path, name: str, nbytes: int) -> None:
        layers = max(1, round(nbytes / BLOCK_BYTES))
        shape = BlockShape(nbytes // layers // _TOKEN_BYTES, _HEADS, _HEAD_DIM)
        self._layers = layers
        self._codec = get_codec("bf16")
        self._layout = ShardLayout.for_chunk(self._codec, [shape] * layers)
        self._kv = torch.randn(shape.tokens, _HEADS, _HEAD_DIM).to(torch.bfloat16)
        self._arena = Arena(self._layout.nbytes)
        self._image = self._arena.view(0, self._layout.nbytes)
        self._written = 0
        spec = StoreSpec(
            session="doctor", rollout=name, model="noise", layers=layers, tokens=shape.tokens,
            heads=_HEADS, head_dim=_HEAD_DIM, frames=1, dtype="bfloat16", codecs=("bf16",),
            positions="none",
        )  # fmt: skip
        self._store = ChunkStore.create(folder, spec)
        self._files = StreamFiles(self._store, 0)
        self._identity = spec.identity()

    def write(self, index: int) -> Callable[[], None]:
        """Prepares a chunk; what is returned publishes it."""
        chunk, self._written = self._written, self._written + 1
        _fill(self._image, self._layout, chunk, self._identity, self._kv)
        return lambda: self._files.write(chunk, self._image)

    def read(self, index: int) -> Callable[[], None]:
        """What is returned brings back a chunk, oldest first."""
        return lambda: self._files.read(index % self._written, 1, self._image)

    @staticmethod
    def times(
        prepare: Callable[[int], Callable[[], None]], most: int, budget: float
    ) -> list[float]:
        """Seconds of each call, at most ``most`` of them and no more than ``budget`` in all."""
        taken: list[float] = []
        for index in range(most):
            call = prepare(index)
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
            if sum(taken) > budget:
                break
        return taken

    def rate(self, times: list[float]) -> Spread:
        """Bytes per second of calls that took ``times``."""
        return Spread.of([self.nbytes / seconds for seconds in times])

    @property
    def nbytes(self) -> int:
        """Bytes of one chunk's file."""
        return self._layout.nbytes

    @property
    def method(self) -> str:
        """As :attr:`ChunkStore.method`."""
        return self._store.method

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *exc: object) -> None:
        self._store.close()
        self._arena.close()


def _fill(image: Bytes, layout: ShardLayout, chunk: int, identity: int, kv: torch.Tensor) -> None:
    """Make ``image`` a chunk as the pager makes them, so that it can be checked when read."""
    codec = get_codec("bf16")
    for layer in range(layout.layers):
        label = BlockLabel(
            layer=layer, chunk=chunk, generation=1, frames=1, position=0.0, frame=0,
            identity=identity,
        )  # fmt: skip
        write_block(image[layout.extent(layer)], codec, label, kv, kv)
    record = ChunkRecord(
        chunk=chunk, generation=1, layers=layout.layers, frames=1, start_frame=0, position=0.0,
        created=0.0, identity=identity,
    )  # fmt: skip
    write_tail(image, layout, record)


def _together(large: _Files, block: _Files, seconds: float) -> Spread:
    """Bytes per second of large writes and of blocks read at the same time, added up."""
    rates: list[float] = []
    began = time.perf_counter()
    for index in range(MIXED):
        rates.append(_one_round(large, block, large.write(index)))
        if time.perf_counter() - began > seconds:
            break
    return Spread.of(rates)


def _one_round(large: _Files, block: _Files, publish: Callable[[], None]) -> float:
    """Read blocks for as long as ``publish`` takes; bytes per second of both together."""
    done = threading.Event()
    reads = 0

    def read() -> None:
        nonlocal reads
        while not done.is_set():
            block.read(reads)()
            reads += 1

    reader = threading.Thread(target=read, name="worldpager-doctor")
    began = time.perf_counter()
    reader.start()
    try:
        publish()
    finally:
        done.set()
        reader.join()
    return (large.nbytes + reads * block.nbytes) / (time.perf_counter() - began)


def measure_codec(repeats: int = 7) -> dict[str, float]:
    """Bytes of 16-bit KV per second that int4 encodes and decodes: ``encode_bandwidth`` and
    ``decode_bandwidth``, medians.
    """
    codec, shape = get_codec("int4"), BlockShape(2640, _HEADS, _HEAD_DIM)
    k = torch.randn(shape.tokens, _HEADS, _HEAD_DIM).to(torch.bfloat16)
    out = torch.empty_like(k), torch.empty_like(k)
    payload = np.empty(codec.payload_size(shape), np.uint8)
    rotation = RopeLayout.wan(_HEAD_DIM).temporal_rotation(1.0)

    def encode(index: int) -> Callable[[], None]:
        return lambda: codec.encode(k, k, payload)

    def decode(index: int) -> Callable[[], None]:
        return lambda: codec.decode(payload, shape, *out, rotation)

    taken = {}
    for name, work in (("encode_bandwidth", encode), ("decode_bandwidth", decode)):
        work(0)()  # compiles
        times = _Files.times(work, repeats, 2.0)
        taken[name] = 4 * shape.elements / Spread.of(times).median
    return taken


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder of our own in ``folder``, removed with all that is in it."""
    made = Path(tempfile.mkdtemp(prefix=".worldpager-doctor-", dir=folder))
    try:
        yield made
    finally:
        shutil.rmtree(made)


def file_system(folder: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Type and device of the file system that holds ``folder``, e.g. ``"ext4 on /dev/vda"``."""
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found, inside = None, folder.resolve()
    length = -1
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 2:
            continue
        point = Path(fields[4].encode().decode("unicode_escape"))
        if inside.is_relative_to(point) and len(point.parts) >= length:
            found, length = f"{kind[0]} on {kind[1]}", len(point.parts)
    return found

"""Faults injected under a running memory: any call, once and for ever, and bits in every field."""

from __future__ import annotations

import errno
import random
import struct
from pathlib import Path

import pytest

from tests.reliability.faults import FailingIO, fail
from tests.reliability.world import World, chunk_bytes, chunk_file, reference_spec
from worldpager.errors import BackgroundError
from worldpager.quant import block, shard
from worldpager.quant.codec import get_codec
from worldpager.quant.shard import ShardLayout, index_bytes, tail_bytes

CALLS = (
    "open_read", "open_new", "pread", "pwrite", "sync", "rename", "unlink", "sync_folder",
    "free_bytes",
)  # fmt: skip
SPEC = reference_spec()
BYTES = chunk_bytes(SPEC)


def healed(directory: Path, world: World) -> None:
    """After all faults have ended: all that is reported is exact, now and after a restart."""
    memory = world.memory
    for _ in range(2):
        try:
            memory.flush()
        except BackgroundError:
            continue  # what was lost is told once
        break
    else:
        raise AssertionError("the memory does not recover")
    assert memory.occupancy.dirty == 0
    present = world.present()
    for _ in range(40):
        memory._session.pager.tick()  # retries that were put off
    assert all(world.load_patiently(chunk) for chunk in present)
    memory.close()
    again = World(directory, dram=16)
    again.remember(world)
    with again.memory:
        found = again.present()  # what was given up as unreadable may be back: its file was kept
        assert present <= found
        assert again.memory.status().ok
        assert all(again.load_patiently(chunk) for chunk in found)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", CALLS)
def test_one_call_fails_once(tmp_path: Path, call: str, number: int) -> None:
    io = FailingIO()
    world = World(tmp_path / "s", dram=14, io=io)
    world.run(range(30))
    io.plan = fail(call, number, nth=io.calls[call] + 1)
    world.run(range(30, 60))
    failed = dict(io.failed)
    io.plan = lambda called, nth: 0
    healed(tmp_path / "s", world)
    if call not in ("unlink",):
        assert failed == {call: 1}
        status = world.memory.status()
        assert sum(status.read_failures.values()) + sum(status.write_failures.values()) == 1
    assert not world.memory.status().lost, "one failure loses nothing"


@pytest.mark.parametrize("call", CALLS)
def test_one_call_fails_for_ever_and_heals(tmp_path: Path, call: str) -> None:
    io = FailingIO()
    world = World(tmp_path / "s", dram=14, io=io)
    world.run(range(30))
    io.plan = fail(call, errno.EIO)
    world.run(range(30, 90))
    io.plan = lambda called, nth: 0
    healed(tmp_path / "s", world)


@pytest.mark.parametrize("seed", range(4))
def test_any_call_fails_at_any_time(tmp_path: Path, seed: int) -> None:
    storm(tmp_path, seed, 150)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_storms(tmp_path: Path, seed: int) -> None:
    storm(tmp_path, seed, 300)


def storm(tmp_path: Path, seed: int, chunks: int) -> None:
    rng = random.Random(seed)
    rate = rng.choice([0.01, 0.05, 0.2, 0.5])
    numbers = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.ENOMEM]

    def plan(call: str, nth: int) -> int:
        return rng.choice(numbers) if rng.random() < rate else 0

    io = FailingIO(share=rng.choice([1, 1, 0.6]), unit=rng.choice([1, 512, 4096]))
    pressure = rng.choice(["block", "drop"])
    world = World(tmp_path / "s", dram=rng.choice([11, 20]), io=io, pressure=pressure)
    io.plan = plan
    world.memory._session.pager._patience = 0.2
    begin = 0
    for version in range(4):  # each but the first goes back a little, to write chunks again
        world.run(range(begin, begin + chunks // 4), version=version)
        begin += chunks // 4 - rng.randrange(1, chunks // 5)
    io.plan = lambda call, nth: 0
    healed(tmp_path / "s", world)


def store_of(tmp_path: Path, chunks: int) -> World:
    world = World(tmp_path / "s", dram=16)
    with world.memory:
        world.run(range(chunks + 1), check=False)
    return world


def test_a_file_torn_at_any_sector_is_absent(tmp_path: Path) -> None:
    """A write of which only the first sectors arrived, the rest still zeros or old bytes."""
    chunks = 60
    world = store_of(tmp_path, chunks)
    rng, torn = random.Random(0), {}
    other = chunk_file(tmp_path / "s", chunks - 1).read_bytes()
    sectors = BYTES // 512
    for chunk in range(1, chunks - 1):
        sector = rng.randrange(sectors)
        path = chunk_file(tmp_path / "s", chunk)
        good = path.read_bytes()
        rest = rng.choice([bytes(len(good)), other])
        path.write_bytes(good[: 512 * sector] + rest[512 * sector :])
        torn[chunk] = path.read_bytes() != good
    check_absent(tmp_path / "s", world, {c for c, bad in torn.items() if bad}, chunks)


@pytest.mark.slow
def test_at_every_sector(tmp_path: Path) -> None:
    for first in range(0, BYTES // 512, 58):
        world = store_of(tmp_path / str(first), 60)
        bad = set()
        for chunk in range(1, 59):
            sector = first + chunk - 1
            path = chunk_file(tmp_path / str(first) / "s", chunk)
            good = path.read_bytes()
            if sector < BYTES // 512:
                path.write_bytes((good[: 512 * sector]).ljust(len(good), b"\0"))
            if path.read_bytes() != good:
                bad.add(chunk)
        check_absent(tmp_path / str(first) / "s", world, bad, 60)


def check_absent(directory: Path, world: World, bad: set[int], chunks: int) -> None:
    again = World(directory, dram=16)
    again.remember(world)
    with again.memory:
        came = {chunk for chunk in range(chunks) if again.load_patiently(chunk)}
        assert came == set(range(chunks)) - bad
        assert not again.memory.status().ok


def fields(layout: struct.Struct) -> list[int]:
    """A byte offset inside each field of a packed structure."""
    offsets, prefix = [], layout.format[0]
    rest, at = layout.format[1:], 0
    while rest:
        digits = ""
        while rest[0].isdigit():
            digits, rest = digits + rest[0], rest[1:]
        code, rest = rest[0], rest[1:]
        times = 1 if code in "sx" else int(digits or 1)
        size = struct.calcsize(prefix + (digits if code in "sx" else "") + code)
        if code != "x":
            offsets += [at + i * size for i in range(times)]
        at += times * size
    return offsets


def test_a_flipped_bit_in_any_field_of_header_record_or_index(tmp_path: Path) -> None:
    layout = ShardLayout.for_chunk(get_codec("int4"), [SPEC.block_shape] * SPEC.layers)
    rng = random.Random(0)
    places = [layout.offsets[2] + at for at in fields(block._FORMAT)]
    places += [layout.tail_offset + at for at in fields(shard._RECORD)]
    index = BYTES - index_bytes(SPEC.layers)
    places += [index + 8 * i for i in range(2 * SPEC.layers)] + [BYTES - 4]
    assert BYTES - tail_bytes(SPEC.layers) == layout.tail_offset and len(places) > 45
    chunks = len(places) + 2
    world = store_of(tmp_path, chunks)
    for chunk, place in enumerate(places, start=1):
        path = chunk_file(tmp_path / "s", chunk)
        data = bytearray(path.read_bytes())
        data[place] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    check_absent(tmp_path / "s", world, set(range(1, len(places) + 1)), chunks)


def test_padding_carries_nothing(tmp_path: Path) -> None:
    """A bit that no field and no payload has harms nothing: it is neither served nor checked."""
    layout = ShardLayout.for_chunk(get_codec("int4"), [SPEC.block_shape] * SPEC.layers)
    offset, length = layout.block(1)
    if offset + length == layout.offsets[2]:
        pytest.skip("this geometry has no padding")
    world = store_of(tmp_path, 10)
    path = chunk_file(tmp_path / "s", 5)
    data = bytearray(path.read_bytes())
    data[offset + length] ^= 1
    path.write_bytes(data)
    again = World(tmp_path / "s", dram=16)
    again.remember(world)
    with again.memory:
        assert again.load_patiently(5)

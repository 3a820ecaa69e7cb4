"""O10: shapes, types, strides and odd values, written, spilled and read back."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.reliability.world import (
    World,
    expected,
    folder_bytes,
    image_bytes,
    made,
    reference_spec,
)
from worldpager.errors import CodecError, ConfigError
from worldpager.quant.codec import BlockShape, get_codec
from worldpager.quant.groups import group_ends

GRID = list(itertools.product(
    (40, 64, 80, 96, 128), (1, 2, 12, 40), (1, 3, 7, 880, 1560),
    ("int4", "int8", "bf16", "int3"), (torch.bfloat16, torch.float16, torch.float32),
))  # fmt: skip
SMALL = [case for case in GRID if case[0] * case[1] * case[2] <= 128 * 12 * 7]
LARGE = [case for case in GRID if case not in SMALL]


def through_all_tiers(directory: Path, case: tuple) -> str:
    """Five chunks through a pool too small for them; "" or why the geometry was refused."""
    head_dim, heads, tokens, codec, dtype = case
    spec = reference_spec(
        retrieve=1, layers=2, heads=heads, head_dim=head_dim, tokens_per_frame=tokens,
        frames_per_chunk=1, sink_frames=1, recent_frames=1, retrieve_frames=1, dtype=dtype,
        rope=reference_spec(head_dim=head_dim).rope,
    )  # fmt: skip
    try:
        world = World(directory, spec=spec, dram=8, codec=codec, chunks=12)
    except (CodecError, ConfigError) as error:
        return str(error)
    with world.memory:
        world.run(range(6))
        world.memory.flush()
        assert all(world.load_patiently(chunk) for chunk in range(5))
        status = world.memory.status()
        assert status.ok and status.occupancy.stored == sum(image_bytes(directory).values())
        assert abs(status.occupancy.disk - folder_bytes(directory)) < 4096
    return ""


def check_grid(tmp_path: Path, cases: list[tuple]) -> None:
    refused = []
    for number, case in enumerate(cases):
        said = through_all_tiers(tmp_path / str(number), case)
        if said:
            refused.append(case)
            assert any(word in said for word in ("head_dim", "dtype", "DRAM")), (case, said)
    assert len(refused) < len(cases) / 4, refused


def test_a_sample_of_all_shapes_types_and_codecs(tmp_path: Path) -> None:
    check_grid(tmp_path, random.Random(4).sample(SMALL, 40))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_all_shapes_types_and_codecs(tmp_path: Path, part: int) -> None:
    check_grid(tmp_path, (SMALL + random.Random(part).sample(LARGE, 60))[part::8])


def test_strided_caches_give_the_same_bits(tmp_path: Path) -> None:
    world = World(tmp_path / "s", dram=12)
    for cache in world.layers:
        for name in ("k", "v"):
            x = cache[name]
            wide = torch.zeros(x.shape[0], x.shape[2], x.shape[1], 2 * x.shape[3], dtype=x.dtype)
            cache[name] = wide[..., ::2].transpose(1, 2)  # heads first, every other channel
    with world.memory:
        world.run(range(60))
        world.memory.flush()
        assert all(world.load_patiently(chunk) for chunk in range(59))


def round_trip(codec: str, x: torch.Tensor) -> torch.Tensor:
    shape = BlockShape(*x.shape)
    coder = get_codec(codec)
    payload = np.empty(coder.payload_size(shape), np.uint8)
    coder.encode(x, x.clone(), payload)
    k, v = torch.empty_like(x), torch.empty_like(x)
    coder.decode(payload, shape, k, v, None)
    return v


ODD = {
    "zero": torch.zeros(3, 2, 64),
    "constant": torch.full((3, 2, 64), 0.75),
    "outlier": torch.cat([torch.full((3, 2, 63), 1e-2), torch.full((3, 2, 1), 1e4)], -1),
    "subnormal": torch.full((3, 2, 64), 1e-40),
}


@pytest.mark.parametrize("codec", ["int4", "int8", "int4-absmax", "int3", "bf16"])
@pytest.mark.parametrize("name", ODD)
def test_odd_values_stay_in_their_group(codec: str, name: str) -> None:
    spec = reference_spec(head_dim=128)
    shape = spec.block_shape
    x = torch.randn(shape.tokens, shape.heads, 128, generator=torch.Generator().manual_seed(0))
    x = x.to(torch.bfloat16)
    plain = round_trip(codec, x)
    odd = x.clone()
    odd[4:7, :, :64] = ODD[name].to(x.dtype)
    got = round_trip(codec, odd)
    assert torch.isfinite(got.float()).all()
    untouched = torch.ones_like(x, dtype=torch.bool)
    untouched[4:7] = False
    assert torch.equal(got[untouched], plain[untouched]), "other tokens keep their bits"
    if name == "zero":
        assert (got[4:7, :, :64] == 0).all() or codec in ("int4", "int3")
    assert list(group_ends(128)) == [64, 128]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("codec", ["int4", "bf16"])
def test_what_is_not_finite_is_refused_counted_and_spreads_nowhere(
    tmp_path: Path, codec: str, value: float
) -> None:
    world = World(tmp_path / "s", dram=12, codec=codec)
    with world.memory:
        for chunk in range(60):
            world.retrieve(chunk)
            assert 5 not in world.last.chunks
            world.check(chunk)
            world.write(chunk)
            if chunk == 5:
                end = int(world.layers[3]["local_end_index"])
                world.layers[3]["v"][0, end - 1, 1, 63] = value
        status = world.memory.status()
        assert status.rejected == {"non-finite": 1} and not status.ok
        assert 5 not in world.present()


def test_the_first_batch_item_has_the_same_bits_whatever_the_batch() -> None:
    one, two = reference_spec(), reference_spec(batch=2)
    for chunk in range(3):
        assert torch.equal(made(one, "s", chunk, 0)[0], made(two, "s", chunk, 0)[0][:1])
        alone, both = (expected(spec, "int4", "s", chunk, 0, 5) for spec in (one, two))
        assert torch.equal(alone[0], both[0][:1]) and torch.equal(alone[1], both[1][:1])

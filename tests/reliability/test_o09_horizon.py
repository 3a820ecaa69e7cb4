"""O9: across the positional horizon."""

from __future__ import annotations

import json
import random
import statistics
import time
from pathlib import Path

import pytest
import torch

from tests.reliability.world import World, made, reference_spec
from worldpager.cli.app import run
from worldpager.errors import PositionError
from worldpager.model_adapter.window import positions

TABLE, LAST = 1024, 341  # chunk 341 would need 1023 to 1025


def test_the_wall_is_named_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``plan`` names the first chunk, from 0, that the library will refuse, whatever the pool."""
    for model in ("self-forcing", "matrix-game-2"):
        assert run(["plan", "--model", model, "--dram", "8GiB", "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["positional_horizon_chunks"] == LAST
        assert said["horizons"][0] | {"rows": TABLE, "chunks": LAST} == said["horizons"][0]
        assert run(["plan", "--model", model, "--dram", "8GiB"]) == 0
        assert f"{LAST} chunks" in capsys.readouterr().out
    spec = reference_spec(table=TABLE)
    scheme = positions("absolute", spec)
    refused = []
    for chunk in range(LAST + 2):
        try:
            scheme.rebase(chunk * spec.frames_per_chunk, 0)
        except PositionError:
            refused.append(chunk)
    assert refused == [LAST, LAST + 1]


def test_without_position_handling_the_wall_is_named_and_not_crossed(tmp_path: Path) -> None:
    world = World(tmp_path / "s", dram=40, positions="absolute", path="yaw-return")
    with world.memory:
        world.run(range(LAST), check=False)
        window = [layer["k"].clone() for layer in world.layers]
        commits = world.memory.stats.commits
        with pytest.raises(PositionError, match=rf"{TABLE} rows \({LAST} chunks\).*moving"):
            world.retrieve(LAST)
        assert world.memory.stats.commits == commits
        assert all(torch.equal(a, b["k"]) for a, b in zip(window, world.layers, strict=True))
        assert all(world.positions[c] == 3 * c for c in range(LAST)), "never clipped"


@pytest.mark.parametrize("chunks", [360, pytest.param(700, marks=pytest.mark.slow)])
def test_with_it_positions_stay_in_the_table_in_order_and_belong_to_the_chunk(
    tmp_path: Path, chunks: int
) -> None:
    world = World(tmp_path / "s", dram=40, chunks=chunks)
    crossings: list[int] = []
    with world.memory:
        for chunk in range(chunks):
            base = world.base
            world.retrieve(chunk)
            if world.base != base:
                crossings.append(chunk)
            world.check(chunk)  # each key at its place, whatever slot it has
            current = 3 * chunk - world.base
            assert current >= 0 and current + 3 <= TABLE
            world.write(chunk)
        assert crossings[0] == LAST
        assert world.memory.stats.deletes == 0, "nothing stored is rewritten"
        assert world.memory.stats.writes <= chunks


def test_the_crossing_costs_no_more_than_twice_any_other_chunk(tmp_path: Path) -> None:
    """Over some ten crossings of a short table, by the medians of one run."""
    world = World(tmp_path / "s", dram=40, spec=reference_spec(table=60), chunks=200)
    crossing, other = [], []
    with world.memory:
        for chunk in range(200):
            base = world.base
            began = time.perf_counter()
            world.retrieve(chunk)
            seconds = time.perf_counter() - began
            (other if world.base == base else crossing).append(seconds)
            world.write(chunk)
    assert len(crossing) >= 10
    assert statistics.median(crossing) <= 2 * statistics.median(other)


def test_the_rotation_is_that_of_the_reference(tmp_path: Path) -> None:
    """A key moved by some frames is the key rotated in float32, within the codec's error."""
    world = World(tmp_path / "s", dram=12, codec="bf16")
    spec = world.spec
    assert spec.rope is not None
    rng = random.Random(0)
    with world.memory:
        world.run(range(40))
        for _ in range(5):
            chunk = rng.randrange(1, 39)
            k = made(spec, "session", chunk, 0)[0].float()
            shift = rng.randrange(-300, 300)
            rotation = spec.rope.temporal_rotation(shift)
            assert rotation is not None
            turned = k.to(torch.bfloat16).clone()
            rotation.apply_(turned)
            want = rotate(k, shift)
            assert (turned.float() - want).abs().max() <= 2**-7 * k.abs().max() * 2


def rotate(k: torch.Tensor, frames: int) -> torch.Tensor:
    """The temporal band of the Wan layout: ``c - 4 (c // 6)`` leading channels of a head, in pairs
    (2i, 2i+1), at angles ``frames / 10000^(2i/c)``.
    """
    head_dim = k.shape[-1]
    c = head_dim - 4 * (head_dim // 6)
    i = torch.arange(0, c, 2, dtype=torch.float64)
    angle = frames / 10000.0 ** (i / c)
    cos, sin = angle.cos(), angle.sin()
    out = k.double().clone()
    a, b = k[..., 0:c:2].double(), k[..., 1:c:2].double()
    out[..., 0:c:2], out[..., 1:c:2] = a * cos - b * sin, a * sin + b * cos
    return out.float()

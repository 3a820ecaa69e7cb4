"""``worldpager inspect`` and ``worldpager verify`` on sound, damaged and foreign folders."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from worldpager.quant.block import BlockLabel, write_block
from worldpager.quant.codec import BlockShape, get_codec
from worldpager.quant.shard import ChunkRecord, ShardLayout, write_tail
from worldpager.tiers.directio import aligned_bytes
from worldpager.tiers.spec import StoreSpec
from worldpager.tiers.store import ChunkStore

Command = Callable[..., tuple[int, str, str]]

LAYERS, SHAPE, CODEC = 2, BlockShape(12, 2, 64), get_codec("int4")
SPEC = StoreSpec(
    session="demo", rollout="run", model="[red]toy[/red] 1\x1b[2J", layers=LAYERS, tokens=12,
    heads=2, head_dim=64, frames=3, dtype="bfloat16", codecs=("int4",), positions="none",
)  # fmt: skip
PLACE = (0.0,) * 3 + tuple(np.eye(3).ravel())


def image_of(chunk: int) -> np.ndarray:
    layout = ShardLayout.for_chunk(CODEC, [SHAPE] * LAYERS)
    image = aligned_bytes(layout.nbytes)
    for layer in range(LAYERS):
        k, v = torch.randn(2, 12, 2, 64, generator=torch.Generator().manual_seed(chunk))
        label = BlockLabel(
            layer=layer, frames=3, generation=1, chunk=chunk, position=3.0 * chunk,
            frame=3 * chunk, identity=SPEC.identity(),
        )  # fmt: skip
        write_block(image[layout.extent(layer)], CODEC, label, k, v)
    record = ChunkRecord(
        chunk=chunk, generation=1, layers=LAYERS, frames=3, start_frame=3 * chunk,
        position=3.0 * chunk, created=0.0, identity=SPEC.identity(),
    )  # fmt: skip
    if chunk % 2:
        record = ChunkRecord(**{f: getattr(record, f) for f in record.__slots__} | {"place": PLACE})
    write_tail(image, layout, record)
    return image


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with chunks 0, 1, 2 and 5; every other one has a pose."""
    path = tmp_path / "store"
    made = ChunkStore.create(path, SPEC)
    for chunk in (0, 1, 2, 5):
        made.write(chunk, image_of(chunk))
    made.close()
    return path


def damage(store: Path, chunk: int, offset: int) -> None:
    shard = store / "run" / "kv" / f"{chunk}.0.0.0.0.0"
    content = bytearray(shard.read_bytes())
    content[offset] ^= 1
    shard.write_bytes(content)


def test_inspect_tells_what_is_there(store: Path, worldpager: Command) -> None:
    status, printed, _ = worldpager("inspect", store, "--json")
    assert status == 0
    (rollout,) = json.loads(printed)["rollouts"]
    assert (rollout["session"], rollout["rollout"], rollout["model"]) == ("demo", "run", SPEC.model)
    assert (rollout["layers"], rollout["codecs"]) == (LAYERS, ["int4"])
    assert (rollout["chunks"], rollout["chunk_ranges"]) == (4, [[0, 2], [5, 5]])
    assert rollout["with_pose"] == 2
    nbytes = image_of(0).nbytes
    assert rollout["chunk_bytes"] == {"min": nbytes, "median": nbytes, "max": nbytes}
    assert rollout["bytes_used"] >= 4 * nbytes
    assert rollout["damaged"] == []


def test_inspect_shows_it_to_people_and_obeys_nothing(store: Path, worldpager: Command) -> None:
    status, printed, _ = worldpager("inspect", store)
    assert status == 0
    assert "demo/run" in printed
    assert "4 (0-2, 5)" in printed
    assert "[red]toy[/red] 1?[2J" in printed


def test_inspect_and_verify_change_nothing(store: Path, worldpager: Command) -> None:
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    worldpager("inspect", store)
    worldpager("verify", store)
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before


def test_verify_finds_a_sound_store_sound(store: Path, worldpager: Command) -> None:
    status, printed, _ = worldpager("verify", store)
    assert status == 0
    assert "4 chunks read, 0 damaged" in printed


def test_verify_lists_what_is_damaged(store: Path, worldpager: Command) -> None:
    layout = ShardLayout.for_chunk(CODEC, [SHAPE] * LAYERS)
    damage(store, 1, layout.block(1)[0] + 200)
    damage(store, 5, layout.nbytes - 10)
    os.truncate(store / "run" / "kv" / "2.0.0.0.0.0", 100)
    status, printed, _ = worldpager("verify", store)
    assert status == 1
    lines = printed.splitlines()
    assert [line.split(": ")[:2] for line in lines[:3]] == [
        ["run/kv/1", "checksum"],
        ["run/kv/2", "size"],
        ["run/kv/5", "index"],
    ]
    assert lines[3] == "4 chunks read, 3 damaged"

    status, printed, _ = worldpager("verify", store, "--json")
    assert status == 1
    report = json.loads(printed)
    assert report["chunks"] == 4
    assert [entry["reason"] for entry in report["damaged"]] == ["checksum", "size", "index"]


def test_inspect_names_what_its_tail_gives_away(store: Path, worldpager: Command) -> None:
    os.truncate(store / "run" / "kv" / "2.0.0.0.0.0", 100)
    (rollout,) = json.loads(worldpager("inspect", store, "--json")[1])["rollouts"]
    assert rollout["damaged"] == [{"stream": "kv", "chunk": 2, "reason": "size"}]
    assert rollout["chunks"] == 3


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_is_no_store_is_one_clear_line(
    command: str, tmp_path: Path, worldpager: Command
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("photos", "empty", "file", "nowhere"):
        status, printed, message = worldpager(command, tmp_path / name)
        assert status == 2, name
        assert not printed
        assert len(message.splitlines()) == 1
        assert name in message

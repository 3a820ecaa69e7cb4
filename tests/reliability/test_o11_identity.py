"""O11: reopening with another identity."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.reliability.world import World, reference_spec
from worldpager.errors import IdentityError
from worldpager.quant.rope import RopeLayout

Snapshot = dict[str, tuple[int, int, bytes]]


def snapshot(root: Path) -> Snapshot:
    """Times, modes and contents of everything below a folder."""
    return {
        str(p): (p.lstat().st_mtime_ns, p.lstat().st_mode, p.read_bytes() if p.is_file() else b"")
        for p in [root, *sorted(root.rglob("*"))]
    }


@pytest.fixture
def used(tmp_path: Path) -> World:
    world = World(tmp_path / "s", dram=12)
    with world.memory:
        world.run(range(30), check=False)
    return world


CHANGES: dict[str, tuple[str, dict[str, object]]] = {
    "model identity": ("model", {"model": "synthetic@another-hash"}),
    "data type": ("dtype", {"dtype": torch.float16}),
    "layers": ("layers", {"layers": 5}),
    "KV heads": ("heads", {"heads": 3}),
    "head size": ("head_dim", {"head_dim": 128}),
    "tokens per chunk": ("tokens", {"tokens_per_frame": 49}),
    "frames per chunk": (
        "frames",
        {
            "tokens_per_frame": 144,
            "frames_per_chunk": 1,
            "sink_frames": 1,
            "recent_frames": 1,
            "retrieve_frames": 3,
        },
    ),
    "position scheme": ("positions", {"rope": RopeLayout.wan(64, table_len=2048)}),
    "batch": ("heads", {"batch": 2}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_geometry_is_refused_by_field_and_nothing_is_touched(
    used: World, what: str
) -> None:
    directory = used.memory.config.store
    before = snapshot(directory)
    field, changes = CHANGES[what]
    with pytest.raises(IdentityError) as caught:
        World(directory, spec=reference_spec(**changes), dram=30)
    assert caught.value.field == field
    assert repr(caught.value.stored) in str(caught.value)
    assert repr(caught.value.wanted) in str(caught.value)
    assert snapshot(directory) == before
    check_still_opens(used)


@pytest.mark.parametrize(
    ("field", "options"), [("codecs", {"codec": "int8"}), ("codecs", {"codec": "int3"}),
                           ("session", {"session": "another"})]
)  # fmt: skip
def test_another_codec_or_session_is_refused(
    used: World, field: str, options: dict[str, str]
) -> None:
    before = snapshot(used.memory.config.store)
    with pytest.raises(IdentityError) as caught:
        World(used.memory.config.store, dram=30, **options)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert snapshot(used.memory.config.store) == before
    check_still_opens(used)


@pytest.mark.parametrize("version", [0, 2, "1", None])
@pytest.mark.parametrize("document", ["zarr.json", "rollout-0/zarr.json"])
def test_another_format_version_is_refused(used: World, version: object, document: str) -> None:
    path = used.memory.config.store / document
    content = json.loads(path.read_text())
    good = path.read_bytes()
    content["attributes"]["worldpager"]["format_version"] = version
    path.write_text(json.dumps(content))
    before = snapshot(used.memory.config.store)
    with pytest.raises(IdentityError) as caught:
        World(used.memory.config.store, dram=12)
    assert (caught.value.field, caught.value.stored) == ("format_version", version)
    assert snapshot(used.memory.config.store) == before
    path.write_bytes(good)
    check_still_opens(used)


def test_another_directory_is_another_namespace(used: World, tmp_path: Path) -> None:
    spec = reference_spec(model="another")
    other = World(tmp_path / "t", spec=spec, dram=12, session="other")
    with other.memory:
        other.run(range(30))
    source = used.memory.config.store / "rollout-0/kv/7.0.0.0.0.0"
    target = tmp_path / "t/rollout-0/kv/7.0.0.0.0.0"
    target.write_bytes(source.read_bytes())  # a block from elsewhere never passes
    again = World(tmp_path / "t", spec=spec, dram=12, session="other")
    again.positions = other.positions
    with again.memory:
        assert 7 not in again.present()
        assert again.memory.status().damaged == {"identity": 1}
        assert again.load_patiently(8)


def check_still_opens(used: World) -> None:
    again = World(used.memory.config.store, dram=12)
    with again.memory:
        assert again.present() == set(range(29))
        assert again.load_patiently(11)
        assert again.memory.status().ok


def test_the_group_size_is_that_of_the_codec(used: World) -> None:
    """Groups are fixed per codec name, so another size is another codec, refused as such."""
    spec = json.loads((used.memory.config.store / "rollout-0/zarr.json").read_text())
    assert spec["attributes"]["worldpager"]["codecs"] == ["int4"]
    assert os.stat(used.memory.config.store).st_mode & 0o777 == 0o700

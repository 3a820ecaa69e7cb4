"""Directories that are not what was asked for: refused by name, and not touched."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.tiers.chunks import SPEC, image
from tests.tiers.conftest import Snapshot
from worldpager.errors import (
    ClosedError,
    ConfigError,
    ForeignDirectoryError,
    IdentityError,
    StoreError,
    StoreLockedError,
)
from worldpager.tiers.documents import MAX_DOCUMENT
from worldpager.tiers.io_backend import SystemIO
from worldpager.tiers.layout import rollout_names
from worldpager.tiers.spec import StoreSpec
from worldpager.tiers.store import ChunkStore

Snap = Callable[[Path], Snapshot]
OTHER = {
    "session": "otherworld",
    "model": "toy 1.0 sha256:9999",
    "branches": 2,
    "layers": 3,
    "tokens": 25,
    "heads": 1,
    "head_dim": 32,
    "frames": 4,
    "dtype": "float16",
    "codecs": ("int4",),
    "positions": "rope t=2 h=3 w=3 theta=256",
    "streams": ("kv", "uncond"),
}


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A store with one chunk, closed."""
    store = ChunkStore.create(tmp_path / "store", SPEC)
    store.write(0, image())
    store.close()
    return tmp_path / "store"


def refused(path: Path, snapshot: Snap, kind: type[Exception], spec: StoreSpec = SPEC) -> str:
    """What opening and creating say, having touched nothing."""
    before = snapshot(path)
    said = set()
    for attempt in (ChunkStore.open, ChunkStore.create):
        with pytest.raises(kind) as caught:
            attempt(path, spec)
        said.add(str(caught.value))
    assert snapshot(path) == before
    assert len(said) == 1
    return said.pop()


def test_every_field_has_a_case() -> None:
    assert {field.name for field in fields(StoreSpec)} - {"rollout"} == set(OTHER)


@pytest.mark.parametrize("field", OTHER)
def test_another_identity_is_refused_by_field(
    used: Path, snapshot: Snap, spec_with, field: str
) -> None:
    said = refused(used, snapshot, IdentityError, spec_with(**{field: OTHER[field]}))
    assert f"{field}={getattr(SPEC, field)!r}" in said
    assert f"{field}={OTHER[field]!r}" in said
    store = ChunkStore.open(used, SPEC)
    assert [chunk.chunk for chunk in store.contents()] == [0]
    store.close()


@pytest.mark.parametrize("version", [0, 2, "1", None, 1.5, True])
@pytest.mark.parametrize("document", ["zarr.json", "first/zarr.json"])
def test_other_format_versions_are_refused(
    used: Path, snapshot: Snap, document: str, version: object
) -> None:
    edit(used / document, format_version=version, invented="by a later version")
    said = refused(used, snapshot, IdentityError)
    assert f"format_version={version!r}" in said
    assert "format_version=1 was asked for" in said


def edit(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text())
    content["attributes"]["worldpager"] |= changes
    path.write_text(json.dumps(content))


def test_another_rollout_lives_beside_and_never_mixes(used: Path, spec_with) -> None:
    other = spec_with(rollout="second", layers=1, codecs=("int4",))
    with pytest.raises(StoreError, match="no rollout 'second'"):
        ChunkStore.open(used, other)
    store = ChunkStore.create(used, other)
    store.write(0, image(other))
    assert [chunk.record.layers for chunk in store.contents()] == [1]
    first = ChunkStore.open(used, SPEC)
    assert [chunk.record.layers for chunk in first.contents()] == [2]
    assert rollout_names(SystemIO(), used) == ["first", "second"]
    store.close()
    first.close()


def test_what_exists_is_not_made_again_and_what_does_not_is_not_opened(
    used: Path, snapshot: Snap, tmp_path: Path
) -> None:
    before = snapshot(tmp_path)
    with pytest.raises(StoreError, match="'first' exists"):
        ChunkStore.create(used, SPEC)
    with pytest.raises(StoreError, match="no rollout 'first'"):
        ChunkStore.open(tmp_path / "nowhere", SPEC)
    assert not ChunkStore.exists(tmp_path / "nowhere", "first")
    assert ChunkStore.exists(used, "first")
    assert snapshot(tmp_path) == before


def test_foreign_directories(tmp_path: Path, snapshot: Snap) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    assert "not empty and no WorldPager store" in refused(tmp_path, snapshot, ForeignDirectoryError)


def test_another_zarr_group(tmp_path: Path, snapshot: Snap) -> None:
    (tmp_path / "zarr.json").write_text(
        '{"zarr_format": 3, "node_type": "group", "attributes": {"by": "others"}}'
    )
    said = refused(tmp_path, snapshot, ForeignDirectoryError)
    assert "no WorldPager metadata (attributes.worldpager: Field required)" in said


def test_a_file_in_the_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    for attempt in (ChunkStore.open, ChunkStore.create):
        with pytest.raises(ForeignDirectoryError, match="not a folder"):
            attempt(tmp_path / "store", SPEC)


DAMAGES = {
    "empty": b"",
    "cut": b'{"zarr_format": 3, "node_type": "gro',
    "not utf-8": b'{"zarr_format": 3, "\xff\xfe": 1}',
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "huge": b" " * (MAX_DOCUMENT + 1),
    "wrong types": b'{"zarr_format": "3", "node_type": "group", "attributes": {"worldpager": {}}}',
    "array": b'{"zarr_format": 3, "node_type": "array", "attributes": {"worldpager": {}}}',
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("document", ["zarr.json", "first/zarr.json"])
def test_damaged_documents(used: Path, snapshot: Snap, document: str, damage: str) -> None:
    (used / document).write_bytes(DAMAGES[damage])
    assert str(used / document) in refused(used, snapshot, ForeignDirectoryError)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": "2"},
        {"layers": -1},
        {"layers": 10**9},
        {"codecs": []},
        {"invented": 1},
        {"kind": "session"},
        {"streams": ["../../etc"]},
        {"session": None},
    ],
)
def test_senseless_identities(used: Path, snapshot: Snap, changes: dict[str, object]) -> None:
    edit(used / "first/zarr.json", **changes)
    refused(used, snapshot, ForeignDirectoryError)
    with pytest.raises(ForeignDirectoryError):
        ChunkStore.inspect(used, "first")


@pytest.mark.parametrize("where", ["zarr.json", "first/zarr.json"])
@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_documents_that_are_no_files(used: Path, snapshot: Snap, where: str, kind: str) -> None:
    path = used / where
    path.rename(used / "first/kv/elsewhere")
    if kind == "link":
        path.symlink_to(used / "first/kv/elsewhere")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert "is not a regular file" in refused(used, snapshot, ForeignDirectoryError)


@pytest.mark.parametrize("where", ["first", "first/kv"])
@pytest.mark.parametrize("kind", ["link", "file"])
def test_folders_that_are_no_folders(used: Path, snapshot: Snap, where: str, kind: str) -> None:
    path = used / where
    path.rename(used.parent / "elsewhere")
    if kind == "link":
        path.symlink_to(used.parent / "elsewhere")
    else:
        path.write_text("")
    assert "is not a folder" in refused(used, snapshot, ForeignDirectoryError)


def test_a_link_given_by_the_caller_is_followed(used: Path) -> None:
    (used.parent / "link").symlink_to(used)
    store = ChunkStore.open(used.parent / "link", SPEC)
    assert [chunk.chunk for chunk in store.contents()] == [0]
    store.close()


def test_a_new_rollout_does_not_move_into_an_occupied_folder(used: Path, spec_with) -> None:
    for occupied in ("second/notes.txt", "third/kv/0.0.0.0.0.0"):
        path = used / occupied
        path.parent.mkdir(parents=True)
        path.write_text("mine")
        rollout = occupied.partition("/")[0]
        with pytest.raises(ForeignDirectoryError, match="in the way of a new rollout"):
            ChunkStore.create(used, spec_with(rollout=rollout))
        assert path.read_text() == "mine"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../b", "/etc", "a\0", "a\n", "zarr.json", ".x", "é", "a" * 101]
)
@pytest.mark.parametrize("field", ["session", "rollout", "streams"])
def test_names_from_callers_are_checked(spec_with, field: str, name: str) -> None:
    with pytest.raises(ConfigError, match=r"name .* cannot be used"):
        spec_with(**{field: (name,) if field == "streams" else name})
    with pytest.raises(ConfigError, match=r"rollout name .* cannot be used"):
        ChunkStore.exists(".", name)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 0}, "layers must be between 1 and 65535, not 0"),
        ({"tokens": 2**32}, "tokens must be between"),
        ({"codecs": ("int4",) * 3}, "3 codecs for 2 layers"),
        ({"streams": ()}, "stream names must be given and differ"),
        ({"streams": ("a", "a")}, "stream names must be given and differ"),
    ],
)
def test_specs_that_cannot_be(spec_with, changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        spec_with(**changes)


def test_identities_differ_by_every_field_and_stream(spec_with) -> None:
    specs = [SPEC, *(spec_with(**{field: value}) for field, value in OTHER.items())]
    specs.append(spec_with(rollout="second"))
    assert len({spec.identity() for spec in specs}) == len(specs)
    two = spec_with(streams=("cond", "uncond"))
    assert two.identity(0) != two.identity(1)
    assert two.identity(0) == spec_with(streams=("cond", "uncond")).identity(0)


def test_a_second_writer_is_told_who_the_first_is(used: Path, snapshot: Snap) -> None:
    store = ChunkStore.open(used, SPEC)
    before = snapshot(used)
    with pytest.raises(StoreLockedError, match=f"in use by process {os.getpid()}"):
        ChunkStore.open(used, SPEC)
    assert snapshot(used) == before
    store.close()
    ChunkStore.open(used, SPEC).close()


def test_inspecting_changes_nothing_and_works_beside_a_writer(used: Path, snapshot: Snap) -> None:
    (used / "first/kv/.3.0.0.0.0.0.1.0.tmp").write_bytes(b"left over")
    before = snapshot(used)
    view = ChunkStore.inspect(used, "first")
    assert view.spec == SPEC
    assert [chunk.chunk for chunk in view.contents()] == [0]
    assert view.verify() == ()
    for call in (lambda: view.write(0, image()), lambda: view.delete(0), view.destroy):
        with pytest.raises(ClosedError, match="to look only"):
            call()
    assert snapshot(used) == before
    writer = ChunkStore.open(used, SPEC)
    writer.write(1, image(chunk=1))
    view.close()
    view = ChunkStore.inspect(used, "first")
    assert [chunk.chunk for chunk in view.contents()] == [0, 1]
    writer.delete(1)
    assert [chunk.chunk for chunk in view.contents()] == [0]
    assert [(chunk.chunk, chunk.reason) for chunk in view.damaged] == [(1, "missing")]
    view.close()
    writer.close()
    with pytest.raises(StoreError, match="no rollout 'second'"):
        ChunkStore.inspect(used, "second")


@pytest.mark.parametrize("field", ["model", "dtype", "positions", "codecs"])
@pytest.mark.parametrize("text", ["x" * 5000, "weights\udcff"])
def test_what_could_not_be_read_again_is_refused_before_it_is_stored(
    tmp_path: Path, field: str, text: str
) -> None:
    value = (text,) if field == "codecs" else text
    with pytest.raises(ConfigError, match=r"characters|Unicode"):
        replace(SPEC, **{field: value})


@pytest.mark.parametrize(
    "attributes",
    [{"x": float("nan")}, {"x": {1, 2}}, {"x": "y" * 2_000_000}, {"x": "\udc80"}],
    ids=["nan", "a set", "too large", "no text"],
)
def test_attributes_that_would_lock_the_rollout_out_are_refused(
    tmp_path: Path, attributes: dict[str, object]
) -> None:
    store = ChunkStore.create(tmp_path, SPEC)
    with pytest.raises(ConfigError, match="attributes"):
        store.publish_metadata({}, attributes)  # type: ignore[arg-type]
    store.close()
    ChunkStore.open(tmp_path, SPEC).close()

"""Other readers: what the store writes by hand is a Zarr v3 hierarchy to zarr-python."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from tests.tiers.chunks import SPEC, image, kv
from worldpager.errors import ConfigError
from worldpager.quant import decode_block, read_tail, verify_block
from worldpager.tiers.documents import ROWS
from worldpager.tiers.spec import StoreSpec
from worldpager.tiers.store import ChunkStore


def decoded(spec: StoreSpec, content: np.ndarray) -> torch.Tensor:
    """``[layers, 2, tokens, heads, head_dim]`` fp32, by the block format alone."""
    _, layout = read_tail(content, content.nbytes, spec.layers)
    layers = []
    for layer in range(spec.layers):
        block = content[layout.extent(layer)]
        header = verify_block(block)
        out = torch.empty(2, header.shape.tokens, spec.heads, spec.head_dim)
        decode_block(block, header, out[0], out[1])
        layers.append(out)
    return torch.stack(layers)


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "int3"])
def test_zarr_reads_the_floats_exactly(tmp_path: Path, spec_with, codec: str) -> None:
    spec = spec_with(codecs=(codec,), head_dim=64)
    store = ChunkStore.create(tmp_path, spec)
    images = {0: image(spec, 0), 2: image(spec, 2, tokens=20), 1500: image(spec, 1500)}
    for chunk, content in images.items():
        store.write(chunk, content)
    store.close()
    array = zarr.open(tmp_path, mode="r")["first/kv"]
    assert array.shape == (2048, 2, 2, 24, 2, 64)
    assert array.dtype == np.float32
    for chunk, content in images.items():
        expected = decoded(spec, content)
        tokens = expected.shape[2]
        np.testing.assert_array_equal(array[chunk][:, :, :tokens], expected)
        assert np.isnan(array[chunk][:, :, tokens:]).all()
        np.testing.assert_array_equal(array[chunk, 1, 0, 3], expected[1, 0, 3])
    assert np.isnan(array[1]).all()
    if codec == "bf16":
        np.testing.assert_array_equal(array[0], kv(spec, 0).float())


def test_the_hierarchy_is_complete_and_nothing_else(tmp_path: Path, spec_with) -> None:
    spec = spec_with(streams=("cond", "uncond"))
    store = ChunkStore.create(tmp_path, spec)
    store.write(5, image(spec, 5, stream=1), 1)
    store.publish_metadata(
        {"poses": np.tile(np.eye(4), (6, 3, 1, 1)), "kept": np.array([True] * 6)},
        {"scale": 1.0, "names": ["x"]},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session = zarr.open_group(tmp_path, mode="r")
        rollout = session["first"]
        assert [name for name, _ in session.members()] == ["first"]
        assert sorted(name for name, _ in rollout.members()) == ["cond", "kept", "poses", "uncond"]
    assert rollout["cond"].shape[0] == 0
    assert rollout["uncond"].shape[0] == 6
    assert not np.isnan(rollout["uncond"][5]).any()
    assert rollout.attrs["scale"] == 1.0
    assert rollout.attrs["worldpager"]["model"] == SPEC.model
    assert rollout["poses"][5, 2].tolist() == np.eye(4).tolist()
    assert rollout["kept"][:].all()
    store.write(7, image(spec, 7, stream=1), 1)
    assert zarr.open_array(tmp_path / "first/uncond", mode="r").shape[0] == 1024
    store.close()


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "uint64", "float32", ">f8"])
@pytest.mark.parametrize("rows", [0, 1, ROWS, ROWS + 1, 3 * ROWS - 1])
def test_small_arrays_of_all_kinds(tmp_path: Path, dtype: str, rows: int) -> None:
    store = ChunkStore.create(tmp_path, SPEC)
    values = np.random.default_rng(rows).integers(0, 2, (rows, 3)).astype(dtype)
    store.publish_metadata({"values": values})
    array = zarr.open_array(tmp_path / "first/values", mode="r")
    assert array.dtype == values.dtype.newbyteorder("=")
    np.testing.assert_array_equal(array[:], values)
    store.close()


def test_small_arrays_grow_shrink_and_are_not_rewritten_in_vain(tmp_path: Path, snapshot) -> None:
    store = ChunkStore.create(tmp_path, SPEC)
    values = np.arange(5.0 * ROWS)
    for rows in (ROWS + 3, 5 * ROWS, 7, 2 * ROWS):
        store.publish_metadata({"values": values[:rows]})
        np.testing.assert_array_equal(
            zarr.open(tmp_path, mode="r")["first/values"][:], values[:rows]
        )
    assert sorted(path.name for path in (tmp_path / "first/values").iterdir()) == [
        "0",
        "1",
        "zarr.json",
    ]
    before = snapshot(tmp_path)
    store.publish_metadata({"values": values[: 2 * ROWS]})
    assert snapshot(tmp_path) == before
    store.close()


def test_attributes_are_the_callers_but_the_identity_is_not(tmp_path: Path) -> None:
    store = ChunkStore.create(tmp_path, SPEC)
    store.publish_metadata({}, {"worldpager": "forged", "note": "hello"})
    store.close()
    attributes = json.loads((tmp_path / "first/zarr.json").read_text())["attributes"]
    assert attributes["note"] == "hello"
    assert attributes["worldpager"]["session"] == "world"
    ChunkStore.open(tmp_path, SPEC).close()


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("../poses", np.zeros(3), "name '../poses' cannot be used"),
        ("kv", np.zeros(3), "is that of a stream"),
        ("poses", np.zeros(3, dtype=object), "numbers or bools and have rows, not object"),
        ("poses", np.zeros(3, dtype="U4"), "numbers or bools"),
        ("poses", np.float64(1), "numbers or bools"),
    ],
)
def test_metadata_that_cannot_be_written(
    tmp_path: Path, name: str, values: np.ndarray, said: str
) -> None:
    store = ChunkStore.create(tmp_path, SPEC)
    with pytest.raises(ConfigError, match=said):
        store.publish_metadata({name: values})
    store.close()

"""Shards written by us, read by zarr-python."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from zarr.registry import get_codec_class, register_codec

from tests.quant.kv_tensors import gaussian, label
from worldpager.errors import CodecError, DamagedBlockError
from worldpager.quant import (
    BlockShape,
    ChunkRecord,
    KeptTokens,
    ShardLayout,
    decode_block,
    get_codec,
    read_header,
    write_block,
    write_tail,
)
from worldpager.quant.zarr_codec import NAME, KVBlockCodec

LAYERS, TOKENS, HEADS, DIM = 3, 17, 2, 64


@pytest.fixture
def array_path(tmp_path: Path) -> Path:
    try:
        get_codec_class(NAME)
    except KeyError:  # the package is on the path but not installed, so has no entry points
        register_codec(NAME, KVBlockCodec)
    shape = (2, TOKENS, HEADS, DIM)
    zarr.create_array(
        tmp_path / "kv",
        shape=(4, LAYERS, *shape),
        shards=(1, LAYERS, *shape),
        chunks=(1, 1, *shape),
        dtype="float32",
        fill_value=float("nan"),
        filters=None,
        serializer=KVBlockCodec(),
        compressors=None,
    )
    return tmp_path / "kv"


def put_chunk(path: Path, chunk: int, tokens: list[int], codec: str = "int4") -> np.ndarray:
    """Write chunk ``chunk`` as its shard; returns what its blocks decode to, NaN below."""
    chosen = get_codec(codec)
    layout = ShardLayout.for_chunk(chosen, [BlockShape(n, HEADS, DIM) for n in tokens])
    image = np.empty(layout.nbytes, np.uint8)
    floats = np.full((LAYERS, 2, TOKENS, HEADS, DIM), np.nan, np.float32)
    for layer, n in enumerate(tokens):
        room = image[layout.extent(layer)]
        k, v = (gaussian(BlockShape(n, HEADS, DIM), 10 * layer + i) for i in (0, 1))
        write_block(room, chosen, label(layer, chunk=chunk), k, v)
        decode_block(room, read_header(room), *torch.from_numpy(floats[layer])[:, :n])
    record = ChunkRecord(
        chunk=chunk, generation=2, layers=LAYERS, frames=3, start_frame=0, position=0.0,
        created=0.0, identity=label().identity,
    )  # fmt: skip
    write_tail(image, layout, record)
    shard = path / "c" / str(chunk) / "0/0/0/0/0"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(image.tobytes())
    return floats


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "int3", "int4-absmax"])
def test_zarr_reads_what_our_codecs_decode(array_path: Path, codec: str) -> None:
    floats = put_chunk(array_path, 2, [TOKENS] * LAYERS, codec)
    array = zarr.open_array(array_path, mode="r")
    assert np.array_equal(array[2], floats)
    assert np.array_equal(array[2, 1, 0, 3:5, 1], floats[1, 0, 3:5, 1])
    assert np.isnan(array[0]).all()


def test_pruned_blocks_end_in_nan(array_path: Path) -> None:
    floats = put_chunk(array_path, 1, [TOKENS, 5, 1])
    array = zarr.open_array(array_path, mode="r")
    assert np.array_equal(array[1], floats, equal_nan=True)
    assert np.isnan(array[1, 1, :, 5:]).all()
    assert not np.isnan(array[1, 1, :, :5]).any()


def test_tokens_that_were_kept_stand_where_they_were(array_path: Path) -> None:
    codec, shape = get_codec("int4"), BlockShape(5, HEADS, DIM)
    layout = ShardLayout.for_chunk(codec, [shape] * LAYERS, TOKENS)
    image = np.empty(layout.nbytes, np.uint8)
    kept = [KeptTokens(np.arange(5) * 2 + layer, TOKENS) for layer in range(LAYERS)]
    for layer, mine in enumerate(kept):
        x = gaussian(shape, layer)
        write_block(image[layout.extent(layer)], codec, label(layer, chunk=0), x, x, mine)
    record = ChunkRecord(
        chunk=0, generation=2, layers=LAYERS, frames=3, start_frame=0, position=0.0,
        created=0.0, identity=label().identity,
    )  # fmt: skip
    write_tail(image, layout, record)
    shard = array_path / "c/0/0/0/0/0/0"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(image.tobytes())
    array = zarr.open_array(array_path, mode="r")
    for layer, mine in enumerate(kept):
        there = ~np.isnan(array[0, layer, 0, :, 0, 0])
        assert np.array_equal(np.flatnonzero(there), mine.ids)


def test_metadata_is_standard_and_has_no_options(array_path: Path) -> None:
    array = zarr.open_array(array_path, mode="r")
    sharding = array.metadata.to_dict()["codecs"][0]
    assert sharding["name"] == "sharding_indexed"
    assert [dict(c) for c in sharding["configuration"]["codecs"]] == [{"name": NAME}]
    assert sharding["configuration"]["index_location"] == "end"
    assert [c["name"] for c in sharding["configuration"]["index_codecs"]] == ["bytes", "crc32c"]


def test_damage_is_found_by_zarr_readers_too(array_path: Path) -> None:
    put_chunk(array_path, 0, [TOKENS] * LAYERS)
    shard = array_path / "c/0/0/0/0/0/0"
    data = bytearray(shard.read_bytes())
    data[200] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DamagedBlockError, match="hash to"):
        zarr.open_array(array_path, mode="r")[0, 0]


def test_blocks_that_do_not_fit_the_array_are_refused(array_path: Path, tmp_path: Path) -> None:
    put_chunk(array_path, 0, [TOKENS] * LAYERS)
    metadata = array_path / "zarr.json"
    text = metadata.read_text()
    metadata.write_text(text.replace(str(TOKENS), "16"))
    with pytest.raises(CodecError, match="tokens up to 16 does not fit chunks of 16"):
        zarr.open_array(array_path, mode="r")[0]
    metadata.write_text(text.replace(" 64", " 32"))
    with pytest.raises(CodecError, match="does not fit array chunks"):
        zarr.open_array(array_path, mode="r")[0]


def test_writing_through_zarr_is_refused_with_the_reason(array_path: Path) -> None:
    array = zarr.open_array(array_path, mode="r+")
    with pytest.raises(CodecError, match="commit chunks through worldpager"):
        array[0] = 1.0


def test_configuration_is_refused() -> None:
    assert KVBlockCodec.from_dict({"name": NAME}) == KVBlockCodec()
    assert KVBlockCodec.from_dict(KVBlockCodec().to_dict()) == KVBlockCodec()
    with pytest.raises(CodecError, match="takes no configuration"):
        KVBlockCodec.from_dict({"name": NAME, "configuration": {"codec": "int4"}})

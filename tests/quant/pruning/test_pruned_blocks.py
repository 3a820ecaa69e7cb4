"""Blocks and chunks of fewer tokens: they know how many, which, and that they were not changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.quant.kv_tensors import CODECS, error_energy, gaussian, label
from worldpager.errors import CodecError, DamagedBlockError
from worldpager.quant import (
    BlockShape,
    ChunkRecord,
    KeptTokens,
    RopeLayout,
    ShardLayout,
    block_size,
    decode_block,
    get_codec,
    kept_tokens,
    read_header,
    verify_block,
    verify_image,
    write_block,
    write_tail,
)
from worldpager.quant.block import FORMAT_VERSION, HEADER_BYTES, PRUNED_VERSION
from worldpager.quant.tokens import bitmap_bytes, read_bitmap

WHOLE = 144
ROPE = RopeLayout.wan(64)


def some(count: int, seed: int = 0, whole: int = WHOLE) -> KeptTokens:
    rng = np.random.default_rng(seed)
    return KeptTokens(np.sort(rng.choice(whole, count, replace=False)), whole)


def block_of(codec: str, kept: KeptTokens, x: torch.Tensor) -> np.ndarray:
    rows = x[torch.from_numpy(kept.ids)]
    out = np.full(block_size(get_codec(codec), BlockShape(*rows.shape), kept.whole), 0xEE, np.uint8)
    write_block(out, get_codec(codec), label(), rows, rows, kept)
    return out


@given(whole=st.integers(1, 300), seed=st.integers(0, 10_000), share=st.floats(0, 1))
def test_a_bitmap_reads_back(whole: int, seed: int, share: float) -> None:
    kept = some(max(1, round(share * whole)), seed, whole)
    bitmap = kept.bitmap()
    assert len(bitmap) == bitmap_bytes(len(kept.ids), whole) <= -(-whole // 8)
    assert np.array_equal(read_bitmap(bitmap, len(kept.ids)), kept.ids)


@pytest.mark.parametrize("ids", [[], [3, 3], [5, 4], [-1, 2], [0, 12]])
def test_tokens_that_are_not_some_of_the_chunk(ids: list[int]) -> None:
    with pytest.raises(CodecError, match="kept tokens"):
        KeptTokens(np.array(ids, np.int64), 12)


@pytest.mark.parametrize("codec", CODECS)
def test_pruning_then_coding_is_coding_the_rows_that_stayed(codec: str) -> None:
    """Scales are of single tokens, so what was dropped changes nothing about what stays."""
    x, kept, rotation = gaussian(BlockShape(WHOLE, 2, 64)), some(37), ROPE.temporal_rotation(-7.5)
    block = block_of(codec, kept, x)
    header = verify_block(block)
    found = [torch.empty(37, 2, 64) for _ in "kv"]
    decode_block(block, header, *found, rotation)
    rows = x[torch.from_numpy(kept.ids)]
    alone = np.empty(get_codec(codec).payload_size(BlockShape(37, 2, 64)), np.uint8)
    get_codec(codec).encode(rows, rows, alone)
    assert np.array_equal(alone, block[HEADER_BYTES : HEADER_BYTES + header.payload_bytes])
    wanted = [torch.empty(37, 2, 64) for _ in "kv"]
    get_codec(codec).decode(alone, BlockShape(37, 2, 64), *wanted, rotation)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert np.array_equal(kept_tokens(block, header), kept.ids)
    still = torch.empty_like(found[0])
    decode_block(block, header, still, still.clone())
    assert error_energy(rows, still) < 0.05


def test_a_block_that_keeps_all_is_of_the_first_format() -> None:
    x = gaussian(BlockShape(WHOLE, 2, 64))
    codec, shape = get_codec("int4"), BlockShape(WHOLE, 2, 64)
    every = KeptTokens(np.arange(WHOLE), WHOLE)
    plain = np.empty(block_size(codec, shape), np.uint8)
    write_block(plain, codec, label(), x, x)
    assert np.array_equal(block_of("int4", every, x), plain)
    assert plain[4] == FORMAT_VERSION and block_of("int4", some(9), x)[4] == PRUNED_VERSION
    assert np.array_equal(kept_tokens(plain, read_header(plain)), np.arange(WHOLE))


def test_a_changed_bitmap_is_noticed() -> None:
    block = block_of("int4", some(37), gaussian(BlockShape(WHOLE, 2, 64)))
    header = verify_block(block)
    for at in range(HEADER_BYTES + header.payload_bytes, header.nbytes):
        changed = block.copy()
        changed[at] ^= 1 << (at % 8)
        with pytest.raises(DamagedBlockError) as caught:
            verify_block(changed)
        assert caught.value.reason == "checksum"
    with pytest.raises(DamagedBlockError) as caught:
        read_bitmap(block[header.nbytes - header.bitmap_bytes : header.nbytes], 36)
    assert caught.value.reason == "header"


def test_another_number_of_rows_than_named_is_refused() -> None:
    x, kept = gaussian(BlockShape(36, 2, 64)), some(37)
    out = np.empty(block_size(get_codec("int4"), BlockShape(36, 2, 64), WHOLE), np.uint8)
    with pytest.raises(CodecError, match="36 tokens are given and 37 named"):
        write_block(out, get_codec("int4"), label(), x, x, kept)


def test_a_chunk_whose_layers_keep_other_tokens() -> None:
    codec, shape = get_codec("int4"), BlockShape(40, 2, 64)
    layout = ShardLayout.for_chunk(codec, [shape] * 3, WHOLE)
    image = np.zeros(layout.nbytes, np.uint8)
    kept = [some(40, seed) for seed in range(3)]
    for layer, mine in enumerate(kept):
        x = gaussian(shape, layer)
        write_block(image[layout.extent(layer)], codec, label(layer), x, x, mine)
    record = ChunkRecord(
        chunk=7, generation=2, layers=3, frames=3, start_frame=21, position=21.0, created=0.0,
        identity=label().identity,
    )  # fmt: skip
    write_tail(image, layout, record)
    _, found, headers = verify_image(image, 3)
    assert found == layout
    for layer, (mine, header) in enumerate(zip(kept, headers, strict=True)):
        assert np.array_equal(kept_tokens(image[layout.extent(layer)], header), mine.ids)


def test_bytes_of_a_real_chunk_go_down_with_its_tokens() -> None:
    sizes = [
        ShardLayout.for_chunk(get_codec("int4"), [BlockShape(n, 12, 128)] * 30, 2640).nbytes
        for n in (2640, 1760, 1320)
    ]
    for size, share in zip(sizes, (1, 2 / 3, 1 / 2), strict=True):
        assert size == pytest.approx(sizes[0] * share, abs=31 * 4096), "but for padding"

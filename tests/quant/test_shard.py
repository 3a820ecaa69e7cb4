from __future__ import annotations

import math
import struct

import google_crc32c
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.quant.kv_tensors import gaussian, label
from worldpager.errors import CodecError, DamagedBlockError
from worldpager.quant import (
    BlockShape,
    ChunkRecord,
    ShardLayout,
    get_codec,
    read_tail,
    tail_bytes,
    verify_image,
    write_block,
    write_tail,
)
from worldpager.quant.block import padded
from worldpager.quant.shard import annex_pages, read_annex

TOKENS = (5, 3, 40)
SHAPES = [BlockShape(tokens, 2, 64) for tokens in TOKENS]
LAYERS = len(SHAPES)
IDENTITY = label().identity


def record(**changes) -> ChunkRecord:
    fields = {
        "chunk": 7,
        "generation": 2,
        "layers": LAYERS,
        "frames": 3,
        "start_frame": 21,
        "position": 21.0,
        "created": 1.75e9,
        "identity": IDENTITY,
        "epoch": 1,
        "place": tuple(float(i) for i in range(12)),
    }
    return ChunkRecord(**{**fields, **changes})


def make_image(**changes) -> tuple[np.ndarray, ShardLayout]:
    codec = get_codec("int4")
    layout = ShardLayout.for_chunk(codec, SHAPES)
    image = np.full(layout.nbytes, 0xEE, np.uint8)
    for layer, shape in enumerate(SHAPES):
        x = gaussian(shape, layer)
        write_block(image[layout.extent(layer)], codec, label(layer), x, x)
    write_tail(image, layout, record(**changes))
    return image, layout


def with_index(image: np.ndarray, entries: list[tuple[int, int]]) -> np.ndarray:
    table = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    index = table + struct.pack("<I", google_crc32c.value(table))
    out = image.copy()
    out[len(out) - len(index) :] = np.frombuffer(index, np.uint8)
    return out


def test_layout_is_pages_and_adds_up() -> None:
    _, layout = make_image()
    assert layout.lengths == (64 + 5 * 2 * 68, 64 + 3 * 2 * 68, 64 + 40 * 2 * 68)
    assert layout.offsets == (0, 4096, 8192, 16384)
    assert layout.block(2) == (8192, 64 + 5440)
    assert layout.extent(1) == slice(4096, 8192)
    assert layout.tail_offset == 16384
    assert layout.nbytes == 16384 + 4096


def test_matrix_game_chunk() -> None:
    layout = ShardLayout.for_chunk(get_codec("int4"), [BlockShape(2640, 12, 128)] * 30)
    assert layout.lengths[0] == 64 + 4_308_480
    assert layout.nbytes == 30 * 4_308_992 + 4096
    assert all(offset % 4096 == 0 for offset in layout.offsets)


def test_tails_of_many_layers_take_more_pages() -> None:
    assert tail_bytes(1) == 4096
    assert tail_bytes(239) == 4096
    assert tail_bytes(240) == 8192


def test_record_and_index_come_back() -> None:
    image, layout = make_image()
    found, found_layout = read_tail(image[layout.tail_offset :], len(image), LAYERS)
    assert found == record()
    assert found_layout == layout
    assert read_tail(image, len(image), LAYERS) == (found, layout)
    assert not image[layout.tail_offset + 256 : -(16 * LAYERS + 4)].any()


def test_no_pose_is_nan_and_the_record_is_256_bytes() -> None:
    plain = ChunkRecord(0, 0, 1, 3, 0, 0.0, 0.0, 0)
    packed = plain.pack()
    assert len(packed) == 256
    found = ChunkRecord.unpack(np.frombuffer(packed, np.uint8))
    assert len(found.place) == 12
    assert all(math.isnan(x) for x in found.place)


def test_verified_image() -> None:
    image, layout = make_image()
    found, found_layout, headers = verify_image(
        image, LAYERS, identity=IDENTITY, chunk=7, generation=2
    )
    assert found == record()
    assert found_layout == layout
    assert [h.label.layer for h in headers] == [0, 1, 2]
    assert [h.shape for h in headers] == SHAPES


@pytest.mark.parametrize(("field", "value"), [("identity", 1), ("chunk", 8), ("generation", 0)])
def test_another_chunk_is_refused(field: str, value: int) -> None:
    image, _ = make_image()
    with pytest.raises(DamagedBlockError, match=f"of {field}") as caught:
        verify_image(image, LAYERS, **{field: value})
    assert caught.value.reason == "identity"


@pytest.mark.parametrize("field", ["identity", "chunk", "generation"])
def test_a_record_over_blocks_of_another_chunk_is_refused(field: str) -> None:
    image, _ = make_image(**{field: 1})
    with pytest.raises(DamagedBlockError) as caught:
        verify_image(image, LAYERS)
    assert caught.value.reason == "identity"


def test_blocks_in_each_others_place_are_refused() -> None:
    codec, shape = get_codec("int4"), SHAPES[0]
    layout = ShardLayout.for_chunk(codec, [shape] * 2)
    image = np.empty(layout.nbytes, np.uint8)
    x = gaussian(shape)
    for layer in (0, 1):
        write_block(image[layout.extent(1 - layer)], codec, label(layer), x, x)
    write_tail(image, layout, record(layers=2))
    with pytest.raises(DamagedBlockError, match="of layer 1") as caught:
        verify_image(image, 2)
    assert caught.value.reason == "identity"


def test_every_byte_that_carries_something_is_guarded() -> None:
    image, layout = make_image()
    tail = layout.tail_offset
    carries = [*range(tail, tail + 256), *range(len(image) - 16 * LAYERS - 4, len(image))]
    for layer in range(LAYERS):
        start, length = layout.block(layer)
        carries += [*range(start, start + 64), *range(start + 64, start + length, 37)]
        carries.append(start + length - 1)
    reasons = set()
    for at in carries:
        image[at] ^= 1 << at % 8
        with pytest.raises(DamagedBlockError) as caught:
            verify_image(image, LAYERS)
        reasons.add(caught.value.reason)
        image[at] ^= 1 << at % 8
    assert reasons >= {"magic", "version", "header", "checksum", "record", "index"}
    verify_image(image, LAYERS)


@pytest.mark.parametrize(
    "entries",
    [
        [(0, 744), (4096, 472), (2**64 - 1, 2**64 - 1)],
        [(0, 744), (4096, 472), (8192, 64)],
        [(0, 744), (4096, 472), (8192, 2**63)],
        [(0, 744), (4096, 472), (4096, 5504)],
        [(4096, 744), (0, 472), (8192, 5504)],
        [(0, 744), (4096, 472), (8193, 5504)],
        [(0, 9000), (12288, 472), (16384, 5504)],
        [(0, 745), (4096, 472), (8192, 5504)],
        [(0, 0), (0, 0), (0, 0)],
    ],
)
def test_sealed_indices_that_lie_are_refused(entries: list[tuple[int, int]]) -> None:
    image, _ = make_image()
    with pytest.raises(DamagedBlockError) as caught:
        verify_image(with_index(image, entries), LAYERS)
    assert caught.value.reason == "index"


def test_images_of_the_wrong_length_are_refused() -> None:
    image, layout = make_image()
    for cut in (image[:-1], image[:4096], image[:0], image[4096:], image[:-4096]):
        with pytest.raises(DamagedBlockError):
            verify_image(cut, LAYERS)
    with pytest.raises(DamagedBlockError) as caught:
        read_tail(image[layout.tail_offset + 1 :], len(image), LAYERS)
    assert caught.value.reason == "size"
    for layers in (1, 2, 4, 5000):
        with pytest.raises(DamagedBlockError):
            verify_image(image, layers)


def test_a_newer_record_is_told_from_a_damaged_one() -> None:
    import xxhash

    packed = bytearray(record().pack())
    packed[4] = 3
    packed[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(packed[:-8])))
    with pytest.raises(DamagedBlockError) as caught:
        ChunkRecord.unpack(np.frombuffer(bytes(packed), np.uint8))
    assert caught.value.reason == "version"


@given(data=st.binary(min_size=1, max_size=600), layers=st.integers(1, 300))
def test_random_tails_are_damage_and_nothing_else(data: bytes, layers: int) -> None:
    image = np.resize(np.frombuffer(data, np.uint8), 16384)
    with pytest.raises(DamagedBlockError):
        verify_image(image, layers)
    with pytest.raises(DamagedBlockError):
        read_tail(np.frombuffer(data, np.uint8), len(data), layers)


@pytest.mark.parametrize("nbytes", [1, 3772, 3773, 30_000])
def test_an_annex_comes_back_from_the_end_alone_and_every_byte_of_it_is_guarded(nbytes) -> None:
    codec, shape = get_codec("int4"), SHAPES[0]
    layout = ShardLayout.for_chunk(codec, [shape], annex=nbytes)
    plain = ShardLayout.for_chunk(codec, [shape])
    assert layout.nbytes - plain.nbytes == annex_pages(1, nbytes)
    assert annex_pages(1, nbytes) == (0 if nbytes <= 4096 - 256 - 20 else padded(nbytes))
    image, annex = np.full(layout.nbytes, 7, np.uint8), bytes(range(1, 251)) * 200
    x = gaussian(shape)
    write_block(image[layout.extent(0)], codec, label(0), x, x)
    write_tail(image, layout, record(layers=1), annex[:nbytes])
    found, found_layout, _ = verify_image(image, 1)
    assert found_layout == layout and found.annex_bytes == nbytes
    end = image[layout.offsets[-1] :]
    assert read_annex(end, found) == read_annex(image, found) == annex[:nbytes]
    for at in range(layout.annex_extent.start, layout.annex_extent.stop, 97):
        image[at] ^= 1
        with pytest.raises(DamagedBlockError, match="annex"):
            verify_image(image, 1)
        image[at] ^= 1
    for bad in (b"", annex[: nbytes + 1]):
        with pytest.raises(CodecError, match="annex has"):
            write_tail(image, layout, record(layers=1), bad)


def test_a_chunk_without_annex_is_what_version_1_wrote() -> None:
    assert record().pack()[4:6] == b"\x01\x00"
    assert not any(record().pack()[248 - 96 : 248])
    with pytest.raises(CodecError, match="at most 65536"):
        ShardLayout((100,), 65_537)


def test_what_does_not_fit_is_refused_at_writing() -> None:
    image, layout = make_image()
    with pytest.raises(CodecError, match="image is"):
        write_tail(image[4096:], layout, record())
    with pytest.raises(CodecError, match="record says 2 layers"):
        write_tail(image, layout, record(layers=2))
    for bad in ({"chunk": 2**32}, {"layers": 2**16}, {"place": (0.0,)}, {"identity": -1}):
        with pytest.raises(CodecError, match="does not fit"):
            record(**bad).pack()
    for lengths in ((), (64,), (100, 0)):
        with pytest.raises(CodecError, match="1 to 65535 blocks"):
            ShardLayout(lengths)


def test_blocks_are_encoded_in_place() -> None:
    image, layout = make_image()
    block = image[layout.extent(2)]
    assert block.base is not None
    k = torch.empty(40, 2, 64)
    _, _, headers = verify_image(image, LAYERS)
    from worldpager.quant import decode_block

    decode_block(block, headers[2], k, torch.empty_like(k))
    assert float((k - gaussian(SHAPES[2], 2)).square().mean()) < 0.01

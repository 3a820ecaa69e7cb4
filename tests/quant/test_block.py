from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quant.kv_tensors import CODECS, gaussian, label
from worldpager.errors import CodecError, DamagedBlockError, NonFiniteError
from worldpager.quant import (
    BlockShape,
    RopeLayout,
    block_size,
    decode_block,
    get_codec,
    identity_hash,
    read_header,
    verify_block,
    write_block,
)

SHAPE = BlockShape(3, 2, 64)
FIELDS = struct.Struct("<4sHHIHHHHIIIdqQQ")
PAYLOAD_FIELD, CHECKSUM_FIELD = 10, 14


def make_block(codec: str = "int4", shape: BlockShape = SHAPE, **fields) -> np.ndarray:
    chosen = get_codec(codec)
    out = np.full(block_size(chosen, shape), 0xEE, np.uint8)
    write_block(out, chosen, label(**fields), gaussian(shape, 1), gaussian(shape, 2))
    return out


def sealed(block: np.ndarray, **changes: object) -> np.ndarray:
    """``block`` with header fields (by number) changed and a checksum that holds."""
    fields = list(FIELDS.unpack(block[:64].tobytes()))
    length = fields[PAYLOAD_FIELD]
    for number, value in changes.items():
        fields[int(number.removeprefix("f"))] = value
    head = FIELDS.pack(*fields)[:56]
    fields[CHECKSUM_FIELD] = xxhash.xxh3_64_intdigest(head + block[64 : 64 + length].tobytes())
    out = block.copy()
    out[:64] = np.frombuffer(FIELDS.pack(*fields), np.uint8)
    return out


def test_header_bytes() -> None:
    block = make_block()
    magic, version, codec, *rest, checksum = FIELDS.unpack(block[:64].tobytes())
    assert (magic, version, codec) == (b"WPKV", 1, 3)
    assert rest == [3, 2, 64, 0, 3, 2, 7, 408, 21.0, 21, 0x1122334455667788]
    assert checksum == xxhash.xxh3_64_intdigest(
        block[:56].tobytes() + block[64 : 64 + 408].tobytes()
    )
    assert len(block) == 4096
    assert not block[64 + 408 :].any()


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_written_is_read(codec: str) -> None:
    shape = BlockShape(48, 2, 64)
    k, v = gaussian(shape, 1, torch.bfloat16), gaussian(shape, 2, torch.bfloat16)
    chosen = get_codec(codec)
    block = np.empty(block_size(chosen, shape), np.uint8)
    written = write_block(block, chosen, label(layer=4, position=2.5, frame=-3), k, v)
    header = verify_block(block, identity=label().identity, chunk=7, layer=4, generation=2)
    assert header == written == read_header(block)
    assert header.shape == shape
    assert header.label == label(layer=4, position=2.5, frame=-3)
    assert len(block) % 4096 == 0
    rotation = RopeLayout.wan(64).temporal_rotation(4)
    found = torch.empty_like(k), torch.empty_like(v)
    decode_block(block, header, *found, rotation)
    wanted = torch.empty_like(k), torch.empty_like(v)
    chosen.decode(block[64 : 64 + header.payload_bytes], shape, *wanted, rotation)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_same_input_same_bytes() -> None:
    assert np.array_equal(make_block(), make_block())


def test_every_bit_of_the_header_is_guarded() -> None:
    block = make_block()
    reasons = set()
    for bit in range(64 * 8):
        damaged = block.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedBlockError) as caught:
            verify_block(damaged, identity=label().identity, chunk=7, layer=0, generation=2)
        reasons.add(caught.value.reason)
    assert reasons == {"magic", "version", "header", "checksum"}


@pytest.mark.parametrize("codec", CODECS)
def test_every_byte_of_the_payload_is_guarded(codec: str) -> None:
    block = make_block(codec, BlockShape(2, 1, 40))
    end = 64 + read_header(block).payload_bytes
    for at in range(64, end):
        block[at] ^= 1 << at % 8
        with pytest.raises(DamagedBlockError) as caught:
            verify_block(block)
        assert caught.value.reason == "checksum"
        block[at] ^= 1 << at % 8
    verify_block(block)
    block[end:] = 0xFF  # padding carries nothing
    verify_block(block)


@pytest.mark.parametrize(
    ("field", "value"), [("identity", 1), ("chunk", 8), ("layer", 1), ("generation", 3)]
)
def test_a_sound_block_of_something_else_is_refused(field: str, value: int) -> None:
    with pytest.raises(DamagedBlockError, match=f"of {field}") as caught:
        verify_block(make_block(), **{field: value})
    assert caught.value.reason == "identity"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"f0": b"WPKW"}, "magic"),
        ({"f1": 3}, "version"),
        ({"f1": 2}, "header"),
        ({"f2": 99}, "header"),
        ({"f2": 2}, "header"),
        ({"f3": 0}, "header"),
        ({"f3": 2**32 - 1}, "header"),
        ({"f3": 2**32 - 1, "f4": 65535, "f5": 65534, "f10": 2**32 - 1}, "header"),
        ({"f3": 300, "f10": 40800}, "size"),
        ({"f5": 63}, "header"),
        ({"f10": 0}, "header"),
        ({"f10": 2**32 - 1}, "header"),
        ({"f11": float("nan")}, "header"),
        ({"f11": float("-inf")}, "header"),
    ],
)
def test_headers_that_lie_are_refused_before_their_lengths_are_used(
    changes: dict, reason: str
) -> None:
    with pytest.raises(DamagedBlockError) as caught:
        verify_block(sealed(make_block(), **changes))
    assert caught.value.reason == reason


@pytest.mark.parametrize("length", [0, 1, 63, 64, 64 + 407])
def test_cut_off_blocks_are_refused(length: int) -> None:
    with pytest.raises(DamagedBlockError) as caught:
        verify_block(make_block()[:length])
    assert caught.value.reason == "size"


@given(data=st.binary(max_size=5000))
def test_random_bytes_are_damage_and_nothing_else(data: bytes) -> None:
    with pytest.raises(DamagedBlockError):
        verify_block(np.frombuffer(data, np.uint8))


@given(edits=st.dictionaries(st.integers(0, 63), st.integers(0, 255), min_size=1, max_size=12))
@settings(max_examples=300)
def test_edited_headers_are_damage_and_nothing_else(edits: dict[int, int]) -> None:
    block = make_block()
    damaged = block.copy()
    for at, value in edits.items():
        damaged[at] = value
    if np.array_equal(block, damaged):
        return
    with pytest.raises(DamagedBlockError):
        verify_block(damaged)


@given(
    fields=st.tuples(
        st.integers(0, 2**16 - 1),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**16 - 1),
        st.integers(0, 2**16 - 1),
        st.integers(0, 2**32 - 1),
    )
)
def test_sealed_nonsense_is_damage_and_nothing_else(fields: tuple[int, ...]) -> None:
    names = ("f2", "f3", "f4", "f5", "f10")
    block = sealed(make_block(), **dict(zip(names, fields, strict=True)))
    with pytest.raises(DamagedBlockError):
        verify_block(block)


def test_a_failed_encode_leaves_nothing_that_passes_for_a_block() -> None:
    block = make_block()
    k = gaussian(SHAPE)
    bad = k.clone()
    bad[2, 1, 63] = torch.nan
    with pytest.raises(NonFiniteError):
        write_block(block, get_codec("int4"), label(), k, bad)
    with pytest.raises(DamagedBlockError, match="no block here"):
        verify_block(block)


def test_only_exact_room_is_written() -> None:
    codec, k = get_codec("int4"), gaussian(SHAPE)
    for room in (np.empty(4095, np.uint8), np.empty(8192, np.uint8)):
        with pytest.raises(CodecError, match="takes 4096 bytes"):
            write_block(room, codec, label(), k, k)
    with pytest.raises(CodecError, match="4 GiB"):
        block_size(codec, BlockShape(2**20, 128, 128))
    for room in (np.empty(8192, np.uint8)[::2], np.empty(4096, np.int8)):
        with pytest.raises(CodecError, match="contiguous"):
            write_block(room, codec, label(), k, k)


@pytest.mark.parametrize(
    "fields",
    [
        {"layer": 2**16},
        {"chunk": -1},
        {"chunk": 2**32},
        {"generation": 2**32},
        {"frames": 2**16},
        {"identity": 2**64},
        {"frame": 2**63},
        {"position": float("nan")},
        {"position": float("inf")},
    ],
)
def test_labels_that_do_not_fit_are_refused(fields: dict) -> None:
    with pytest.raises(CodecError, match=f"block .*{next(iter(fields))}"):
        label(**fields)


def test_identity_is_a_function_of_the_fields_only() -> None:
    fields = {"model": "m", "layers": 30, "theta": 10000.0}
    assert identity_hash(fields) == identity_hash(dict(reversed(fields.items())))
    assert identity_hash(fields) == xxhash.xxh3_64_intdigest(
        b'{"layers":30,"model":"m","theta":10000.0}'
    )
    for other in ({**fields, "layers": 31}, {**fields, "layers": "30"}, {"model": "m"}):
        assert identity_hash(other) != identity_hash(fields)
    assert 0 <= identity_hash({}) < 2**64

"""The compiled kernels against the plain reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quant.kv_tensors import (
    DTYPES,
    decode,
    encode,
    error_energy,
    gaussian,
    roundtrip,
    seeds,
    small_shapes,
)
from worldpager.quant import BlockShape, get_codec, reference
from worldpager.quant.groups import group_count, group_ends, hadamard_blocks, signs

BITS = {"int4": 4, "int3": 3}


def split(payload: np.ndarray, shape: BlockShape, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale words ``[2, tokens, heads, groups]`` and codes ``[2, tokens, heads, dim]``."""
    rows, groups = shape.tokens * shape.heads, group_count(shape.head_dim)
    half = payload.reshape(2, -1)
    words = half[:, : rows * groups * 2].copy().view("<u2")
    data = half[:, rows * groups * 2 :].reshape(2 * rows, -1)
    string = np.unpackbits(data, axis=1, bitorder="little").reshape(2 * rows, shape.head_dim, bits)
    codes = (string * (1 << np.arange(bits))).sum(-1)
    return (
        words.reshape(2, shape.tokens, shape.heads, groups),
        codes.reshape(2, shape.tokens, shape.heads, shape.head_dim),
    )


def words_of(scales: torch.Tensor) -> np.ndarray:
    return scales.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("codec", BITS)
@given(shape=small_shapes, seed=seeds, dtype=st.sampled_from(DTYPES), outlier=st.booleans())
@settings(max_examples=12)
def test_rotated_codecs(
    codec: str, shape: BlockShape, seed: int, dtype: torch.dtype, outlier: bool
) -> None:
    k, v = gaussian(shape, seed, dtype), gaussian(shape, seed + 1, dtype)
    if outlier:
        k[..., seed % shape.head_dim] *= 50
        v[0] = 0
    bits = BITS[codec]
    words, codes = split(encode(codec, k, v), shape, bits)
    for i, x in enumerate((k, v)):
        wanted_codes, wanted_scales = reference.encode_rotated(x, bits)
        assert np.array_equal(words[i], words_of(wanted_scales))
        assert np.array_equal(codes[i], wanted_codes.numpy())
        decoded = reference.decode_rotated(wanted_codes, wanted_scales, bits)
        assert torch.equal(roundtrip(codec, x), decoded)


@pytest.mark.parametrize(
    ("codec", "frame", "head_dim"),
    [("int4", 16, 64), ("int4", 25, 128), ("int3", 16, 64), ("int4", 17, 80), ("int3", 40, 200)],
)
def test_values_make_up_for_half_of_what_the_frame_before_lost(
    codec: str, frame: int, head_dim: int
) -> None:
    shape = BlockShape(3 * frame, 2, head_dim)
    k, v = gaussian(shape, 1, torch.bfloat16), gaussian(shape, 2, torch.bfloat16)
    v[frame + 3, 1] = 0  # rows of zeros stay zeros
    out = np.empty(get_codec(codec).payload_size(shape), np.uint8)
    get_codec(codec).encode(k, v, out, frame)
    words, codes = split(out, shape, BITS[codec])
    for i, (x, carried) in enumerate(((k, 0), (v, frame))):
        wanted_codes, wanted_scales = reference.encode_rotated(x, BITS[codec], carried)
        assert np.array_equal(words[i], words_of(wanted_scales))
        assert np.array_equal(codes[i], wanted_codes.numpy())
    _, found = decode(codec, out, shape)
    alone = decode(codec, encode(codec, k, v), shape)[1]
    assert not found[frame + 3, 1].any()

    def of_means(x: torch.Tensor) -> float:
        """Error of what attention sees that looks at a place in all frames alike."""
        wanted, got = (y.float().unflatten(0, (3, frame)).mean(0) for y in (v, x))
        return error_energy(wanted, got)

    assert of_means(found) < 0.75 * of_means(alone)
    assert error_energy(v, found) < 1.25 * error_energy(v, alone)


def test_frames_shorter_than_a_tile_are_coded_alone() -> None:
    x, codec = gaussian(BlockShape(45, 2, 64)), get_codec("int4")
    out = np.empty(codec.payload_size(BlockShape(45, 2, 64)), np.uint8)
    codec.encode(x, x, out, 15)
    assert np.array_equal(out, encode("int4", x, x))


@pytest.mark.parametrize(
    ("codec", "tokens", "head_dim"),
    [("int4", 1024, 64), ("int4", 1024, 128), ("int3", 1111, 40), ("int4", 1537, 96)],
)
def test_key_means_travel_in_the_sign_bits_of_scales(
    codec: str, tokens: int, head_dim: int
) -> None:
    shape = BlockShape(tokens, 2, head_dim)
    k, v = gaussian(shape, 1, torch.bfloat16), gaussian(shape, 2, torch.bfloat16)
    k[:, 0, :3] += torch.tensor([40, -7, 3])
    k[5, 1, 7] = 3000  # would shift the means of all other tokens: this head goes without
    payload = encode(codec, k, v)
    words, codes = split(payload, shape, BITS[codec])
    mean = reference.channel_means(k)
    assert mean[0, :3].tolist() == pytest.approx([40, -7, 3], abs=0.2)
    assert not mean[1].any()
    signs_of_scales = reference.spread_means(mean, tokens, group_count(head_dim))
    assert np.array_equal(words[0] >> 15, signs_of_scales.numpy())
    assert not (words[1] >> 15).any()
    wanted_codes, wanted_scales = reference.encode_rotated(k.float() - mean, BITS[codec])
    assert np.array_equal(codes[0], wanted_codes.numpy())
    assert np.array_equal(words[0] & 0x7FFF, words_of(wanted_scales))
    found, _ = decode(codec, payload, shape)
    wanted = reference.decode_rotated(wanted_codes, wanted_scales, BITS[codec]) + mean
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("tokens", "head_dim"), [(1023, 64), (1023, 128), (639, 40), (1535, 96)])
def test_blocks_too_short_for_means_have_none(tokens: int, head_dim: int) -> None:
    k = gaussian(BlockShape(tokens, 1, head_dim)) + 3
    words, _ = split(encode("int4", k, k), BlockShape(tokens, 1, head_dim), 4)
    assert not (words >> 15).any()
    assert np.array_equal(words[0], words[1])


def test_means_are_kept_by_heads_that_gain() -> None:
    plain = gaussian(BlockShape(1024, 3, 64))
    offset = plain + 5
    padded = offset.clone()
    padded[100:, 1] = 0
    assert reference.channel_means(offset).all()
    assert reference.channel_means(padded)[[0, 2]].all()
    assert not reference.channel_means(padded)[1].any()
    assert (roundtrip_k("int4", padded)[100:, 1] == 0).all()
    for x in (plain, offset):
        middle = x.mean(0)
        found = error_energy(x - middle, roundtrip_k("int4", x) - middle)
        assert found == pytest.approx(0.007, rel=0.1)


def roundtrip_k(codec: str, k: torch.Tensor) -> torch.Tensor:
    return decode(codec, encode(codec, k, k), BlockShape(*k.shape))[0]


@given(shape=small_shapes, seed=seeds, dtype=st.sampled_from(DTYPES))
@settings(max_examples=20)
def test_int8(shape: BlockShape, seed: int, dtype: torch.dtype) -> None:
    x = gaussian(shape, seed, dtype) * 3
    words, codes = split(encode("int8", x, x), shape, 8)
    wanted_codes, wanted_scales = reference.encode_int8(x)
    assert np.array_equal(words[0], words_of(wanted_scales))
    assert np.array_equal(codes[0].astype(np.uint8).view(np.int8), wanted_codes.numpy())
    assert torch.equal(roundtrip("int8", x), reference.decode_int8(wanted_codes, wanted_scales))


@given(shape=small_shapes, seed=seeds, dtype=st.sampled_from(DTYPES))
@settings(max_examples=20)
def test_absmax(shape: BlockShape, seed: int, dtype: torch.dtype) -> None:
    x = gaussian(shape, seed, dtype) * 3
    words, codes = split(encode("int4-absmax", x, x), shape, 4)
    wanted_codes, wanted_scales = reference.encode_absmax(x)
    assert np.array_equal(words[0], words_of(wanted_scales))
    assert np.array_equal(codes[0] - 8, wanted_codes.numpy())
    decoded = reference.decode_absmax(wanted_codes, wanted_scales)
    assert torch.equal(roundtrip("int4-absmax", x), decoded)


@pytest.mark.parametrize("head_dim", [2, 6, 40, 64, 80, 96, 128, 200])
def test_rotation_is_orthonormal(head_dim: int) -> None:
    unit = torch.eye(head_dim)
    matrix = reference.rotate(unit)
    torch.testing.assert_close(matrix @ matrix.T, unit, atol=1e-5, rtol=0)
    torch.testing.assert_close(reference.rotate_back(matrix), unit, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [2, 8, 64])
def test_hadamard_is_sylvesters(size: int) -> None:
    i = np.arange(size)
    sylvester = 1 - 2 * (np.bitwise_count(i[:, None] & i[None, :]) % 2).astype(np.float32)
    assert np.array_equal(reference.hadamard(torch.eye(size)).numpy(), sylvester)


def test_division_of_a_head() -> None:
    assert hadamard_blocks(128).tolist() == [128]
    assert hadamard_blocks(96).tolist() == [64, 32]
    assert hadamard_blocks(80).tolist() == [64, 16]
    assert hadamard_blocks(40).tolist() == [32, 8]
    assert group_ends(128).tolist() == [64, 128]
    assert group_ends(96).tolist() == [96]
    assert group_ends(40).tolist() == [40]
    assert group_ends(200).tolist() == [64, 128, 200]


def test_sign_vector_is_part_of_the_format() -> None:
    assert "".join("-+"[int(s > 0)] for s in signs(40)) == SIGNS_40
    assert np.array_equal(signs(128)[:40], signs(40))


SIGNS_40 = "++--+-+-+--++--++++-++-+----+-+-+----+-+"

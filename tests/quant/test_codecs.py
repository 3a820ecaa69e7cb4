from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quant.kv_tensors import (
    CODECS,
    DTYPES,
    decode,
    encode,
    error_energy,
    gaussian,
    roundtrip,
    seeds,
    shapes,
    small_shapes,
)
from worldpager.errors import CodecError, NonFiniteError
from worldpager.quant import BlockShape, Codec, RopeLayout, codec_by_id, codec_names, get_codec

LOSSY = [name for name in CODECS if name != "bf16"]
FEW_BITS = ["int4", "int3", "int4-absmax"]


def test_names_and_numbers_are_part_of_the_format() -> None:
    numbers = {name: get_codec(name).id for name in codec_names()}
    assert numbers == {"bf16": 1, "int8": 2, "int4": 3, "int3": 4, "int4-absmax": 5}
    assert all(codec_by_id(get_codec(name).id).name == name for name in CODECS)
    assert all(isinstance(get_codec(name), Codec) for name in CODECS)


def test_unknown_codecs_are_refused_by_name() -> None:
    with pytest.raises(CodecError, match=r"no codec 'int5'; known are bf16, int8"):
        get_codec("int5")
    with pytest.raises(CodecError, match="no codec has id 99"):
        codec_by_id(99)


MATRIX_GAME = BlockShape(2640, 12, 128)
REFERENCE_SHAPES = [
    MATRIX_GAME,
    BlockShape(4680, 12, 128),
    BlockShape(4680, 40, 128),
    BlockShape(144, 2, 64),
    BlockShape(48, 2, 64),
]


@pytest.mark.parametrize("codec", ["int4", "int4-absmax"])
def test_matrix_game_sizes(codec: str) -> None:
    size = get_codec(codec).payload_size(MATRIX_GAME)
    assert size == 4_308_480
    assert 30 * size == 129_254_400


@pytest.mark.parametrize("shape", REFERENCE_SHAPES, ids=str)
@pytest.mark.parametrize(
    ("codec", "bits"),
    [("bf16", 16), ("int8", 8.25), ("int4", 4.25), ("int3", 3.25), ("int4-absmax", 4.25)],
)
def test_bits_per_value_with_all_side_data(codec: str, bits: float, shape: BlockShape) -> None:
    assert get_codec(codec).payload_size(shape) * 8 == bits * 2 * shape.elements


@pytest.mark.parametrize(("head_dim", "bits"), [(40, 4.4), (80, 4.2), (96, 4 + 1 / 6), (200, 4.24)])
def test_bits_where_64_does_not_divide_the_head(head_dim: int, bits: float) -> None:
    shape = BlockShape(7, 3, head_dim)
    found = get_codec("int4").payload_size(shape) * 8 / (2 * shape.elements)
    assert found == pytest.approx(bits)


@pytest.mark.parametrize(
    ("codec", "head_dim"), [("int4", 63), ("int4-absmax", 1), ("int3", 60), ("int3", 2)]
)
def test_head_dims_that_do_not_pack_are_refused_by_name(codec: str, head_dim: int) -> None:
    with pytest.raises(CodecError, match=rf"{codec} codec needs head_dim .* not {head_dim}"):
        get_codec(codec).payload_size(BlockShape(3, 2, head_dim))


@pytest.mark.parametrize("dims", [(0, 1, 64), (1, 0, 64), (1, 1, 0), (1, 70000, 64), (-1, 1, 64)])
def test_shapes_that_no_block_has_are_refused(dims: tuple[int, int, int]) -> None:
    with pytest.raises(CodecError, match="block"):
        BlockShape(*dims)


@given(shape=shapes, seed=seeds, dtype=st.sampled_from(DTYPES))
@settings(max_examples=12)
def test_bf16_rounds_once_and_is_exact_for_bf16(
    shape: BlockShape, seed: int, dtype: torch.dtype
) -> None:
    x = gaussian(shape, seed, dtype)
    assert torch.equal(roundtrip("bf16", x, torch.bfloat16), x.bfloat16())
    assert torch.equal(roundtrip("bf16", x), x.bfloat16().float())


@given(
    words=st.lists(st.integers(0, 65535), min_size=64, max_size=64), dtype=st.sampled_from(DTYPES)
)
def test_bf16_keeps_every_finite_word_and_converts_like_torch(
    words: list[int], dtype: torch.dtype
) -> None:
    patterns = torch.tensor(words).to(torch.int16).view(torch.bfloat16)
    x = torch.where(patterns.isfinite(), patterns, 0).view(1, 1, 64)
    wanted = x.to(dtype)
    assert torch.equal(roundtrip("bf16", x, dtype), wanted)


@given(words=st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=64))
def test_bf16_rounds_every_fp32_like_torch(words: list[int]) -> None:
    patterns = torch.tensor(words).to(torch.int32).view(torch.float32)
    keep = patterns.isfinite() & patterns.bfloat16().isfinite()
    x = torch.where(keep, patterns, 0).view(1, 1, 64)
    assert torch.equal(roundtrip("bf16", x, torch.bfloat16), x.bfloat16())


def test_every_fp16_value_is_read_and_written_exactly() -> None:
    every = torch.arange(65536).to(torch.int16).view(torch.float16)
    x = torch.where(every.isfinite(), every, 0).view(32, 16, 128)
    assert torch.equal(roundtrip("bf16", x, torch.bfloat16), x.bfloat16())
    assert torch.equal(roundtrip("bf16", x, torch.float16), x.bfloat16().half())


ENERGY = {"int8": 5e-5, "int4": 0.0080, "int3": 0.0330, "int4-absmax": 0.0135}


@given(shape=shapes, seed=seeds, scale=st.sampled_from([1e-2, 1.0, 1e3]))
@settings(max_examples=12)
def test_error_energy_of_gaussian_blocks(shape: BlockShape, seed: int, scale: float) -> None:
    x = gaussian(shape, seed) * scale
    few = 1 + 6 / np.sqrt(shape.tokens * shape.heads)  # small blocks scatter about the mean
    for codec, bound in ENERGY.items():
        assert error_energy(x, roundtrip(codec, x)) < bound * few, codec


@pytest.mark.parametrize(
    ("codec", "energy"), [("int4", 0.0070), ("int3", 0.0301), ("int4-absmax", 0.0116)]
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_error_energy_of_a_large_gaussian_block(codec: str, energy: float, head_dim: int) -> None:
    x = gaussian(BlockShape(512, 4, head_dim))
    assert error_energy(x, roundtrip(codec, x)) == pytest.approx(energy, rel=0.04)


@pytest.mark.parametrize("codec", ["int4", "int3"])
def test_inner_products_are_kept_per_group(codec: str) -> None:
    x = gaussian(BlockShape(200, 2, 64))
    y = roundtrip(codec, x)
    ratio = (x * y).sum(-1) / (x * x).sum(-1)
    assert torch.allclose(ratio, torch.ones(()), atol=1e-3)  # what an fp16 scale leaves


def test_int8_error_is_at_most_half_a_step() -> None:
    x = gaussian(BlockShape(64, 3, 128)) * torch.logspace(-30, 30, 64)[:, None, None]
    step = x.unflatten(-1, (2, 64)).abs().amax(-1, keepdim=True) / 127 * (1 + 2**-7)
    error = (roundtrip("int8", x) - x).unflatten(-1, (2, 64)).abs()
    assert (error <= step * 0.5001).all()


def test_absmax_error_is_at_most_half_a_step() -> None:
    x = gaussian(BlockShape(64, 3, 128))
    step = x.unflatten(-1, (2, 64)).abs().amax(-1, keepdim=True) / 7 * (1 + 2**-10)
    error = (roundtrip("int4-absmax", x) - x).unflatten(-1, (2, 64)).abs()
    assert (error <= step * 0.505).all()


@given(
    codec=st.sampled_from(CODECS),
    shape=small_shapes,
    seed=seeds,
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["transposed", "strided", "expanded", "sliced", "reversed axes"]),
)
def test_any_strides_give_the_bits_of_a_contiguous_copy(
    codec: str, shape: BlockShape, seed: int, dtype: torch.dtype, layout: str
) -> None:
    x = gaussian(shape, seed, dtype)
    if layout == "transposed":
        view = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "strided":
        view = x.repeat_interleave(3, dim=-1)[..., ::3]
    elif layout == "expanded":
        view = x[:1].expand(shape.tokens, -1, -1)
    elif layout == "sliced":
        view = torch.cat([x + 1, x, x - 1], dim=0)[shape.tokens : 2 * shape.tokens]
    else:
        view = x.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    copy = view.contiguous().clone()
    assert np.array_equal(encode(codec, view, x), encode(codec, copy, x))
    assert np.array_equal(encode(codec, x, view), encode(codec, x, copy))


@given(
    codec=st.sampled_from(CODECS),
    shape=small_shapes,
    dtype=st.sampled_from(DTYPES),
    turned=st.booleans(),
)
def test_decoding_into_strided_outputs_writes_only_them(
    codec: str, shape: BlockShape, dtype: torch.dtype, turned: bool
) -> None:
    x = gaussian(shape)
    payload = encode(codec, x, x)
    rotation = RopeLayout.wan(shape.head_dim).temporal_rotation(3) if turned else None
    k, v = decode(codec, payload, shape, dtype, rotation)
    room = torch.full((shape.heads, shape.tokens + 2, 2 * shape.head_dim), 7.0, dtype=dtype)
    rooms = room, room.clone()
    slots = [r.transpose(0, 1)[1:-1, :, ::2] for r in rooms]
    get_codec(codec).decode(payload, shape, slots[0], slots[1], rotation)
    for slot, wanted in zip(slots, (k, v), strict=True):
        assert torch.equal(slot, wanted)
        slot.fill_(7.0)
    assert all((r == 7.0).all() for r in rooms)


@given(codec=st.sampled_from(CODECS), shape=small_shapes, dtype=st.sampled_from(DTYPES))
def test_outputs_in_16_bit_are_the_fp32_outputs_rounded(
    codec: str, shape: BlockShape, dtype: torch.dtype
) -> None:
    x = gaussian(shape)
    assert torch.equal(roundtrip(codec, x, dtype), roundtrip(codec, x).to(dtype))


@given(
    codec=st.sampled_from(CODECS),
    shape=small_shapes,
    frames=st.floats(-1e6, 1e6, allow_nan=False).filter(bool),
)
def test_fused_rotation_is_decoding_then_rotating(
    codec: str, shape: BlockShape, frames: float
) -> None:
    x = gaussian(shape)
    payload = encode(codec, x, x)
    rotation = RopeLayout.wan(shape.head_dim).temporal_rotation(frames)
    assert rotation is not None
    still, _ = decode(codec, payload, shape)
    turned, v = decode(codec, payload, shape, rotation=rotation)
    assert torch.equal(turned, rotation.apply_(still.clone()))
    assert torch.equal(v, still)
    low, _ = decode(codec, payload, shape, torch.bfloat16, rotation)
    assert torch.equal(low, turned.bfloat16())


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("value", [1e4, -300.0])
def test_an_outlier_touches_its_own_head_and_token_only(codec: str, value: float) -> None:
    shape = BlockShape(17, 3, 128)
    x = gaussian(shape)
    struck = x.clone()
    struck[5, 1, 70] = value
    same = roundtrip(codec, x) == roundtrip(codec, struck)
    spread = torch.zeros(17, 3, 128, dtype=torch.bool)
    spread[5, 1, 64 if codec in ("int8", "int4-absmax") else 0 :] = True
    assert same[~spread].all()
    assert not same[spread].all()


@pytest.mark.parametrize("codec", CODECS)
def test_zero_groups_decode_to_zero(codec: str) -> None:
    x = gaussian(BlockShape(20, 2, 128))
    x[3] = 0
    x[4, 1] = -0.0
    y = roundtrip(codec, x)
    assert (y[3] == 0).all()
    assert (y[4, 1] == 0).all()
    assert (roundtrip(codec, torch.zeros(1, 1, 64)) == 0).all()


@pytest.mark.parametrize("codec", FEW_BITS)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_constant_heads_keep_their_value(codec: str, head_dim: int) -> None:
    x = torch.full((3, 2, head_dim), 1.75)
    bound = {"int4": 0.02, "int3": 0.08, "int4-absmax": 1e-6}[codec]
    assert error_energy(x, roundtrip(codec, x)) < bound


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", [(0, 0, 0), (16, 2, 127), (16, 0, 64), (7, 1, 63)])
def test_non_finite_values_are_refused(
    codec: str, bad: float, dtype: torch.dtype, where: tuple[int, int, int]
) -> None:
    x = gaussian(BlockShape(17, 3, 128), dtype=dtype)
    struck = x.clone()
    struck[where] = bad
    with pytest.raises(NonFiniteError, match="K holds NaN or infinity"):
        encode(codec, struck, x)
    with pytest.raises(NonFiniteError, match="V holds NaN or infinity"):
        encode(codec, x, struck)


@pytest.mark.parametrize(
    ("codec", "value"), [("bf16", 3.4e38), ("int4", 3e6), ("int3", 3e37), ("int4-absmax", 1e6)]
)
def test_values_beyond_the_scale_are_refused_not_clamped(codec: str, value: float) -> None:
    x = torch.zeros(17, 2, 64)
    x[16, 1, 3] = value
    with pytest.raises(CodecError, match=f"too large for the {codec} codec"):
        encode(codec, x, x)


@pytest.mark.parametrize("codec", FEW_BITS)
def test_large_values_that_fit_keep_their_accuracy(codec: str) -> None:
    x = gaussian(BlockShape(32, 2, 128)) * 3000
    assert error_energy(x, roundtrip(codec, x)) < 0.035


@pytest.mark.parametrize("codec", FEW_BITS)
@pytest.mark.parametrize("scale", [1e-5, 1e-7, 1e-12, 1e-30, 1e-44])
def test_tiny_values_lose_accuracy_but_stay_tiny(codec: str, scale: float) -> None:
    x = gaussian(BlockShape(5, 2, 64)) * scale
    y = roundtrip(codec, x)
    assert y.isfinite().all()
    assert y.abs().max() <= 2 * x.abs().max()


@given(codec=st.sampled_from(CODECS), data=st.binary(min_size=0, max_size=700), seed=seeds)
def test_any_payload_decodes_without_harm(codec: str, data: bytes, seed: int) -> None:
    shape = BlockShape(3, 1, 64)
    payload = np.random.default_rng(seed).integers(
        0, 256, get_codec(codec).payload_size(shape), np.uint8
    )
    payload[: len(data)] = np.frombuffer(data, np.uint8)[: len(payload)]
    first, second = (decode(codec, payload, shape)[0] for _ in range(2))
    assert torch.equal(first.nan_to_num(), second.nan_to_num())


def test_misuse_is_explained() -> None:
    codec = get_codec("int4")
    shape = BlockShape(3, 2, 64)
    x = gaussian(shape)
    payload = encode("int4", x, x)
    with pytest.raises(CodecError, match=r"dtype torch\.float64"):
        encode("int4", x.double(), x)
    with pytest.raises(CodecError, match="must both be"):
        codec.encode(x, x[:2], payload)
    with pytest.raises(CodecError, match="must both be"):
        codec.encode(x[0], x[0], payload)
    with pytest.raises(CodecError, match=f"{len(payload)} bytes, not 10"):
        codec.encode(x, x, payload[:10])
    with pytest.raises(CodecError, match="contiguous run of bytes"):
        codec.encode(x, x, np.repeat(payload, 2)[::2])
    with pytest.raises(CodecError, match="contiguous run of bytes"):
        codec.decode(payload.view(np.int8), shape, x, x)
    with pytest.raises(CodecError, match="K is"):
        codec.decode(payload, shape, x[:2], x)
    with pytest.raises(CodecError, match="V is expanded"):
        codec.decode(payload, shape, x, x[:1].expand(3, 2, 64))
    with pytest.raises(CodecError, match="does not fit head_dim 64"):
        codec.decode(payload, shape, x, x, RopeLayout(split=(40, 0, 0)).temporal_rotation(1))
    meta = torch.empty(3, 2, 64, device="meta")
    with pytest.raises(CodecError, match="is on meta"):
        codec.encode(meta, meta, payload)


def test_tensors_with_gradients_are_read_and_inputs_are_left_alone() -> None:
    x = gaussian(BlockShape(5, 2, 64)).requires_grad_()
    before = x.detach().clone()
    encode("int4", x, x)
    assert torch.equal(x.detach(), before)


@given(
    magnitudes=st.lists(st.floats(-1e4, 1e4, width=32), min_size=128, max_size=128),
    codec=st.sampled_from(["int4", "int3"]),
)
@settings(max_examples=30)
def test_values_up_to_ten_thousand_always_fit(magnitudes: list[float], codec: str) -> None:
    x = torch.tensor(magnitudes).view(1, 1, 128)
    assert roundtrip(codec, x).isfinite().all()


@pytest.mark.parametrize("codec", CODECS)
def test_blocks_coded_at_once_in_many_threads_are_the_same(codec: str) -> None:
    blocks = [gaussian(BlockShape(33, 2, 64), seed) for seed in range(16)]
    with ThreadPoolExecutor(8) as pool:
        payloads = list(pool.map(lambda x: encode(codec, x, x), blocks))
        decoded = list(pool.map(lambda p: decode(codec, p, BlockShape(33, 2, 64))[0], payloads))
    for x, payload, y in zip(blocks, payloads, decoded, strict=True):
        assert np.array_equal(payload, encode(codec, x, x))
        assert torch.equal(y, roundtrip(codec, x))

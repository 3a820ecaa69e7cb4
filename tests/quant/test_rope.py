from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worldpager.errors import CodecError, ConfigError, PositionError
from worldpager.quant import RopeLayout

VECTORS = json.loads((Path(__file__).parent / "vectors/worldkv_rope_shift.json").read_text())
CASES = {case["delta_frames"]: case["out_first4"] for case in VECTORS["cases"]}


def exact_rotation(key: np.ndarray, frames: float, layout: RopeLayout) -> np.ndarray:
    """The formula in float64 from complex exponentials."""
    pairs = layout.split[0]
    z = key[..., : 2 * pairs : 2] + 1j * key[..., 1 : 2 * pairs : 2]
    z = z * np.exp(1j * frames * layout.theta ** (-np.arange(pairs) / pairs))
    out = key.astype(np.float64).copy()
    out[..., : 2 * pairs : 2], out[..., 1 : 2 * pairs : 2] = z.real, z.imag
    return out


def vector_layout() -> RopeLayout:
    return RopeLayout.wan(VECTORS["head_dim"], table_len=VECTORS["table_positions"])


def test_vector_layout_is_the_wan_layout() -> None:
    layout = vector_layout()
    assert layout.split[0] == VECTORS["temporal_pairs"]
    assert layout.frequencies.tolist() == pytest.approx(VECTORS["temporal_pair_frequencies"])


@pytest.mark.parametrize("frames", [d for d in CASES if abs(d) <= 1023])
def test_official_vectors(frames: int) -> None:
    key = torch.tensor(VECTORS["key"])
    rotation = vector_layout().temporal_rotation(frames)
    out = key.clone() if rotation is None else rotation.apply_(key.clone())
    assert out[:4].tolist() == pytest.approx(CASES[frames], abs=1e-5)
    assert torch.equal(out[4:], key[4:])


def test_beyond_the_table_the_formula_holds_and_nothing_is_clamped() -> None:
    key = np.array(VECTORS["key"])
    layout = vector_layout()
    rotation = layout.temporal_rotation(2000)
    assert rotation is not None
    out = rotation.apply_(torch.tensor(key, dtype=torch.float32)).numpy()
    assert out == pytest.approx(exact_rotation(key, 2000, layout), abs=1e-5)
    assert out[:4] != pytest.approx(CASES[2000], abs=1e-2)


@given(
    frames=st.one_of(st.integers(-(10**7), 10**7), st.floats(-1e7, 1e7, allow_nan=False)),
    head_dim=st.sampled_from([40, 64, 80, 96, 128]),
    seed=st.integers(0, 1000),
)
def test_any_frame_is_exact_in_fp32(frames: float, head_dim: int, seed: int) -> None:
    layout = RopeLayout.wan(head_dim)
    key = np.random.default_rng(seed).uniform(-1, 1, (3, head_dim)).astype(np.float32)
    rotation = layout.temporal_rotation(frames)
    out = torch.from_numpy(key.copy())
    if rotation is not None:
        rotation.apply_(out)
    assert np.abs(out.numpy() - exact_rotation(key, frames, layout)).max() < 1e-5


@pytest.mark.parametrize("made_at", [0, 1023, 1024, 123_457, 9_999_999, 10**7])
@pytest.mark.parametrize("shown_at", [0, 5, 1022, 1_048_575.25, 10**7 - 0.5, 10**7])
def test_a_key_made_at_any_frame_shows_at_any_other(made_at: int, shown_at: float) -> None:
    """Rotated by the model at one frame, moved to another, it is as if made there."""
    layout = RopeLayout.wan(128, table_len=None)
    bare = np.random.default_rng(3).uniform(-1, 1, (8, 128))
    cached = torch.from_numpy(exact_rotation(bare, made_at, layout).astype(np.float32))
    rotation = layout.temporal_rotation(shown_at - made_at)
    if rotation is not None:
        rotation.apply_(cached)
    assert np.abs(cached.numpy() - exact_rotation(bare, shown_at, layout)).max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_strided_tensors_are_rotated_in_place_and_rounded_once(dtype: torch.dtype) -> None:
    layout = RopeLayout.wan(64)
    rotation = layout.temporal_rotation(-12.25)
    assert rotation is not None
    store = torch.randn(2, 64, 5).to(dtype)
    view = store.transpose(1, 2)
    wanted = view.float()
    rotation.apply_(wanted)
    assert rotation.apply_(view) is view
    assert torch.equal(store.transpose(1, 2), wanted.to(dtype))


def test_only_the_fastest_pairs_turn_where_so_many_are_asked_for() -> None:
    layout, key = RopeLayout.wan(128), torch.randn(4, 128)
    fast, whole = layout.temporal_rotation(3.5, pairs=11), layout.temporal_rotation(3.5)
    assert fast is not None
    assert whole is not None
    found, all_turned = fast.apply_(key.clone()), whole.apply_(key.clone())
    assert torch.equal(found[:, :22], all_turned[:, :22])
    assert torch.equal(found[:, 22:], key[:, 22:])
    assert not torch.equal(all_turned[:, 22:44], key[:, 22:44])


def test_there_and_back() -> None:
    layout = RopeLayout.wan(128)
    key = torch.randn(10, 128)
    out = key.clone()
    for frames in (7.0, -7.0):
        rotation = layout.temporal_rotation(frames)
        assert rotation is not None
        rotation.apply_(out)
    torch.testing.assert_close(out, key, atol=1e-6, rtol=0)


def test_rotation_does_not_change_length() -> None:
    rotation = RopeLayout.wan(128).temporal_rotation(123456.5)
    assert rotation is not None
    assert np.hypot(rotation.cos, rotation.sin) == pytest.approx(np.ones(22), abs=1e-6)


def test_split_of_known_models() -> None:
    assert RopeLayout.wan(128).split == (22, 21, 21)
    assert RopeLayout.wan(64).split == (12, 10, 10)
    assert RopeLayout.wan(40).split == (8, 6, 6)
    assert RopeLayout.wan(2).split == (1, 0, 0)
    assert RopeLayout.wan(80).head_dim == 80


def test_nothing_to_do_is_none() -> None:
    assert RopeLayout.wan(64).temporal_rotation(0) is None
    assert RopeLayout.wan(64).temporal_rotation(-0.0) is None
    assert RopeLayout(split=(0, 4, 4)).temporal_rotation(5) is None


def test_scale_multiplies_the_frame() -> None:
    half = RopeLayout(split=(4, 2, 2), scale=0.5).temporal_rotation(6)
    whole = RopeLayout(split=(4, 2, 2)).temporal_rotation(3)
    assert half is not None
    assert whole is not None
    assert np.array_equal(half.cos, whole.cos)
    assert np.array_equal(half.sin, whole.sin)


@pytest.mark.parametrize("frames", [float("nan"), float("inf"), -float("inf")])
def test_endless_moves_are_refused(frames: float) -> None:
    with pytest.raises(PositionError, match="finite"):
        RopeLayout.wan(64).temporal_rotation(frames)


def test_positions_are_held_against_the_table() -> None:
    layout = RopeLayout.wan(64, table_len=1024)
    layout.check_position(0)
    layout.check_position(1021, frames=3)
    RopeLayout.wan(64, table_len=None).check_position(10**9)
    for position, frames in ((1022, 3), (-1, 1), (1024, 1), (float("nan"), 1)):
        with pytest.raises(PositionError):
            layout.check_position(position, frames)


@pytest.mark.parametrize(
    "fields",
    [
        {"split": (1, 1, 1), "pairing": "halves"},
        {"split": (-1, 1, 1)},
        {"split": (1, 1, 1), "theta": 0.0},
        {"split": (1, 1, 1), "theta": float("inf")},
        {"split": (1, 1, 1), "scale": float("nan")},
        {"split": (1, 1, 1), "table_len": 0},
    ],
)
def test_layouts_that_make_no_sense_are_refused(fields: dict) -> None:
    with pytest.raises(ConfigError):
        RopeLayout(**fields)


@pytest.mark.parametrize("head_dim", [0, 1, 63])
def test_odd_heads_are_refused(head_dim: int) -> None:
    with pytest.raises(ConfigError, match="even"):
        RopeLayout.wan(head_dim)


def test_rotation_of_another_model_is_refused() -> None:
    rotation = RopeLayout.wan(128).temporal_rotation(1)
    assert rotation is not None
    with pytest.raises(CodecError, match="head_dim 40"):
        rotation.apply_(torch.zeros(2, 40))

"""Temporal positions: nothing leaves the table, order is kept, the end is told in advance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worldpager.errors import ConfigError, PositionError
from worldpager.model_adapter.frontend import KVSpec
from worldpager.model_adapter.window import (
    Absolute,
    Moving,
    Piece,
    check_walls,
    drawn_near,
    horizon,
    position_names,
    positions,
)
from worldpager.quant.rope import RopeLayout, Wall

HERE = Path(__file__).parent
DECOPRUNE = json.loads((HERE / "vectors/decoprune_rope.json").read_text())
WORLDKV = json.loads((HERE.parent / "quant/vectors/worldkv_rope_shift.json").read_text())


def spec(
    table: int | None = 1024, retrieve: int = 9, frames: int = 3, walls: tuple[Wall, ...] = ()
) -> KVSpec:
    return KVSpec(
        model="test", layers=1, heads=2, head_dim=64, tokens_per_frame=4, frames_per_chunk=frames,
        sink_frames=frames, recent_frames=frames, retrieve_frames=retrieve,
        rope=RopeLayout.wan(64, table_len=table), walls=walls,
    )  # fmt: skip


def pieces(*frames: int, base: int = 0, length: int = 3) -> list[Piece]:
    """Chunks at these true frames, stored while the base was ``base``; the last matches best."""
    count = len(frames)
    return [Piece(f, length, float(f - base), count - 1 - i) for i, f in enumerate(frames)]


def placed(name: str, geometry: KVSpec, start: int, base: int, held: list[Piece]) -> list[float]:
    """Position of every retrieved frame."""
    moves = positions(name, geometry).place(start, base, held)
    return [
        piece.position + i + (move[0] if len(move) == 1 else move[i])
        for piece, move in zip(held, moves, strict=True)
        for i in range(piece.frames)
    ]


def test_absolute_keeps_every_position_and_names_the_horizon() -> None:
    scheme = Absolute(spec())
    assert scheme.place(300, 0, pieces(3, 96)) == [(0.0,), (0.0,)]
    assert scheme.rebase(340 * 3, 0) == 0
    with pytest.raises(PositionError, match=r"1025.*1024 rows \(341 chunks\).*moving"):
        scheme.rebase(341 * 3, 0)


@pytest.mark.parametrize("name", ["moving", "moving-best-first", "fractional"])
@given(
    chunks=st.integers(1, 3000),
    old=st.sets(st.integers(0, 3000), max_size=3),
    frames=st.sampled_from([1, 3, 4]),
)
def test_positions_with_a_moving_base_stay_in_the_table(
    name: str, chunks: int, old: set[int], frames: int
) -> None:
    geometry = spec(retrieve=3 * frames, frames=frames)
    scheme = positions(name, geometry)
    bases = [0]
    for chunk in range(chunks):
        bases.append(bases[-1] + scheme.rebase(chunk * frames, bases[-1]))
    start, base = (chunks - 1) * frames, bases[-1]
    held = [
        Piece(c * frames, frames, float(c * frames - bases[c + 1]), rank)
        for rank, c in enumerate(sorted(old))
        if geometry.sink_chunks <= c < chunks - 1 - geometry.recent_chunks
    ]
    found = placed(name, geometry, start, base, held)
    row = start - base
    assert all(geometry.sink_frames <= p <= row - geometry.recent_frames - 1 for p in found)
    assert 0 <= row <= 1024 - frames
    if name != "moving-best-first":
        assert found == sorted(found)
        assert len(set(found)) == len(found), "no two frames at one place"


def test_moving_positions_belong_to_the_chunk_and_not_to_what_was_stored() -> None:
    assert placed("moving", spec(), 60, 0, pieces(3, 30, 12, base=2)) == [
        48, 49, 50, 51, 52, 53, 54, 55, 56,
    ]  # fmt: skip


def test_best_first_is_worldkvs_order_and_moving_the_chronological_one() -> None:
    """The official example: the best match lands furthest from the recent frames."""
    example = WORLDKV["virtual_positions"]["example"]
    best, other = example["src_frame_ids"]
    assert best > other
    held, start = pieces(other, best), example["current_end_frame"] - example["chunk_frames"]
    official = dict(zip((best, other), example["delta"], strict=True))
    moves = positions("moving-best-first", spec()).place(start, 0, held)
    assert moves == [(official[other],), (official[best],)]
    in_time = Moving(spec()).place(start, 0, held)
    assert [p.frame + m[0] for p, m in zip(held, in_time, strict=True)] == example["virt"]


@pytest.mark.parametrize("context", [4, 8, 20])
def test_fractional_positions_are_decoprunes(context: int) -> None:
    wanted = DECOPRUNE["virtual_positions"][f"context={context}"]
    assert [drawn_near(f, context) for f in range(context)] == pytest.approx(wanted)


def test_a_long_context_is_drawn_near() -> None:
    wanted = DECOPRUNE["context_240"]
    for frame, name in ((0, "first"), (1, "second"), (231, "frame_231"), (232, "frame_232")):
        assert drawn_near(frame, 240) == pytest.approx(wanted[name], abs=1e-6)


@pytest.mark.parametrize("context", [9, 16])
def test_short_contexts_are_not_stretched(context: int) -> None:
    assert DECOPRUNE["virtual_positions"][f"context={context}"][0] < 0, "the published defect"
    assert [drawn_near(f, context) for f in range(context)] == list(map(float, range(context)))


@given(context=st.integers(1, 10**7), frame=st.integers(0, 10**7))
def test_drawing_near_keeps_order_and_never_reaches_back(context: int, frame: int) -> None:
    frame = min(frame, context - 1)
    found = drawn_near(frame, context)
    assert frame <= found < context
    assert context - found <= 17 or context <= 17
    assert frame == 0 or drawn_near(frame - 1, context) < found


def test_fractional_positions_are_computed_anew_for_each_window() -> None:
    held = pieces(3, 60)
    for start in (120, 240):
        found = placed("fractional", spec(), start, 0, held)
        wanted = [drawn_near(f, start) for f in (3, 4, 5, 60, 61, 62)]
        assert found == pytest.approx(wanted, abs=1e-9)


def test_fast_bands_turn_half_the_pairs_and_end_with_the_table() -> None:
    scheme = positions("fractional-fast", spec())
    assert scheme.pairs == 6
    counts = DECOPRUNE["temporal_pair_count"]
    whole = RopeLayout.wan(128).split[0]
    assert (counts["fast_bands_64"], counts["all_bands_64"]) == (whole // 2, whole)
    with pytest.raises(PositionError, match="1024 rows"):
        scheme.rebase(341 * 3, 0)


def test_keys_turn_as_in_the_official_vector() -> None:
    case = DECOPRUNE["rotation"]
    layout = RopeLayout.wan(128)
    key = torch.zeros(128)
    key[0:4] = torch.tensor([1.0, 0.0, 1.0, 0.0])
    key[44:46] = torch.tensor([1.0, 0.5])
    moved = drawn_near(case["frame"], case["context"])
    assert moved == case["virtual"]
    rotation = layout.temporal_rotation(moved - case["frame"])
    assert rotation is not None
    found = rotation.apply_(key.clone())
    assert found[:2].tolist() == pytest.approx(case["key_pair0_after"], abs=1e-5)
    assert found[2:4].tolist() == pytest.approx(case["key_pair1_after"], abs=1e-5)
    assert torch.equal(found[44:], key[44:])
    assert rotation.pairs == case["pairs_rotated"]


def test_a_window_longer_than_the_table_is_refused() -> None:
    with pytest.raises(PositionError, match="1032 frames does not fit"):
        Moving(spec(retrieve=1023))


@pytest.mark.parametrize("name", ["fractional", "fractional-fast"])
def test_more_recent_frames_than_stay_in_place_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="recent part has 9"):
        positions(name, spec(frames=9))


@pytest.mark.parametrize("name", position_names())
def test_models_without_a_table_have_no_wall(name: str) -> None:
    endless = spec(table=None)
    scheme = positions(name, endless)
    assert scheme.rebase(10**6, 0) == 0
    assert horizon(endless, scheme) is None


def test_every_declared_wall_is_told_in_advance_and_at_the_boundary() -> None:
    matrix_game = spec(walls=(Wall("action table", 7500),))
    assert horizon(matrix_game, positions("moving", matrix_game)) == ("action table", 2500)
    assert horizon(matrix_game, positions("absolute", matrix_game)) == ("position table", 341)
    check_walls(matrix_game, 7497)
    with pytest.raises(PositionError, match=r"row 7502 .* action table.*7500 rows \(2500 chunks\)"):
        check_walls(matrix_game, 7500)


def test_unknown_scheme_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'relative'; known are absolute, moving"):
        positions("relative", spec())

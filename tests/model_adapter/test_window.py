"""Temporal positions: nothing leaves the table, order is kept, the end is told in advance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldpager.errors import ConfigError, PositionError
from worldpager.model_adapter.frontend import KVSpec
from worldpager.model_adapter.window import Absolute, Moving, positions
from worldpager.quant.rope import RopeLayout


def spec(table: int | None = 1024, retrieve: int = 9, frames: int = 3) -> KVSpec:
    return KVSpec(
        model="test", layers=1, heads=2, head_dim=64, tokens_per_frame=4, frames_per_chunk=frames,
        sink_frames=frames, recent_frames=frames, retrieve_frames=retrieve,
        rope=RopeLayout.wan(64, table_len=table),
    )  # fmt: skip


def test_absolute_keeps_every_position_and_names_the_horizon() -> None:
    scheme = Absolute(spec())
    assert scheme.place(300, 0, [3.0, 96.0]) == [3.0, 96.0]
    assert scheme.rebase(340 * 3, 0) == 0
    with pytest.raises(PositionError, match=r"1025.*1024 rows \(341 chunks\).*moving"):
        scheme.rebase(341 * 3, 0)


@given(chunks=st.integers(1, 3000), wanted=st.integers(0, 3), frames=st.sampled_from([1, 3, 4]))
def test_moving_positions_stay_in_the_table_in_order(chunks: int, wanted: int, frames: int) -> None:
    geometry = spec(retrieve=3 * frames, frames=frames)
    scheme = Moving(geometry)
    base = 0
    for chunk in range(chunks):
        base += scheme.rebase(chunk * frames, base)
    start = (chunks - 1) * frames
    older = max(0, min(wanted, chunks - 1 - geometry.sink_chunks - geometry.recent_chunks))
    placed = scheme.place(start, base, [0.0] * older)
    row = start - base
    recents = range(max(geometry.sink_frames, row - geometry.recent_frames), row, frames)
    order = [*placed, *map(float, recents), float(row)]
    assert order == sorted(set(order))
    assert all(p >= 0 and p + frames <= 1024 for p in order)
    if chunks > 1:
        assert order[0] >= geometry.sink_frames, "the sink keeps the first positions to itself"


def test_moving_positions_belong_to_the_chunk_and_not_to_what_was_stored() -> None:
    scheme = Moving(spec())
    assert scheme.place(60, 0, [3.0, 30.0, 12.0]) == [48.0, 51.0, 54.0]


def test_a_window_longer_than_the_table_is_refused() -> None:
    with pytest.raises(PositionError, match="1032 frames does not fit"):
        Moving(spec(retrieve=1023))


def test_models_without_a_table_have_no_wall() -> None:
    for name in ("absolute", "moving"):
        assert positions(name, spec(table=None)).rebase(10**6, 0) == 0


def test_unknown_scheme_is_named() -> None:
    with pytest.raises(ConfigError, match="'relative'"):
        positions("relative", spec())

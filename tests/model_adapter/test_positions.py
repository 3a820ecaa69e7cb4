"""Every position scheme from storage to the window: one exact rotation of what was stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.model_adapter.synthetic import SyntheticFrontend, made, reference_spec, stored
from worldpager.errors import PositionError
from worldpager.model_adapter.window import drawn_near
from worldpager.quant.rope import Wall

FRAMES = 3


def exact(key: torch.Tensor, frames: float, frequencies: np.ndarray) -> torch.Tensor:
    """``key`` turned by ``frames`` in float64 on as many pairs as there are frequencies."""
    out = key.double().numpy().copy()
    pairs = len(frequencies)
    z = out[..., : 2 * pairs : 2] + 1j * out[..., 1 : 2 * pairs : 2]
    z = z * np.exp(1j * frames * frequencies)
    out[..., : 2 * pairs : 2], out[..., 1 : 2 * pairs : 2] = z.real, z.imag
    return torch.from_numpy(out)


@pytest.mark.parametrize("name", ["fractional", "fractional-fast"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_window_holds_each_frame_turned_once(tmp_path: Path, name: str, batch: int) -> None:
    spec = reference_spec(table=96 if name == "fractional" else 1024, batch=batch)
    frontend = SyntheticFrontend(tmp_path / "s", spec, chunks_in_dram=60, positions=name)
    assert spec.rope is not None
    turning = spec.rope.frequencies[: 6 if name == "fractional-fast" else None]
    compared = 0
    with frontend.memory:
        for chunk in range(50):
            frontend.boundary(chunk)
            for index, other in enumerate(frontend.memory.last.retrieved):
                as_stored = stored(spec, "int4", made(spec, "session", other, 2), 0)[0]
                found = frontend.retrieved(index)[2][0]
                rows = zip(found.chunk(FRAMES, 1), as_stored.chunk(FRAMES, 1), strict=True)
                for frame, (got, key) in enumerate(rows):
                    to = drawn_near(FRAMES * other + frame, FRAMES * chunk) - frontend.base
                    moved = to - (frontend.positions[other] + frame)
                    wanted = exact(key, moved, turning)
                    # the reference starts from keys already rounded to bf16, hence the room
                    torch.testing.assert_close(got.double(), wanted, atol=0.03, rtol=0.01)
                    compared += moved != 0
            frontend.append(chunk)
    assert compared > 100
    assert (frontend.base > 0) == (name == "fractional")


def test_a_pruned_chunk_turns_each_token_by_its_own_frame(tmp_path: Path) -> None:
    spec = reference_spec()
    held = {}
    for pruning in ("none", "worldkv:0.3"):
        frontend = SyntheticFrontend(
            tmp_path / pruning, spec, chunks_in_dram=60, positions="fractional", pruning=pruning
        )
        with frontend.memory as memory:
            frontend.run(range(30))
            frontend.boundary(30)
            tokens = memory.last.active_tokens - 2 * spec.tokens_per_chunk
            per_chunk = tokens // len(memory.last.retrieved)
            start = spec.tokens_per_chunk
            held[pruning] = frontend.layers[0]["k"][0, start : start + per_chunk].clone()
    whole, kept = held["none"], held["worldkv:0.3"]
    assert len(kept) < len(whole)
    same = [any(torch.equal(token, other) for other in whole) for token in kept]
    assert all(same), "what is left of a chunk stands where it stands in the whole one"


def test_best_first_places_the_same_chunks_in_another_order(tmp_path: Path) -> None:
    windows = {}
    for name in ("moving", "moving-best-first"):
        frontend = SyntheticFrontend(
            tmp_path / name, reference_spec(), chunks_in_dram=60, positions=name, path="loop"
        )
        with frontend.memory:
            frontend.run(range(45))
            frontend.boundary(45)
            keys = [frontend.retrieved(slot)[0][0].clone() for slot in range(3)]
            windows[name] = frontend.memory.last.retrieved, keys
    in_time, best_first = windows["moving"], windows["moving-best-first"]
    assert in_time[0] == best_first[0]
    # The best match is in the middle of time, so it and its elder change places.
    moved = [not torch.equal(a, b) for a, b in zip(in_time[1], best_first[1], strict=True)]
    assert moved == [True, True, False]


def test_a_declared_wall_is_told_before_and_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    spec = replace(reference_spec(table=48), walls=(Wall("action table", 60),))
    frontend = SyntheticFrontend(tmp_path / "s", spec, chunks_in_dram=40)
    with frontend.memory as memory:
        assert memory.horizon == ("action table", 20)
        frontend.run(range(20))
        commits, base = memory.stats.commits, frontend.base
        with pytest.raises(PositionError, match=r"action table, which has 60 rows \(20 chunks\)"):
            frontend.boundary(20)
        assert (memory.stats.commits, frontend.base) == (commits, base)

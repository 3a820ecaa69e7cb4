"""What a caller hands over is refused by an error of our own, nothing changed, or kept exactly."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.reliability.world import KV, World
from worldpager.errors import CodecError, ConfigError, StoreError, WorldPagerError
from worldpager.model_adapter.frontend import ChunkStep
from worldpager.model_adapter.ring_cache import RingCache

FRAMES = 3
NAN, FAR = np.full((FRAMES, 4, 4), np.nan), np.full((FRAMES, 4, 4), 1e300)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A world that goes on after each refusal, as if nothing had been asked."""
    world = World(tmp_path_factory.mktemp("misuse") / "s", dram=14)
    with world.memory:
        world.run(range(20))
        yield world


def step_of(world: World, **changes: object) -> ChunkStep:
    """The next step, with ``changes``."""
    assert world.begun is not None
    chunk = world.begun + 1
    step = ChunkStep(chunk, chunk * FRAMES, world.begun, world.path[chunk])
    return replace(step, **changes)  # type: ignore[arg-type]


def goes_on(world: World) -> None:
    """The next chunk is taken and served as if the call before had not been made."""
    assert world.begun is not None
    commits = world.memory.stats.commits
    world.step(world.begun + 1)
    assert world.memory.stats.commits == commits + 1
    world.memory.settle()
    assert world.memory.status().ok


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk": -1}, {"chunk": 2**32}, {"chunk": 2**70}, {"chunk": 20.0}, {"chunk": "20"},
        {"chunk": None}, {"start_frame": -3}, {"start_frame": 2**62}, {"start_frame": 2**70},
        {"start_frame": 60.5}, {"start_frame": float("nan")}, {"finished": 3}, {"finished": -1},
        {"poses": None}, {"poses": NAN}, {"poses": -FAR}, {"poses": np.eye(4)}, {"poses": "no"},
        {"poses": np.zeros((0, 4, 4))}, {"poses": [[1], [1, 2]]}, {"poses_ahead": [NAN]},
        {"poses_ahead": np.eye(4)[None]}, {"finished_poses": NAN},
        {"query": np.full(128, np.inf, np.float32)},
    ],
    ids=lambda changes: " ".join(f"{k}={str(v)[:12]}" for k, v in changes.items()).split("\n")[0],
)  # fmt: skip
def test_a_step_that_cannot_be(running: World, changes: dict[str, object]) -> None:
    present, window = running.present(), [layer["k"].clone() for layer in running.layers]
    with pytest.raises(ConfigError):
        running.memory.boundary(step_of(running, **changes), running.cache())
    assert running.present() == present
    assert all(torch.equal(a, b["k"]) for a, b in zip(window, running.layers, strict=True))
    goes_on(running)


class Odd(RingCache):
    """A cache whose finished chunk is ``change``\\ d in one layer, or in all."""

    change: Callable[[torch.Tensor], object]
    layer: int | None = None

    def read(self, layer: int) -> KV:
        k, v = super().read(layer)
        if self.layer in (None, layer):
            return type(self).change(k), type(self).change(v)  # type: ignore[return-value]
        return k, v


@pytest.mark.parametrize("layer", [None, 2], ids=["all layers", "one layer"])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.cat([x, x], 1), lambda x: x[:, :0], lambda x: x[:, :, :1],
        lambda x: x[..., :32], lambda x: x.repeat(2, 1, 1, 1), lambda x: x[0],
        lambda x: x.half(), lambda x: x.float(), lambda x: x.double(), lambda x: x.to(torch.int8),
        lambda x: x.to("meta"), lambda x: x.float().numpy(), lambda x: None,
    ],
    ids=["longer", "empty", "heads", "head size", "batch", "3 axes", "fp16", "fp32", "fp64",
         "int8", "meta", "numpy", "none"],
)  # fmt: skip
def test_a_finished_chunk_of_another_geometry(
    running: World, change: Callable[[torch.Tensor], object], layer: int | None
) -> None:
    present = running.present()
    kind = type("Changed", (Odd,), {"change": staticmethod(change), "layer": layer})
    cache = kind(running.layers, running.spec, running._lower)
    with pytest.raises(CodecError):
        running.memory.boundary(step_of(running), cache)
    assert running.present() == present
    goes_on(running)


@pytest.mark.parametrize("call", ["read", "open", "slot"])
@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()], ids=["error", "^C"])
def test_a_cache_that_raises_passes_through_and_the_step_may_be_repeated(
    running: World, call: str, error: BaseException
) -> None:
    def fails(cache: RingCache, *arguments: object) -> None:
        raise error

    kind = type("Failing", (RingCache,), {call: fails})
    before, base = running.present(), [dict(layer) for layer in running.layers]
    with pytest.raises(type(error)):
        running.memory.boundary(
            step_of(running), kind(running.layers, running.spec, running._lower)
        )
    assert running.present() - before <= {running.begun}
    for layer, was in zip(running.layers, base, strict=True):
        layer.update(was)
    assert running.begun is not None
    goes_on(running)


def test_a_shorter_chunk_is_one_of_fewer_tokens(tmp_path: Path) -> None:
    world = World(tmp_path / "s", dram=14)
    short = type("Short", (Odd,), {"change": staticmethod(lambda x: x[:, :100])})
    with world.memory:
        world.run(range(8))
        world.memory.boundary(step_of(world), short(world.layers, world.spec, world._lower))
        assert world.present() == set(range(8))
        world.memory.flush()


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), "5"])
def test_a_timeout_that_cannot_be(running: World, timeout: float) -> None:
    for call in (running.memory.flush, running.memory.close):
        with pytest.raises(ConfigError, match="timeout"):
            call(timeout)
    goes_on(running)


def test_a_memory_is_neither_copied_nor_pickled(running: World) -> None:
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match="neither copied nor pickled"):
            duplicate(running.memory)
    goes_on(running)


@pytest.mark.parametrize(
    "options",
    [
        {"dram": 0}, {"dram": -5}, {"disk": 0}, {"disk": -1}, {"codec": "zip"},
        {"retrieval": "x"}, {"eviction": "x"}, {"on_miss": "x"}, {"positions": "x"},
        {"pressure": "x"}, {"pruning": "x"}, {"page_frames": 2}, {"page_frames": 0},
        {"session": "a/b"}, {"session": ".."}, {"session": ""}, {"session": "x" * 300},
        {"session": "a\0b"}, {"read_limit": 0}, {"write_limit": -1},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_cannot_be_leave_nothing_behind(
    tmp_path: Path, options: dict[str, object]
) -> None:
    with pytest.raises(WorldPagerError):
        World(tmp_path / "s", **({"dram": 14} | options))  # type: ignore[arg-type]
    assert not (tmp_path / "s").exists()


def test_places_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place in ("file", "file/below", "loop", "x" * 300, "a\0b"):
        with pytest.raises((StoreError, ConfigError)):
            World(tmp_path / place, dram=14)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StoreError):
        World(Path("relative"), dram=14)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "loop"]
    assert (tmp_path / "file").read_text() == "mine"


def test_chunks_in_any_order_are_what_was_last_written_under_their_ids(tmp_path: Path) -> None:
    """Gaps, steps back and the same id twice in a row; what is asked for is the newest."""
    world = World(tmp_path / "s", dram=14, chunks=120)
    order = [0, 1, 2, 3, 50, 51, 52, 10, 11, 12, 12, 12, 90, 91, 4, 5, 51, 52, 53, 100, 101]
    with world.memory:
        for version, chunk in enumerate(order):
            world.step(chunk, version=version)
        world.memory.flush()
        assert world.present() == set(order[:-1])
        assert all(world.load_patiently(chunk) for chunk in world.present())
    again = World(tmp_path / "s", dram=14, chunks=120)
    again.remember(world)
    with again.memory:
        assert again.present() == set(order[:-1])
        assert all(again.load_patiently(chunk) for chunk in again.present())

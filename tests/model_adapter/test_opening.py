"""Opening that fails at any point, and ends that come at any point, leave nothing behind."""

from __future__ import annotations

import gc
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from tests.reliability.world import World, chunk_bytes, leftovers, reference_spec
from worldpager.errors import BackgroundError, WorldPagerError
from worldpager.model_adapter.memory import MemoryConfig, WorldMemory
from worldpager.pager.pool import MemoryPool

SPEC = reference_spec()
QUOTA = 12 * chunk_bytes(SPEC)
PARTS = tuple(f"/worldpager/{part}/" for part in ("pager", "tiers", "model_adapter"))


class Interrupt:
    """Raises KeyboardInterrupt on entering the ``nth`` function of ours, on this thread.

    Not where a context manager of ours goes on after its body, nor in place of a call that gives a
    thing back: what Ctrl-C catches there stays until the process ends.
    """

    def __init__(self, nth: int | None) -> None:
        self.nth, self.calls, self.where = nth, 0, ""

    def __enter__(self) -> Interrupt:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call" or frame.f_code.co_flags & inspect.CO_GENERATOR:
            return
        if frame.f_code.co_name in ("close", "release"):
            return
        if not any(part in frame.f_code.co_filename for part in PARTS):
            return
        self.calls += 1
        if self.calls == self.nth:
            self.where = f"{frame.f_code.co_qualname} at {frame.f_code.co_filename}"
            sys.setprofile(None)
            raise KeyboardInterrupt


def level() -> tuple[int, set[str]]:
    for thread in threading.enumerate():
        if thread.name in ("worldpager-close", "worldpager-publish"):
            thread.join(20)
    gc.collect()
    threads = {t.name for t in threading.enumerate() if t.name.startswith("worldpager")}
    return len(os.listdir("/proc/self/fd")), threads


def calls_of(opened: Callable[[Path], WorldMemory], folder: Path) -> int:
    """How many of our functions opening enters."""
    with Interrupt(None) as counting:
        memory = opened(folder)
    memory.close()
    return counting.calls


def places(calls: int, most: int) -> list[int]:
    return sorted({1 + round(n * (calls - 1) / (most - 1)) for n in range(most)})


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("most", [25, pytest.param(10_000, marks=pytest.mark.slow)])
def test_opening_interrupted_anywhere_leaves_nothing(tmp_path: Path, most: int, used: bool) -> None:
    with MemoryPool(QUOTA) as pool:

        def opened(folder: Path) -> WorldMemory:
            if used and not folder.exists():
                with World(folder, dram=12).memory as memory:
                    memory.flush()
            return WorldMemory(MemoryConfig(store=folder, dram=QUOTA), SPEC, pool=pool)

        opened(tmp_path / "first").close()  # kernels are compiled, and modules imported
        if used:
            opened(tmp_path / "counted").close()
        calls = calls_of(opened, tmp_path / "counted")
        assert calls > 100
        before = level()
        for nth in places(calls, min(most, calls)):
            folder = tmp_path / str(nth)
            if used:
                opened(folder).close()
            try:
                with Interrupt(nth) as interrupt:
                    opened(folder).close()
            except KeyboardInterrupt:
                pass
            else:  # not so many calls this time; or it came in a callback that cannot pass it on
                assert nth > calls * 0.9, interrupt.where
            assert level() == before, interrupt.where
            assert pool.free == pool.nbytes, interrupt.where
            opened(folder).close()  # what was made so far is in nobody's way
            assert leftovers(folder) == [], interrupt.where


def test_opening_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    with World(tmp_path / "s", dram=12).memory:
        pass
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "cat.jpg").touch()
    with MemoryPool(QUOTA) as pool:
        held = World(tmp_path / "held", dram=12)
        before = level()
        for folder, changes in (
            ("s", {"codec": "bf16"}), ("s", {"session": "other"}), ("foreign", {}), ("held", {}),
            ("s", {"retrieval": "nothing known"}), ("s", {"dram": 1}), ("s", {"dram": 2 * QUOTA}),
            ("s", {"disk": 0}), ("s", {"read_limit": 0}), ("new", {"write_limit": -1}),
        ):  # fmt: skip
            for shared in (pool, None):
                if shared is None and changes.get("dram") == 2 * QUOTA:
                    continue
                fields = {"store": tmp_path / folder, "dram": QUOTA} | changes
                with pytest.raises(WorldPagerError):
                    WorldMemory(MemoryConfig(**fields), SPEC, pool=shared)  # type: ignore[arg-type]
                assert level() == before and pool.free == pool.nbytes, (folder, changes)
        held.memory.close()


@pytest.mark.parametrize("most", [12, pytest.param(400, marks=pytest.mark.slow)])
def test_a_boundary_interrupted_anywhere_gives_all_back_at_the_end(
    tmp_path: Path, most: int
) -> None:
    """Ctrl-C inside ``boundary``, ``with`` around it: as a user's loop would have it."""
    with MemoryPool(QUOTA) as pool:
        before = level()
        for nth in places(700, most):
            world = _world(pool, tmp_path / str(nth))
            with pytest.raises((KeyboardInterrupt, BackgroundError)), world.memory:
                world.run(range(15))
                world.memory.flush()
                with Interrupt(nth):
                    world.run(range(15, 30), check=False)
            assert level() == before and pool.free == pool.nbytes
            again = _world(pool, tmp_path / str(nth))
            with again.memory:
                assert set(range(14)) <= again.present()
                assert all(again.load_patiently(chunk) for chunk in again.present())


def _world(pool: MemoryPool, folder: Path) -> World:
    from functools import partial

    from tests.reliability import world as world_module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world_module, "WorldMemory", partial(WorldMemory, pool=pool))
        return World(folder, dram=12)


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(3)", "memory.close(); pool.close()"])
def test_an_interpreter_ends_with_a_pool_open(tmp_path: Path, end: str) -> None:
    code = f"""
import sys
from pathlib import Path
from tests.reliability.world import chunk_bytes, reference_spec
from worldpager import MemoryConfig, MemoryPool, WorldMemory
spec = reference_spec()
quota = 12 * chunk_bytes(spec)
pool = MemoryPool(2 * quota)
memory = WorldMemory(MemoryConfig(store=Path(sys.argv[1]), dram=quota), spec, pool=pool)
{end}
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == (3 if "3" in end else 0), done.stderr
    assert "Traceback" not in done.stderr
    with World(tmp_path / "s", dram=12).memory as memory:
        assert memory.status().ok

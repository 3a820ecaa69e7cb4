"""O7: the pinned budget is what was asked, or says why not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.reliability.children import script
from worldpager.errors import BudgetError
from worldpager.tiers.budget import memory_limit

GIB = 1 << 30
SHARE, SLACK = 1.05, 64 << 20

FILL = """
import os, sys
from pathlib import Path
from tests.reliability.world import World, chunk_bytes, reference_spec
import torch
budget = int(sys.argv[2])
def locked_and_resident():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return sum(int(fields[k].split()[0]) * 1024 for k in ("VmRSS", "VmLck"))
warm = World(Path(sys.argv[1]) / "warm", dram=12)
warm.run(range(40), check=False)
warm.memory.close()
before = locked_and_resident()
world = World(Path(sys.argv[1]) / "s", dram=budget / chunk_bytes(reference_spec()), chunks=80)
opened = locked_and_resident() - before
world.run(range(80), check=False)
status = world.memory.status()
filled = locked_and_resident() - before
print(opened, filled, status.pool, status.pinned, status.pin_reason, sep="|")
assert not torch.cuda.is_initialized()
world.memory.close()
del world
import gc; gc.collect()
print(locked_and_resident() - before)
"""


def fill(tmp_path: Path, budget: int, limit: str = "") -> None:
    if memory_limit().available < 2 * budget + SLACK:
        pytest.skip(f"needs {2 * budget} bytes of free memory")
    child = script(FILL, tmp_path, budget, limit=limit)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    opened, filled, pool, pinned, reason = out.splitlines()[0].split("|")
    assert budget - 4096 <= int(pool) <= budget
    assert int(opened) >= 0.95 * budget, "the memory is there from the start"
    assert int(filled) <= SHARE * budget + SLACK
    assert int(pinned) == 0 and reason, "status says why nothing is page-locked"
    assert int(out.splitlines()[1]) <= SLACK, "and it is given back"


def test_the_pool_takes_what_was_asked_and_gives_it_back(tmp_path: Path) -> None:
    fill(tmp_path, int(1.1 * GIB))


@pytest.mark.slow
def test_also_where_hardly_anything_may_be_locked(tmp_path: Path) -> None:
    fill(tmp_path, int(0.3 * GIB), limit="-l 64")


@pytest.mark.slow
@pytest.mark.parametrize("gib", [2.1, 4.1])
def test_larger_pools(tmp_path: Path, gib: float) -> None:
    fill(tmp_path, int(gib * GIB))


def test_an_impossible_budget_is_refused_with_the_numbers_and_a_smaller_one_opens(
    tmp_path: Path,
) -> None:
    from tests.reliability.world import World, chunk_bytes, reference_spec

    bound = memory_limit()
    chunks = 2 * bound.limit / chunk_bytes(reference_spec())
    with pytest.raises(BudgetError, match=rf"requested.*available.*limit.*{bound.source}"):
        World(tmp_path / "s", dram=chunks)
    with World(tmp_path / "s", dram=12).memory as memory:
        assert memory.status().ok


LIMITED = """
import sys
from pathlib import Path
open(sys.argv[2] + "/cgroup.procs", "w").write("0")
from tests.reliability.world import World, chunk_bytes, forget_oracle, reference_spec
from worldpager.errors import BudgetError
per = chunk_bytes(reference_spec())
try:
    World(Path(sys.argv[1]) / "s", dram=600e6 / per)
    print("opened")
except BudgetError as error:
    print("refused", "memory.limit_in_bytes" in str(error) or "memory.max" in str(error))
world = World(Path(sys.argv[1]) / "s", dram=64e6 / per, chunks=901)
for chunk in range(900):
    world.step(chunk, check=False)
    forget_oracle()
world.memory.flush()
group = Path(sys.argv[2])
names = ("memory.usage_in_bytes", "memory.current")
print("used", next(int((group / n).read_text()) for n in names if (group / n).exists()))
world.memory.close()
"""


def limited_group(nbytes: int) -> Path | None:
    """A new memory control group of ours, v1 or v2; None where none can be made."""
    for root, name in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
                       ("/sys/fs/cgroup", "memory.max")):  # fmt: skip
        if not (Path(root) / name).exists() and not (Path(root) / "cgroup.controllers").exists():
            continue  # a plain folder would take any name and limit nothing
        group = Path(root) / f"worldpager-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            with open(group / name, "r+") as limit:
                limit.write(str(nbytes))
            return group
        except OSError:
            group.rmdir()
    return None


def test_inside_a_container_the_limit_is_the_containers(tmp_path: Path) -> None:
    """Some 90 MB go through a group of 512 MiB, in which a pool of 600 MB is refused."""
    group = limited_group(512 << 20)
    if group is None:
        pytest.skip("needs a memory control group that can be made here")
    try:
        child = script(LIMITED, tmp_path, group)
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, (child.returncode, err)
        lines = out.splitlines()
        assert lines[0] == "refused True"
        assert int(lines[1].split()[1]) < 480 << 20, "no page cache piles up"
    finally:
        group.rmdir()


@pytest.mark.gpu
def test_after_failed_pinning_the_next_cuda_call_succeeds() -> None:
    import torch

    from worldpager.tiers.arena import Arena

    arena = Arena(1 << 20)
    device = torch.device("cuda")
    assert arena.pin(device)
    other = Arena(1 << 20)
    other._memory = arena._memory  # registered already: the second attempt fails
    assert not other.pin(device) and other.pin_reason
    assert torch.zeros(4, device=device).sum().item() == 0
    other._memory = None
    arena.close()

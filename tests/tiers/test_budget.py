from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from worldpager.errors import BudgetError
from worldpager.tiers.budget import HEADROOM, check_budget, default_dram_budget, memory_limit

GIB = 1 << 30
V1_NO_LIMIT = 0x7FFFFFFFFFFFF000


class Machine:
    """A made-up ``/proc`` and ``/sys/fs/cgroup`` below a folder."""

    def __init__(self, root: Path, available: int = 20 * GIB, total: int = 24 * GIB) -> None:
        self.root = root
        self.write(
            "proc/meminfo",
            f"MemTotal: {total >> 10} kB\nMemFree: 1 kB\nMemAvailable: {available >> 10} kB\n",
        )

    def write(self, path: str, text: str | int) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def mounted(self, groups: str, *mounts: str) -> None:
        self.write("proc/self/cgroup", groups)
        self.write("proc/self/mountinfo", "\n".join(mounts))

    def v1(self, group: str, limit: int, usage: int, cache: int = 0) -> None:
        folder = f"sys/fs/cgroup/memory/{group}"
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", usage)
        self.write(
            f"{folder}/memory.stat",
            f"active_file 1\ninactive_file 1\ntotal_active_file {cache // 2}\n"
            f"total_inactive_file {cache - cache // 2}",
        )

    def v2(self, group: str, usage: int, cache: int = 0, **limits: int | str) -> None:
        folder = f"sys/fs/cgroup/{group}"
        for name, value in limits.items():
            self.write(f"{folder}/memory.{name}", value)
        self.write(f"{folder}/memory.current", usage)
        self.write(f"{folder}/memory.stat", f"anon 5\nactive_file 0\ninactive_file {cache}")


V1 = "40 30 0:33 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory"
V1_OTHER = "39 30 0:32 / /sys/fs/cgroup/blkio rw,nosuid - cgroup cgroup rw,blkio"
V2 = "41 30 0:34 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_groups_the_machine_decides(machine: Machine) -> None:
    bound = memory_limit(machine.root)
    assert (bound.available, bound.limit, bound.source) == (20 * GIB, 24 * GIB, "free memory")


def test_v1_counts_page_cache_as_available(machine: Machine) -> None:
    machine.mounted("9:blkio:/job\n4:cpu,memory:/job", V1_OTHER, V1)
    machine.v1("job", 4 * GIB, 3 * GIB, cache=GIB)
    bound = memory_limit(machine.root)
    assert (bound.available, bound.limit) == (2 * GIB, 4 * GIB)
    assert bound.source == "/sys/fs/cgroup/memory/job/memory.limit_in_bytes"


def test_v1_without_a_limit_and_a_tighter_parent(machine: Machine) -> None:
    machine.mounted("4:memory:/pod/job", V1)
    machine.v1("pod/job", V1_NO_LIMIT, GIB)
    machine.v1("pod", 3 * GIB, 2 * GIB)
    machine.v1("", V1_NO_LIMIT, 9 * GIB)
    bound = memory_limit(machine.root)
    assert bound.available == GIB
    assert bound.source.endswith("/pod/memory.limit_in_bytes")


def test_v2_takes_the_lower_of_max_and_high_at_all_levels(machine: Machine) -> None:
    machine.mounted("0::/user/job", V2)
    machine.v2("user/job", 1 * GIB, max="max", high=5 * GIB)
    machine.v2("user", 2 * GIB, cache=GIB, max=4 * GIB, high="max")
    bound = memory_limit(machine.root)
    assert (bound.available, bound.source) == (3 * GIB, "/sys/fs/cgroup/user/memory.max")
    machine.v2("user/job", 4 * GIB, max="max", high=5 * GIB)
    bound = memory_limit(machine.root)
    assert (bound.available, bound.source) == (GIB, "/sys/fs/cgroup/user/job/memory.high")


def test_inside_a_container_the_mount_shows_our_group_as_its_root(machine: Machine) -> None:
    mount = "41 30 0:34 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
    machine.mounted("0::/docker/abc/inner", mount)
    machine.v2("inner", GIB, max=3 * GIB)
    machine.v2("", GIB, max=2 * GIB)
    assert memory_limit(machine.root).available == GIB
    for outside in ("0::/docker/xyz", "0::/../other"):
        machine.mounted(outside, mount)
        assert memory_limit(machine.root).source == "/sys/fs/cgroup/memory.max"


def test_a_group_over_its_limit_has_nothing_left(machine: Machine) -> None:
    machine.mounted("0::/job", V2)
    machine.v2("job", 3 * GIB, max=2 * GIB)
    assert memory_limit(machine.root).available == 0
    with pytest.raises(BudgetError):
        default_dram_budget(machine.root)


@pytest.mark.parametrize("text", ["", "banana", "-5", "99999999999999999999999"])
def test_odd_files_do_not_count(machine: Machine, text: str) -> None:
    machine.mounted(f"0::/job\nnonsense\n::{text}", V2, "short line", "a - b")
    machine.write("sys/fs/cgroup/job/memory.max", text)
    machine.write("sys/fs/cgroup/job/memory.current", GIB)
    assert memory_limit(machine.root).source == "free memory"


def test_nothing_known_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="mount /proc"):
        memory_limit(tmp_path)


def test_check_budget_says_all_numbers(machine: Machine) -> None:
    machine.mounted("0::/job", V2)
    machine.v2("job", GIB, max=4 * GIB)
    most = 3 * GIB - HEADROOM
    check_budget(most, machine.root)
    with pytest.raises(BudgetError) as refused:
        check_budget(most + 1, machine.root)
    for number in (most + 1, 3 * GIB, most):
        assert f"{number} bytes" in str(refused.value)
    assert "4GiB (/sys/fs/cgroup/job/memory.max)" in str(refused.value)


def test_the_default_is_half_in_whole_pages(machine: Machine) -> None:
    machine.mounted("0::/job", V2)
    machine.v2("job", 0, max=GIB + 12345)
    assert default_dram_budget(machine.root) == (GIB + 12345) // 8192 * 4096


def test_this_machine() -> None:
    bound = memory_limit()
    assert 0 < bound.available <= psutil.virtual_memory().total
    assert bound.available <= bound.limit
    assert 0 < default_dram_budget() <= bound.available

"""``worldpager doctor``: it measures the real thing, leaves nothing behind, its file is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from worldpager.cli import measuring
from worldpager.cli.doctor import page_lock_limit, remarks
from worldpager.cli.measuring import file_system
from worldpager.errors import ConfigError
from worldpager.sim.machines import MACHINES, load_machine

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and smaller transfers than on a real visit."""
    for name, count in (("SEQUENTIAL", 2), ("BLOCKS", 3), ("SMALL", 3), ("MIXED", 1)):
        monkeypatch.setattr(measuring, name, count)
    monkeypatch.setattr(measuring, "SEQUENTIAL_BYTES", 2 << 20)
    monkeypatch.setattr(measuring, "BLOCK_BYTES", 1 << 20)


def test_a_visit_writes_a_profile_that_plan_takes(worldpager: Command, tmp_path: Path) -> None:
    folder, out = tmp_path / "disk", tmp_path / "machine.json"
    folder.mkdir()
    status, printed, _ = worldpager(
        "doctor", "--folder", folder, "--out", out, "--endurance", "600TB", "--json"
    )
    assert status == 0
    profile = load_machine(str(out))
    assert json.loads(printed) == json.loads(out.read_text())
    assert list(folder.iterdir()) == []

    disk = profile.disk
    for rate in (disk.read_sequential, disk.read_block, disk.write_sequential, disk.write_block):
        assert 1e6 < rate.low <= rate.median <= rate.high < 1e12
        assert rate.repeats >= 2
    assert disk.shared is not None
    assert disk.method.startswith(("direct", "buffered"))
    assert disk.rated_bytes == 600 * 10**12
    assert disk.capacity_bytes
    assert profile.limit_bytes > 0
    assert profile.host.encode_bandwidth
    assert profile.host.decode_bandwidth

    plan = json.loads(worldpager("plan", "--machine", out, "--json")[1])
    assert plan["pool_bytes"] == profile.pool_bytes
    assert plan["read_bandwidth"] == round(disk.read_bandwidth)
    assert plan["disk_life_hours"] > 0


def test_people_see_the_figures_and_what_to_do_next(
    worldpager: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    status, printed, _ = worldpager("doctor", "--folder", tmp_path)
    assert status == 0
    for words in ("read, sequential", "write, block by block", "page-locked", "GB/s", "--out"):
        assert words in printed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--folder", "/nowhere/at/all"], ["/nowhere/at/all", "not a folder"]),
        (["--endurance", "much"], ["--endurance", "much"]),
    ],
)
def test_a_bad_option_is_one_clear_line(
    options: list[str], words: list[str], worldpager: Command
) -> None:
    status, printed, message = worldpager("doctor", *options)
    assert status == 2
    assert not printed
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message


def test_a_full_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = measuring.shutil.disk_usage(tmp_path)._replace(free=1 << 30)
    monkeypatch.setattr(measuring.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ConfigError, match="1GiB free"):
        measuring.measure_disk(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(measuring, "_together", fail)
    with pytest.raises(OSError, match="gone"):
        measuring.measure_disk(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_page_lock_limit_knows_the_capability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    status = tmp_path / "status"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    status.write_text("Name:\tpython\nCapEff:\t0000000000000000\n")
    assert page_lock_limit(status) == 8 << 20
    status.write_text(f"CapEff:\t{1 << 14:016x}\n")
    assert page_lock_limit(status) is None
    assert page_lock_limit(tmp_path / "none") == 8 << 20
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert page_lock_limit(tmp_path / "none") is None


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "21 1 8:1 / / rw - ext4 /dev/root rw\n"
        f"22 21 8:2 / {tmp_path} rw,noatime shared:1 - xfs /dev/nvme0n1 rw\n"
        "nonsense\n"
    )
    assert file_system(tmp_path, table) == "xfs on /dev/nvme0n1"
    assert file_system(Path("/"), table) == "ext4 on /dev/root"
    assert file_system(tmp_path, tmp_path / "none") is None


def test_remarks_say_what_to_know() -> None:
    profile = MACHINES["sata"]
    assert list(remarks(profile)) == []
    disk = profile.disk.model_copy(
        update={"file_system": "tmpfs on tmpfs", "method": "buffered I/O: refused"}
    )
    odd = profile.model_copy(
        update={"disk": disk, "limit_bytes": 1 << 30, "lock_bytes": 8 << 20,
                "limit_source": "/sys/fs/cgroup/memory.max"}
    )  # fmt: skip
    said = " ".join(remarks(odd))
    for words in ("memory, not on a disk", "No direct I/O", "page-locked", "memory.max"):
        assert words in said

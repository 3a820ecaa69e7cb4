"""What the scenarios share: nothing may be left behind, small disks, shims over the C library."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SHIM = Path(__file__).with_name("shim.c")


def our_threads() -> list[threading.Thread]:
    return [
        t
        for t in threading.enumerate()
        if t.name.startswith("worldpager") and "levels" not in t.name
    ]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No thread and no descriptor of ours outlives its test."""
    descriptors, threads = set(os.listdir("/proc/self/fd")), our_threads()
    yield
    for thread in our_threads():  # of memories that were dropped, or whose disk hung
        if thread not in threads:
            thread.join(10)
    assert set(our_threads()) <= set(threads)
    assert len(os.listdir("/proc/self/fd")) <= len(descriptors)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts file systems of so many bytes."""
    mounted: list[Path] = []

    def mount(nbytes: int) -> Path:
        disk = tmp_path / f"disk{len(mounted)}"
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(disk)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"needs a small file system: {done.stderr.strip()}")
        mounted.append(disk)
        return disk

    yield mount
    for disk in mounted:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared library to be preloaded; what it does to the C library's calls, see ``shim.c``."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler for the shim over the C library")
    target = tmp_path_factory.mktemp("shim") / "shim.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(target), str(SHIM), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the shim does not compile here: {done.stderr.strip()[-300:]}")
    return target

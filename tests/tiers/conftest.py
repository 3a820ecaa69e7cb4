"""What the tests of the disk tier share: children that die, folders that show every change."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zarr

from tests.tiers.chunks import SPEC
from worldpager.quant.zarr_codec import KVBlockCodec
from worldpager.tiers.spec import StoreSpec


@pytest.fixture(autouse=True, scope="session")
def _zarr_is_ready() -> None:
    """Our codec registered, as its entry point does where the package is installed, and the event
    loop that zarr keeps started, so that its descriptors are not taken for leaked ones.
    """
    zarr.registry.register_codec("worldpager.kvblock", KVBlockCodec)
    zarr.zeros(1)


@pytest.fixture(autouse=True)
def _no_descriptor_is_leaked() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= len(before)


@pytest.fixture
def in_child() -> Callable[[Callable[[], object]], None]:
    """Runs a function in a forked process and fails with what it raised."""

    def run(function: Callable[[], object]) -> None:
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                function()
            except BaseException:
                os.write(write, traceback.format_exc().encode()[-60_000:])
            finally:
                os._exit(0)
        os.close(write)
        os.waitpid(pid, 0)
        with os.fdopen(read, "rb") as pipe:
            trouble = pipe.read().decode()
        assert not trouble, trouble

    return run


Snapshot = dict[str, tuple[int, int, bytes]]


@pytest.fixture
def snapshot() -> Callable[[Path], Snapshot]:
    """Everything below a folder: time stamps, modes, contents, link targets."""

    def take(root: Path) -> Snapshot:
        found: Snapshot = {}
        for path in [root, *sorted(root.rglob("*"))]:
            status = path.lstat()
            content = b""
            if path.is_symlink():
                content = os.readlink(path).encode()
            elif path.is_file():
                content = path.read_bytes()
            found[str(path)] = (status.st_mtime_ns, status.st_mode, content)
        return found

    return take


@pytest.fixture
def real_bytes() -> Callable[[Path], int]:
    """Bytes of all regular files below a folder."""
    return lambda root: sum(p.lstat().st_size for p in root.rglob("*") if p.is_file())


@pytest.fixture
def spec_with() -> Callable[..., StoreSpec]:
    """The tests' spec with some fields changed."""
    return lambda **changes: replace(SPEC, **changes)

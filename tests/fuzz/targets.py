"""All fuzz targets, what each may raise, and valid inputs to begin from."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fuzz import blocks, files, folders
from worldpager.errors import WorldPagerError

Target = Callable[[bytes], None]

TARGETS: dict[str, Target] = {
    "block": blocks.block,
    "record": blocks.record,
    "tail": blocks.tail,
    "document": folders.document,
    "store": folders.store,
    "memory": folders.memory,
    "name": files.name,
    "path": files.path,
    "run": files.run,
    "machine": files.machine,
    "prediction": files.prediction,
}
"""Each takes an input's bytes; it raises our own errors for what is refused, and nothing else."""

CORPUS = Path(__file__).with_name("corpus")
MEMORY_BYTES = 512 << 20
"""Address space that an input may take beyond what is there before it."""


def check(target: str, data: bytes) -> None:
    """Run a target on one input; raises what must not be raised."""
    try:
        TARGETS[target](data)
    except WorldPagerError:
        return


@contextmanager
def little_memory() -> Iterator[None]:
    """Within, what is allocated from a length in the input is refused by the system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def seeds(target: str) -> list[bytes]:
    """Valid inputs of a target."""
    store = folders.valid_store()
    image = store["rollout-0/kv/2.0.0.0.0.0"]
    match target:
        case "block":
            return [flag + image[: len(image) // 2][:4096] for flag in (b"\0", b"\xff")]
        case "record":
            return [flag + image[-4096:][: blocks.RECORD_BYTES] for flag in (b"\0", b"\xff")]
        case "tail":
            return [flag + b"\1" + image for flag in (b"\0", b"\x40", b"\xff")]
        case "document":
            owner = b'{"pid":1,"start":2,"boot":"x","host":"y"}'
            own = [bytes([i]) + store[name] for i, name in enumerate(folders.DOCUMENTS)]
            return [*own, b"\3" + owner]
        case "store" | "memory":
            return [b"", *_changes()]
        case "name":
            return [b"rollout-0", b"24GiB", b"1.5s", "\u00e9/../x".encode()]
        case "path":
            return [files.valid_path()]
        case "run":
            return [bytes([i]) + content for i, content in enumerate(files.valid_run().values())]
        case "machine":
            return [files.valid_machine()]
        case "prediction":
            return [flag + files.valid_prediction() for flag in (b"\0", b"\xff")]
    raise AssertionError(target)


def _changes() -> list[bytes]:
    """One input for each kind of change to a directory and each of some files, then a seal."""
    names = list(folders.valid_store())
    files = [names.index(name) for name in (*folders.DOCUMENTS, "rollout-0/kv/3.0.0.0.0.0")]
    return [
        bytes([kind, file]) + b"\x28\0\0" + b"\x03abc" + bytes([10, file, 0, 0, 0, 0])
        for kind in range(13)
        for file in files
    ]

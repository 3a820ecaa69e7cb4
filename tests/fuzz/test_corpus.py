"""What fuzzing begins from and what it has found: nothing but our own errors leaves, ever again."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.fuzz import targets

SECONDS = 20


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise AssertionError(f"an input took longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("target", targets.TARGETS)
def test_every_kept_input(target: str) -> None:
    kept = sorted((targets.CORPUS / target).glob("*"))
    for data in [b"", *targets.seeds(target), *(file.read_bytes() for file in kept)]:
        signal.alarm(SECONDS)
        with targets.little_memory():
            targets.check(target, data)

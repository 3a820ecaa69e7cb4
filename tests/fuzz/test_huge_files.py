"""Files that claim to be huge and take no room: nothing is allocated for what they say."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz.targets import little_memory
from tests.tiers.chunks import SPEC
from worldpager.quant.shard import ChunkRecord, ShardLayout, write_tail
from worldpager.tiers import recovery
from worldpager.tiers.budget import MemoryLimit
from worldpager.tiers.directio import aligned_bytes
from worldpager.tiers.store import ChunkStore

HUGE = replace(SPEC, tokens=2**32 - 1, heads=64, head_dim=128)


def huge_store(root: Path, nbytes: int, tail: bytes) -> ChunkStore:
    ChunkStore.create(root, HUGE).close()
    with (root / "first" / "kv" / "5.0.0.0.0.0").open("wb") as file:
        file.truncate(nbytes)
        file.seek(nbytes - len(tail))
        file.write(tail)
    return ChunkStore.inspect(root, "first")


def test_a_file_that_is_no_chunks_is_not_read_as_a_whole(tmp_path: Path) -> None:
    store = huge_store(tmp_path / "s", 1 << 43, b"")
    with little_memory():
        assert store.contents() == []
        (found,) = store.verify()
    assert found.reason == "index"


def test_a_sound_tail_on_more_than_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = ShardLayout((1 << 31, 1 << 31))
    record = ChunkRecord(5, 0, 2, 3, 15, 15.0, 1e9, HUGE.identity())
    tail = aligned_bytes(4096)

    class Image:
        """Only as much of the image as its end."""

        def __len__(self) -> int:
            return layout.nbytes

        def __getitem__(self, part: slice) -> np.ndarray:
            return tail[part.start - layout.tail_offset :]

        def __setitem__(self, part: slice, value: object) -> None:
            """Zeros before the tail, and no annex: the sparse file has both already."""

    write_tail(Image(), layout, record)  # type: ignore[arg-type]
    store = huge_store(tmp_path / "s", layout.nbytes, tail.tobytes())
    assert [chunk.chunk for chunk in store.contents()] == [5]
    monkeypatch.setattr(recovery, "memory_limit", lambda: MemoryLimit(1 << 30, 1 << 30, "test"))
    with little_memory():
        (found,) = store.verify()
    assert found.reason == "unreadable" and "memory" in found.message
    assert os.listdir(tmp_path / "s" / "first" / "kv")

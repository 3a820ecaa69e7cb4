"""WorldAttention's tier, operation by operation: the same least recently used order in our core.

Where the official tier has a disk every chunk of ours is written ahead of its eviction; where it
has none, writes are never begun and the coldest chunk is dropped.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from worldpager.pager import events as ev
from worldpager.pager.core import Core
from worldpager.pager.events import ChunkKey
from worldpager.pager.eviction import get_eviction
from worldpager.pager.policies import WriteBack
from worldpager.prefetch.fallback import get_fallback

FILE = Path(__file__).parent.parent / "prefetch" / "vectors" / "hkv_lru.json"
RUNS = json.loads(FILE.read_text())["runs"]
BYTES = 4096


class Tier:
    """Put and get on a core whose transfers end at once."""

    def __init__(self, chunks: int, nvme: bool) -> None:
        self.core = Core(
            chunks * BYTES,
            eviction=get_eviction("lru", lambda stream: None),
            fallback=get_fallback("wait"),
            pressure="block" if nvme else "drop",
            write_back=WriteBack(0.0, 0.0) if nvme else WriteBack(1.0, 1.0, spare=0),
        )
        self.nvme = nvme
        self.files: set[int] = set()
        self.drops = self.loads = 0

    def send(self, event: ev.Event) -> list[ev.Action]:
        actions = self.core.handle(event)
        for action in actions:
            match action:
                case ev.Write(key, generation):
                    if self.nvme:
                        self.files.add(key.chunk)
                        self.send(ev.WriteDone(key, generation))
                case ev.Read(key, generation):
                    self.loads += 1
                    self.send(ev.ReadDone(key, generation))
                case ev.Lost():
                    self.drops += 1
        return actions

    def put(self, chunk: int) -> None:
        actions = self.send(ev.Reserve(ChunkKey(0, chunk), BYTES))
        (grant,) = (action for action in actions if isinstance(action, ev.Granted))
        self.send(ev.Commit(grant.key, grant.generation))

    def get(self, chunk: int) -> bool:
        found = False
        for _ in range(2):  # the second time after the read
            for action in self.send(ev.Boundary(0, 0, (chunk,), (chunk,))):
                if isinstance(action, ev.Serve):
                    found = len(action.chunks) == 1
        self.send(ev.Boundary(0, 0, (), ()))  # nothing stays pinned
        return found

    @property
    def order(self) -> list[int]:
        pages = sorted(self.core.table.resident(), key=lambda page: page.last_used)
        return [page.key.chunk for page in pages]


@pytest.mark.parametrize("run", RUNS, ids=[f"{r['cpu_max_chunks']}-{r['nvme']}" for r in RUNS])
def test_the_same_chunks_stay_in_memory_in_the_same_order(run: dict) -> None:
    tier = Tier(max(1, run["cpu_max_chunks"]), run["nvme"])
    for op in run["ops"]:
        if op["op"] == "put":
            tier.put(op["id"])
        else:
            assert tier.get(op["id"]) == op["hit"], op
        assert tier.order == op["cpu_lru_to_mru"], op
        if run["nvme"]:
            assert set(op["nvme"]) <= tier.files, "what left memory is on disk"
        assert (tier.loads, tier.drops) == (op["loads"], op["drops"]), op

"""What the papers report, as they report it: the figures that `worldpager reproduce` stands beside.

All but LingBot-World's are for Matrix-Game 2.0 on one RTX 4090 (24 GB), PCIe 4.0, 32 GiB of host
memory unless said, one NVMe SSD. Times in milliseconds, bandwidths in bytes per second, chunks
counted from 1.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "WorldPager (paper)"

STOPS: dict[str, int | None] = {
    "GPU bf16": 21,
    "DRAM bf16, 32 GiB": 60,
    "DRAM int4, 32 GiB": 226,
    "DRAM int4, 64 GiB": 496,
    "no position handling": 341,
    "tiers int4, 32 GiB": None,
}
"""The chunk at which each design stops; None where it does not. For 64 GiB the paper's own model
says 492, its run stopped at 496."""
STOP_PREDICTED_64 = 492


@dataclass(frozen=True, slots=True)
class Cost:
    """One design: median and P99 of a chunk's time, and the median stall in it."""

    median: float | None
    p99: float | None
    stall: float | None


COSTS = {
    "sliding window, nothing stored": Cost(1022.9, 1029.3, 0.0),
    "GPU bf16": Cost(None, None, None),
    "synchronous, DRAM bf16": Cost(1259.0, 1275.2, 58.2),
    "prefetched, DRAM bf16": Cost(1207.6, 1223.4, 0.0),
    "synchronous, DRAM int4": Cost(1230.8, 1253.2, 15.8),
    "tiers int4": Cost(1210.5, 1226.2, 0.0),
}
COST_CHUNKS, COST_SKIPPED = 36, 3

BANDWIDTHS = (0.1e9, 0.25e9, 0.5e9, 1e9, 2e9, 5e9)
ZERO_STALL_DOWN_TO = 0.25e9
"""The prefetched design's median stall is 0 down to here; on demand every bandwidth stalls."""

INTERVALS = {
    "pool not full": (3, 225),
    "eviction": (225, 240),
    "revisits": (240, 256),
}
WRITE_BACK = {
    "synchronous eviction": {"pool not full": 0.0, "eviction": 102.0, "revisits": 135.8},
    "background write-back": {"pool not full": 0.0, "eviction": 1.8, "revisits": 4.9},
}
"""Increment of the chunk time over the interval in which the pool is not full."""

SESSION_CHUNKS, SESSION_FPS = 3000, 9.5

LINGBOT_CHUNKS = 256
LINGBOT_RESERVE = round(4.13 * 2**30)
"""Host memory that is not the pool, from the published first writes (4.04 to 4.22 GiB)."""


@dataclass(frozen=True, slots=True)
class LingBot:
    """One design: chunk time, median and greatest wait, first write and first read."""

    chunk: float
    wait: float | None
    most: float | None
    first_write: int | None
    first_read: int | None


LINGBOT = {
    "sliding window": LingBot(2576.0, None, None, None, None),
    "on demand, 32 GiB": LingBot(3488.0, 37.7, 375.4, 102, 179),
    "WorldPager, 32 GiB": LingBot(3491.0, 0.017, 0.103, 102, 178),
    "WorldPager, 64 GiB": LingBot(3496.0, 0.017, 0.107, 218, 236),
}

SATA_BANDWIDTH, SATA_CHUNKS, SATA_MET = 0.5e9, 2000, "10/10"

HELD_OUT = {
    "spill point and first read within 1 chunk": "8/8",
    "zero against non-zero stall": "15/15",
    "non-zero stall within 30 %": "7/9",
    "all criteria": "22/24",
}

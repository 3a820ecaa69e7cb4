"""Late windows end: once the bandwidth covers what windows newly need, nothing is late for long."""

from __future__ import annotations

import pytest

from worldpager.cli.reproduction.base import there_and_back
from worldpager.sim.simulator import SimConfig, simulate

OUT, HURRY, CALM, CHUNKS = 60, 10, 10, 110


@pytest.mark.parametrize(("retrieve", "bandwidth"), [(1, 1.1), (2, 1.1), (3, 1.6), (3, 3.1)])
@pytest.mark.parametrize("pool", [12, 25])
def test_a_hurry_leaves_nothing_behind(retrieve: int, bandwidth: float, pool: int) -> None:
    """On the way back every window needs one more chunk. For a while windows come faster than
    these can be read; afterwards there is time for ``bandwidth`` reads a window again.
    """
    seconds = [1.0] * OUT + [0.1] * HURRY + [1.0] * (CHUNKS - OUT - HURRY)
    config = SimConfig(
        pool * 4096, 4096, seconds, retrieve=retrieve, on_miss="wait",
        read_limit=round(bandwidth * 4096),
    )  # fmt: skip
    stalls = [chunk.stall_ms for chunk in simulate(config, there_and_back(CHUNKS, 3))]
    assert sum(stalls[:OUT]) == 0
    assert sum(stalls[OUT + HURRY + CALM :]) == 0
    if pool == 12:
        assert sum(stalls) > 0

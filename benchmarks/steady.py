"""Which runs milliseconds do not decide: what ``validation.py`` asks before it registers a run.

Where an arrival and a window meet within milliseconds, the run is decided by them and no
prediction can know. Such a run is found by simulation alone, before anything real runs: its outcome
changes when the memory's own work costs more or less, or when the disk is shakier or slower to
answer. Its bandwidth is then moved by some per cent until its outcome stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace

from worldpager.prefetch.poses import Floats
from worldpager.quant.codec import get_codec
from worldpager.sim.closed_form import chunk_bytes
from worldpager.sim.devices import DiskModel
from worldpager.sim.machines import MachineProfile
from worldpager.sim.predictions import Inputs, Outcome, columns, sim_config
from worldpager.sim.presets import get_preset
from worldpager.sim.simulator import HostModel, SimConfig, simulate

FACTORS = (1.0, 1.04, 0.96, 1.08, 0.92, 1.12, 0.88, 1.2, 0.8)
"""Of the bandwidth, tried in this order."""
POOL_CHUNKS = 2
"""More than the design's, at most."""
EXACT = ("spill_chunk", "first_read_chunk", "stalled", "bytes_read", "bytes_written")
HOST_COSTS = (0.3, 2.0, 3.0)
SHAKY = ({"jitter": 0.3, "read_latency": 2e-3, "write_latency": 4e-3},
         {"jitter": 0.2, "write_latency": 2e-2})  # fmt: skip
SEEDS = 5


def steadied(inputs: Inputs, path: Floats, machine: MachineProfile, host: HostModel) -> Inputs:
    """``inputs`` with the first pool and bandwidth at which every variant does the same. Raises
    :class:`RuntimeError` where there are none: the design needs another cell.
    """
    for tried in _near(inputs):
        config = sim_config(tried, machine, host)
        if len({_outcome(each, path) for each in _variants(config)}) == 1:
            return tried
    raise RuntimeError(f"milliseconds decide this run wherever it was tried: {inputs}")


def _near(inputs: Inputs) -> Iterator[Inputs]:
    chunk = chunk_bytes(get_preset(inputs.model), get_codec(inputs.codec)).stored
    assert inputs.read_limit is not None
    for more in range(POOL_CHUNKS + 1):
        pool = inputs.dram_bytes + more * chunk
        for factor in FACTORS:
            limit = round(factor * inputs.read_limit)
            yield inputs.model_copy(update={"dram_bytes": pool, "read_limit": limit})


def _variants(config: SimConfig) -> Iterator[SimConfig]:
    yield config
    for factor in HOST_COSTS:
        yield replace(config, host=HostModel(*(factor * cost for cost in astuple(config.host))))
    for shaky in SHAKY:
        disk: DiskModel = replace(config.disk, **shaky)  # type: ignore[arg-type]
        yield from (replace(config, disk=disk, seed=seed) for seed in range(SEEDS))


def _outcome(config: SimConfig, path: Floats) -> tuple[object, ...]:
    outcome = Outcome.of(columns(simulate(config, path)))
    return tuple(getattr(outcome, name) for name in EXACT)

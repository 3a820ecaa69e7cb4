"""Traces: a rollout that has run, as the input of simulations that ask "what if".

A trace holds what the rollout was given (its path, its options) and what only a run can tell: the
compute time of each chunk and the cost of encoding and decoding on its machine. Replaying it
unchanged says how well the simulator knows that machine; replaying it with other budgets, policies
and devices says what would have been.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from worldpager.pager.eviction import EvictionPolicy, eviction_names
from worldpager.prefetch.poses import Floats
from worldpager.sim.belady import Belady
from worldpager.sim.machines import MachineProfile
from worldpager.sim.predictions import Inputs, Outcome, columns, sim_config
from worldpager.sim.simulator import (
    HostModel,
    SimConfig,
    Simulator,
    demands,
    reads_on_demand,
)


@dataclass(frozen=True, slots=True)
class Trace:
    """A finished rollout. ``compute_seconds``: of each chunk, without the boundary before it.
    ``host``: medians of what encoding and decoding a chunk took. ``outcome``: what was observed.
    """

    inputs: Inputs
    path: Floats
    compute_seconds: tuple[float, ...]
    host: HostModel
    outcome: Outcome

    @classmethod
    def of(cls, inputs: Inputs, path: Floats, metrics: Mapping[str, Any]) -> Trace:
        """From the columns of a ``metrics.jsonl``; ``path`` may go on where the rollout ended."""
        done = len(metrics["chunk"])
        compute = (_floats(metrics["wall_ms"]) - _floats(metrics["boundary_ms"])) / 1e3
        served = np.array([len(chunks) for chunks in metrics["retrieved"]])
        decode = _floats(metrics["decode_ms"])[served > 0] / served[served > 0]
        host = HostModel(
            encode_seconds=_median(_floats(metrics["encode_ms"])[1:]) / 1e3,
            decode_seconds=_median(decode) / 1e3,
        )
        times = tuple(np.maximum(compute, 0.0).tolist())
        return cls(
            inputs.model_copy(update={"chunks": done}),
            path[:done],
            times,
            host,
            Outcome.of(metrics),
        )

    def config(self, machine: MachineProfile | None = None) -> SimConfig:
        """The simulation of what ran, on ``machine``; ``replace`` it to ask "what if"."""
        config = sim_config(self.inputs, machine, self.host)
        return replace(config, compute_seconds=self.compute_seconds)

    def replay(self, config: SimConfig) -> Outcome:
        """What the rollout would have done under ``config``."""
        return Outcome.of(columns(Simulator(config, self.path).run()))


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One eviction policy on one path.

    ``reads``: chunks read where windows wait and nothing is loaded ahead, so that every policy sees
    the same demands. ``above_bound``: that many more than Belady's optimum, as a fraction; None
    where the optimum reads nothing. ``outcome``: in the whole pipeline as configured.
    """

    name: str
    reads: int
    above_bound: float | None
    outcome: Outcome


def compare_policies(
    config: SimConfig, path: Floats, names: Sequence[str] | None = None
) -> list[PolicyResult]:
    """Eviction policies side by side, Belady's optimum first.

    The optimum is a bound for ``reads`` only: in the whole pipeline, where loads ahead follow a
    prediction, knowing every demand is good but not provably best.
    """
    future = demands(config, path)
    results: list[PolicyResult] = []
    for name in [Belady.name, *(eviction_names() if names is None else names)]:
        reads = reads_on_demand(config, path, _policy(name, future))
        bound = results[0].reads if results else reads
        run = Simulator(replace(config, eviction=_policy(name, future)), path).run()
        above = reads / bound - 1 if bound else (0.0 if reads == 0 else None)
        results.append(PolicyResult(name, reads, above, Outcome.of(columns(run))))
    return results


def _policy(name: str, future: Sequence[Sequence[int]]) -> str | EvictionPolicy:
    return Belady(future) if name == Belady.name else name


def _floats(column: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray(column, dtype=np.float64)


def _median(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    return float(np.median(values)) if len(values) else 0.0

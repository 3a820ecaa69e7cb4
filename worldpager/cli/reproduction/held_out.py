"""Held-out validation: predictions written down first, then the runs, then the comparison.

For each run the simulator executes the product's own core on a modelled disk that is exactly the
bandwidth limit of the run, with this machine's codec as measured before; the prediction is saved
with its hash, the run begins afterwards, and nothing is adjusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from worldpager.cli.reproduction.base import Case, Chart, Columns, Lab, Reproduction, Row, Series
from worldpager.cli.reproduction.base import last as last_of
from worldpager.sim import published
from worldpager.sim.predictions import (
    Inputs,
    Outcome,
    Prediction,
    poses_hash,
    predict,
    write_prediction,
)

CHUNKS, POOL_CHUNKS = 80, 12
_BANDWIDTHS = (0.05e9, 0.1e9, 0.25e9, 0.5e9, 2e9)
_DESIGNS = {
    "prefetched": {"on_miss": "wait"},
    "on demand": {"on_miss": "wait", "prefetch": False},
    "never waits": {"on_miss": "stale"},
}
_OTHERS = ("lingbot-world-1.3b", "self-forcing")
PAPER_STALL, OUR_STALL = 0.3, 0.1
"""Relative tolerance on a non-zero stall: the paper's and ours."""


@dataclass(frozen=True, slots=True)
class _Run:
    name: str
    predicted: Prediction
    observed: Outcome


def reproduce(lab: Lab) -> Reproduction:
    """Every criterion over all runs. The predictions are what is simulated."""
    folder = lab.folder / "predictions" / datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    runs = [_run(lab, name, case, folder) for name, case in _cases()] if lab.measured else []
    rows = []
    for what, paper, met in _criteria(runs):
        measured = f"{sum(met)}/{len(met)}" if met else None
        rows.append(Row(what=what, paper=paper, measured=measured))
    return Reproduction(
        name="held-out",
        title="Held-out validation: predictions registered before the runs",
        source=published.SOURCE,
        settings={**lab.settings, "runs": len(runs), "chunks": CHUNKS, "pool, chunks": POOL_CHUNKS},
        rows=[*rows, *_detail(runs)],
        charts=[_chart(runs)] if runs else [],
        notes=[
            "Each prediction lies beside this table in predictions/, with its hash and time. "
            "`worldpager validate` holds any other run against one.",
            "Stalls are sums over a run at its own scale; a run counts as not stalling where all "
            "its waits together are below 0.1 % of its compute time.",
            "Missed: " + ("; ".join(_missed(runs)) or "nothing") + ".",
        ],
    )


def _cases() -> list[tuple[str, Case]]:
    cases = []
    for bandwidth in _BANDWIDTHS:
        for design, options in _DESIGNS.items():
            cases.append(("matrix-game-2", design, bandwidth, options))
    for model in _OTHERS:
        for bandwidth in (0.05e9, 0.5e9):
            for design in ("prefetched", "on demand"):
                cases.append((model, design, bandwidth, _DESIGNS[design]))
    made = []
    for model, design, bandwidth, options in cases:
        stored = Case(CHUNKS, 0, model=model).stored
        case = Case(
            CHUNKS,
            POOL_CHUNKS * stored,
            model=model,
            read_bandwidth=bandwidth,
            **options,  # type: ignore[arg-type]
        )
        made.append((f"{model} {design} {bandwidth / 1e9:g} GB/s", case))
    return made


def _run(lab: Lab, name: str, case: Case, folder: Path) -> _Run:
    small, path = lab.smaller(case), case.path
    inputs = Inputs(
        model=small.model,
        codec=case.codec,
        chunks=case.chunks,
        path="there and back",
        poses=poses_hash(path),
        dram_bytes=small.pool,
        retrieve=case.retrieve,
        eviction=case.eviction,
        on_miss=case.on_miss,
        prefetch=case.prefetch,
        read_limit=lab.limit(case, case.read_bandwidth),
        chunk_time=lab.chunk_time,
    )
    prediction = predict(inputs, path, None, lab.host_of(case))
    folder.mkdir(parents=True, exist_ok=True)
    write_prediction(prediction, folder / f"{name.replace(' ', '-').replace('/', '-per-')}.json")
    return _Run(name, prediction, _outcome(lab.run(case, name)))


def _outcome(columns: Columns) -> Outcome:
    counters = {n: [last_of(columns, n)] for n in ("spill_chunk", "first_read_chunk")}
    return Outcome.of({**{n: v.tolist() for n, v in columns.items()}, **counters})


def _criteria(runs: list[_Run]) -> list[tuple[str, str | None, list[bool]]]:
    """Each criterion, the paper's count, and whether each run met it."""
    near, zero, size = [], [], {PAPER_STALL: [], OUR_STALL: []}  # type: ignore[var-annotated]
    exact: dict[str, list[bool]] = {
        "spill_chunk": [], "first_read_chunk": [], "bytes_read": [], "bytes_written": []
    }  # fmt: skip
    for run in runs:
        said, seen = _said(run.predicted), run.observed
        for name in ("spill_chunk", "first_read_chunk"):
            near.append(_near(getattr(said, name), getattr(seen, name), 1))
        for name, met in exact.items():
            met.append(getattr(said, name) == getattr(seen, name))
        zero.append(said.stalled == seen.stalled)
        if said.stalled:
            for tolerance, met in size.items():
                met.append(abs(seen.stall_ms - said.stall_ms) <= tolerance * said.stall_ms)
    counts = {
        "spill point and first read within 1 chunk": near,
        "zero against non-zero stall": zero,
        "non-zero stall within 30 %": size[PAPER_STALL],
        "non-zero stall within 10 %": size[OUR_STALL],
        **{f"{name.replace('_', ' ')} exact": met for name, met in exact.items()},
        "all criteria": near + zero + size[PAPER_STALL],
    }
    return [(what, published.HELD_OUT.get(what), met) for what, met in counts.items()]


def _said(prediction: Prediction) -> Outcome:
    return Outcome(**{c.name: c.predicted for c in prediction.criteria})


def _near(said: int | None, seen: int | None, slack: int) -> bool:
    return said == seen if said is None or seen is None else abs(said - seen) <= slack


def _detail(runs: list[_Run]) -> list[Row]:
    return [
        Row(what=f"{run.name}: all stalls", unit="ms", simulated=round(said.stall_ms, 1),
            measured=round(run.observed.stall_ms, 1))
        for run in runs
        if (said := _said(run.predicted)).stalled or run.observed.stalled
    ]  # fmt: skip


def _missed(runs: list[_Run]) -> list[str]:
    """What differs from its prediction by more than the registered tolerance."""
    return [
        f"{run.name}: {verdict.name} {verdict.predicted} predicted, {verdict.observed} observed"
        for run in runs
        for verdict in run.predicted.judge(run.observed)
        if not verdict.met
    ]


def _chart(runs: list[_Run]) -> Chart:
    said = [_said(run.predicted).stall_ms for run in runs]
    seen = [run.observed.stall_ms for run in runs]
    most = max([1.0, *said, *seen])
    return Chart(
        x="predicted stall of a run, ms",
        y="observed, ms",
        series=[
            Series(label="runs", x=said, y=seen, marks=True),
            Series(label="as predicted", x=[0.0, most], y=[0.0, most]),
        ],
    )

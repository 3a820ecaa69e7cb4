"""What is known so far: outcomes in a file, one line each, and means with intervals over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from worldpager.cli.recall_episodes import Episode, Outcome

RESAMPLES = 10_000
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over episodes and its 95 % bootstrap interval; ``count`` episodes."""

    mean: float
    low: float
    high: float
    count: int


def estimate(values: Floats) -> Estimate:
    """The mean of ``values`` ``[n]``, with the percentile interval of resampled means."""
    rng = np.random.default_rng(0)
    means = rng.choice(values, (RESAMPLES, len(values))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(float(values.mean()), float(low), float(high), len(values))


class Results:
    """Outcomes by episode. ``file``: where they are kept, a line of JSON each."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.outcomes: dict[Episode, Outcome] = {}
        if file.exists():
            for line in file.read_text().splitlines():
                outcome = Outcome.parse(line)
                self.outcomes[outcome.episode] = outcome

    def add(self, outcome: Outcome) -> None:
        """Keep an outcome, on disk too."""
        with self._file.open("a") as out:
            out.write(outcome.line() + "\n")
        self.outcomes[outcome.episode] = outcome

    def of(self, method: str, codec: str, kind: str) -> dict[tuple[str, int], Outcome]:
        """The outcomes of one row, by path and seed."""
        return {
            (e.path, e.seed): outcome
            for e, outcome in self.outcomes.items()
            if (e.method, e.codec, e.kind) == (method, codec, kind)
        }


def _value(outcome: Outcome, gap: str, metric: str) -> float | None:
    """A metric of the class ``gap``, or of ``all`` revisits, each frame counting alike."""
    if gap != "all":
        return outcome.scores.get(gap, {}).get(metric)
    parts = [found for found in outcome.scores.values() if metric in found]
    if not parts:
        return None
    pairs = sum(found["pairs"] for found in parts)
    return sum(found[metric] * found["pairs"] for found in parts) / pairs


def score(rows: Mapping[tuple[str, int], Outcome], gap: str, metric: str) -> Estimate | None:
    """A metric's mean over the episodes that have revisits of the class ``gap`` (or ``all``)."""
    found = [_value(outcome, gap, metric) for outcome in rows.values()]
    values = [value for value in found if value is not None]
    return estimate(np.array(values)) if values else None


def change(
    rows: Mapping[tuple[str, int], Outcome],
    reference: Mapping[tuple[str, int], Outcome],
    gap: str,
    metric: str,
) -> Estimate | None:
    """The mean difference to ``reference`` over the worlds that both have seen, pair by pair."""
    values = []
    for key in rows.keys() & reference.keys():
        ours, theirs = (_value(r[key], gap, metric) for r in (rows, reference))
        if ours is not None and theirs is not None:
            values.append(ours - theirs)
    values.sort()  # in an order that does not depend on hashes, so that intervals repeat
    return estimate(np.array(values)) if values else None


def mean_of(rows: Iterable[Outcome], name: str) -> float:
    """Mean of a plain field of outcomes."""
    return float(np.mean([getattr(outcome, name) for outcome in rows]))

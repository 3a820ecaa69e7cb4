"""Predictions on file: whole, unchanged, never replaced, and judged as they say."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from worldpager.errors import ConfigError
from worldpager.prefetch.paths import make_path
from worldpager.sim.machines import load_machine
from worldpager.sim.predictions import (
    Inputs,
    Outcome,
    Prediction,
    Tolerance,
    poses_hash,
    predict,
    read_prediction,
    write_prediction,
)

PATH = make_path("yaw-return", 60, 3)
INPUTS = Inputs(chunks=60, path="yaw-return", poses=poses_hash(PATH), dram_bytes=720 << 10)


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return predict(INPUTS, PATH, load_machine("sata"), now=datetime(2026, 11, 30, tzinfo=UTC))


def test_it_names_all_that_it_depends_on(prediction: Prediction) -> None:
    assert prediction.inputs == INPUTS
    assert prediction.machine == load_machine("sata")
    assert len(prediction.code) == len(prediction.hash) == 64
    assert [c.name for c in prediction.criteria] == list(Outcome.model_fields)


def test_equal_inputs_predict_the_same(prediction: Prediction) -> None:
    again = predict(INPUTS, PATH, load_machine("sata"), now=prediction.created)
    assert again == prediction


def test_another_machine_is_another_hash(prediction: Prediction) -> None:
    other = predict(INPUTS, PATH, load_machine("nvme-pcie4"), now=prediction.created)
    assert other.hash != prediction.hash


def test_a_path_must_be_the_one_named() -> None:
    with pytest.raises(ConfigError, match="camera path"):
        predict(INPUTS, make_path("loop", 60, 3))


def test_it_comes_back_from_its_file(prediction: Prediction, tmp_path: Path) -> None:
    write_prediction(prediction, tmp_path / "p.json")
    assert read_prediction(tmp_path / "p.json") == prediction


def test_it_is_never_overwritten(prediction: Prediction, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    write_prediction(prediction, file)
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="never overwritten"):
        write_prediction(prediction, file)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p["criteria"][0].update(predicted=99),
        lambda p: p["criteria"][0]["tolerance"].update(absolute=5.0),
        lambda p: p["inputs"].update(dram_bytes=1),
        lambda p: p["machine"]["disk"]["read_sequential"].update(median=5e8 + 1, high=5e8 + 1),
        lambda p: p.update(created="2020-01-01T00:00:00Z"),
        lambda p: p.update(code="0" * 64),
        lambda p: p["host"].update(encode_seconds=1.0),
    ],
    ids=["value", "tolerance", "input", "machine", "time", "code", "host"],
)
def test_any_later_change_shows(prediction: Prediction, change, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    content = prediction.model_dump(mode="json")
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="changed after it was written"):
        read_prediction(file)


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.json"):
        read_prediction(tmp_path / "nothing.json")
    (tmp_path / "text.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a prediction"):
        read_prediction(tmp_path / "text.json")


def test_a_run_that_does_as_predicted_meets_all(prediction: Prediction) -> None:
    outcome = Outcome(**{c.name: c.predicted for c in prediction.criteria})
    assert all(verdict.met for verdict in prediction.judge(outcome))
    worse = outcome.model_copy(update={"bytes_read": outcome.bytes_read + 1})
    missed = [v.name for v in prediction.judge(worse) if not v.met]
    assert missed == ["bytes_read"]


@pytest.mark.parametrize(
    ("predicted", "observed", "met"),
    [
        (100, 100, True), (100, 105, True), (100, 110, True), (100, 111, False), (3, 5, True),
        (3, 6, False), (None, None, True), (None, 3, False), (3, None, False),
        (True, True, True), (True, False, False), (False, True, False),
    ],
)  # fmt: skip
def test_tolerances(predicted: object, observed: object, met: bool) -> None:
    tolerance = Tolerance(absolute=2, relative=0.1)
    assert tolerance.allows(predicted, observed) is met  # type: ignore[arg-type]


def test_small_waits_count_as_none() -> None:
    def outcome(stall: float) -> Outcome:
        return Outcome.of(
            {
                "stall_ms": [0.0, stall], "wall_ms": [1000.0, 1000.0 + stall],
                "boundary_ms": [0.0, stall], "spill_chunk": [None, 2],
                "first_read_chunk": [None, None], "bytes_read_total": [0, 0],
                "bytes_written_total": [0, 7], "stale": [False, True],
            }
        )  # fmt: skip

    assert not outcome(1.9).stalled
    assert outcome(2.1).stalled
    assert outcome(2.1).stale_windows == 1


def test_a_path_is_told_from_another() -> None:
    moved = PATH.copy()
    assert poses_hash(moved + 1e-9) == poses_hash(PATH)
    moved[10, 0, 0, 3] += 1e-3
    assert poses_hash(moved) != poses_hash(PATH)
    assert poses_hash(PATH[:-1]) != poses_hash(PATH)

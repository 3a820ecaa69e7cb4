"""``predict``, ``validate`` and ``replay``, on run folders made from simulations."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from worldpager.prefetch.paths import make_path
from worldpager.sim.predictions import Inputs, poses_hash, sim_config
from worldpager.sim.simulator import simulate

Command = Callable[..., tuple[int, str, str]]
POOL = "720KiB"
OPTIONS: dict[str, Any] = {
    "chunks": 60, "path": "yaw-return", "seed": 0, "dram_bytes": 720 << 10, "codec": "int4",
    "retrieve": 3, "on_miss": "wait", "read_limit": 90_000, "write_limit": None, "chunk_time": 0.3,
}  # fmt: skip
ARGUMENTS = (
    "--chunks", 60, "--dram", POOL, "--on-miss", "wait", "--read-limit", "90kB/s",
    "--chunk-time", "300ms",
)  # fmt: skip


def make_run(folder: Path, summary: dict[str, Any] | None = None, **options: Any) -> Path:
    """A run's folder as ``rollout`` leaves it, its metrics from the simulator."""
    chosen = OPTIONS | options
    path = make_path(chosen["path"], chosen["chunks"], 3, chosen["seed"])
    inputs = Inputs(poses=poses_hash(path), **chosen)
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as lines:
        for chunk in simulate(sim_config(inputs), path):
            lines.write(json.dumps(chunk.as_dict() | {"rss_bytes": 1}) + "\n")
    facts = {
        "status": "complete", "options": chosen, "wall_seconds": 20.0,
        "started": "2100-01-01T00:00:00+00:00",
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(facts | (summary or {})))
    return folder


def test_walls_on_the_way_are_told(worldpager: Command, tmp_path: Path) -> None:
    model = ("--model", "matrix-game-2@1/30", "--dram", "2GiB", "--retrieve", 0)
    for chunks, beyond in ((341, 0), (2501, 2)):
        status, printed, _ = worldpager(
            "predict", "--out", tmp_path / f"{chunks}.json", *model, "--chunks", chunks
        )
        assert status == 0
        told = [line for line in printed.splitlines() if "Goes beyond" in line]
        assert len(told) == beyond
    assert "position table (1024 rows, 341 chunks): positions move on" in told[0]
    assert "action table (7500 rows, 2500 chunks): see to it in the frontend" in told[1]


@pytest.fixture
def predicted(worldpager: Command, tmp_path: Path) -> Path:
    status, printed, message = worldpager("predict", "--out", tmp_path / "p.json", *ARGUMENTS)
    assert (status, message) == (0, "")
    assert "validate RUN" in printed
    return tmp_path / "p.json"


def test_a_run_as_predicted_is_met(predicted: Path, worldpager: Command, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    status, printed, _ = worldpager("validate", run, predicted, "--json")
    answer = json.loads(printed)
    assert status == 0
    assert answer["met"] == len(answer["criteria"]) == 7
    status, printed, _ = worldpager("validate", run, predicted)
    assert status == 0
    for words in ("7 of 7 met", "first spill", "chunk 18", "exact", "yes"):
        assert words in printed


def test_a_run_otherwise_is_told_criterion_by_criterion(
    predicted: Path, worldpager: Command, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["bytes_read_total"] += 1
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, printed, _ = worldpager("validate", run, predicted, "--json")
    assert status == 1
    assert [c["name"] for c in json.loads(printed)["criteria"] if not c["met"]] == ["bytes_read"]
    assert "NO" in worldpager("validate", run, predicted)[1]


def test_a_prediction_is_never_overwritten(predicted: Path, worldpager: Command) -> None:
    before = predicted.read_bytes()
    status, _, message = worldpager("predict", "--out", predicted, "--dram", "1MiB")
    assert status == 2
    assert "never overwritten" in message
    assert predicted.read_bytes() == before


def test_a_changed_prediction_is_refused(
    predicted: Path, worldpager: Command, tmp_path: Path
) -> None:
    predicted.write_text(predicted.read_text().replace('"predicted": 18', '"predicted": 19'))
    status, _, message = worldpager("validate", make_run(tmp_path / "run"), predicted)
    assert status == 2
    assert "changed after it was written" in message


def test_a_run_that_began_earlier_is_refused(
    predicted: Path, worldpager: Command, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", {"started": "2001-01-01T00:00:00+00:00"})
    status, _, message = worldpager("validate", run, predicted)
    assert status == 2
    assert "predict first" in message


def test_without_a_start_the_files_tell(
    predicted: Path, worldpager: Command, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", {"started": None})
    assert worldpager("validate", run, predicted)[0] == 2  # 20 seconds long and written just now
    later = (run / "metrics.jsonl").stat().st_mtime + 60
    os.utime(run / "metrics.jsonl", (later, later))
    status, printed, _ = worldpager("validate", run, predicted)
    assert status == 0
    assert "by its files" in printed


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"dram_bytes": 1 << 20}, "dram_bytes"),
        ({"path": "loop"}, "poses"),
        ({"read_limit": None}, "read_limit"),
        ({"chunk_time": 0.4}, "chunk_time"),
    ],
    ids=lambda value: str(value),
)
def test_a_prediction_of_another_run_is_refused(
    options: dict[str, Any], word: str, predicted: Path, worldpager: Command, tmp_path: Path
) -> None:
    status, _, message = worldpager("validate", make_run(tmp_path / "run", **options), predicted)
    assert status == 2
    assert "another run" in message
    assert word in message


def test_a_machine_predicted_with_is_the_one_run_with(worldpager: Command, tmp_path: Path) -> None:
    arguments = ("--chunks", 60, "--dram", POOL, "--on-miss", "wait", "--chunk-time", "300ms")
    prediction = tmp_path / "p.json"
    assert worldpager("predict", "--out", prediction, *arguments, "--machine", "sata")[0] == 0
    sata = {"read_limit": 500_000_000, "write_limit": 500_000_000}
    for name, limits, status in (
        ("held-to-it", sata, 0),
        ("on-it", {"read_limit": None}, 0),
        ("slower", {"read_limit": 90_000}, 2),
    ):
        run = make_run(tmp_path / name, **limits)
        assert worldpager("validate", run, prediction)[0] == status


def test_half_a_run_is_refused(predicted: Path, worldpager: Command, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"status": "interrupted"})
    status, _, message = worldpager("validate", run, predicted)
    assert status == 2
    assert "interrupted" in message


def test_a_pool_that_no_memory_opens_with_is_refused(worldpager: Command, tmp_path: Path) -> None:
    status, _, message = worldpager("predict", "--out", tmp_path / "p.json", "--dram", "20KiB")
    assert status == 2
    assert "too small" in message
    assert not (tmp_path / "p.json").exists()


def test_replay_says_what_would_have_been(worldpager: Command, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    printed = worldpager("replay", run, "--dram", "2MiB", "--json")[1]
    answer = json.loads(printed)
    ran, same = answer["outcomes"]["as it ran"], answer["outcomes"]["the same, simulated"]
    assert same == pytest.approx(ran)
    assert ran["stalled"]
    assert answer["outcomes"]["what if"]["spill_chunk"] > ran["spill_chunk"]
    assert not answer["outcomes"]["what if"]["stalled"]
    reads = [policy["reads_on_demand"] for policy in answer["policies"]]
    assert answer["policies"][0]["name"] == "belady"
    assert min(reads) == reads[0]


def test_replay_for_people(worldpager: Command, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    status, printed, _ = worldpager("replay", run, "--unlimited", "--eviction", "lru")
    assert status == 0
    for words in ("what if read_limit = None", "eviction = lru", "belady", "as it ran"):
        assert words in printed
    assert "belady" not in worldpager("replay", run, "--no-policies")[1]


def test_stored_poses_come_before_the_path_s_name(worldpager: Command, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"options": OPTIONS | {"path": "gone.npy"}})
    status, _, message = worldpager("replay", run)
    assert status == 2
    assert "gone.npy" in message
    np.save(run / "poses.npy", make_path("yaw-return", 60, 3))
    answer = json.loads(worldpager("replay", run, "--no-policies", "--json")[1])
    assert answer["outcomes"]["the same, simulated"] == pytest.approx(
        answer["outcomes"]["as it ran"]
    )


@pytest.mark.parametrize("missing", ["metrics.jsonl", "summary.json"])
def test_a_folder_without_a_run_is_one_clear_line(
    missing: str, worldpager: Command, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    (run / missing).unlink()
    status, _, message = worldpager("replay", run)
    assert status == 2
    assert missing in message
    assert len(message.splitlines()) == 1


def test_what_cannot_be_understood_is_one_clear_line(worldpager: Command, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"options": OPTIONS | {"retrieve": "many"}})
    status, _, message = worldpager("replay", run)
    assert status == 2
    assert "retrieve" in message
    (run / "poses.npy").write_bytes(b"no array")
    assert "poses.npy" in worldpager("replay", run)[2]
    (run / "summary.json").write_text("{")
    assert "not a rollout's folder" in worldpager("replay", run)[2]


def test_a_model_slower_than_predicted_is_named(
    predicted: Path, worldpager: Command, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[7]["model_ms"] = 900.0
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "1 chunks took longer" in worldpager("validate", run, predicted)[1]


@pytest.mark.slow
def test_a_real_rollout_against_its_prediction(worldpager: Command, tmp_path: Path) -> None:
    options = ("--chunks", 40, "--dram", "500KiB", "--path", "walk", "--seed", 2)
    assert worldpager("predict", "--out", tmp_path / "p.json", *options)[0] == 0
    ran = worldpager("rollout", *options, "--out", tmp_path / "run", "--no-compare")
    assert ran[0] == 0
    printed = worldpager("validate", tmp_path / "run", tmp_path / "p.json", "--json")[1]
    met = {c["name"]: c["met"] for c in json.loads(printed)["criteria"]}
    assert met["spill_chunk"]
    answer = json.loads(worldpager("replay", tmp_path / "run", "--json")[1])
    ran_so, same = answer["outcomes"]["as it ran"], answer["outcomes"]["the same, simulated"]
    assert same["spill_chunk"] == ran_so["spill_chunk"]
    assert abs(same["first_read_chunk"] - ran_so["first_read_chunk"]) <= 1

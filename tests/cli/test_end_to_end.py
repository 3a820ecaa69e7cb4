"""The commands with the real model, memory and disk."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., tuple[int, str, str]]
POOL = "432KiB"  # the 16-bit chunk of the sink and eight others


def test_a_short_rollout_spills_reads_back_and_verifies(
    worldpager: Command, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    status, printed, _ = worldpager(
        "rollout", "--chunks", 48, "--dram", POOL, "--out", out, "--no-compare", "--json"
    )
    assert status == 0
    summary = json.loads(printed)
    plan = json.loads(worldpager("plan", "--model", "builtin", "--dram", POOL, "--json")[1])
    assert summary["chunks"] == 48
    assert summary["spill_chunk"] == plan["spill_chunk"]
    assert summary["chunk_bytes"] == plan["chunk_bytes"]
    assert summary["chunk_reads"] > 0
    assert summary["bytes_read"] % summary["chunk_bytes"] == 0
    assert summary["stall_ms"]["max"] == 0
    assert sum(summary["hits"].values()) == summary["retrieved_chunks"]
    assert summary["revisit"]["psnr"] > 15
    for name in ("report.html", "video.gif"):
        assert (out / name).stat().st_size > 10_000

    status, printed, _ = worldpager("verify", out / "store")
    assert status == 0
    assert "0 damaged" in printed
    (rollout,) = json.loads(worldpager("inspect", out / "store", "--json")[1])["rollouts"]
    assert rollout["chunks"] >= 47
    assert rollout["with_pose"] == rollout["chunks"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_rollout_cleanly(
    number: signal.Signals, worldpager: Command, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    main = "from worldpager.cli.app import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", main, "rollout", "--dram", POOL, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no third chunk in two minutes"
        time.sleep(0.1)
    process.send_signal(number)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in message
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["chunks"] >= 3
    assert (out / "report.html").exists()
    assert worldpager("verify", out / "store")[0] == 0


def test_another_model_runs_without_weights_and_as_predicted(
    worldpager: Command, tmp_path: Path
) -> None:
    out, said = tmp_path / "run", tmp_path / "said.json"
    given = ("--dram", "1MiB", "--chunks", 90, "--on-miss", "wait")  # past the path's return
    small, timed = "matrix-game-2@1/3000", ("--chunk-time", "5ms", "--out")
    assert worldpager("predict", "--model", small, *given, *timed, said)[0] == 0
    status, printed, message = worldpager(
        "rollout", "--model", "matrix-game-2", "--scale", "1/3000", *given, *timed, out
    )
    assert status == 0
    assert "1 of 30 layers" in message
    assert "PSNR" in printed
    summary = json.loads((out / "summary.json").read_text())
    assert summary["options"]["model"] == small
    assert summary["chunk_reads"] > 0
    assert not (out / "video.gif").exists()
    verdicts = json.loads(worldpager("validate", out, said, "--json")[1])["criteria"]
    # what was written when the last chunk ended depends on the machine's pace, the spill does not
    assert {v["name"]: v["met"] for v in verdicts}["spill_chunk"]


def test_pruning_spills_where_it_was_predicted_to(worldpager: Command, tmp_path: Path) -> None:
    out, said = tmp_path / "run", tmp_path / "said.json"
    given = ("--dram", "400KiB", "--chunks", 40, "--prune", "worldkv:0.25")
    assert worldpager("predict", *given, "--chunk-time", "20ms", "--out", said)[0] == 0
    ran = worldpager(
        "rollout", *given, "--chunk-time", "20ms", "--no-compare", "--json", "--out", out
    )
    summary = json.loads(ran[1])
    assert summary["tokens_kept"] == 0.5
    assert summary["median_chunk_bytes"] < summary["chunk_bytes"]
    assert 0.2 < summary["pruning_ratio"] < 0.5
    assert summary["options"]["pruning"] == "worldkv:0.25"
    verdicts = json.loads(worldpager("validate", out, said, "--json")[1])["criteria"]
    spill = {v["name"]: v for v in verdicts}["spill_chunk"]
    assert spill["met"] and spill["observed"] == summary["spill_chunk"] > 12
    assert worldpager("verify", out / "store")[0] == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--prune", "worldky"), "known are none, worldkv"),
        (("--prune", "worldkv:1.5"), "keep ratio"),
        (("--model", "longlive", "--prune", "decoprune"), "samples nothing"),
    ],
)
def test_pruning_that_is_none_is_refused_before_anything_is_written(
    options: tuple[str, ...], why: str, worldpager: Command, tmp_path: Path
) -> None:
    status, printed, message = worldpager("rollout", *options, "--out", tmp_path / "run")
    assert (status, printed) == (2, "")
    assert why in message and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options", [("--model", "doom"), ("--model", "longlive", "--scale", "big")], ids=" ".join
)
def test_a_model_or_scale_that_is_none_is_one_clear_line(
    options: tuple[str, ...], worldpager: Command, tmp_path: Path
) -> None:
    status, printed, message = worldpager("rollout", *options, "--out", tmp_path / "run")
    assert (status, printed) == (2, "")
    assert options[-1] in message
    assert len(message.splitlines()) == 1
    assert not (tmp_path / "run").exists()

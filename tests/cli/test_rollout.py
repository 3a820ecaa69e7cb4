"""``worldpager rollout``: options, results, and every way it can end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.cli.fake_run import CHUNK, FIRST_READ, SPILL, fake_metrics
from worldpager.cli import recording
from worldpager.cli.pictures import write_film
from worldpager.errors import StoreFullError
from worldpager.model_adapter.rollout import ChunkMetrics, RolloutConfig
from worldpager.prefetch.paths import make_path
from worldpager.quant.codec import get_codec
from worldpager.sim.closed_form import chunk_bytes
from worldpager.sim.presets import get_preset

Command = Callable[..., tuple[int, str, str]]
Ran = list[RolloutConfig]


def summary_of(out: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def test_results_of_a_whole_run(fake_rollout: Ran, worldpager: Command, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    status, printed, progress = worldpager(
        "rollout", "--chunks", 120, "--dram", "400KiB", "--out", out
    )
    assert status == 0
    assert "120 chunks" in printed
    assert "report.html" in printed
    assert "rollout 120/120" in progress

    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["chunk"] for line in lines] == list(range(120))

    summary = summary_of(out)
    assert summary["status"] == "complete"
    assert summary["chunks"] == 120
    assert summary["video_seconds"] == 90
    assert summary["wall_seconds"] > 0
    assert summary["chunk_ms"]["p50"] == 104.5
    assert summary["stall_ms"] == {"p50": 0, "p99": 0, "max": 0}
    assert summary["decode_ms"]["p50"] == 1.5
    assert summary["stale_chunks"] == 1
    assert summary["stale_reasons"] == {"not resident": 1}
    assert summary["spill_chunk"] == SPILL
    assert summary["first_read_chunk"] == FIRST_READ
    assert summary["chunk_bytes"] == chunk_bytes(get_preset("builtin"), get_codec("int4")).stored
    assert summary["bytes_written"] == 116 * CHUNK
    assert (summary["bytes_read"], summary["chunk_reads"]) == (81 * CHUNK, 81)
    assert (summary["retrieved_chunks"], summary["retrieved_from_nvme"]) == (354, 40)
    assert summary["hits"] == {"staged": 354, "dram": 0, "nvme": 0, "stale": 0, "empty": 0}
    assert summary["rss_bytes"] == {"start": 300_000_000, "end": 300_011_900}
    assert summary["rss_growth_per_chunk"] == pytest.approx(100)
    assert summary["revisit"]["pairs"] > 100
    assert summary["revisit"]["psnr"] > summary["revisit"]["psnr_without_memory"] + 6


def test_the_comparison_is_the_same_rollout_without_retrieval(
    fake_rollout: Ran, worldpager: Command, tmp_path: Path
) -> None:
    worldpager(
        "rollout", "--chunks", 12, "--seed", 7, "--path", "walk", "--chunk-time", "250ms",
        "--read-limit", "0.25GB/s", "--write-limit", "1MB/s", "--disk", "1GiB",
        "--on-miss", "nearest", "--codec", "int3", "--out", tmp_path / "run",
    )  # fmt: skip
    with_memory, without = fake_rollout
    assert (with_memory.chunk_time, with_memory.retrieve) == (0.25, 3)
    assert (with_memory.read_limit, with_memory.write_limit) == (250_000_000, 1_000_000)
    assert (with_memory.disk_bytes, with_memory.on_miss) == (2**30, "nearest")
    assert with_memory.codec == "int3"
    assert without.retrieve == 0
    assert (without.chunk_time, without.read_limit, without.write_limit) == (None, None, None)
    assert without.seed == with_memory.seed == 7
    assert np.array_equal(without.path, with_memory.path)
    assert not (tmp_path / "run" / "without-memory" / "store").exists()


def test_a_machine_caps_what_nothing_else_caps(
    fake_rollout: Ran, worldpager: Command, tmp_path: Path
) -> None:
    options = ("rollout", "--chunks", 12, "--no-compare", "--machine", "sata")
    worldpager(*options, "--out", tmp_path / "a")
    worldpager(*options, "--read-limit", "1MB/s", "--out", tmp_path / "b")
    assert [(ran.read_limit, ran.write_limit) for ran in fake_rollout] == [
        (500_000_000, 500_000_000),
        (1_000_000, 500_000_000),
    ]
    status, _, message = worldpager("rollout", "--machine", "toaster", "--out", tmp_path / "c")
    assert status == 2
    assert "toaster" in message and "nvme-pcie4" in message
    assert not (tmp_path / "c").exists()


def test_no_comparison_where_none_is_wanted(
    fake_rollout: Ran, worldpager: Command, tmp_path: Path
) -> None:
    worldpager("rollout", "--chunks", 50, "--no-compare", "--out", tmp_path / "run")
    assert len(fake_rollout) == 1
    assert summary_of(tmp_path / "run")["revisit"]["psnr_without_memory"] is None
    worldpager("rollout", "--chunks", 50, "--retrieve", 0, "--out", tmp_path / "run")
    assert len(fake_rollout) == 2


def test_minutes_are_of_video(fake_rollout: Ran, worldpager: Command, tmp_path: Path) -> None:
    worldpager("rollout", "--minutes", 0.5, "--no-compare", "--out", tmp_path / "run")
    assert fake_rollout[0].chunks == 40
    assert summary_of(tmp_path / "run")["video_seconds"] == 30


def test_retrieval_and_pages_reach_the_rollout(
    fake_rollout: Ran, worldpager: Command, tmp_path: Path
) -> None:
    options = ("--retrieval", "fov:far=9", "--page-frames", 1, "--no-compare")
    worldpager("rollout", "--chunks", 8, *options, "--out", tmp_path / "run")
    assert fake_rollout[-1].retrieval == "fov:far=9" and fake_rollout[-1].page_frames == 1
    told = summary_of(tmp_path / "run")["options"]
    assert told["retrieval"] == "fov:far=9" and told["page_frames"] == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--retrieval", "near"), "no retrieval policy 'near'"),
        (("--retrieval", "fov:far=0"), "near < far"),
        (("--retrieval", "action"), "driven by keys"),
        (("--retrieval", "query", "--model", "matrix-game-2@1/30"), "needs a model's queries"),
    ],
)
def test_retrieval_that_cannot_be_is_one_clear_line(
    worldpager: Command, tmp_path: Path, options: tuple[str, ...], why: str
) -> None:
    status, _, printed = worldpager("rollout", *options, "--out", tmp_path / "run")
    assert status != 0 and why in printed
    assert not (tmp_path / "run").exists()


def test_a_path_from_a_file(fake_rollout: Ran, worldpager: Command, tmp_path: Path) -> None:
    poses = make_path("loop", 20, 3).reshape(-1, 4, 4)
    np.save(tmp_path / "camera.npy", poses)
    worldpager(
        "rollout", "--chunks", 20, "--path", tmp_path / "camera.npy", "--out", tmp_path / "run"
    )
    assert np.array_equal(fake_rollout[0].path.reshape(-1, 4, 4), poses)


def test_json_is_all_that_is_printed(
    fake_rollout: Ran, worldpager: Command, tmp_path: Path
) -> None:
    status, printed, _ = worldpager("rollout", "--chunks", 10, "--json", "--out", tmp_path / "r")
    assert status == 0
    assert json.loads(printed) == summary_of(tmp_path / "r")


class _Resources(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_report_is_one_file_with_charts_and_pictures(
    fake_rollout: Ran, worldpager: Command, tmp_path: Path
) -> None:
    worldpager("rollout", "--chunks", 100, "--out", tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    found = _Resources()
    found.feed(page)
    assert found.tags.count("svg") == 6
    assert found.tags.count("img") == 4 * 6
    assert "script" not in found.tags
    assert all(link.startswith("data:image/png;base64,") for link in found.links if link[0] != "#")
    for words in ("Time per chunk", "Host memory", "Tier occupancy", "Reads and writes", "Stalls"):
        assert words in page


def test_the_film_shows_both_rollouts(
    fake_rollout: Ran, worldpager: Command, tmp_path: Path
) -> None:
    worldpager("rollout", "--chunks", 150, "--out", tmp_path / "run")
    with Image.open(tmp_path / "run" / "video.gif") as film:
        assert film.n_frames == 225  # every second of 450
        assert film.size == (65 * 4, 32 * 4)


# ---- ways to end --------------------------------------------------------------------------------


def ends_after(chunks: int, error: BaseException | None = None) -> Callable[..., object]:
    def run_rollout(config: RolloutConfig) -> Iterator[ChunkMetrics]:
        for chunk in range(chunks):
            yield fake_metrics(chunk)
        if error is None:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            raise error

    return run_rollout


@pytest.mark.parametrize("error", [KeyboardInterrupt(), None], ids=["ctrl-c", "sigterm"])
def test_an_interrupted_run_keeps_its_results(
    error: BaseException | None,
    worldpager: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording, "run_rollout", ends_after(30, error))
    status, _, message = worldpager("rollout", "--out", tmp_path / "run")
    assert status == 130
    assert "Traceback" not in message
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["chunks"]) == ("interrupted", 30)
    assert (tmp_path / "run" / "report.html").exists()


def test_a_failed_run_says_why_in_one_line(
    worldpager: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = StoreFullError("no space left in /disk: 12KiB free; free some or lower --disk")
    monkeypatch.setattr(recording, "run_rollout", ends_after(30, full))
    status, _, message = worldpager("rollout", "--out", tmp_path / "run")
    assert status == 2
    assert message.splitlines()[-1] == f"worldpager: {full}"
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["error"]) == ("failed", str(full))
    assert summary["chunks"] == 30


def test_a_run_that_fails_at_once_still_has_a_summary(
    worldpager: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "run_rollout", ends_after(0, StoreFullError("no space")))
    assert worldpager("rollout", "--out", tmp_path / "run")[0] == 2
    assert summary_of(tmp_path / "run")["chunks"] == 0


# ---- folders and options that cannot be used ----------------------------------------------------


def test_a_second_run_replaces_the_first(
    fake_rollout: Ran, worldpager: Command, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert worldpager("rollout", "--chunks", 30, "--out", out)[0] == 0
    assert worldpager("rollout", "--chunks", 10, "--out", out)[0] == 0
    assert summary_of(out)["chunks"] == 10
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 10


def test_a_folder_with_other_files_is_left_alone(
    fake_rollout: Ran, worldpager: Command, tmp_path: Path
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    (tmp_path / "store").mkdir()
    status, _, message = worldpager("rollout", "--chunks", 10, "--out", tmp_path)
    assert status == 2
    assert len(message.splitlines()) == 1
    assert str(tmp_path) in message
    assert {entry.name for entry in tmp_path.iterdir()} == {"thesis.txt", "store"}
    assert not fake_rollout


def test_a_folder_that_another_rollout_writes_to_is_left_alone(
    fake_rollout: Ran, worldpager: Command, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with recording.claimed(out):
        status, _, message = worldpager("rollout", "--chunks", 10, "--out", out)
    assert status == 2
    assert f"process {os.getpid()}" in message
    assert len(message.splitlines()) == 1
    assert not fake_rollout
    assert worldpager("rollout", "--chunks", 10, "--out", out)[0] == 0


def test_a_file_is_no_folder(worldpager: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        status, _, message = worldpager("rollout", "--out", out)
        assert status == 2
        assert "not a folder" in message


def test_an_unwritable_folder(
    worldpager: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refused)  # root may write anywhere, so ask for the refusal
    status, _, message = worldpager("rollout", "--out", tmp_path / "run")
    assert status == 2
    assert message == f"worldpager: cannot write to {tmp_path / 'run'}: permission denied\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dram", "lots"], ["--dram", "lots", "24GiB"]),
        (["--read-limit", "0"], ["--read-limit", "positive"]),
        (["--chunk-time", "soon"], ["--chunk-time", "250ms"]),
        (["--chunks", "0"], ["--chunks"]),
        (["--minutes", "-1"], ["--minutes"]),
        (["--minutes", "nan"], ["--minutes"]),
        (["--chunks", "5", "--minutes", "1"], ["--chunks", "--minutes"]),
        (["--retrieve", "-1"], ["--retrieve"]),
        (["--on-miss", "hope"], ["--on-miss", "nearest"]),
        (["--codec", "int2"], ["int2", "int4"]),
        (["--path", "spiral"], ["spiral", "yaw-return"]),
        (["--path", "missing.npy"], ["missing.npy"]),
        (["--frames", "5"], ["--frames"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") and len(value) > 1 else "",
)
def test_a_bad_option_is_one_clear_line(
    options: list[str], words: list[str], worldpager: Command, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    status, printed, message = worldpager("rollout", "--out", out, *options)
    assert status == 2
    assert not printed
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message
    assert not out.exists()


def test_an_mp4_holds_every_frame(tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="PyAV is not installed (extra: video)")
    frames = np.random.default_rng(0).integers(0, 255, (40, 32, 32, 3), dtype=np.uint8)
    assert write_film(frames, frames, tmp_path / "film.mp4") == 40
    with av.open(str(tmp_path / "film.mp4")) as film:
        assert sum(1 for _ in film.decode(video=0)) == 40

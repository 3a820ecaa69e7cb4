"""The pure parts behind a rollout's results: metrics, quantiles, growth, revisits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.fake_run import fake_metrics
from worldpager.cli.metrics import MetricsLog, read_metrics
from worldpager.cli.revisits import OUT_OF_SIGHT_CHUNKS, Revisits, find_revisits, psnr
from worldpager.cli.summary import Quantiles, Revisit, growth_per_chunk, summarise
from worldpager.prefetch.paths import make_path


def test_metrics_are_on_disk_before_the_next_chunk(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for chunk in range(3):
            log.write(fake_metrics(chunk).as_dict())
            assert len(path.read_text().splitlines()) == chunk + 1


def test_metrics_read_back_as_columns_without_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for chunk in range(4):
            log.write(fake_metrics(chunk).as_dict())
    path.write_text(path.read_text() + '{"chunk": 4, "wa')
    columns = read_metrics(path)
    assert columns["chunk"].tolist() == [0, 1, 2, 3]
    assert columns["hits.staged"].tolist() == [0, 1, 2, 3]
    assert columns["retrieved"][3] == [0, 1, 2]
    assert columns["spill_chunk"][0] is None


def test_not_a_number_is_never_written(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log, pytest.raises(ValueError, match="JSON"):
        log.write({"wall_ms": float("nan")})


def test_quantiles() -> None:
    values = np.arange(101.0)
    assert Quantiles.of(values) == Quantiles(p50=50, p99=99, max=100)
    assert Quantiles.of(values[:0]) == Quantiles()


def test_growth_counts_from_the_spill_on() -> None:
    rss = np.concatenate([np.arange(50) * 1_000_000, 50_000_000 + np.arange(100) * 512])
    assert growth_per_chunk(rss, 51) == pytest.approx(512)
    assert growth_per_chunk(rss, None) is None
    assert growth_per_chunk(rss, 145) is None


def test_a_summary_of_nothing_is_a_summary() -> None:
    summary = summarise(
        {},
        status="interrupted",
        chunk_bytes=1,
        video_seconds_per_chunk=0.75,
        wall_seconds=0.1,
        revisit=Revisit(),
        options={"seed": 3},
    )
    written = json.loads(summary.model_dump_json())
    assert (written["status"], written["chunks"], written["options"]) == (
        "interrupted",
        0,
        {"seed": 3},
    )


# ---- revisits -----------------------------------------------------------------------------------


def test_a_turning_camera_comes_back_to_each_frame() -> None:
    path = make_path("yaw-return", 72, 3)
    revisits = find_revisits(path)
    poses = path.reshape(-1, 4, 4)
    assert np.allclose(poses[revisits.first], poses[revisits.again], atol=1e-9)
    assert (revisits.again // 3 - revisits.first // 3 > OUT_OF_SIGHT_CHUNKS).all()
    assert (np.diff(revisits.again) > 0).all()
    assert len(revisits) > 72


def test_a_camera_that_never_returns_has_no_revisits() -> None:
    path = np.tile(np.eye(4), (40, 3, 1, 1))
    path[..., 0, 3] = np.arange(120).reshape(40, 3)
    revisits = find_revisits(path)
    assert len(revisits) == 0
    assert psnr(np.zeros((120, 4, 4, 3), np.uint8), revisits) is None


def test_no_chunk_no_revisits() -> None:
    assert len(find_revisits(np.empty((0, 3, 4, 4)))) == 0


def test_psnr_is_the_mean_over_pairs() -> None:
    frames = np.zeros((4, 8, 8, 3), dtype=np.uint8)
    frames[2] = 51  # a fifth of the range: 20 log10(5) = 13.98 dB
    frames[3] = 255  # black against white: 0 dB
    pairs = Revisits(np.array([0, 0, 0]), np.array([1, 2, 3]))
    assert psnr(frames, pairs) == pytest.approx((100 + 13.979 + 0) / 3, abs=1e-3)

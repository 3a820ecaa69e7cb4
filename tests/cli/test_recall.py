"""``worldpager recall``: paths that come back, scores that can be trusted, runs that resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from worldpager.cli import recall_episodes, recall_paths
from worldpager.cli.recall_episodes import Episode, Outcome, run_episode
from worldpager.cli.recall_methods import METHODS, get_method
from worldpager.cli.recall_paths import FRAMES, GAPS, PATHS, recall_path
from worldpager.cli.recall_report import report
from worldpager.cli.recall_results import Results, change, estimate, score
from worldpager.cli.recall_scores import Scorer, psnr, ssim
from worldpager.cli.revisits import find_revisits
from worldpager.errors import ConfigError
from worldpager.model_adapter.builtin import load_model
from worldpager.model_adapter.builtin.rooms import HALF

Command = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("name", PATHS)
def test_paths_return_the_way_they_came_with_every_gap(name: str) -> None:
    path = recall_path(name, 144, 3)
    assert path.shape == (144, FRAMES, 4, 4)
    assert np.array_equal(path, path[::-1, ::-1])
    assert np.abs(path[..., :3, 3]).max(axis=(0, 1)) == pytest.approx(np.zeros(3), abs=HALF[0] - 1)
    turned = path[..., :3, :3]
    assert np.allclose(turned @ turned.swapaxes(-1, -2), np.eye(3))
    found = find_revisits(path)
    gaps = found.again // FRAMES - found.first // FRAMES
    for least, end in GAPS.values():
        assert ((gaps >= least) & (gaps < end)).sum() >= 8 * FRAMES
    assert not np.array_equal(path, recall_path(name, 144, 4))
    assert np.array_equal(path, recall_path(name, 144, 3))


def test_psnr_and_ssim_of_known_pictures() -> None:
    rng = np.random.default_rng(0)
    first = rng.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    assert psnr(first, first).tolist() == [100.0] * 3
    assert ssim(first, first) == pytest.approx(np.ones(3))
    grey, lighter = np.full_like(first, 100), np.full_like(first, 110)
    assert psnr(grey, lighter) == pytest.approx(np.full(3, 20 * np.log10(255 / 10)))
    # flat pictures differ in luminance alone: (2 x y + C1) / (x^2 + y^2 + C1)
    c1 = (0.01 * 255) ** 2
    assert ssim(grey, lighter) == pytest.approx(np.full(3, (22_000 + c1) / (22_100 + c1)))
    noisy = np.clip(first.astype(int) + rng.integers(-40, 41, first.shape), 0, 255)
    assert 0.5 < float(ssim(first, noisy.astype(np.uint8)).mean()) < 1.0
    other = rng.integers(0, 256, first.shape, dtype=np.uint8)
    assert abs(float(ssim(first, other).mean())) < 0.1


def test_ssim_is_the_formula_written_out() -> None:
    """One window of 11 x 11 fits an 11 x 11 picture: weighted moments by hand."""
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 256, (2, 1, 11, 11, 3), dtype=np.uint8)
    side = np.exp(-(np.arange(-5, 6) ** 2) / (2 * 1.5**2))
    weight = (np.outer(side, side) / side.sum() ** 2)[..., None]

    def mean(values: np.ndarray) -> np.ndarray:
        return (weight * values).sum(axis=(0, 1))

    a, b = x[0].astype(float), y[0].astype(float)
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    var_a, var_b = mean(a * a) - mean(a) ** 2, mean(b * b) - mean(b) ** 2
    wanted = (2 * mean(a) * mean(b) + c1) * (2 * (mean(a * b) - mean(a) * mean(b)) + c2)
    wanted /= (mean(a) ** 2 + mean(b) ** 2 + c1) * (var_a + var_b + c2)
    assert ssim(x, y) == pytest.approx([wanted.mean()])


def test_intervals_cover_the_mean_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(2)
    found = [estimate(rng.normal(1.0, 2.0, 24)) for _ in range(100)]
    covered = sum(e.low <= 1.0 <= e.high for e in found)
    assert 85 <= covered <= 100
    assert all(e.low <= e.mean <= e.high and e.count == 24 for e in found)


def made(method: str, codec: str, seed: int, decibels: float) -> Outcome:
    scores = {
        gap: {"psnr": decibels, "ssim": 0.9, "pairs": 10 * (i + 1)} for i, gap in enumerate(GAPS)
    }
    return Outcome(Episode(method, codec, "observed", "turning", seed), scores, 144, 26_368, 30, 3)


def test_differences_are_taken_world_by_world(tmp_path: Path) -> None:
    results = Results(tmp_path / "recall.jsonl")
    for seed, level in enumerate((20.0, 30.0, 25.0)):
        results.add(made("retrieval", "bf16", seed, level))
        results.add(made("retrieval", "int4", seed, level - 0.05))
    results.add(made("retrieval", "int4", 9, 99.0))
    again = Results(tmp_path / "recall.jsonl")
    assert again.outcomes == results.outcomes
    rows = [again.of("retrieval", codec, "observed") for codec in ("int4", "bf16")]
    for gap in (*GAPS, "all"):
        found = change(*rows, gap, "psnr")
        assert found is not None
        assert (found.mean, found.low, found.high) == pytest.approx((-0.05, -0.05, -0.05))
        assert found.count == 3, "a world that one of them has not seen does not count"
    assert score(rows[1], "all", "psnr").mean == pytest.approx(25.0)  # type: ignore[union-attr]
    assert score(rows[1], "all", "lpips") is None
    text = report(again, "LPIPS is left out")
    assert "| int4 | retrieval by camera, 3 chunks | observed | -0.05 [-0.05, -0.05]" in text
    assert "int4 against bf16: interval includes zero | observed | **no**" in text
    assert text.endswith("LPIPS is left out\n")


def test_every_method_makes_a_memory_that_opens(tmp_path: Path) -> None:
    from worldpager.model_adapter.memory import WorldMemory
    from worldpager.model_adapter.rollout import builtin_spec

    shape = load_model().config
    for method in METHODS.values():
        spec = builtin_spec(shape, 12 if method.chunks is None else method.chunks, "test")
        assert method.against is None or method.against in METHODS
        episode = Episode(method.name, "int4", "observed", "turning", 0, chunks=12)
        WorldMemory(method.config(tmp_path / method.name, spec, episode), spec).close()


def test_memory_beats_the_window(tmp_path: Path) -> None:
    model, scorer = load_model(), Scorer(with_lpips=False)
    got = {}
    for name in ("sliding", "retrieval"):
        episode = Episode(name, "int4", "observed", "turning", 0, chunks=48)
        got[name] = run_episode(model, get_method(name), episode, scorer, tmp_path)
    window, memory = got["sliding"], got["retrieval"]
    for gap in ("short", "mid"):
        assert memory.scores[gap]["psnr"] > window.scores[gap]["psnr"] + 6
    assert memory.window_tokens == window.window_tokens == 3 * 48
    assert 26_000 < memory.chunk_bytes < 27_000
    assert list(tmp_path.iterdir()) == [], "stores are gone"


def test_a_run_resumes_and_writes_table_and_figure(
    worldpager: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall_paths, "PATHS", ("turning",))
    monkeypatch.setattr(recall_episodes, "KINDS", ("observed",))
    out = tmp_path / "out"
    options = ("--out", out, "--methods", "retrieval", "--worlds", 1, "--chunks", 48)
    status, _, told = worldpager("recall", *options, "--codecs", "int4", "--limit", "0s")
    assert status == 0
    assert "1 episodes are left" in told
    status, _, told = worldpager("recall", *options, "--codecs", "int4")
    assert (status, told) == (0, "")
    lines = (out / "recall.jsonl").read_text()
    assert lines.count("\n") == 1
    assert worldpager("recall", *options, "--codecs", "int4")[0] == 0
    assert (out / "recall.jsonl").read_text() == lines, "nothing is run twice"
    assert "### Observed context" in (out / "recall.md").read_text()
    assert (out / "recall.png").read_bytes()[1:4] == b"PNG"


def test_what_cannot_be_run_is_refused(worldpager: Command, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'magic'; known are sliding"):
        get_method("magic")
    for options in (("--chunks", 47), ("--chunks", 20), ("--worlds", 0), ("--methods", "magic")):
        status, _, told = worldpager("recall", "--out", tmp_path / "out", *options)
        assert status != 0
        assert told
    assert not (tmp_path / "out").exists()

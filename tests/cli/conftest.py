"""What the tests of commands share: a way to call them, and a rollout without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.cli.fake_run import fake_metrics, picture
from worldpager.cli import app, recording
from worldpager.model_adapter.rollout import ChunkMetrics, RolloutConfig


@pytest.fixture
def fake_rollout(monkeypatch: pytest.MonkeyPatch) -> list[RolloutConfig]:
    """Stands in for the real rollout; holds the configurations that were run."""
    ran: list[RolloutConfig] = []

    def run_rollout(config: RolloutConfig) -> Iterator[ChunkMetrics]:
        ran.append(config)
        rng = np.random.default_rng(config.seed)
        Path(config.store_dir).mkdir()
        with (Path(config.out_dir) / recording.FRAMES).open("wb") as frames:
            for chunk in range(config.chunks):
                for pose in config.path[chunk]:
                    noise = 5.0 if config.retrieve else 50.0
                    frames.write(picture(pose, noise, rng).tobytes())
                frames.flush()
                yield fake_metrics(chunk, config.retrieve)

    monkeypatch.setattr(recording, "run_rollout", run_rollout)
    return ran


@pytest.fixture
def worldpager(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command as the script does: exit status, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = app.run([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run

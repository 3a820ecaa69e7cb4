"""attach: what it recognises, what it refuses, what it tells the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.frontends import wan
from worldpager import FrontendError, attach
from worldpager.errors import ConfigError
from worldpager.model_adapter.frontend import ChunkStep
from worldpager.model_adapter.frontends.base import Arguments, fingerprint
from worldpager.prefetch.paths import make_path

OPTIONS: dict[str, Any] = {"dram": "64MiB", "on_miss": "wait"}


@pytest.fixture
def pipeline() -> Any:
    return wan.seeded(wan.Pipeline, torch.float32)


def test_an_unknown_object_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FrontendError, match=r"Linear is no frontend.*max_attention_size"):
        attach(torch.nn.Linear(2, 2), store=tmp_path / "s", **OPTIONS)
    assert not (tmp_path / "s").exists()


def test_an_unknown_name_is_refused_with_those_known(pipeline: Any, tmp_path: Path) -> None:
    with pytest.raises(FrontendError, match=r"no frontend 'wann'; known are .*self-forcing"):
        attach(pipeline, store=tmp_path / "s", frontend="wann", **OPTIONS)


def test_a_pipeline_has_one_memory_at_a_time(pipeline: Any, tmp_path: Path) -> None:
    with (
        attach(pipeline, store=tmp_path / "s", **OPTIONS),
        pytest.raises(FrontendError, match="has a memory already"),
    ):
        attach(pipeline, store=tmp_path / "other", **OPTIONS)
    attach(pipeline, store=tmp_path / "s", **OPTIONS).detach()


def test_what_cannot_be_opened_changes_nothing(pipeline: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no retrieval policy"):
        attach(pipeline, store=tmp_path / "s", retrieval="nearby", **OPTIONS)
    attach(pipeline, store=tmp_path / "s", **OPTIONS).detach()


def test_another_batch_than_was_said_is_refused(pipeline: Any, tmp_path: Path) -> None:
    with (
        attach(pipeline, store=tmp_path / "s", **OPTIONS),
        pytest.raises(FrontendError, match=r"batch.*\(2, 2, 64, torch.float32\)"),
    ):
        pipeline.inference(wan.noise(1, torch.float32, batch=2), torch.zeros(wan.DIM))


def test_batches_are_kept_apart(tmp_path: Path) -> None:
    pipeline = wan.seeded(wan.Pipeline, torch.float32)
    noise, context = wan.noise(5, torch.float32, batch=2), torch.zeros(wan.DIM)
    want = pipeline.inference(noise, context)
    pipeline = wan.seeded(wan.Pipeline, torch.float32)
    with attach(pipeline, store=tmp_path / "s", window={"batch": 2}, retrieve=0, **OPTIONS):
        got = pipeline.inference(noise, context)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_rollout_that_has_begun_is_refused(pipeline: Any, tmp_path: Path) -> None:
    calls = {"context": torch.zeros(wan.DIM), "kv_cache": wan.empty_cache(1, 48, torch.float32)}
    x = wan.noise(1, torch.float32)
    pipeline.generator(x, 0.0, current_start=0, **calls)
    with (
        attach(pipeline, store=tmp_path / "s", **OPTIONS),
        pytest.raises(FrontendError, match="1;"),
    ):
        pipeline.generator(x, 1.0, current_start=24, **calls)


def test_a_bare_model_needs_its_sizes(tmp_path: Path) -> None:
    model = wan.seeded(wan.Model, torch.float32)
    with pytest.raises(FrontendError, match="tokens_per_frame"):
        attach(model, store=tmp_path / "s", **OPTIONS)
    window = {"tokens_per_frame": wan.TOKENS, "frames_per_chunk": wan.CHUNK}
    with attach(model, store=tmp_path / "s", window=window, **OPTIONS) as attachment:
        cache = wan.empty_cache(1, 6 * wan.TOKENS, torch.float32)
        for start in (0, 24, 24, 48):
            model(
                wan.noise(1, torch.float32), torch.zeros(1), torch.zeros(wan.DIM), kv_cache=cache,
                current_start=start,
            )  # fmt: skip
        assert attachment.chunk == 2
        assert attachment.memory.stats.commits == 2


def test_poses_known_beforehand_and_asked_for(tmp_path: Path) -> None:
    path = make_path("loop", 6, wan.CHUNK)
    seen: list[ChunkStep] = []
    for number, poses in enumerate((path, lambda chunk: path[chunk])):
        pipeline = wan.seeded(wan.Pipeline, torch.float32)
        with attach(pipeline, store=tmp_path / str(number), poses=poses, **OPTIONS) as attachment:
            assert attachment.memory.config.retrieval == "camera"
            attachment.listeners.append(lambda step, _, __: seen.append(step))
            wan.run(pipeline, 6)
    assert all(np.array_equal(step.poses, path[step.chunk]) for step in seen)  # type: ignore[arg-type]
    assert [len(step.poses_ahead) for step in seen] == [5, 4, 3, 2, 1, 0] + [0] * 6


def test_too_few_poses_are_refused(pipeline: Any, tmp_path: Path) -> None:
    path = make_path("loop", 2, wan.CHUNK)
    with (
        attach(pipeline, store=tmp_path / "s", poses=path, **OPTIONS),
        pytest.raises(ConfigError, match="chunk 2 begins, but poses= has those of 2"),
    ):
        wan.run(pipeline, 4)


def test_a_first_frame_of_its_own_is_refused(pipeline: Any, tmp_path: Path) -> None:
    pipeline.independent_first_frame = True
    with pytest.raises(FrontendError, match="independent_first_frame"):
        attach(pipeline, store=tmp_path / "s", **OPTIONS)


def test_a_fingerprint_tells_weights_apart() -> None:
    a, b = (wan.seeded(wan.Model, torch.float32) for _ in "ab")
    assert fingerprint(a) == fingerprint(b)
    b.head.weight[0, 0] += 1
    assert fingerprint(a) != fingerprint(b)


def test_arguments_are_found_however_they_are_passed() -> None:
    arguments = Arguments(wan.SelfAttention(6, 0))
    args, kwargs = ("x", "freqs", "cache", 24), {"cache_start": 25}
    assert arguments.get("current_start", args, kwargs) == 24
    assert arguments.get("cache_start", args, kwargs) == 25
    assert arguments.get("cache_start", args, {}) is None
    changed = arguments.replaced(args, kwargs, {"current_start": 0, "cache_start": 1})
    assert changed == (("x", "freqs", "cache", 0), {"cache_start": 1})

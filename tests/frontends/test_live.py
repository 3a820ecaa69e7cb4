"""Live sessions: saved, resumed in another process, taken back, forked; and prompts that change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frontends import game, wan
from worldpager import Attachment, FrontendError, attach, fork
from worldpager.errors import ConfigError, ForeignDirectoryError
from worldpager.prefetch.paths import make_path

CHUNKS, PART = 24, 14
"""In all, of which some lie past the table; and until the session is saved."""
OPTIONS: dict[str, Any] = {"dram": "64MiB", "on_miss": "wait", "retrieve": 2, "positions": "moving"}


def opened(store: Path, pipeline: Any = None, **options: Any) -> tuple[Any, Attachment]:
    """A pipeline as a new process has it, with the memory at ``store``."""
    pipeline = pipeline or wan.seeded(wan.Pipeline, torch.float32)
    path = make_path("loop", CHUNKS, wan.CHUNK)
    return pipeline, attach(pipeline, store=store, poses=path, **OPTIONS, **options)


def generate(pipeline: Any, chunks: int, first: int = 0) -> list[torch.Tensor]:
    """The loop in the caller's hands: from any chunk on."""
    noise = wan.noise(CHUNKS, torch.float32)[:, : chunks * wan.CHUNK]
    return pipeline.inference(noise, torch.ones(wan.DIM), first)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """All chunks at one go."""
    pipeline, attachment = opened(tmp_path_factory.mktemp("whole"))
    with attachment:
        return generate(pipeline, CHUNKS)


def test_a_session_goes_on_in_a_new_process_bit_for_bit(
    tmp_path: Path, whole: list[torch.Tensor]
) -> None:
    pipeline, attachment = opened(tmp_path / "s")
    with attachment:
        begun = generate(pipeline, PART)
        attachment.save(tmp_path / "saved", generator=torch.tensor([1, 2, 3]))
    pipeline, attachment = opened(tmp_path / "s")
    with attachment:
        assert attachment.resume(tmp_path / "saved") == PART
        assert attachment.extra["generator"].tolist() == [1, 2, 3]
        rest = generate(pipeline, CHUNKS, first=PART)
    assert all(torch.equal(a, b) for a, b in zip(begun + rest, whole, strict=True))


def test_saved_by_a_listener_it_goes_on_with_the_chunk_that_began(
    tmp_path: Path, whole: list[torch.Tensor]
) -> None:
    pipeline, attachment = opened(tmp_path / "s")
    saved = tmp_path / "saved"
    with attachment:
        attachment.listeners.append(
            lambda step, _, __: attachment.save(saved) if step.chunk == 21 else None
        )
        generate(pipeline, 22)
    pipeline, attachment = opened(tmp_path / "s")
    with attachment:
        assert attachment.resume(saved) == 21
        rest = generate(pipeline, CHUNKS, first=21)
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[21:], strict=True))


def test_a_session_is_taken_back_and_takes_another_way(
    tmp_path: Path, whole: list[torch.Tensor]
) -> None:
    pipeline, attachment = opened(tmp_path / "s")
    with attachment:
        generate(pipeline, PART)
        attachment.save(tmp_path / "saved")
        attachment.resume(tmp_path / "saved")
        pipeline.inference(wan.noise(CHUNKS, torch.float32), -torch.ones(wan.DIM), PART)
        attachment.resume(tmp_path / "saved")
        rest = generate(pipeline, CHUNKS, first=PART)
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[PART:], strict=True))


def test_a_game_goes_on_with_its_action_caches_and_where_it_stood(tmp_path: Path) -> None:
    def played(folder: Path, parts: list[range]) -> list[torch.Tensor]:
        out: list[torch.Tensor] = []
        for part in parts:
            pipeline = wan.seeded(game.GamePipeline, torch.float32)
            with attach(pipeline, store=folder / "s", **OPTIONS) as attachment:
                if part.start:
                    attachment.resume(folder / "saved")
                out += game.run(pipeline, part.stop, part.start)
                attachment.save(folder / "saved")
        return out

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    once = played(tmp_path / "a", [range(28)])
    twice = played(tmp_path / "b", [range(14), range(14, 27), range(27, 28)])
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


def test_a_fork_and_its_original_share_files_and_go_different_ways(
    tmp_path: Path, whole: list[torch.Tensor]
) -> None:
    pipeline, attachment = opened(tmp_path / "s")
    with attachment:
        generate(pipeline, PART)
        attachment.save(tmp_path / "saved")
        fork(tmp_path / "s", tmp_path / "f")
        attachment.resume(tmp_path / "saved")
        pipeline.inference(wan.noise(CHUNKS, torch.float32), -torch.ones(wan.DIM), PART)
    files = [tmp_path / at / "rollout-0" / "kv" / "3.0.0.0.0.0" for at in "sf"]
    assert files[0].samefile(files[1])
    pipeline, attachment = opened(tmp_path / "f")
    with attachment:
        attachment.resume(tmp_path / "saved")
        rest = generate(pipeline, CHUNKS, first=PART)
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[PART:], strict=True))
    with pytest.raises(ForeignDirectoryError, match="is there already"):
        fork(tmp_path / "s", tmp_path / "f")


def test_a_loop_that_begins_elsewhere_is_refused(tmp_path: Path) -> None:
    pipeline, attachment = opened(tmp_path / "s")
    with attachment:
        generate(pipeline, 4)
        attachment.save(tmp_path / "saved")
        attachment.resume(tmp_path / "saved")
        with pytest.raises(FrontendError, match="goes on at frame 12, but the loop begins at 15"):
            generate(pipeline, 6, first=5)


def test_what_was_saved_otherwise_is_refused(tmp_path: Path) -> None:
    pipeline, attachment = opened(tmp_path / "s")
    with attachment:
        with pytest.raises(ConfigError, match="no chunk was generated"):
            attachment.save(tmp_path / "saved")
        with pytest.raises(FrontendError, match="holds no saved session"):
            attachment.resume(tmp_path / "saved")
        generate(pipeline, 3)
        attachment.save(tmp_path / "saved")
        generate(pipeline, 3)
        with pytest.raises(ConfigError, match="of rollout 0, but the newest in the store is 1"):
            attachment.resume(tmp_path / "saved")
    pipeline = wan.seeded(lambda: wan.Pipeline(local=9), torch.float32)
    with (
        attach(pipeline, store=tmp_path / "other", **OPTIONS) as attachment,
        pytest.raises(FrontendError, match=r"saved with spec .*recent_frames=3"),
    ):
        attachment.resume(tmp_path / "saved")

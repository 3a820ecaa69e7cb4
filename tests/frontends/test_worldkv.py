"""WorldKV's fork: its window is set in ``generate``, and its bank must be off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.frontends import lingbot, wan
from tests.frontends.test_lingbot import folder, run
from worldpager import FrontendError, attach
from worldpager.testing import CHECKS, Case

__all__ = ["folder"]  # a fixture

CHUNKS = 6
WINDOW = {"window": {"tokens_per_frame": wan.TOKENS}}


class Pipeline(lingbot.Pipeline):
    """Sink and window are put on the modules by ``generate``."""

    def __init__(self) -> None:
        super().__init__(local=9)
        self.model.config = SimpleNamespace(sink_size=3)  # type: ignore[assignment]

    def generate(
        self,
        prompt: str,
        action_path: str | None = None,
        chunk_size: int = 3,
        frame_num: int = 81,
        use_retrieval: bool = False,
    ) -> list[torch.Tensor]:
        for block in self.model.blocks:
            block.self_attn.local_attn_size = self.local_attn_size
            block.self_attn.sink_size = self.model.config.sink_size
        return super().generate(prompt, action_path, chunk_size, frame_num)


def attend_everything(pipeline: Any) -> None:
    pipeline.local_attn_size = 60


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[Case, Path], str], folder: Path, tmp_path: Path) -> None:
    case = Case(
        make=lambda dtype: wan.seeded(Pipeline, dtype),
        run=lambda pipeline, chunks: run(pipeline, chunks, 3, folder),
        attend_everything=attend_everything,
        chunks=CHUNKS,
        beyond=wan.horizon(),
        options=WINDOW,
    )
    print(check(case, tmp_path / "stores"))


def test_its_own_bank_must_be_off(folder: Path, tmp_path: Path) -> None:
    pipeline = wan.seeded(Pipeline, torch.float32)
    with attach(pipeline, store=tmp_path / "store", dram="64MiB", **WINDOW) as attachment:
        assert attachment.frontend == "worldkv"
        with pytest.raises(FrontendError, match=r"use_retrieval=True.*brings its own memory"):
            pipeline.generate("a street", str(folder), use_retrieval=True)

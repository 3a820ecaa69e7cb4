"""The README's code runs as it stands there (on a smaller geometry)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from worldpager.prefetch.paths import make_path

README = Path(__file__).parent.parent / "README.md"


def test_the_integration_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, code, sharing = re.findall(
        r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL
    )
    code = code.replace("layers=30", "layers=1").replace("heads=12", "heads=1")
    code = code.replace("=880", "=4")
    code = code.replace('store=Path("world")', 'store=Path("world"), dram=1 << 20')
    tokens, made = 12, []

    def empty() -> dict[str, torch.Tensor]:
        return {
            "k": torch.zeros(1, 6 * tokens, 1, 128, dtype=torch.bfloat16),
            "v": torch.zeros(1, 6 * tokens, 1, 128, dtype=torch.bfloat16),
            "global_end_index": torch.zeros(1, dtype=torch.long),
            "local_end_index": torch.zeros(1, dtype=torch.long),
        }

    cache = empty()

    def generate(chunk: int) -> None:
        end = int(cache["local_end_index"])
        cache["k"][:, end : end + tokens] = chunk
        cache["local_end_index"] += tokens
        made.append(end // tokens)

    names = {
        "camera": make_path("yaw-return", 10, 3),
        "kv_cache": [cache],
        "lower": lambda frames: None,
        "generate": generate,
    }
    exec(compile(code, str(README), "exec"), names)
    assert made[:6] == [0, 1, 2, 3, 4, 5], "the window grows to sink, three retrieved, recent"
    assert set(made[6:]) == {5}

    sharing = sharing.replace("24 << 30", "2 << 20").replace("4 << 30", "1 << 20")
    names |= {"cond": [empty()], "uncond": [empty()]}
    names["step"] = names["ChunkStep"](0, 0, None, poses=names["camera"][0])
    exec(compile(sharing, str(README), "exec"), names)
    assert list((tmp_path / "guided").iterdir())

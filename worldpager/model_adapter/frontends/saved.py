"""A live session in one file: what the store does not hold of a rollout that is to go on.

A safetensors file: the window's own tokens as the model left them, the caches that no memory keeps,
the bookmark, and whatever the caller adds: state of samplers, generators and decoders.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from worldpager.errors import FrontendError
from worldpager.model_adapter.bookmark import Bookmark
from worldpager.model_adapter.frontend import KVSpec

FORMAT = "worldpager-session-1"
_ARRAYS = ("poses", "pose", "prompt")


@dataclass(frozen=True)
class Saved:
    """``state``: the adapter's tensors, by its own names. ``extra``: the caller's."""

    frontend: str
    spec: KVSpec
    bookmark: Bookmark
    state: Mapping[str, torch.Tensor]
    extra: Mapping[str, torch.Tensor]

    def write(self, path: Path) -> None:
        """Write whole, or leave what was there. Raises :class:`OSError`."""
        book = asdict(self.bookmark)
        tensors = {
            **{f"state.{name}": value for name, value in self.state.items()},
            **{f"extra.{name}": value for name, value in self.extra.items()},
            **{
                f"bookmark.{name}": torch.from_numpy(book[name])
                for name in _ARRAYS
                if book[name] is not None
            },
        }
        numbers = {name: value for name, value in book.items() if name not in _ARRAYS}
        meta = {
            "format": FORMAT,
            "frontend": self.frontend,
            "spec": repr(self.spec),
            "bookmark": json.dumps(numbers),
        }
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        own = {name: value.detach().clone().contiguous() for name, value in tensors.items()}
        save_file(own, unfinished, metadata=meta)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)

    @classmethod
    def read(cls, path: Path, frontend: str, spec: KVSpec) -> Saved:
        """Raises :class:`FrontendError` for a file that is none of ours, or of another frontend,
        model or window.
        """
        try:
            with safe_open(path, framework="pt") as file:
                meta = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, FileNotFoundError) as error:
            raise FrontendError(f"{path} holds no saved session: {error}") from error
        for name, want in (("format", FORMAT), ("frontend", frontend), ("spec", repr(spec))):
            if meta.get(name) != want:
                raise FrontendError(
                    f"{path} was saved with {name} {meta.get(name)}, but this is {want}; attach as "
                    "it was attached then"
                )
        arrays: dict[str, Any] = {
            name: tensors[f"bookmark.{name}"].numpy()
            for name in _ARRAYS
            if f"bookmark.{name}" in tensors
        }
        return cls(
            frontend,
            spec,
            Bookmark(**json.loads(meta["bookmark"]), **arrays),
            _below("state.", tensors),
            _below("extra.", tensors),
        )


def _below(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }

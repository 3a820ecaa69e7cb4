"""WorldKV's own code, a fork of LingBot-World-Fast, with this memory in the place of its bank.

Its ``generate`` sets a window of its own on the modules: the sink of the model's configuration and
six recent frames, those of the current chunk included. The bank in it keeps every chunk in lists
that no one else can reach; so it must be off, ``generate(use_retrieval=False)``, as it is by
default.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from worldpager.errors import FrontendError
from worldpager.model_adapter.frontends.base import attribute
from worldpager.model_adapter.frontends.lingbot import TOKENS_PER_FRAME, LingBot
from worldpager.model_adapter.frontends.wan import Native

RECENT = 6
"""Frames besides the sink, fixed in its code."""


class WorldKV(LingBot):
    """A LingBot pipeline whose ``generate`` knows ``use_retrieval``."""

    name: ClassVar[str] = "worldkv"
    looks_for: ClassVar[str] = "generate(use_retrieval=, action_path=) and model.config.sink_size"

    @classmethod
    def matches(cls, target: object) -> bool:
        return (
            super().matches(target)
            and "use_retrieval" in inspect.signature(target.generate).parameters  # type: ignore[attr-defined]
        )

    def native(self) -> Native:
        chunk = self.options.frames_per_chunk or int(
            inspect.signature(self.target.generate).parameters["chunk_size"].default
        )
        sink = int(attribute(self.model, "config.sink_size") or 0)
        return Native(self.options.tokens_per_frame or TOKENS_PER_FRAME, chunk, sink + RECENT, sink)

    def _around_generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        for name in ("use_retrieval", "full_kv", "sliding_window"):
            if given.get(name):
                raise FrontendError(
                    f"generate({name}={given[name]}) brings its own memory or window; leave it at "
                    "its default while another memory is attached"
                )
        return super()._around_generate(original, *args, **kwargs)

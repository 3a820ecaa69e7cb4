"""Self-Forcing and its kin: text to video, a few denoising steps a chunk, or guidance with two
caches. CausVid and Rolling-Forcing have the same dicts under the same names.
"""

from __future__ import annotations

from typing import Any, ClassVar

from worldpager.errors import FrontendError
from worldpager.model_adapter.frontends.base import WindowOptions, attribute
from worldpager.model_adapter.frontends.wan import WanAdapter


class SelfForcing(WanAdapter):
    """A pipeline with ``kv_cache1``, or with ``kv_cache_pos`` and ``kv_cache_neg``; or a bare model
    of this family, whose caller hands it one cache list.
    """

    name: ClassVar[str] = "self-forcing"
    looks_for: ClassVar[str] = (
        "generator.model.blocks[*].self_attn with max_attention_size, and frame_seq_length"
    )

    def __init__(self, target: Any, options: WindowOptions) -> None:
        if attribute(target, "independent_first_frame"):
            raise FrontendError(
                "this pipeline has independent_first_frame, a first chunk of 1 frame; only chunks "
                "of one size are supported"
            )
        names = [("kv_cache_pos", "kv_cache_neg"), ("kv_cache1",)]
        self.lists = next((n for n in names if all(hasattr(target, name) for name in n)), ())  # type: ignore[misc]
        super().__init__(target, options)

    @classmethod
    def matches(cls, target: object) -> bool:
        blocks = attribute(cls.transformer(target), "blocks")
        return blocks is not None and hasattr(blocks[0].self_attn, "max_attention_size")

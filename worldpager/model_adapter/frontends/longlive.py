"""LongLive 2: chunks of 8 latent frames, a sink, shots with prompts of their own.

It publishes how far the first layer's cache is filled before it calls the transformer, so the
boundary is at its wrapper, ``generator``. Attention reads a copy, and all layers are written after
the last one has run; the ring is none the wiser.

With absolute positions keys are cached after rotation, as in the rest of the family. With relative
ones they are cached before it and rotated by their place in the window at every read: retrieved
chunks get their positions for nothing, there is no table to leave, and no position scheme matters.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

import torch

from worldpager.errors import FrontendError
from worldpager.model_adapter.frontends.base import WindowOptions, attribute, wrap
from worldpager.model_adapter.frontends.rings import Layers
from worldpager.model_adapter.frontends.wan import Call, Native, WanAdapter
from worldpager.model_adapter.ring_cache import RingCache
from worldpager.quant.rope import RopeLayout


class RelativeRing(RingCache):
    """Its model rotates keys by their place in the window, so none is ever moved here."""

    def shift(self, k: torch.Tensor, frames: float) -> None:
        """Nothing: the place of the slot is the position."""


class LongLive(WanAdapter):
    """A pipeline with ``kv_cache_pos`` and ``kv_cache_neg`` that sets its model's window itself."""

    name: ClassVar[str] = "longlive"
    looks_for: ClassVar[str] = (
        "_set_all_modules_max_attention_size, use_relative_rope and "
        "generator.model.blocks[*].self_attn"
    )
    model_paths: ClassVar[tuple[str, ...]] = ("_dit_model", "generator.model")

    def __init__(self, target: Any, options: WindowOptions) -> None:
        if target.quantize_kv:
            raise FrontendError(
                "this pipeline keeps its cache in NVFP4 (kv_quant), which takes back only what it "
                "packed itself; build it with kv_quant=False, the store is in 4 bits all the same"
            )
        if target.multi_shot_sink:
            raise FrontendError(
                "this pipeline pins a chunk of every shot (multi_shot_sink), and a chunk that is "
                "pinned where it stands cannot be moved; set multi_shot_sink to False, retrieval "
                "brings old shots back"
            )
        guided = float(target.guidance_scale) != 1.0
        self.lists = ("kv_cache_pos", "kv_cache_neg") if guided else ("kv_cache_pos",)  # type: ignore[misc]
        super().__init__(target, options)

    @classmethod
    def matches(cls, target: object) -> bool:
        return (
            hasattr(target, "_set_all_modules_max_attention_size")
            and hasattr(target, "use_relative_rope")
            and cls.transformer(target) is not None
        )

    @property
    def entry(self) -> torch.nn.Module:
        module: torch.nn.Module = self.target.generator
        return module

    def native(self) -> Native:
        chunk, window = int(self.target.num_frame_per_block), int(self.target.local_attn_size)
        if window < 0:  # it makes a ring of three chunks then
            window = 3 * chunk
        return Native(
            int(self.target.frame_seq_length), chunk, window, int(self.target.sink_size or 0)
        )

    def widen(self, undo: ExitStack) -> None:
        frames = self.capacity // self._native.tokens_per_frame

        def around(original: Any, local_attn_size: int) -> Any:
            return original(frames)

        wrap(undo, self.target, "_set_all_modules_max_attention_size", around)

    def begin_chunk(self, start: int, caches: list[Layers], call: Call) -> None:
        if (float(self.target.guidance_scale) != 1.0) != (self.branches == 2):
            raise FrontendError(
                f"guidance_scale is {self.target.guidance_scale} now, but the memory was attached "
                f"to keep {self.branches} cache(s); attach again after changing it"
            )
        super().begin_chunk(start, caches, call)

    def ring(self, layers: Layers, **more: Any) -> RingCache:
        kind = RelativeRing if self.target.use_relative_rope else RingCache
        return kind(layers, self._spec, **more)

    def rope(self, head_dim: int) -> RopeLayout | None:
        if self.target.use_relative_rope:
            return None
        scale = self.target.inference_t_scale
        scale = float(attribute(self.model, "t_scale") or 1.0) if scale is None else float(scale)
        rows: torch.Tensor = attribute(self.model, "freqs")
        table = len(rows) if scale == 1.0 else None  # else computed, not looked up
        layout = RopeLayout.wan(head_dim)
        return RopeLayout(split=layout.split, table_len=table, scale=scale)

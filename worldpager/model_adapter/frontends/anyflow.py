"""AnyFlow-FAR in diffusers: the last chunks in full, all older ones compressed and made anew.

After every chunk the model encodes all frames again, so its keys of an old chunk change from chunk
to chunk and its full resolution is gone. What is kept here is a chunk as it was in full when it was
finished, and a window is ``[compressed | retrieved | full]``: the compressed past stays as it is.

Keys are cached before rotation and all rotated at once when they are read. What is stored has been
rotated already, and stands among the others with a rotation that turns nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch

from worldpager.errors import FrontendError
from worldpager.model_adapter.frontend import KVSpec
from worldpager.model_adapter.frontends.base import (
    Arguments,
    Begin,
    FrontendAdapter,
    OnBegin,
    WindowOptions,
    attribute,
    fingerprint,
    need,
)
from worldpager.quant.rope import RopeLayout, Wall

TOKENS_PER_FRAME = 1560
"""Of 480 by 832 pixels, the size that it is released for."""

Slices = list[tuple[torch.Tensor, torch.Tensor]]


class FarCache:
    """:class:`FrontendCache` over the dicts of all layers, between two chunks.

    ``end``: tokens of the full cache in use, which the finished chunk ends; ``rotation``: complex
    ``[tokens, head_dim // 2]`` of that chunk.
    """

    def __init__(
        self, layers: Mapping[int, Any], spec: KVSpec, end: int, rotation: torch.Tensor
    ) -> None:
        self.spec = spec
        self.windows: Slices = []
        self._layers = layers
        self._end = end
        self._rotation = rotation
        self._starts: list[int] = []

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = slice(self._end - self.spec.tokens_per_chunk, self._end)
        k, v = self._layers[layer]["full_cache"][:, :, :, tokens].transpose(2, 3)
        exact = self._rotation.real.dtype
        pairs = torch.view_as_complex(k.to(exact).reshape(*k.shape[:-1], -1, 2))
        rotated = torch.view_as_real(pairs * self._rotation[:, None]).flatten(-2)
        return rotated.to(k.dtype), v

    def open(self, tokens: Sequence[int]) -> None:
        self._starts = [sum(tokens[:i]) for i in range(len(tokens) + 1)]
        self.windows = []
        for layer in range(self.spec.layers if tokens else 0):
            like, shape = self._layers[layer]["full_cache"], self.spec
            size = (shape.batch, self._starts[-1], shape.heads, shape.head_dim)
            self.windows.append((like.new_empty(size), like.new_empty(size)))

    def slot(self, layer: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = self._starts[index : index + 2]
        k, v = self.windows[layer]
        return k[:, start:end], v[:, start:end]

    def shift(self, k: torch.Tensor, frames: float) -> None:
        raise NotImplementedError("keys are rotated as in Wan: spec.rope says how")

    def rebase(self, frames: int) -> None:
        raise NotImplementedError("all frames are encoded anew, at positions from 0")


class AnyFlowFar(FrontendAdapter):
    """An ``AnyFlowFARPipeline``, or its transformer."""

    name: ClassVar[str] = "anyflow-far"
    looks_for: ClassVar[str] = "transformer.config.full_chunk_limit and transformer.blocks[*].attn1"

    def __init__(self, target: Any, options: WindowOptions) -> None:
        if options.recent is not None or options.sink is not None:
            raise FrontendError(
                "the recent chunks of anyflow-far are its model's full_chunk_limit - 1, and it has "
                "no sink; leave recent= and sink= out"
            )
        super().__init__(target, options)
        self.model: torch.nn.Module = need(self.transformer(target), "transformer", self.name)
        self._config: Any = self.model.config
        self._blocks: Sequence[Any] = list(self.model.blocks)
        self._spec = self._describe()
        self._arguments = Arguments(self.model)
        self._last: object = None  # the cache of the rollout that runs
        self._index = -1  # in chunk_partition, of the chunk being generated
        self._cache: FarCache | None = None

    @staticmethod
    def transformer(target: object) -> Any:
        for path in ("transformer", ""):
            model = attribute(target, path)
            if attribute(model, "config.full_chunk_limit") is not None:
                return model
        return None

    @classmethod
    def matches(cls, target: object) -> bool:
        blocks = attribute(cls.transformer(target), "blocks")
        return blocks is not None and len(blocks) > 0 and hasattr(blocks[0], "attn1")

    @property
    def spec(self) -> KVSpec:
        return self._spec

    @property
    def hooked(self) -> object:
        return self.model

    def install(self, undo: ExitStack, begin: OnBegin) -> None:
        self._begin = begin
        undo.callback(self._forget)
        handle = self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        undo.callback(handle.remove)
        for layer, block in enumerate(self._blocks):
            handle = block.attn1.register_forward_pre_hook(self._insert(layer), with_kwargs=True)
            undo.callback(handle.remove)

    def _before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        names = ("hidden_states", "chunk_partition", "kv_cache", "kv_cache_flag")
        given = {name: self._arguments.get(name, args, kwargs) for name in names}
        layers, flag = given["kv_cache"], given["kv_cache_flag"]
        if layers is None or flag is None or flag["is_cache_step"]:
            return
        partition = list(given["chunk_partition"])
        index = len(partition) - 1
        if layers is self._last and index == self._index:
            return
        self._last, self._index, self._cache = layers, index, None
        lead = self._lead(partition)
        if lead and index == 0:
            return  # the first chunk has another size: only its compressed form is kept
        chunk = index - (lead > 0)
        self._check(given["hidden_states"], partition, layers)
        cache = self._finished(given["hidden_states"], partition, layers)
        self._begin(Begin(chunk * self._spec.frames_per_chunk, cache))
        self._cache = cache if cache.windows else None

    def _lead(self, partition: Sequence[int]) -> int:
        """Frames of a first chunk of another size, else 0."""
        return partition[0] if partition[0] != self._spec.frames_per_chunk else 0

    def _finished(
        self, latents: torch.Tensor, partition: Sequence[int], layers: Mapping[int, Any]
    ) -> FarCache:
        """The cache whose chunk before the last of ``partition`` is finished."""
        spec, done = self._spec, partition[:-1]
        compressed = max(0, len(partition) - int(self._config.full_chunk_limit))
        end = sum(done[compressed:]) * spec.tokens_per_frame
        patch, small = self._config.patch_size, self._config.compressed_patch_size
        height, width = latents.shape[-2:]
        rotary = self.model.rope(  # type: ignore[operator]
            far_cfg={
                "total_frames": max(sum(done), spec.frames_per_chunk),
                "num_compressed_frames": max(0, sum(done) - spec.frames_per_chunk),
                "full_frame_shape": (height // patch[1], width // patch[2]),
                "compressed_frame_shape": (height // small[1], width // small[2]),
            },
            device=latents.device,
        )["key"]
        return FarCache(layers, spec, end, rotary[0, 0, -spec.tokens_per_chunk :])

    def _insert(self, layer: int) -> Any:
        """A hook that puts the window's chunks behind the compressed ones of ``layer``."""

        def hook(module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            flag = kwargs.get("kv_cache_flag")
            if self._cache is None or flag is None or flag["is_cache_step"]:
                return None
            held, rotary = kwargs["kv_cache"], kwargs["rotary_emb"]["key"]
            old = flag["num_cached_compressed_tokens"]
            window = torch.stack(self._cache.windows[layer]).transpose(2, 3)
            tokens = window.shape[3]
            none = torch.ones_like(rotary[:, :, :1]).expand(-1, -1, tokens, -1)
            more = {
                "kv_cache": {
                    **held,
                    "compressed_cache": torch.cat(
                        [held["compressed_cache"][:, :, :, :old], window], dim=3
                    ),
                },
                "kv_cache_flag": {**flag, "num_cached_compressed_tokens": old + tokens},
                "rotary_emb": {
                    **kwargs["rotary_emb"],
                    "key": torch.cat([rotary[:, :, :old], none, rotary[:, :, old:]], dim=2),
                },
            }
            return args, {**kwargs, **more}

        return hook

    def _check(
        self, latents: torch.Tensor, partition: Sequence[int], layers: Mapping[int, Any]
    ) -> None:
        spec, patch = self._spec, self._config.patch_size
        tokens = (latents.shape[-2] // patch[1]) * (latents.shape[-1] // patch[2])
        batch = layers[0]["full_cache"].shape[1]
        if (tokens, batch) != (spec.tokens_per_frame, spec.batch):
            raise FrontendError(
                f"a frame has {tokens} tokens and the batch is {batch} (twice as large with "
                f"guidance), but {spec.tokens_per_frame} and {spec.batch} were expected; give "
                f"window={{'tokens_per_frame': {tokens}, 'batch': {batch}}} to attach"
            )
        sizes = set(partition[1 if self._lead(partition) else 0 : -1])
        if sizes - {spec.frames_per_chunk}:
            raise FrontendError(
                f"chunk_partition has chunks of {sorted(sizes)} frames between its first and last, "
                f"but all must have {spec.frames_per_chunk}; give "
                "window={'frames_per_chunk': ...} to attach, or equal chunks to the pipeline"
            )

    def _forget(self) -> None:
        """Keep nothing alive of the rollout."""
        self._last = self._cache = None
        self._index = -1

    def _describe(self) -> KVSpec:
        options, config = self.options, self._config
        partition = list(config.chunk_partition)
        chunk = options.frames_per_chunk or int(partition[min(1, len(partition) - 1)])
        head_dim = int(config.attention_head_dim)
        return KVSpec(
            model=options.model or fingerprint(self.model),
            layers=len(self._blocks),
            heads=int(config.num_attention_heads),
            head_dim=head_dim,
            tokens_per_frame=options.tokens_per_frame or TOKENS_PER_FRAME,
            frames_per_chunk=chunk,
            sink_frames=0,
            recent_frames=(int(config.full_chunk_limit) - 1) * chunk,
            retrieve_frames=options.retrieve * chunk,
            rope=RopeLayout.wan(head_dim, table_len=None),
            batch=options.batch,
            dtype=options.dtype or next(self.model.parameters()).dtype,
            walls=(Wall("position table", int(config.rope_max_seq_len)),),
        )

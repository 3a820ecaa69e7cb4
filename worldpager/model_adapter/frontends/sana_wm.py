"""The refiner of SANA-WM in diffusers: 3 latent frames at a time behind a sink and a short history.

Its cache is an object with a sink cached before rotation, which is rotated at every read to stand
right before the history, and a history cached after it, which the loop appends to and trims by
frames. Nothing is preallocated. So the window is put in place for each forward alone, and taken
back after it: ``[sink | retrieved | history]``, the sink moved further back by what is between.

Frequencies run over all heads at once, time, height and width in turn, so no band of a head says
how far a key has turned. What the model itself computes for two frames does.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch

from worldpager.errors import FrontendError
from worldpager.model_adapter.frontend import KVSpec
from worldpager.model_adapter.frontends.base import (
    Begin,
    FrontendAdapter,
    OnBegin,
    WindowOptions,
    attribute,
    fingerprint,
    need,
    wrap,
)

TOKENS_PER_FRAME = 880
"""Of 704 by 1280 pixels, the size that it is released for."""

Rotary = tuple[torch.Tensor, torch.Tensor]


class RefinerCache:
    """:class:`FrontendCache` over one ``SanaWMRefinerKVCache``, between two blocks of frames."""

    def __init__(self, cache: Any, spec: KVSpec, adapter: SanaRefiner) -> None:
        self.spec = spec
        self.retrieved = 0  # tokens of the window between sink and history
        self.windows: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._layers = cache.layer_caches
        self._adapter = adapter
        self._starts: list[int] = []

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, held = self.spec.tokens_per_chunk, self._layers[layer]
        return self._heads(held.history_k[:, -tokens:]), self._heads(held.history_v[:, -tokens:])

    def open(self, tokens: Sequence[int]) -> None:
        self._starts = [sum(tokens[:i]) for i in range(len(tokens) + 1)]
        self.retrieved, self.windows = self._starts[-1], []
        if not self.retrieved:
            return  # its own history, as it is
        recent = self.spec.recent_frames * self.spec.tokens_per_frame
        for held in self._layers:
            parts = []
            for history in (held.history_k, held.history_v):
                tail = history[:, history.shape[1] - min(recent, history.shape[1]) :]
                room = history.new_empty(history.shape[0], self.retrieved, history.shape[2])
                parts.append(torch.cat([room, tail], dim=1))
            self.windows.append((parts[0], parts[1]))

    def slot(self, layer: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = self._starts[index : index + 2]
        k, v = self.windows[layer]
        return self._heads(k[:, start:end]), self._heads(v[:, start:end])

    def shift(self, k: torch.Tensor, frames: float) -> None:
        """Turn by what the model turns a key by in ``frames`` frames."""
        cos, sin = self._adapter.difference(frames, k.device)
        if self._adapter.split:  # the halves of a head are pairs
            one, two = k.chunk(2, dim=-1)
        else:  # neighbours are
            one, two = k[..., ::2], k[..., 1::2]
        re, im = one.float(), two.float()
        turned = re * cos - im * sin, im * cos + re * sin
        one.copy_(turned[0])
        two.copy_(turned[1])

    def rebase(self, frames: int) -> None:
        raise NotImplementedError("positions are computed and have no table to leave")

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], self.spec.heads, self.spec.head_dim)


class SanaRefiner(FrontendAdapter):
    """A ``SanaWMLTX2Refiner``, or its transformer."""

    name: ClassVar[str] = "sana-wm-refiner"
    looks_for: ClassVar[str] = (
        "transformer.build_rotary_emb_for_absolute_positions and transformer.transformer_blocks"
    )

    def __init__(self, target: Any, options: WindowOptions) -> None:
        if options.sink is not None:
            raise FrontendError(
                "the sink of sana-wm-refiner is an argument of its call, in frames; leave sink= out"
            )
        super().__init__(target, options)
        self.model: torch.nn.Module = need(self.transformer(target), "transformer", self.name)
        self._spec = self._describe()
        self._last: object = None  # the cache of the rollout that runs
        self._chunk: int | None = None
        self._finished = False  # its final keys and values have been captured
        self._window: RefinerCache | None = None
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._own_sink: Rotary | None = None
        self._size: dict[str, Any] = {}  # of the rollout, as the loop gives it
        self._build: Any = None

    @staticmethod
    def transformer(target: object) -> Any:
        for path in ("transformer", ""):
            model = attribute(target, path)
            if attribute(model, "build_rotary_emb_for_absolute_positions") is not None:
                return model
        return None

    @classmethod
    def matches(cls, target: object) -> bool:
        return attribute(cls.transformer(target), "transformer_blocks") is not None

    @property
    def spec(self) -> KVSpec:
        return self._spec

    @property
    def hooked(self) -> object:
        return self.model

    def install(self, undo: ExitStack, begin: OnBegin) -> None:
        self._begin = begin
        undo.callback(self._forget)
        self._build = self.model.build_rotary_emb_for_absolute_positions
        wrap(undo, self.model, "build_rotary_emb_for_absolute_positions", self._around_positions)
        before = self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        undo.callback(before.remove)
        after = self.model.register_forward_hook(
            self._after_forward, with_kwargs=True, always_call=True
        )
        undo.callback(after.remove)

    # ---- the loop ------------------------------------------------------------------------------

    def _around_positions(self, original: Any, *args: Any, **kwargs: Any) -> Rotary:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        self._size = {name: given[name] for name in given if name != "frame_positions"}
        rotary: Rotary = original(*args, **kwargs)
        return rotary

    def _before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        cache, mode = kwargs.get("kv_cache"), kwargs.get("kv_cache_mode")
        if cache is None or mode == "capture_pre_rope":
            return
        if cache is not self._last:
            self._last, self._chunk = cache, None
            self._begin_chunk(0, cache, kwargs)
        elif self._chunk is not None and self._finished:
            self._begin_chunk(self._chunk + 1, cache, kwargs)
        self._finished = mode == "inject_and_capture_post_rope"
        self._show(cache)

    def _begin_chunk(self, chunk: int, cache: Any, kwargs: Mapping[str, Any]) -> None:
        spec, tokens = self._spec, kwargs["hidden_states"].shape
        sink = cache.layer_caches[0].sink_k_pre
        frame = sink.shape[1] if sink is not None and sink.shape[1] else spec.tokens_per_frame
        if chunk == 0 and (tokens[1] != spec.tokens_per_chunk or frame % spec.tokens_per_frame):
            raise FrontendError(
                f"a block has {tokens[1]} tokens, but {spec.frames_per_chunk} frames of "
                f"{spec.tokens_per_frame} were expected; give window={{'tokens_per_frame': ..., "
                "'frames_per_chunk': ...} to attach"
            )
        if tokens[0] != spec.batch:
            raise FrontendError(
                f"the batch is {tokens[0]}, but {spec.batch} was expected; give "
                "window={'batch': ...} to attach"
            )
        held = cache.layer_caches[0].history_k
        least = min(chunk, spec.recent_chunks) * spec.tokens_per_chunk
        if chunk and held.shape[1] < least:
            raise FrontendError(
                f"the history holds {held.shape[1]} tokens, but {spec.recent_chunks} recent chunks "
                f"of {spec.tokens_per_chunk} are to be shown; give a smaller recent= to attach"
            )
        window = RefinerCache(cache, spec, self)
        self._begin(Begin(chunk * spec.frames_per_chunk, window))
        self._window, self._chunk = window, chunk

    def _show(self, cache: Any) -> None:
        """Put the window in the place of the history, for one forward."""
        window = self._window
        if window is None or not window.retrieved:
            return
        layers = cache.layer_caches
        self._own = [(held.history_k, held.history_v) for held in layers]
        self._own_sink = cache.sink_pe
        for held, (k, v) in zip(layers, window.windows, strict=True):
            held.history_k, held.history_v = k, v
        sink = layers[0].sink_k_pre
        if sink is not None and self._chunk is not None:
            frames = sink.shape[1] // self._spec.tokens_per_frame
            shown = window.windows[0][0].shape[1] // self._spec.tokens_per_frame
            # the first block of frames stands right behind the sink
            first = self._chunk * self._spec.frames_per_chunk - shown
            cache.sink_pe = self._positions([float(first + i) for i in range(frames)])

    def _after_forward(
        self, module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any
    ) -> None:
        cache = kwargs.get("kv_cache")
        if cache is None or not self._own:
            return
        for held, (k, v) in zip(cache.layer_caches, self._own, strict=True):
            held.history_k, held.history_v = k, v
        cache.sink_pe = self._own_sink
        self._own, self._own_sink = [], None

    def _forget(self) -> None:
        """Keep nothing alive of the rollout."""
        self._last = self._window = self._chunk = None

    # ---- positions -----------------------------------------------------------------------------

    def _positions(self, frames: list[float], **size: Any) -> Rotary:
        rotary: Rotary = self._build(frame_positions=frames, **{**self._size, **size})
        return rotary

    def difference(self, frames: float, device: torch.device) -> Rotary:
        """``cos`` and ``sin`` of what every pair of channels turns by in ``frames`` frames, float32
        ``[heads, head_dim // 2]``.
        """
        patch = int(self.model.config.patch_size)  # type: ignore[union-attr, arg-type]
        # both well behind the first frame, whose middle is not where the others' are
        at = 8.0 + max(0.0, -frames)
        ends = [
            self._positions([at + move], batch_size=1, height=patch, width=patch, device=device)
            for move in (0.0, frames)
        ]
        (cos_a, sin_a), (cos_b, sin_b) = ([self._pairs(part) for part in end] for end in ends)
        return cos_b * cos_a + sin_b * sin_a, sin_b * cos_a - cos_b * sin_a

    def _pairs(self, part: torch.Tensor) -> torch.Tensor:
        if part.ndim == 4:  # split: [batch, heads, tokens, head_dim // 2]
            return part[0, :, 0]
        # interleaved: [batch, tokens, channels], every value twice
        return part[0, 0, ::2].reshape(self._spec.heads, -1)

    @property
    def split(self) -> bool:
        """Whether a head's halves are pairs, and not its neighbours."""
        return str(self.model.config.rope_type) == "split"  # type: ignore[union-attr]

    # ---- sizes ---------------------------------------------------------------------------------

    def _describe(self) -> KVSpec:
        options, config = self.options, self.model.config
        call = inspect.signature(type(self.target).__call__).parameters
        chunk = options.frames_per_chunk or _default(call, "block_size", 3)
        history = _default(call, "kv_max_frames", 11) - _default(call, "sink_size", 1)
        recent = history // chunk if options.recent is None else options.recent
        return KVSpec(
            model=options.model or fingerprint(self.model),
            layers=len(self.model.transformer_blocks),  # type: ignore[arg-type]
            heads=int(config.num_attention_heads),  # type: ignore[union-attr, arg-type]
            head_dim=int(config.attention_head_dim),  # type: ignore[union-attr, arg-type]
            tokens_per_frame=options.tokens_per_frame or TOKENS_PER_FRAME,
            frames_per_chunk=chunk,
            sink_frames=0,  # no chunk: frames of the input, kept apart
            recent_frames=recent * chunk,
            retrieve_frames=options.retrieve * chunk,
            rope=None,
            batch=options.batch,
            dtype=options.dtype or next(self.model.parameters()).dtype,
        )


def _default(parameters: Mapping[str, inspect.Parameter], name: str, otherwise: int) -> int:
    return int(parameters[name].default) if name in parameters else otherwise

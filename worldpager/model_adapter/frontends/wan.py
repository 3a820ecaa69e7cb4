"""Frontends of the Wan family: a list of one dict a layer, handed to every forward.

The transformer gets ``kv_cache=`` and ``current_start=``, the first token of the chunk, with every
call. Each layer's dict holds ``k``, ``v`` ``[batch, capacity, heads, head_dim]`` and how far it is
filled. All forwards of a chunk have the same ``current_start`` and overwrite the same tokens; the
last of them, at timestep 0, leaves what stays. So the first forward with another ``current_start``
is the boundary: the chunk before is final, and nothing of it is overwritten yet.

The ring is made larger there by exchanging the tensors in the dicts, which are all that the
pipeline holds on to. A frontend that finds room behind ``local_end_index`` never rolls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from worldpager.errors import FrontendError
from worldpager.model_adapter.branches import BranchedCache
from worldpager.model_adapter.frontend import FrontendCache, KVSpec
from worldpager.model_adapter.frontends import rings
from worldpager.model_adapter.frontends.base import (
    Arguments,
    Begin,
    FrontendAdapter,
    OnBegin,
    WindowOptions,
    attribute,
    fingerprint,
    need,
    put,
    whole_chunks,
)
from worldpager.model_adapter.frontends.rings import Layers
from worldpager.model_adapter.ring_cache import RingCache
from worldpager.quant.rope import RopeLayout, Wall


@dataclass(frozen=True, slots=True)
class Native:
    """The window that a model has by itself, in latent frames: the current chunk included."""

    tokens_per_frame: int
    frames_per_chunk: int
    window_frames: int
    sink_frames: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One forward of the transformer, its arguments by name."""

    arguments: Arguments
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name, self.args, self.kwargs)


@dataclass(frozen=True, slots=True)
class _Restore:
    """A saved state that the chunk at frame ``start`` goes on from."""

    state: Mapping[str, torch.Tensor]
    start: int
    base: int


class WanAdapter(FrontendAdapter):
    """What the family shares. A subclass says how its pipeline is recognised, where its window's
    sizes are found (:meth:`native`), and which caches a call goes with (:meth:`caches`).
    """

    model_paths: ClassVar[tuple[str, ...]] = ("generator.model", "model", "")
    """Where the transformer is, tried in this order; ``""`` is the target itself."""
    walls: ClassVar[tuple[Wall, ...]] = ()
    lists: ClassVar[tuple[str, ...]] = ()
    """Attributes of the pipeline that hold its cache lists, one a guidance branch; none where the
    loop keeps its cache to itself.
    """

    def __init__(self, target: Any, options: WindowOptions) -> None:
        super().__init__(target, options)
        model = need(self.transformer(target), "transformer with blocks", self.name)
        self.model: torch.nn.Module = model
        self._attention: list[Any] = [block.self_attn for block in model.blocks]
        self._native = self._with_sink(self.native())
        self._spec = self._describe()
        self._start: int | None = None  # first frame of the chunk being generated
        self._lowered = 0  # frames by which positions are lowered
        self._capacity: int | None = None  # of the pipeline's own rings, once seen
        self._begin: OnBegin | None = None
        self._current: list[Layers] = []  # those of the boundary that is being done
        self._pending: _Restore | None = None

    @classmethod
    def transformer(cls, target: object) -> Any:
        """The module that gets ``kv_cache=``, or ``None``."""
        for path in cls.model_paths:
            model = attribute(target, path)
            blocks = attribute(model, "blocks")
            if blocks is not None and len(blocks) and hasattr(blocks[0], "self_attn"):
                return model
        return None

    def native(self) -> Native:
        """The model's own window. By default from where Self-Forcing and its kin have it."""
        options, first = self.options, self._attention[0]
        tokens = options.tokens_per_frame or attribute(self.target, "frame_seq_length")
        frames = (
            options.frames_per_chunk
            or attribute(self.target, "num_frame_per_block")
            or attribute(self.model, "num_frame_per_block")
        )
        tokens = int(
            need(tokens, "frame_seq_length (or window={'tokens_per_frame': ...})", self.name)
        )
        local = int(attribute(first, "local_attn_size") or -1)
        if local < 0:
            local = int(need(attribute(first, "max_attention_size"), "window", self.name)) // tokens
        return Native(tokens, int(frames or 1), local, int(attribute(first, "sink_size") or 0))

    def caches(self, call: Call) -> list[Layers]:
        """The cache lists of all guidance branches that advance with this call; empty where it has
        none. By default those on the pipeline, else the one that the call brings.
        """
        own = self.own_caches()
        given = call["kv_cache"]
        if given is None or (own and not any(given is layers for layers in own)):
            return [] if given is None else [given]
        return own or [given]

    def own_caches(self) -> list[Layers]:
        """The cache lists that the pipeline holds now."""
        found = [attribute(self.target, name) for name in self.lists]
        return [layers for layers in found if layers is not None]

    def control(self, call: Call) -> Mapping[str, Any]:
        """Keys and mouse of the chunk that ``call`` begins."""
        return {}

    @property
    def branches(self) -> int:
        """Guidance branches, each with a cache list."""
        return max(1, len(self.lists))

    @property
    def spec(self) -> KVSpec:
        return self._spec.branched(self.branches) if self.branches > 1 else self._spec

    @property
    def hooked(self) -> object:
        return self.model

    @property
    def capacity(self) -> int:
        """Tokens of a widened ring."""
        spec = self._spec
        frames = spec.sink_frames + spec.retrieve_frames + spec.recent_frames
        return (frames + spec.frames_per_chunk) * spec.tokens_per_frame

    def install(self, undo: ExitStack, begin: OnBegin) -> None:
        self._begin = begin
        undo.callback(self._give_back)
        self.widen(undo)
        handle = self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        undo.callback(handle.remove)
        for attention in self._attention:
            undo.callback(self._lower_in(attention, "current_start", "cache_start"))

    def widen(self, undo: ExitStack) -> None:
        """Let attention read the whole ring."""
        for attention in self._attention:
            if hasattr(attention, "max_attention_size"):
                put(undo, attention, "max_attention_size", self.capacity)

    # ---- what happens at a boundary ------------------------------------------------------------

    def _before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        call = Call(self._arguments(module), args, kwargs)
        caches = self.caches(call)
        if not caches:
            return
        start, odd = divmod(int(call["current_start"] or 0), self._native.tokens_per_frame)
        if odd:
            raise FrontendError(
                f"a forward begins at token {call['current_start']}, within a frame of "
                f"{self._native.tokens_per_frame} tokens; give window={{'tokens_per_frame': ...}}"
            )
        again = start == self._start and not (start == 0 and rings.unused(caches))
        if again and self._pending is None:
            return
        self.begin_chunk(start, caches, call)

    def begin_chunk(self, start: int, caches: list[Layers], call: Call) -> None:
        """Have the memory do its work before the chunk at true frame ``start``."""
        assert self._begin is not None
        self._check(caches)
        pending = self._pending
        if pending is not None and start != pending.start:
            raise FrontendError(
                f"the session goes on at frame {pending.start}, but the loop begins at {start}; "
                "have it begin there"
            )
        if pending is None and self._start is not None and 0 < start < self._start:
            raise FrontendError(
                f"the loop went back from frame {self._start} to {start}; a rollout can only go "
                "on, begin anew at frame 0, or go on from where it was saved"
            )
        if start == 0:
            self.begin_rollout(caches)
        for cache in (cache for layers in caches for cache in layers):
            if cache["k"].shape[1] != self.capacity:
                self._capacity = cache["k"].shape[1]
                rings.resize(cache, self.capacity, self._native_sink())
        if pending is not None:
            self.fill(pending.state, caches, start - pending.base)
            self._lowered, self._pending = pending.base, None
        self._current = caches
        try:
            self._begin(Begin(start, self._cache(caches), self.control(call)))
        finally:
            self._current = []
        self._start = start

    def begin_rollout(self, caches: list[Layers]) -> None:
        """Nothing that the caches hold is of this rollout, and its positions are not lowered."""
        self._lowered = 0
        rings.empty(caches)

    # ---- a session that goes on elsewhere ------------------------------------------------------

    def state(self, *, begun: bool) -> dict[str, torch.Tensor]:
        spec, sink = self._spec, self._native_sink()
        frames = spec.recent_frames + (0 if begun else spec.frames_per_chunk)
        caches = self._current or self.own_caches()
        if not caches:
            raise FrontendError(
                f"a session of {self.name} can only be saved by a listener: between two chunks "
                "nobody but its loop has the cache"
            )
        return rings.kept(caches, sink, frames * spec.tokens_per_frame)

    def restore(self, state: Mapping[str, torch.Tensor], start_frame: int, base: int) -> None:
        self._pending = _Restore(state, start_frame, base)

    def fill(self, state: Mapping[str, torch.Tensor], caches: list[Layers], position: int) -> None:
        """Put what :meth:`state` told into the caches; the next chunk is at ``position``."""
        rings.fill(state, caches, position * self._spec.tokens_per_frame)

    # ---- parts ---------------------------------------------------------------------------------

    def lower(self, frames: int) -> None:
        """From now on the frontend's positions are lower by another ``frames``."""
        self._lowered += frames

    def _cache(self, caches: list[Layers]) -> FrontendCache:
        rings = [
            RingCache(
                layers,
                self._spec,
                self.lower if index == 0 else _nothing,
                sink_frames=self._sink_frames,
                recent_frames=self._recent_frames,
            )
            for index, layers in enumerate(caches)
        ]
        return rings[0] if len(rings) == 1 else BranchedCache(rings)

    def _check(self, caches: list[Layers]) -> None:
        spec = self._spec
        if len(caches) != self.branches:
            raise FrontendError(
                f"a call has a cache that is none of the pipeline's {', '.join(self.lists)}; run "
                "the pipeline's own loop, or attach the bare model"
            )
        want = (spec.batch, spec.heads, spec.head_dim, spec.dtype)
        for layers in caches:
            k = layers[0]["k"]
            found = (k.shape[0], k.shape[2], k.shape[3], k.dtype)
            if len(layers) != spec.layers or found != want:
                raise FrontendError(
                    f"the cache has {len(layers)} layers and (batch, heads, head_dim, dtype) "
                    f"{found}, but {spec.layers} and {want} were expected; give "
                    "window={'batch': ..., 'dtype': ...} to attach"
                )

    def _lower_in(self, module: torch.nn.Module, *names: str) -> Callable[[], None]:
        """Have ``module`` see the arguments ``names``, in tokens, lowered."""
        arguments = Arguments(module)

        def hook(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._lowered == 0:
                return None
            tokens = self._lowered * self._native.tokens_per_frame
            given = {name: arguments.get(name, args, kwargs) for name in names}
            lowered = {name: value - tokens for name, value in given.items() if value is not None}
            return arguments.replaced(args, kwargs, lowered)

        return module.register_forward_pre_hook(hook, with_kwargs=True).remove

    def _give_back(self) -> None:
        """Leave the pipeline's own rings at their size, positions as the loop counts them."""
        if self._capacity is None:
            return
        spec, sink = self._spec, self._sink_frames
        window = spec.recent_frames + spec.frames_per_chunk + sink
        fitting = min(self._capacity, window * spec.tokens_per_frame)
        for layers in self.own_caches():
            if self._lowered:
                RingCache(layers, spec, _nothing, sink_frames=sink).rebase(-self._lowered)
            for cache in layers:
                rings.resize(cache, fitting, self._native_sink())  # without what was retrieved
                rings.resize(cache, self._capacity, self._native_sink())

    # ---- sizes ---------------------------------------------------------------------------------

    def _arguments(self, module: torch.nn.Module) -> Arguments:
        return Arguments(module)

    def _with_sink(self, native: Native) -> Native:
        """``native`` with the sink that the caller wants, and as many recent frames as before."""
        if self.options.sink is None:
            return native
        sink = self.options.sink * native.frames_per_chunk
        window = native.window_frames + sink - native.sink_frames
        return replace(native, sink_frames=sink, window_frames=window)

    def _native_sink(self) -> int:
        return self._sink_frames * self._native.tokens_per_frame

    @property
    def _sink_frames(self) -> int:
        """Those of the ring: whole chunks, since what is retrieved is, or what the model has."""
        return self._spec.sink_frames if self.options.retrieve else self._native.sink_frames

    @property
    def _recent_frames(self) -> int:
        """As :attr:`_sink_frames`."""
        own = self.options.retrieve == 0 and self.options.recent is None
        return self._native_recent() if own else self._spec.recent_frames

    def _native_recent(self) -> int:
        """Frames before the current chunk that the model shows besides its sink."""
        native = self._native
        return max(0, native.window_frames - native.sink_frames - native.frames_per_chunk)

    def _describe(self) -> KVSpec:
        options, native, chunk = self.options, self._native, self._native.frames_per_chunk
        recent = self._native_recent() if options.recent is None else options.recent * chunk
        first: Any = self._attention[0]
        heads, head_dim = int(first.num_heads), int(first.head_dim)
        return KVSpec(
            model=options.model or fingerprint(self.model),
            layers=len(self._attention),
            heads=heads,
            head_dim=head_dim,
            tokens_per_frame=native.tokens_per_frame,
            frames_per_chunk=chunk,
            sink_frames=whole_chunks(native.sink_frames, chunk),
            recent_frames=whole_chunks(recent, chunk),
            retrieve_frames=options.retrieve * chunk,
            rope=self.rope(head_dim),
            batch=options.batch,
            dtype=options.dtype or next(self.model.parameters()).dtype,
            walls=self.walls,
        )

    def rope(self, head_dim: int) -> RopeLayout | None:
        """How cached keys are rotated: as in Wan, with the model's own table."""
        table = attribute(self.model, "freqs")
        return RopeLayout.wan(head_dim, table_len=1024 if table is None else len(table))


def _nothing(frames: int) -> None:
    """Lowers nothing: another does, or has."""

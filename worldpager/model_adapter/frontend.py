"""What a frontend (a world model and its loop) and WorldPager say to each other.

A frontend integration implements :class:`FrontendCache` for its kind of cache. Its loop, or a hook
in it, builds one :class:`ChunkStep` and calls ``WorldMemory.boundary(step, cache)`` once before
each chunk's first forward. The frontend's glue owns the layout of the window; the library owns
storage and choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from worldpager.errors import ConfigError
from worldpager.model_adapter.attention.segments import PagedWindow
from worldpager.prefetch.keys import Vector
from worldpager.quant.codec import BlockShape
from worldpager.quant.pruning import CleanPredictions
from worldpager.quant.rope import RopeLayout, Wall

Poses = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Geometry of a frontend's KV cache and of its window, in latent frames.

    ``rope``: how cached keys were rotated, or ``None`` for keys cached before rotation.
    ``model``: identity of the weights (a hash or version); blocks of another model are refused.
    ``recent_frames`` does not count the chunk being generated. ``walls``: the model's further
    tables, looked up by true latent frame, which a memory cannot get round (Matrix-Game 2.0's
    action modules have ``Wall("action table", 7500)``). ``layers`` counts those of all guidance
    ``branches``; see :meth:`branched`.
    """

    model: str
    layers: int
    heads: int
    head_dim: int
    tokens_per_frame: int
    frames_per_chunk: int
    sink_frames: int
    recent_frames: int
    retrieve_frames: int
    rope: RopeLayout | None
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    walls: tuple[Wall, ...] = ()
    branches: int = 1

    def __post_init__(self) -> None:
        for name in (
            "layers",
            "heads",
            "head_dim",
            "tokens_per_frame",
            "frames_per_chunk",
            "batch",
            "branches",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"KVSpec.{name} must be at least 1, not {getattr(self, name)}")
        for name in ("sink_frames", "recent_frames", "retrieve_frames"):
            frames = getattr(self, name)
            if frames < 0 or frames % self.frames_per_chunk:
                raise ConfigError(
                    f"KVSpec.{name} must be a multiple of frames_per_chunk="
                    f"{self.frames_per_chunk}, not {frames}"
                )

        if self.layers % self.branches:
            raise ConfigError(
                f"KVSpec.layers={self.layers} cannot be those of {self.branches} equal branches; "
                "use spec.branched(n) on the spec of one"
            )

    def branched(self, branches: int) -> KVSpec:
        """The spec of ``branches`` caches like this one, kept together by a ``BranchedCache``.

        Raises :class:`ConfigError` where this is one of several branches already.
        """
        if self.branches > 1:
            raise ConfigError(f"the spec has {self.branches} branches already; give that of one")
        return replace(self, layers=self.layers * branches, branches=branches)

    def check_same(self, other: KVSpec, ours: str, theirs: str) -> None:
        """Raises :class:`ConfigError` naming the first field in which ``other`` differs; ``ours``
        and ``theirs`` say in the message whose specs they are.
        """
        for field_ in fields(self):
            mine, its = getattr(self, field_.name), getattr(other, field_.name)
            if mine != its:
                raise ConfigError(
                    f"KVSpec.{field_.name} is {mine!r} for {ours}, but {its!r} for {theirs}; "
                    "make both with the same spec"
                )

    @property
    def tokens_per_chunk(self) -> int:
        return self.tokens_per_frame * self.frames_per_chunk

    @property
    def block_shape(self) -> BlockShape:
        """Shape of a whole chunk's block, the batch folded into the heads."""
        return BlockShape(self.tokens_per_chunk, self.batch * self.heads, self.head_dim)

    @property
    def sink_chunks(self) -> int:
        return self.sink_frames // self.frames_per_chunk

    @property
    def recent_chunks(self) -> int:
        return self.recent_frames // self.frames_per_chunk

    @property
    def retrieve_chunks(self) -> int:
        return self.retrieve_frames // self.frames_per_chunk


@dataclass(frozen=True, slots=True)
class ChunkStep:
    """One chunk about to be generated, as its frontend's loop sees it.

    ``start_frame``: its first true latent frame. ``finished``: the chunk whose final KV the cache
    now ends with (``None`` before the first; then a new rollout begins). ``poses``: camera-to-world
    ``[frames, 4, 4]`` of this chunk in the OpenCV convention, or ``None`` where there is no camera.
    ``poses_ahead``: the same for the chunks that follow, as far as their control input is known;
    empty in a live session, where they are extrapolated. ``finished_poses``: those of the finished
    chunk, needed only where this process did not see it begin (a rollout that was taken up again).
    ``predictions``: what the sampler held to be the finished chunk's clean latents, for pruning
    that scores by them.
    ``control``: keys and mouse, for models that have no camera: see :mod:`prefetch.controls`.
    ``query``: mean query of layer 0 for this chunk, normed but not rotated, float32 ``[heads *
    head_dim]``, for policies that look at keys; ``queries_ahead``: the same for the chunks that
    follow, as far as they can be told.
    """

    chunk: int
    start_frame: int
    finished: int | None
    poses: Poses | None = None
    poses_ahead: Sequence[Poses] | Poses = ()
    finished_poses: Poses | None = None
    predictions: CleanPredictions | None = None
    control: Mapping[str, Any] = field(default_factory=dict)
    query: Vector | None = None
    queries_ahead: Sequence[Vector] = ()


class FrontendCache(Protocol):
    """One frontend's KV cache between two chunks. Called from the model thread only.

    The cache's contents are ``[sink | retrieved | recent]``, and the frontend appends the current
    chunk behind them. Tensors are views of the frontend's own memory, ``[batch, tokens, heads,
    head_dim]``; nothing is kept beyond the call.
    """

    spec: KVSpec

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the chunk just finished, as the frontend cached them."""

    def open(self, tokens: Sequence[int]) -> None:
        """Lay the cache out anew with room between sink and recent, one slot of ``tokens[i]``
        tokens a retrieved chunk. Called after every ``read`` of this boundary and before ``slot``.
        """

    def slot(self, layer: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Writable K and V of the ``index``-th slot that ``open`` made."""

    def shift(self, k: torch.Tensor, frames: float) -> None:
        """Rotate keys by ``frames`` along time, in place. Only called where ``spec.rope`` is
        ``None``: for a frontend whose rotation is not a band of each head.
        """

    def rebase(self, frames: int) -> None:
        """From now on lower every position by another ``frames``: of the recent chunks already in
        the cache (the sink keeps its own) and of all chunks to come.
        """


@runtime_checkable
class PagedCache(FrontendCache, Protocol):
    """A cache whose model attends to stored blocks themselves. Offering :meth:`attach` is the
    choice: ``open`` and ``slot`` are not called then, and nothing is decoded.
    """

    def attach(self, window: PagedWindow) -> None:
        """Lay the cache out as ``[sink | recent]`` and let the model attend to ``window`` as well,
        until the next boundary and no longer. Called where ``open`` would be.
        """

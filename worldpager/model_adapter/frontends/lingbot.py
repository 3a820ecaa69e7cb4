"""LingBot-World-Fast and LingBot-World 2.0: image to video along the camera path of a poses.npy.

``generate`` keeps its cache to itself: it asks ``_initialize_self_kv_cache`` for a list, or for two
with guidance, and hands them to every forward. That method is where the ring gets its size, so the
full rollout is never allocated. What a forward may read is an argument, ``max_attention_size``.

By themselves these models show all of the past, but for version 2.0 with a ``local_attn_size``. A
window of the whole past has no size, so one is chosen here: a chunk of sink and a recent chunk.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.interpolate import interp1d
from scipy.spatial.transform import Rotation, Slerp

from worldpager.errors import FrontendError
from worldpager.model_adapter.frontend import Poses
from worldpager.model_adapter.frontends.base import Arguments, OnBegin, WindowOptions, put, wrap
from worldpager.model_adapter.frontends.wan import Call, Layers, Native, WanAdapter

TOKENS_PER_FRAME = 1560
"""Of 480 by 832 pixels, the size that these models are released for."""


class LingBot(WanAdapter):
    """A pipeline that makes its cache list in ``generate`` and reads its camera from a folder."""

    name: ClassVar[str] = "lingbot-world"
    looks_for: ClassVar[str] = (
        "generate(action_path=, chunk_size=), _initialize_self_kv_cache and "
        "model.blocks[*].self_attn"
    )
    retrieval: ClassVar[str] = "camera"
    model_paths: ClassVar[tuple[str, ...]] = ("model",)

    def __init__(self, target: Any, options: WindowOptions) -> None:
        if int(getattr(target, "sp_size", 1)) > 1:
            raise FrontendError(
                f"this pipeline shares its heads among sp_size={target.sp_size} processes; attach "
                "to one that runs in a single process"
            )
        options = replace(options, dtype=options.dtype or getattr(target, "pipe_dtype", None))
        self._running = False  # inside generate()
        self._made: list[Layers] = []  # the cache lists of that generate()
        self._path: Poses | None = None
        super().__init__(target, options)

    @classmethod
    def matches(cls, target: object) -> bool:
        generate = getattr(target, "generate", None)
        return (
            hasattr(target, "_initialize_self_kv_cache")
            and callable(generate)
            and {"action_path", "chunk_size"} <= set(inspect.signature(generate).parameters)
            and cls.transformer(target) is not None
        )

    def native(self) -> Native:
        parameters = inspect.signature(self.target.generate).parameters
        chunk = self.options.frames_per_chunk or int(parameters["chunk_size"].default)
        tokens = self.options.tokens_per_frame or TOKENS_PER_FRAME
        window = int(getattr(self.target, "local_attn_size", -1))
        if window < 0:
            return Native(tokens, chunk, window_frames=3 * chunk, sink_frames=chunk)
        return Native(tokens, chunk, window, int(self.target.sink_size))

    @property
    def branches(self) -> int:
        return 2 if getattr(self.target, "infer_mode", "") == "causal_pretrain" else 1

    def own_caches(self) -> list[Layers]:
        return self._made

    def caches(self, call: Call) -> list[Layers]:
        """Those of the running ``generate``; others, as of warming up, are none of a rollout."""
        given = call["kv_cache"]
        return self._made if any(given is layers for layers in self._made) else []

    def path(self) -> Poses | None:
        return self._path

    def install(self, undo: ExitStack, begin: OnBegin) -> None:
        wrap(undo, self.target, "generate", self._around_generate)
        wrap(undo, self.target, "_initialize_self_kv_cache", self._around_allocation)
        super().install(undo, begin)

    def widen(self, undo: ExitStack) -> None:
        for attention in self._attention:
            if attention.local_attn_size == -1:
                # version 2.0 counts from the rollout's start then, and not from local_end_index
                put(undo, attention, "local_attn_size", self.capacity)
        handle = self.model.register_forward_pre_hook(self._read_all, with_kwargs=True)
        undo.callback(handle.remove)

    def begin_chunk(self, start: int, caches: list[Layers], call: Call) -> None:
        frames, height, width = call["x"][0].shape[1:]
        native = self._native
        found = (frames, height * width // 4)
        if found != (native.frames_per_chunk, native.tokens_per_frame):
            raise FrontendError(
                f"a chunk has {found[0]} frames of {found[1]} tokens, but "
                f"{native.frames_per_chunk} of {native.tokens_per_frame} were expected; give "
                f"window={{'frames_per_chunk': {found[0]}, 'tokens_per_frame': {found[1]}}} to "
                "attach"
            )
        super().begin_chunk(start, caches, call)

    def _around_generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs)
        given.apply_defaults()
        folder = given.arguments["action_path"]
        if folder is not None:
            self._path = camera_path(
                folder, given.arguments["frame_num"], given.arguments["chunk_size"]
            )
        self._running = True
        try:
            return original(*args, **kwargs)
        finally:
            self._running, self._made, self._path = False, [], None

    def _around_allocation(self, original: Any, *args: Any, **kwargs: Any) -> Layers:
        given = inspect.signature(original).bind(*args, **kwargs)
        if not self._running:
            return original(*args, **kwargs)  # type: ignore[no-any-return]
        batch, _, *rest = given.arguments["shape"]
        given.arguments["shape"] = [batch, self.capacity, *rest]
        layers: Layers = original(*given.args, **given.kwargs)
        self._made.append(layers)
        return layers

    def _read_all(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        arguments = Arguments(module)
        if not self.caches(Call(arguments, args, kwargs)):
            return None
        return arguments.replaced(args, kwargs, {"max_attention_size": self.capacity})


def camera_path(folder: str | Path, frame_num: int, frames_per_chunk: int) -> Poses:
    """Camera-to-world of every latent frame, float64 ``[chunks, frames_per_chunk, 4, 4]``.

    From ``folder/poses.npy`` ``[frames, 4, 4]``, one pose a video frame in the OpenCV convention,
    of which ``generate`` takes up to ``frame_num``. As it does, the latent frames are spread evenly
    over them: linear between positions, spherical between rotations. Unlike what the model gets,
    the result is not made relative. Raises :class:`FrontendError` for another shape.
    """
    file = Path(folder) / "poses.npy"
    poses = np.load(file)
    if poses.ndim != 3 or poses.shape[1:] != (4, 4) or not len(poses):
        raise FrontendError(f"{file} has shape {poses.shape}, not [frames, 4, 4] with frames > 0")
    video = min((frame_num - 1) // 4, (len(poses) - 1) // 4) * 4 + 1
    latent = (video - 1) // 4 + 1
    latent -= latent % frames_per_chunk
    if latent == 0 or video < 2:
        raise FrontendError(
            f"{file} has {len(poses)} poses and frame_num is {frame_num}, too few for a chunk of "
            f"{frames_per_chunk} latent frames"
        )
    poses = np.asarray(poses[:video], np.float64)
    given, wanted = np.arange(video), np.linspace(0, video - 1, latent)
    path = np.tile(np.eye(4), (latent, 1, 1))
    path[:, :3, :3] = Slerp(given, Rotation.from_matrix(poses[:, :3, :3]))(wanted).as_matrix()
    path[:, :3, 3] = interp1d(given, poses[:, :3, 3], axis=0)(wanted)
    return path.reshape(-1, frames_per_chunk, 4, 4)

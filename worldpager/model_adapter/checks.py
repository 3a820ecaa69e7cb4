"""What a frontend hands over, looked at before anything changes."""

from __future__ import annotations

import math
import operator
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch

from worldpager.errors import CodecError, ConfigError
from worldpager.model_adapter.frontend import ChunkStep, FrontendCache, KVSpec
from worldpager.prefetch.poses import FURTHEST

MAX_FRAME = 1 << 48
"""True frames are below this: positions made of them are exact in float64."""
_MAX_UNITS = 1 << 32  # ids of what is stored have 32 bits, on disk as well


def check_step(step: ChunkStep, before: ChunkStep | None, pages: int) -> None:
    """Raise :class:`ConfigError` for a step that no chunk can have, or that does not follow the one
    ``before``. ``pages``: units of a chunk.
    """
    if step.finished is not None and before is not None and step.finished != before.chunk:
        raise ConfigError(
            f"chunk {step.chunk} says that chunk {step.finished} was finished, but the last "
            f"one begun was {before.chunk}; call boundary() once for every chunk, in order"
        )
    _check_number("chunk", step.chunk, _MAX_UNITS // pages)
    _check_number("start_frame", step.start_frame, MAX_FRAME)
    if step.poses is not None:
        _check_poses("poses", step.chunk, step.poses)
    if step.finished_poses is not None:
        _check_poses("finished_poses", step.chunk, step.finished_poses)
    for poses in step.poses_ahead:
        _check_poses("poses_ahead", step.chunk, poses)
    for query in () if step.query is None else (step.query, *step.queries_ahead):
        if not np.isfinite(query).all():
            raise ConfigError(
                f"the query of chunk {step.chunk} holds NaN or infinity; leave it out"
            )


def _check_number(name: str, number: int, end: int) -> None:
    try:
        inside = 0 <= operator.index(number) < end
    except TypeError:
        inside = False
    if not inside:
        raise ConfigError(
            f"ChunkStep.{name} must be a whole number from 0 to {end - 1}, not {number!r}"
        )


def _check_poses(name: str, chunk: int, poses: npt.ArrayLike) -> None:
    try:
        array = np.asarray(poses, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} of chunk {chunk} cannot be read as numbers: {error}") from None
    if array.ndim != 3 or array.shape[1:] != (4, 4) or len(array) == 0:
        raise ConfigError(
            f"{name} of chunk {chunk} must be [F, 4, 4] with F >= 1, not {list(array.shape)}"
        )
    if not (np.abs(array) <= FURTHEST).all():
        raise ConfigError(
            f"{name} of chunk {chunk} hold NaN, infinity or coordinates beyond {FURTHEST:g}; give "
            "finite ones, or None where there is no camera"
        )


def check_finished(cache: FrontendCache, spec: KVSpec) -> None:
    """Raise :class:`CodecError` where the finished chunk is not of the geometry of ``spec``: it may
    have fewer tokens, as many in each layer.
    """
    tokens: int | None = None
    for layer in range(spec.layers):
        for name, x in zip("KV", cache.read(layer), strict=True):
            _check_tensor(f"{name} of layer {layer}", x, spec, tokens)
            tokens = x.shape[1]


def _check_tensor(name: str, x: object, spec: KVSpec, tokens: int | None) -> None:
    """``tokens``: as many as the tensors before it have, if there were any."""
    if not isinstance(x, torch.Tensor) or x.ndim != 4:
        shape = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise CodecError(f"{name} must be a tensor [batch, tokens, heads, head_dim], not {shape}")
    batch, found, heads, head_dim = x.shape
    wanted = (spec.batch, spec.heads, spec.head_dim)
    fits = found == tokens if tokens is not None else 0 < found <= spec.tokens_per_chunk
    if (batch, heads, head_dim) != wanted or not fits:
        many = tokens if tokens is not None else f"1 to {spec.tokens_per_chunk}"
        raise CodecError(
            f"{name} has the shape {list(x.shape)}, but a chunk has [batch, tokens, heads, "
            f"head_dim] = [{spec.batch}, {many}, {spec.heads}, {spec.head_dim}]"
        )
    if x.dtype != spec.dtype:
        raise CodecError(
            f"{name} is {x.dtype}, but KVSpec.dtype is {spec.dtype}; make the spec with the "
            "cache's dtype"
        )


def refuse_copies(memory: object) -> NoReturn:
    """The ``__reduce__`` of what can be neither copied nor pickled: raises :class:`ConfigError`."""
    raise ConfigError(
        "a memory is neither copied nor pickled, since its directory has one writer; close it and "
        "open the directory where it is to go on"
    )


def check_timeout(seconds: object) -> None:
    """Raise :class:`ConfigError` for seconds that cannot be waited; ``None`` is for ever."""
    number = isinstance(seconds, (int, float)) and math.isfinite(seconds) and seconds >= 0
    if seconds is not None and not number:
        raise ConfigError(f"a timeout must be 0 or more finite seconds, not {seconds!r}")

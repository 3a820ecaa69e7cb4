"""Tensors as the flat words, element strides and kind that the kernels take, and their checks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from worldpager.errors import CodecError, NonFiniteError
from worldpager.quant import kernels
from worldpager.quant.codec import BlockShape, Bytes
from worldpager.quant.rope import TemporalRotation

Floats = npt.NDArray[np.float32]

_KINDS = {
    torch.float32: kernels.FP32,
    torch.bfloat16: kernels.BF16,
    torch.float16: kernels.FP16,
}
_STILL: Floats = np.empty(0, np.float32)


class Words(NamedTuple):
    """A tensor ``[tokens, heads, head_dim]`` as kernels see it; shares the tensor's memory."""

    words: npt.NDArray[np.uint16]
    strides: tuple[int, int, int]
    kind: int


def words_of(name: str, tensor: torch.Tensor) -> Words:
    """View ``tensor`` without copying. Raises :class:`CodecError` naming what cannot be taken."""
    if tensor.dtype not in _KINDS:
        raise CodecError(f"{name} has dtype {tensor.dtype}; pass bfloat16, float16 or float32")
    if tensor.device.type != "cpu":
        raise CodecError(f"{name} is on {tensor.device}; CPU codecs read and write CPU tensors")
    if tensor.dim() != 3:
        raise CodecError(f"{name} must be [tokens, heads, head_dim], not {list(tensor.shape)}")
    tokens, heads, dim = tensor.stride()
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.detach().as_strided((span,), (1,)).view(torch.int16).numpy()
    return Words(flat.view(np.uint16), (tokens, heads, dim), _KINDS[tensor.dtype])


def shape_of(k: torch.Tensor, v: torch.Tensor) -> BlockShape:
    """The block shape of a K and a V. Raises :class:`CodecError` if they differ."""
    if k.shape != v.shape or k.dim() != 3:
        raise CodecError(
            f"K {list(k.shape)} and V {list(v.shape)} must both be [tokens, heads, head_dim]"
        )
    return BlockShape(*k.shape)


def check_payload(codec: str, payload: Bytes, size: int) -> Bytes:
    """``payload`` if it is a contiguous run of ``size`` bytes, else :class:`CodecError`."""
    if payload.dtype != np.uint8 or payload.ndim != 1 or not payload.flags.c_contiguous:
        raise CodecError(f"a payload must be a contiguous run of bytes, not {payload.dtype} data")
    if len(payload) != size:
        raise CodecError(f"the {codec} payload of this shape is {size} bytes, not {len(payload)}")
    return payload


def check_output(name: str, tensor: torch.Tensor, shape: BlockShape) -> Words:
    """``tensor`` as words to write to; it must have ``shape`` and elements of its own."""
    if tuple(tensor.shape) != (shape.tokens, shape.heads, shape.head_dim):
        raise CodecError(f"{name} is {list(tensor.shape)} but the block is {shape}")
    if any(s == 0 and n > 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
        raise CodecError(f"{name} is expanded: its elements share memory; pass a writable copy")
    return words_of(name, tensor)


def check_status(codec: str, name: str, status: int) -> None:
    """Raise what an encoder's return value means."""
    if status == kernels.NON_FINITE:
        raise NonFiniteError(
            f"{name} holds NaN or infinity, which no block may carry; find out where the model "
            "produced it before the chunk is committed"
        )
    if status == kernels.TOO_LARGE:
        raise CodecError(
            f"{name} holds values too large for the {codec} codec's 16-bit numbers; "
            "use the int8 codec, which takes any finite value"
        )


def turn_of(rotation: TemporalRotation | None, head_dim: int) -> tuple[Floats, Floats]:
    """Cosines and sines for the kernels; empty where nothing turns."""
    if rotation is None:
        return _STILL, _STILL
    if 2 * rotation.pairs > head_dim:
        raise CodecError(
            f"a rotation of {rotation.pairs} pairs does not fit head_dim {head_dim}; "
            "use the rope layout of the model the keys came from"
        )
    return rotation.cos, rotation.sin

"""Codec ``int8``: symmetric groups of 64 with a bf16 scale, 8.25 bits per value.

``scale = max|x| / 127`` rounded up to bf16, ``code = rint(x / scale)``, ``x' = code * scale``. The
scale has bf16's range, so any finite input is taken; the error of a value is at most half a scale.
"""

from __future__ import annotations

from typing import Any

from worldpager.quant import kernels
from worldpager.quant.codec import Bytes
from worldpager.quant.grouped import Dims, GroupedCodec, Turn
from worldpager.quant.tensors import Words


class Int8Codec(GroupedCodec):
    """Near-lossless at half the size of bf16."""

    name = "int8"
    id = 2
    bits = 8
    multiple = 1

    def _encode(
        self, words: Words, dims: Dims, ends: Any, out: Bytes, keys: bool, frame_tokens: int
    ) -> int:
        status: int = kernels.encode_int8(*words, dims, ends, out)
        return status

    def _decode(
        self, data: Bytes, dims: Dims, ends: Any, turn: Turn, words: Words, keys: bool
    ) -> None:
        kernels.decode_int8(data, dims, ends, *turn, *words)

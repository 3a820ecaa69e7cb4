"""Codec ``int4-absmax``: plain symmetric groups of 64 with an fp16 scale, 4.25 bits per value.

``scale = fp16(max|x| / 7)``, ``code = clamp(rint(x / scale), -7, 7) + 8``, ``x' = (code - 8) *
scale``. The layout that published sizes and quality figures refer to; ``int4`` is as small and
better.
"""

from __future__ import annotations

from typing import Any

from worldpager.quant import kernels
from worldpager.quant.codec import Bytes
from worldpager.quant.grouped import Dims, GroupedCodec, Turn
from worldpager.quant.tensors import Words


class AbsmaxCodec(GroupedCodec):
    """The baseline to compare with."""

    name = "int4-absmax"
    id = 5
    bits = 4
    multiple = 2

    def _encode(
        self, words: Words, dims: Dims, ends: Any, out: Bytes, keys: bool, frame_tokens: int
    ) -> int:
        status: int = kernels.encode_absmax(*words, dims, ends, out)
        return status

    def _decode(
        self, data: Bytes, dims: Dims, ends: Any, turn: Turn, words: Words, keys: bool
    ) -> None:
        kernels.decode_absmax(data, dims, ends, *turn, *words)

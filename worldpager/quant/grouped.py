"""What the grouped codecs share: K then V, each with 16-bit scales ahead of its packed codes.

A group is a run of 64 values of one head of one token, the last of a head longer where 64 does not
divide ``head_dim``. No scale, and so no error, is shared between heads or tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from worldpager.quant import tensors
from worldpager.quant.codec import BlockShape, Bytes
from worldpager.quant.groups import check_multiple, group_count, group_ends
from worldpager.quant.rope import TemporalRotation
from worldpager.quant.tensors import Floats, Words

Dims = tuple[int, int, int]
Turn = tuple[Floats, Floats]


class GroupedCodec(ABC):
    """A codec of fixed bits per code and one 16-bit scale a group; subclasses bring the kernels."""

    name: str
    id: int
    bits: int
    multiple: int
    """What ``head_dim`` must be a multiple of, so that the codes of a row fill whole bytes."""

    def payload_size(self, shape: BlockShape) -> int:
        """Exact payload bytes: for K and V, codes and two bytes a group."""
        check_multiple(self.name, shape, self.multiple)
        row = 2 * group_count(shape.head_dim) + shape.head_dim * self.bits // 8
        return 2 * shape.tokens * shape.heads * row

    def encode(self, k: torch.Tensor, v: torch.Tensor, out: Bytes, frame_tokens: int = 0) -> None:
        """See :class:`~worldpager.quant.codec.Codec`."""
        shape = tensors.shape_of(k, v)
        out = tensors.check_payload(self.name, out, self.payload_size(shape))
        dims = (shape.tokens, shape.heads, shape.head_dim)
        for name, x, part in zip("KV", (k, v), out.reshape(2, -1), strict=True):
            words, ends = tensors.words_of(name, x), group_ends(shape.head_dim)
            status = self._encode(words, dims, ends, part, name == "K", frame_tokens)
            tensors.check_status(self.name, name, status)

    def decode(
        self,
        payload: Bytes,
        shape: BlockShape,
        k_out: torch.Tensor,
        v_out: torch.Tensor,
        rotation: TemporalRotation | None = None,
    ) -> None:
        """See :class:`~worldpager.quant.codec.Codec`."""
        payload = tensors.check_payload(self.name, payload, self.payload_size(shape))
        dims = (shape.tokens, shape.heads, shape.head_dim)
        outputs = [tensors.check_output(n, x, shape) for n, x in (("K", k_out), ("V", v_out))]
        turns = [tensors.turn_of(r, shape.head_dim) for r in (rotation, None)]
        ends = group_ends(shape.head_dim)
        for i, part in enumerate(payload.reshape(2, -1)):
            self._decode(part, dims, ends, turns[i], outputs[i], i == 0)

    @abstractmethod
    def _encode(
        self, words: Words, dims: Dims, ends: Any, out: Bytes, keys: bool, frame_tokens: int
    ) -> int:
        """Encode K (``keys``) or V; returns a kernel status."""

    @abstractmethod
    def _decode(
        self, data: Bytes, dims: Dims, ends: Any, turn: Turn, words: Words, keys: bool
    ) -> None:
        """Decode K (``keys``) or V into ``words``, turning each row by ``turn``."""

"""Codec ``bf16``: K then V as bf16 words, row-major. Lossless for bf16 tensors.

fp32 and fp16 values are rounded to the nearest bf16, ties to even.
"""

from __future__ import annotations

import torch

from worldpager.quant import kernels, tensors
from worldpager.quant.codec import BlockShape, Bytes
from worldpager.quant.rope import TemporalRotation


class Bf16Codec:
    """16 bits per value: what the model wrote."""

    name = "bf16"
    id = 1

    def payload_size(self, shape: BlockShape) -> int:
        """Two bytes for each value of K and V; any shape."""
        return 4 * shape.elements

    def encode(self, k: torch.Tensor, v: torch.Tensor, out: Bytes, frame_tokens: int = 0) -> None:
        """See :class:`~worldpager.quant.codec.Codec`; finite values above bf16's range refused."""
        shape = tensors.shape_of(k, v)
        out = tensors.check_payload(self.name, out, self.payload_size(shape))
        dims = (shape.tokens, shape.heads, shape.head_dim)
        for name, x, part in zip("KV", (k, v), out.reshape(2, -1), strict=True):
            status = kernels.encode_bf16(*tensors.words_of(name, x), dims, part)
            tensors.check_status(self.name, name, status)

    def decode(
        self,
        payload: Bytes,
        shape: BlockShape,
        k_out: torch.Tensor,
        v_out: torch.Tensor,
        rotation: TemporalRotation | None = None,
    ) -> None:
        """See :class:`~worldpager.quant.codec.Codec`; exact for bf16 unless rotated."""
        payload = tensors.check_payload(self.name, payload, self.payload_size(shape))
        dims = (shape.tokens, shape.heads, shape.head_dim)
        outputs = [tensors.check_output(n, x, shape) for n, x in (("K", k_out), ("V", v_out))]
        turns = [tensors.turn_of(r, shape.head_dim) for r in (rotation, None)]
        for part, words, turn in zip(payload.reshape(2, -1), outputs, turns, strict=True):
            kernels.decode_bf16(part, dims, *turn, *words)

"""The Zarr v3 codec ``worldpager.kvblock``: one block as one chunk of floats.

An array of KV is ``[chunks, layers, 2, tokens, heads, head_dim]`` float32; an inner chunk is one
block, ``[1, 1, 2, tokens, heads, head_dim]``, K first. A block with fewer tokens than the array
has rows of NaN: a pruned one where tokens were dropped, a short last one at its end. Nothing has to
be configured: a block's header names its codec and shape. Reading only: blocks carry what an array
cannot tell, such as the positions of their keys, so they are written by WorldPager's store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from zarr.abc.codec import ArrayBytesCodec

from worldpager.errors import CodecError
from worldpager.quant.block import decode_block, kept_tokens, verify_block

if TYPE_CHECKING:
    from typing import Self

    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import Buffer, NDBuffer
    from zarr.core.common import JSON

NAME = "worldpager.kvblock"


@dataclass(frozen=True)
class KVBlockCodec(ArrayBytesCodec):
    """Array-to-bytes codec, found by name through the ``zarr.codecs`` entry points."""

    is_fixed_size = False

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        """From the codec's entry in ``zarr.json``."""
        if data.get("name") != NAME or data.get("configuration"):
            raise CodecError(f"{data} is not {NAME!r}, which takes no configuration")
        return cls()

    def to_dict(self) -> dict[str, JSON]:
        """The codec's entry in ``zarr.json``."""
        return {"name": NAME}

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Not known from the array: codec and tokens differ from block to block."""
        raise NotImplementedError

    def _decode_sync(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        shape = chunk_spec.shape
        data = np.ascontiguousarray(chunk_data.as_numpy_array()).view(np.uint8)
        header = verify_block(data)
        block = header.shape
        if len(shape) != 6 or shape[:3] != (1, 1, 2) or shape[4:] != (block.heads, block.head_dim):
            raise CodecError(f"{block} does not fit array chunks of shape {shape}")
        places = kept_tokens(data, header)
        if places[-1] >= shape[3]:
            raise CodecError(
                f"a block with tokens up to {places[-1]} does not fit chunks of {shape[3]}"
            )
        kv = torch.empty(2, block.tokens, block.heads, block.head_dim)
        decode_block(data, header, kv[0], kv[1])
        floats = np.full(shape[2:], np.nan, dtype=np.float32)
        floats[:, places] = kv.numpy()
        values = floats.reshape(shape).astype(chunk_spec.dtype.to_native_dtype(), copy=False)
        return chunk_spec.prototype.nd_buffer.from_numpy_array(values)

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        return self._decode_sync(chunk_data, chunk_spec)

    def _encode_sync(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> Buffer | None:
        raise CodecError(
            f"{NAME} arrays are read-only in zarr: a block also carries the positions and identity "
            "of its keys; commit chunks through worldpager, or convert to another codec"
        )

    async def _encode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> Buffer | None:
        return self._encode_sync(chunk_data, chunk_spec)

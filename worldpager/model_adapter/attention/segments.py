"""What attention consumes instead of one contiguous K and V: segments, where they lie.

A window is ``[sink | retrieved | recent | current]``. Its parts that a frontend holds itself are
dense tensors; its retrieved parts are blocks in the pager's pool, as they were encoded, and the
rotation in time that their keys need in this window. Nothing is decoded or laid out anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt
import torch

from worldpager.errors import CodecError
from worldpager.quant.block import HEADER_BYTES, BlockHeader, decode_block
from worldpager.quant.codec import Bytes, codec_by_id
from worldpager.quant.groups import group_count
from worldpager.quant.kernels_means import get_means
from worldpager.quant.reference import rotate
from worldpager.quant.rope import TemporalRotation
from worldpager.quant.rotated import RotatedCodec, carries_means

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class DenseKV:
    """Keys after RoPE and values, ``[B, tokens, H, D]`` each, any strides; views, not copies."""

    k: torch.Tensor
    v: torch.Tensor


class StoredKV:
    """One block of the codecs ``int4`` or ``int3``, or a page of it, as it lies in the pool.

    Valid as long as the bytes are: for a block of a window, until the stream's next one.
    """

    def __init__(
        self,
        block: Bytes,
        header: BlockHeader,
        rotation: TemporalRotation | None = None,
        page: tuple[int, int] | None = None,
    ) -> None:
        """``block``: the block's bytes, ``header`` as read from them. ``rotation``: moves its keys
        to where this window has them. ``page``: first token and the one after the last, by default
        all. Raises :class:`CodecError` for another codec or a page outside the block.
        """
        codec = codec_by_id(header.codec_id)
        if not isinstance(codec, RotatedCodec):
            raise CodecError(
                f"blocks of codec {codec.name!r} cannot be attended to as they are stored; store "
                "in int4 or int3, or let windows be decoded"
            )
        self.shape = shape = header.shape
        self.bits = codec.bits
        self.rotation = rotation
        self.first, self.stop = (0, shape.tokens) if page is None else page
        if not 0 <= self.first < self.stop <= shape.tokens:
            raise CodecError(f"tokens {self.first} to {self.stop} are no page of {shape}")
        self._block, self._header = block, header
        self.payload = block[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
        self._there: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """Tokens that attention sees."""
        return self.stop - self.first

    @property
    def halves(self) -> tuple[Bytes, Bytes]:
        """Keys and values: scales, then codes."""
        keys, values = self.payload.reshape(2, -1)
        return keys, values

    @cached_property
    def moved_means(self) -> torch.Tensor | None:
        """The keys' channel means where this window has the keys: fp32 ``[B * H, D]`` or ``None``.

        A key is ``R (e * H z + mean)``, so its mean adds ``q . (R mean)`` to every score of a
        query, whatever the token.
        """
        tokens, heads, dim = self.shape.tokens, self.shape.heads, self.shape.head_dim
        groups = group_count(dim)
        if not carries_means((tokens, heads, dim), groups):
            return None
        means: Floats = np.empty(heads * dim, np.float32)
        get_means(self.halves[0], (tokens, heads, dim), groups, means)
        moved = torch.from_numpy(means).view(heads, dim)
        return moved if self.rotation is None else self.rotation.apply_(moved)

    @cached_property
    def query_matrix(self) -> torch.Tensor:
        """What queries are multiplied by to meet codes: fp32 ``[D, D]``.

        ``q . R (e * H z) = (H (e * R' q)) . z``: both the shift in time and the codec's rotation of
        heads move from every key to the query.
        """
        dim = self.shape.head_dim
        if self.rotation is None:
            return head_rotation(dim)
        back = TemporalRotation(self.rotation.cos, -self.rotation.sin)
        return back.apply_(torch.eye(dim)) @ head_rotation(dim)

    def decode_into(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """The whole block where this window has it, into ``[tokens, B * H, D]`` each."""
        decode_block(self._block, self._header, k, v, self.rotation)

    def decode(self, batch: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the page, ``[B, tokens, H, D]`` each: what attention goes without."""
        tokens, heads, dim = self.shape.tokens, self.shape.heads, self.shape.head_dim
        k, v = torch.empty(2, tokens, heads, dim, dtype=dtype)
        self.decode_into(k, v)
        page = slice(self.first, self.stop)
        k, v = (x[page].view(-1, batch, heads // batch, dim).transpose(0, 1) for x in (k, v))
        return k, v

    def on(self, device: torch.device) -> torch.Tensor:
        """The payload on ``device``, uint8; copied there once."""
        if self._there is None or self._there.device != device:
            self._there = torch.from_numpy(self.payload).to(device, non_blocking=True)
        return self._there


Segment = DenseKV | StoredKV


@dataclass(frozen=True, slots=True)
class PagedWindow:
    """A window's retrieved chunks, undecoded and in time order.

    ``chunks[i][layer]`` is a view of the pool, valid until the stream's next boundary.
    """

    chunks: Sequence[Sequence[StoredKV]]

    def layer(self, layer: int) -> tuple[StoredKV, ...]:
        """One layer's segments."""
        return tuple(chunk[layer] for chunk in self.chunks)

    @property
    def nbytes(self) -> int:
        """Bytes that attention reads instead of K and V."""
        return sum(block.payload.nbytes for chunk in self.chunks for block in chunk)


@cache
def head_rotation(head_dim: int) -> torch.Tensor:
    """The codecs' rotation as a matrix, ``y = x M``: fp32 ``[D, D]``, orthonormal."""
    return rotate(torch.eye(head_dim))

"""What a codec is, and how one is found by name.

A codec turns the K and V of one block, ``[tokens, heads, head_dim]`` each, into bytes and back. Its
payload size follows from the shape alone, so the slot for a chunk can be reserved before anything
is encoded. Codecs hold no state; one file each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from worldpager.errors import CodecError
from worldpager.quant.rope import TemporalRotation

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Shape of a block's K and of its V: ``[tokens, heads, head_dim]``.

    A batch is folded into ``heads`` by the caller, so that batch items never share a scale or mean.
    """

    tokens: int
    heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for field, most in (("tokens", 2**32 - 1), ("heads", 65535), ("head_dim", 65535)):
            value = getattr(self, field)
            if not 0 < value <= most:
                raise CodecError(f"block {field} must be between 1 and {most}, not {value}")

    @property
    def elements(self) -> int:
        """Number of values in K (as many again in V)."""
        return self.tokens * self.heads * self.head_dim


@runtime_checkable
class Codec(Protocol):
    """Encodes one block. Implementations are stateless, thread-safe and release the interpreter
    lock while they work.
    """

    name: str
    """Name in options, attributes and file metadata, e.g. ``"int4"``."""
    id: int
    """The codec's number in block headers; never reused for another layout."""

    def payload_size(self, shape: BlockShape) -> int:
        """Exact payload bytes of a block of ``shape``, header and padding not counted.

        Raises :class:`CodecError` naming the dimension that the layout cannot hold.
        """

    def encode(self, k: torch.Tensor, v: torch.Tensor, out: Bytes, frame_tokens: int = 0) -> None:
        """Write the payload of ``k`` and ``v`` into ``out`` (uint8, exactly ``payload_size``).

        ``k``, ``v``: ``[tokens, heads, head_dim]``, bf16, fp16 or fp32, on the CPU, any strides;
        they are read before the call returns and never kept. ``frame_tokens``: how many make a
        latent frame, where they are whole frames one after the other, and 0 where they are not; a
        codec may spread its errors by it, and decoding does not depend on it. Raises
        :class:`NonFiniteError` where a value is NaN or infinite, :class:`CodecError` for a shape or
        dtype it cannot take; what is in ``out`` is then undefined.
        """

    def decode(
        self,
        payload: Bytes,
        shape: BlockShape,
        k_out: torch.Tensor,
        v_out: torch.Tensor,
        rotation: TemporalRotation | None = None,
    ) -> None:
        """Write the decoded K and V into the caller's tensors (same shape, bf16, fp16 or fp32, any
        strides), adding ``rotation`` to the keys' temporal pairs on the way if it is given.
        """


@cache
def _codecs() -> dict[str, Codec]:
    from worldpager.quant import BUILTIN_CODECS

    found: dict[str, Codec] = {codec.name: codec for codec in BUILTIN_CODECS}
    for entry in entry_points(group="worldpager.codecs"):
        codec = entry.load()()
        if codec.name in found or codec.id in {c.id for c in found.values()}:
            raise CodecError(
                f"codec {codec.name!r} (id {codec.id}) from {entry.value!r} takes a name or id "
                "that is already in use; give it another or uninstall its package"
            )
        found[codec.name] = codec
    return found


def codec_names() -> list[str]:
    """Names of all codecs, built in and from the ``worldpager.codecs`` entry points."""
    return list(_codecs())


def get_codec(name: str) -> Codec:
    """The codec called ``name``. Raises :class:`CodecError` listing the known names."""
    try:
        return _codecs()[name]
    except KeyError:
        raise CodecError(f"no codec {name!r}; known are {', '.join(codec_names())}") from None


def codec_by_id(number: int) -> Codec:
    """The codec with ``number`` in block headers. Raises :class:`CodecError` if none has it."""
    for codec in _codecs().values():
        if codec.id == number:
            return codec
    raise CodecError(f"no codec has id {number}; the block needs a newer version or a plugin")

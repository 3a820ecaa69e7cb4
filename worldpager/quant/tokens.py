"""Which tokens of its chunk a block holds, where it does not hold all.

A token's place in the whole chunk never changes, whatever was dropped before it, so it is stored as
one bit a token behind the block's payload.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worldpager.errors import CodecError, DamagedBlockError

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]


def bitmap_bytes(tokens: int, whole: int) -> int:
    """Bytes by which a block of ``tokens`` of a chunk's ``whole`` tokens tells which: none where
    it holds them all.
    """
    return 0 if tokens == whole else -(-whole // 8)


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """``ids``: places in the whole chunk of the tokens kept, int64, ascending; ``whole``: how many
    tokens that chunk has.
    """

    ids: Ids
    whole: int

    def __post_init__(self) -> None:
        """Raises :class:`CodecError` unless ``ids`` are some places of the chunk in order."""
        ids = self.ids
        if ids.ndim != 1 or not len(ids) or ids[0] < 0 or ids[-1] >= self.whole:
            raise CodecError(f"kept tokens must be some of 0 to {self.whole - 1}")
        if (np.diff(ids) <= 0).any():
            raise CodecError("kept tokens must be in ascending order, each once")

    def bitmap(self) -> Bytes:
        """One bit a token of the whole chunk, the first in the lowest bit; empty where all are
        kept.
        """
        if len(self.ids) == self.whole:
            return np.empty(0, np.uint8)
        bits = np.zeros(self.whole, np.uint8)
        bits[self.ids] = 1
        return np.packbits(bits, bitorder="little")


def read_bitmap(bitmap: Bytes, tokens: int) -> Ids:
    """The places of ``tokens`` kept tokens, int64, ascending.

    Raises :class:`DamagedBlockError` with reason ``header`` where the bits are not so many.
    """
    if not len(bitmap):
        return np.arange(tokens, dtype=np.int64)
    ids = np.flatnonzero(np.unpackbits(bitmap, bitorder="little")).astype(np.int64)
    if len(ids) != tokens:
        raise DamagedBlockError(
            "header", f"the block holds {tokens} tokens, its bitmap names {len(ids)}"
        )
    return ids

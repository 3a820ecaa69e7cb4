"""How a head is divided: scale groups, Hadamard blocks, the fixed sign vector."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from worldpager.errors import CodecError
from worldpager.quant.codec import BlockShape

GROUP = 64
SIGN_SEED = 0x57504B56  # "WPKV"

_MASK = 2**64 - 1


def group_count(head_dim: int) -> int:
    """Scale groups of a head: as many as whole runs of 64 fit, at least one."""
    return max(1, head_dim // GROUP)


@cache
def group_ends(head_dim: int) -> npt.NDArray[np.int64]:
    """End of each group along ``head_dim``: runs of 64, the last one takes what is left over."""
    ends = np.arange(1, group_count(head_dim) + 1, dtype=np.int64) * GROUP
    ends[-1] = head_dim
    return ends


@cache
def hadamard_blocks(head_dim: int) -> npt.NDArray[np.int64]:
    """Sizes of the Hadamard blocks of a head: its binary digits, largest first (96 = 64 + 32)."""
    digits = [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1]
    return np.array(digits, dtype=np.int64)


@cache
def signs(head_dim: int) -> npt.NDArray[np.float32]:
    """The fixed sign vector, one for all heads: bit 63 of SplitMix64 from ``SIGN_SEED``, set = -1.

    Output ``d`` of the generator gives channel ``d``, so longer heads extend shorter ones.
    """
    found = np.empty(head_dim, np.float32)
    state = SIGN_SEED
    for d in range(head_dim):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        found[d] = -1.0 if (z ^ (z >> 31)) >> 63 else 1.0
    return found


def check_multiple(codec: str, shape: BlockShape, of: int) -> None:
    """Raise :class:`CodecError` unless ``head_dim`` is a multiple of ``of``."""
    if shape.head_dim % of:
        raise CodecError(
            f"the {codec} codec needs head_dim to be a multiple of {of}, not {shape.head_dim}; "
            "use int8 or bf16 for this model"
        )

"""Codecs ``int4`` and ``int3``: heads rotated, then coded on a Gaussian grid.

``y = H (e * x)`` per head, with a fixed sign vector ``e`` and an orthonormal Hadamard ``H``, makes
values near Gaussian whatever the channels look like. Each group of 64 is then coded on the
Lloyd-Max levels of the unit Gaussian, with the fp16 scale for which the decoded vector keeps its
inner product with the original, ``s = <y, y> / <y, level>``, and the best of eight clip ratios.
Decoding: ``x' = e * H (s * level)``.

What one value loses is partly made up for by the next: half of a value vector's error is added to
the vector in its place one frame later before that is coded. Attention looks at both alike, and so
part of their errors cancels. Decoding knows nothing of it.

Keys often share an offset per channel, which costs levels and tells nothing. Scales are positive,
so their sign bits are free: in blocks with enough tokens they carry the fp16 mean of each key
channel, which is subtracted first and added last. A value takes 4.25 or 3.25 bits, all side data
included, where 64 divides ``head_dim``, and less where it does not and ``head_dim`` is above 64.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from worldpager.quant import kernels, kernels_means, kernels_rotated
from worldpager.quant.codec import Bytes
from worldpager.quant.grouped import Dims, GroupedCodec, Turn
from worldpager.quant.groups import hadamard_blocks, signs
from worldpager.quant.kernels_search import BUCKET
from worldpager.quant.lanes import LANES
from worldpager.quant.tensors import Floats, Words

LEVELS = {
    4: (0.1285, 0.3884, 0.6572, 0.9430, 1.2569, 1.6187, 2.0697, 2.7332),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
}
"""Positive half of each grid by bits; code ``c`` is ``-level[n-1-c]`` below ``n``, else
``level[c-n]``."""


CLIPS = {
    4: tuple(1.15 - 0.05 * i for i in range(8)),
    3: tuple(1.0 - 0.05 * i for i in range(8)),
}
"""Where the encoder tries to put the top level, as fractions of a group's largest magnitude.

Not part of the format. On rotated values the best place is almost never outside this range.
"""


CARRY = 0.5
"""Share of a value vector's error that the next frame makes up for; not part of the format. More
lowers the error of attention little further and raises that of a vector on its own.
"""


class Grid(NamedTuple):
    """A grid as the kernels take it: eight magnitudes, unused ones out of reach."""

    magnitudes: Floats
    middles: Floats
    steps: Floats
    buckets: Floats
    table: Floats


@cache
def grid(bits: int) -> Grid:
    """Level magnitudes, midpoints, steps to try (per largest magnitude), the one midpoint in each
    bucket of magnitudes with the levels on both sides of it, level of each code.
    """
    half = np.array(LEVELS[bits], np.float32)
    magnitudes = np.concatenate([half, np.full(8 - len(half), half[-1], np.float32)])
    middles = np.full(7, np.inf, np.float32)
    middles[: len(half) - 1] = (half[1:] + half[:-1]) / np.float32(2)
    steps = np.array(CLIPS[bits], np.float32) / half[-1]
    edges = (np.arange(LANES) - 0.5) * BUCKET
    below = np.searchsorted(middles, edges)  # midpoints that are less than all of the bucket
    above = np.searchsorted(middles, edges + BUCKET)
    inside = np.append(middles, np.inf).astype(np.float32)[below]
    buckets = np.concatenate([inside, magnitudes[below], magnitudes[above]])
    table = np.tile(np.concatenate([-half[::-1], half]), LANES // (2 * len(half)))
    return Grid(magnitudes, middles, steps, buckets, table)


class Frame(NamedTuple):
    """The rotation of a head: sign over root of block size per channel, and Hadamard blocks."""

    weight: Floats
    blocks: npt.NDArray[np.int64]


@cache
def frame(head_dim: int) -> Frame:
    """What ``H`` and ``e`` are for heads of ``head_dim``."""
    blocks = hadamard_blocks(head_dim)
    norms = (1 / np.sqrt(blocks)).astype(np.float32)
    return Frame(signs(head_dim) * np.repeat(norms, blocks), blocks)


def carries_means(dims: Dims, groups: int) -> bool:
    """Whether a head's key scales have sign bits enough for its fp16 means: 1,024 tokens and more
    where 64 divides ``head_dim``."""
    return dims[0] * groups >= 16 * dims[2]


class RotatedCodec(GroupedCodec):
    """One grid of the family."""

    def __init__(self, name: str, number: int, bits: int) -> None:
        self.name = name
        self.id = number
        self.bits = bits
        self.multiple = 2 if bits == 4 else 8

    def _encode(
        self, words: Words, dims: Dims, ends: Any, out: Bytes, keys: bool, frame_tokens: int
    ) -> int:
        levels, turned = grid(self.bits), frame(dims[2])
        mean = np.zeros(dims[1] * dims[2], np.float32)
        centred = keys and carries_means(dims, len(ends))
        if centred:
            kernels_means.channel_means(*words, dims, mean)
        status: int = kernels_rotated.encode_rotated(
            *words,
            dims,
            ends,
            self.bits,
            mean,
            turned.weight,
            turned.blocks,
            levels.magnitudes,
            levels.middles,
            levels.steps,
            levels.buckets,
            levels.table,
            0 if keys else frame_tokens,
            np.float32(CARRY),
            out,
        )
        if status == kernels.OK and centred:
            kernels_means.put_means(mean, dims, len(ends), out)
        return status

    def _decode(
        self, data: Bytes, dims: Dims, ends: Any, turn: Turn, words: Words, keys: bool
    ) -> None:
        turned = frame(dims[2])
        mean = np.zeros(dims[1] * dims[2], np.float32)
        if keys and carries_means(dims, len(ends)):
            kernels_means.get_means(data, dims, len(ends), mean)
        kernels_rotated.decode_rotated(
            data, dims, ends, self.bits, mean, turned.weight, turned.blocks, grid(self.bits).table,
            *turn, *words,
        )  # fmt: skip

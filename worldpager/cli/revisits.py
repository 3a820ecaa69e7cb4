"""Where a camera path returns, and how alike the pictures are when it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worldpager.prefetch.paths import revisit_pairs

Frames = npt.NDArray[np.uint8]

OUT_OF_SIGHT_CHUNKS = 8
_PSNR_CAP = 100.0
_BATCH = 256


@dataclass(frozen=True, slots=True)
class Revisits:
    """Frame numbers ``first[i] < again[i]`` of one view, int64 ``[pairs]``, ``again`` rising."""

    first: npt.NDArray[np.int64]
    again: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.first)

    def before(self, frames: int) -> Revisits:
        """The pairs within the first ``frames`` frames."""
        keep = self.again < frames
        return Revisits(self.first[keep], self.again[keep])


def find_revisits(path: npt.NDArray[np.float64]) -> Revisits:
    """The frames of ``path`` (``[chunks, F, 4, 4]``) that show what a frame long before showed.

    A revisit counts from :data:`OUT_OF_SIGHT_CHUNKS` on: nearer, the model's own window shows it.
    """
    frames = path.shape[1]
    pairs = np.array(revisit_pairs(path, OUT_OF_SIGHT_CHUNKS), dtype=np.int64).reshape(-1, 2, 2)
    again, first = (pairs @ np.array([frames, 1])).T
    return Revisits(first, again)


def psnr(frames: Frames, revisits: Revisits) -> float | None:
    """Mean PSNR in dB of revisits against first visits; None without a pair.

    ``frames``: uint8 ``[frames, height, width, 3]``, may be a memory map. Each pair counts alike;
    identical pictures count as 100 dB.
    """
    if not len(revisits):
        return None
    values = np.concatenate(list(pair_psnr(frames, revisits)))
    return float(values.mean())


def pair_psnr(frames: Frames, revisits: Revisits) -> Iterator[npt.NDArray[np.float64]]:
    """PSNR in dB of each pair, a batch of pairs at a time."""
    for start in range(0, len(revisits), _BATCH):
        batch = slice(start, start + _BATCH)
        first = frames[revisits.first[batch]].astype(np.float64)
        error = np.square(first - frames[revisits.again[batch]]).mean(axis=(1, 2, 3))
        with np.errstate(divide="ignore"):
            yield np.minimum(10 * np.log10(255.0**2 / error), _PSNR_CAP)

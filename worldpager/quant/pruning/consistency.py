"""DeCoPrune: keep the tokens that denoising was not sure of early.

A sampler predicts the clean latents ("x0") at every step. Where an early step already agreed with
the last one, the token was determined by what the model saw anyway, and its KV is dispensable.
Scores cost nothing on the normal trajectory; observed chunks need one extra forward.

A token is a cell of the latents, ``2 x 2`` in the Wan family, in the order frame, row, column. One
mask serves all layers and heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from worldpager.errors import ConfigError
from worldpager.quant.pruning.preference import Scores, highest

Variant = Literal["mse", "normalised", "chunk-normalised", "cosine"]
Mask = npt.NDArray[np.bool_]

PROBE_STEP = 2
"""The step whose prediction is compared with the last: the third of four (level 899 of 1,000)."""
_LEAST_ENERGY = 1e-8


@dataclass(frozen=True, slots=True, eq=False)
class CleanPredictions:
    """What a sampler held to be a chunk's clean latents, at the probe step and at the end.

    ``probe``, ``final``: ``[channels, frames, height, width]``. ``cell``: rows and columns of
    latents that make up a token.
    """

    probe: torch.Tensor
    final: torch.Tensor
    cell: tuple[int, int] = (2, 2)

    def __post_init__(self) -> None:
        """Raises :class:`ConfigError` for tensors of other or unequal shapes."""
        shape = tuple(self.probe.shape)
        whole = len(shape) == 4 and not (shape[2] % self.cell[0] or shape[3] % self.cell[1])
        if not whole or tuple(self.final.shape) != shape:
            raise ConfigError(
                f"clean predictions are two tensors [channels, frames, height, width] in whole "
                f"cells of {self.cell}, not {shape} and {tuple(self.final.shape)}"
            )

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, rows and columns of tokens."""
        _, frames, height, width = self.probe.shape
        return frames, height // self.cell[0], width // self.cell[1]


def token_scores(predictions: CleanPredictions, variant: Variant = "mse") -> Scores:
    """Disagreement of the two predictions by token: float64 ``[frames * rows * columns]``.

    ``mse``: mean squared difference over channels and cell; ``normalised``: that over the token's
    own mean square in the final prediction; ``chunk-normalised``: over the chunk's. ``cosine`` is
    an agreement: the cosine of both, 0 where one is zero.
    """
    probe, final = (_cells(x, predictions.cell) for x in (predictions.probe, predictions.final))
    if variant == "cosine":
        norms = probe.norm(dim=1) * final.norm(dim=1)
        score = (probe * final).sum(1) / norms.clamp_min(_LEAST_ENERGY)
    else:
        score = (probe - final).square().mean(1)
        energy = final.square().mean(1)
        if variant == "normalised":
            score = score / energy.clamp_min(_LEAST_ENERGY)
        elif variant == "chunk-normalised":
            score = score / energy.mean().clamp_min(_LEAST_ENERGY)
    return np.asarray(score, dtype=np.float64)


def _cells(x: torch.Tensor, cell: tuple[int, int]) -> torch.Tensor:
    """``[C, F, h, w]`` as float32 ``[tokens, C * cell]``."""
    channels, frames, height, width = x.shape
    rows, columns = height // cell[0], width // cell[1]
    parts = x.float().reshape(channels, frames, rows, cell[0], columns, cell[1])
    return parts.permute(1, 2, 4, 0, 3, 5).reshape(frames * rows * columns, -1)


def threshold_mask(scores: npt.ArrayLike, gamma: float, variant: Variant = "mse") -> Mask:
    """Which tokens to keep: bool ``[tokens]``.

    Strictly more than ``gamma``, for ``cosine`` at most ``gamma``; scores that are not finite are
    kept. Raises :class:`ConfigError` where ``gamma`` is not finite.
    """
    if not math.isfinite(gamma):
        raise ConfigError(f"a pruning threshold must be finite, not {gamma}")
    values = np.asarray(scores, dtype=np.float64)
    doubtful = values <= gamma if variant == "cosine" else values > gamma
    return doubtful | ~np.isfinite(values)


def spatial_floor(
    scores: npt.ArrayLike,
    mask: Mask,
    grid: tuple[int, int, int],
    *,
    least: int,
    block: int = 4,
    threshold: float = 0.0,
) -> Mask:
    """``mask`` with at least ``least`` tokens kept in every block of ``block`` x ``block`` tokens.

    The highest scores come first, of equal ones the smaller id. A block whose highest score is at
    most ``threshold`` stays as it is. ``grid``: frames, rows, columns; blocks at the edge may be
    smaller.
    """
    values = np.asarray(scores, dtype=np.float64).reshape(grid)
    values = np.where(np.isfinite(values), values, np.inf)
    out = mask.reshape(grid).copy()
    frames, rows, columns = grid
    for frame in range(frames):
        for row in range(0, rows, block):
            for column in range(0, columns, block):
                at = (frame, slice(row, row + block), slice(column, column + block))
                kept, inside = out[at], values[at]
                if inside.max() > threshold and kept.sum() < least:
                    order = np.where(kept, np.inf, inside).reshape(-1)
                    chosen = highest(order, min(least, order.size))
                    kept[np.unravel_index(chosen, kept.shape)] = True
    return out.reshape(-1)


def due(chunk: int, generating: int, window: int = 1) -> bool:
    """Whether ``chunk`` is pruned once ``generating`` is done: ``i < (c + 1) - 2 w``.

    So ``2 w`` chunks before the current one are whole while it is denoised. Chunk 0 is never
    scored, hence never pruned. A :class:`WorldMemory` keeps this schedule where its window's
    recent part is ``2 w`` chunks, since it prunes what it stores and leaves that part alone.
    """
    return 0 < chunk < generating + 1 - 2 * window


def probe_seed(seed: int, chunk: int) -> int:
    """Seed of the noise that an observed chunk is probed with: ``seed + 104729 (c + 1)``."""
    return seed + 104729 * (chunk + 1)


def renoised(clean: torch.Tensor, noise: torch.Tensor, level: float) -> torch.Tensor:
    """An observed chunk at noise ``level`` in [0, 1] of a flow-matching schedule, to be probed."""
    return (1 - level) * clean + level * noise

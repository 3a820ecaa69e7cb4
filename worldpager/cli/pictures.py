"""Pictures from a rollout: frames side by side for the report, and the film."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from worldpager.cli.revisits import Frames, Revisits, pair_psnr

_SHOWN_PAIRS = 6
_FILM_FRAMES = 300
_FILM_MS = 80
_LEAST_SIDE = 128
"""Small frames are enlarged to about this many pixels, so that a person can see them."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A revisit beside its first visit, as data URLs of PNGs; PSNR in dB between them."""

    first_frame: int
    again_frame: int
    first: str
    again: str
    psnr: float


def comparisons(frames: Frames, revisits: Revisits) -> list[Comparison]:
    """A few revisits, evenly spread over the rollout."""
    if not len(revisits):
        return []
    shown = np.unique(np.linspace(0, len(revisits) - 1, _SHOWN_PAIRS).astype(int))
    few = Revisits(revisits.first[shown], revisits.again[shown])
    quality = np.concatenate(list(pair_psnr(frames, few)))
    return [
        Comparison(first, again, _data_url(frames[first]), _data_url(frames[again]), decibels)
        for first, again, decibels in zip(
            few.first.tolist(), few.again.tolist(), quality.tolist(), strict=True
        )
    ]


def write_film(frames: Frames, without_memory: Frames | None, path: Path) -> int:
    """Write an animated GIF of at most 300 frames and return how many it has.

    With the rollout ``without_memory`` beside it, each picture shows both, memory on the left.
    """
    count = len(frames) if without_memory is None else min(len(frames), len(without_memory))
    if not count:
        return 0
    numbers = range(0, count, -(-count // _FILM_FRAMES))

    def images() -> Iterator[Image.Image]:
        for number in numbers:
            picture = frames[number]
            if without_memory is not None:
                gap = np.full_like(picture[:, :1], 255)
                picture = np.concatenate([picture, gap, without_memory[number]], axis=1)
            yield _enlarged(picture).quantize(64)

    film = images()
    next(film).save(
        path, format="GIF", save_all=True, append_images=film, duration=_FILM_MS, loop=0
    )
    return len(numbers)


def _enlarged(frame: npt.NDArray[np.uint8]) -> Image.Image:
    height, width = frame.shape[:2]
    factor = max(1, _LEAST_SIDE // height)
    image = Image.fromarray(np.ascontiguousarray(frame))
    return image.resize((width * factor, height * factor), Image.Resampling.NEAREST)


def _data_url(frame: npt.NDArray[np.uint8]) -> str:
    out = io.BytesIO()
    _enlarged(frame).save(out, format="PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode("ascii")

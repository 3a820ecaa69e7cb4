"""Pictures from a rollout: frames side by side for the report, and the film."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
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
    """Write a film to ``path`` and return how many frames it has: an animated GIF of at most 300
    frames for ``.gif``, all of them as H.264 for ``.mp4`` (which needs PyAV: :func:`has_pyav`).

    With the rollout ``without_memory`` beside it, each picture shows both, memory on the left.
    """
    count = len(frames) if without_memory is None else min(len(frames), len(without_memory))
    if not count:
        return 0
    step = -(-count // _FILM_FRAMES) if path.suffix == ".gif" else 1
    numbers = range(0, count, step)
    images = (_film_image(frames, without_memory, number) for number in numbers)
    (_write_gif if path.suffix == ".gif" else _write_mp4)(images, path)
    return len(numbers)


def has_pyav() -> bool:
    """Whether PyAV, an optional dependency, is there to write MP4."""
    return find_spec("av") is not None


def _film_image(frames: Frames, without_memory: Frames | None, number: int) -> Image.Image:
    picture = frames[number]
    if without_memory is not None:
        gap = np.full_like(picture[:, :1], 255)
        picture = np.concatenate([picture, gap, without_memory[number]], axis=1)
    return _enlarged(picture)


def _write_gif(images: Iterator[Image.Image], path: Path) -> None:
    few = (image.quantize(64) for image in images)
    next(few).save(path, format="GIF", save_all=True, append_images=few, duration=_FILM_MS, loop=0)


def _write_mp4(images: Iterator[Image.Image], path: Path) -> None:
    import av

    first = next(images)
    with av.open(str(path), "w") as film:
        stream = film.add_stream("libx264", rate=1000 // _FILM_MS)
        # H.264 wants even sides; and they must be set before the first frame opens the encoder
        stream.width, stream.height = first.width // 2 * 2, first.height // 2 * 2
        stream.pix_fmt = "yuv420p"
        for image in chain((first,), images):
            picture = np.asarray(image)[: stream.height, : stream.width]
            film.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture))))
        film.mux(stream.encode(None))


def _enlarged(frame: npt.NDArray[np.uint8]) -> Image.Image:
    height, width = frame.shape[:2]
    factor = max(1, _LEAST_SIDE // height)
    image = Image.fromarray(np.ascontiguousarray(frame))
    return image.resize((width * factor, height * factor), Image.Resampling.NEAREST)


def _data_url(frame: npt.NDArray[np.uint8]) -> str:
    out = io.BytesIO()
    _enlarged(frame).save(out, format="PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode("ascii")

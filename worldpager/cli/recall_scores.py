"""How alike two pictures are: PSNR, SSIM, and LPIPS where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from worldpager.cli.revisits import Frames

_PEAK = 255.0
_SIGMA, _RADIUS = 1.5, 5
_C1, _C2 = (0.01 * _PEAK) ** 2, (0.03 * _PEAK) ** 2
_PSNR_CAP = 100.0

LPIPS_SIDE = 128
"""Pictures are enlarged to this many pixels: LPIPS' network needs more than 32."""


def psnr(first: Frames, again: Frames) -> npt.NDArray[np.float64]:
    """PSNR in dB of each pair of ``[n, height, width, 3]``, 100 for equal ones."""
    error = np.square(first.astype(np.float64) - again).mean(axis=(1, 2, 3))
    with np.errstate(divide="ignore"):
        return np.asarray(np.minimum(10 * np.log10(_PEAK**2 / error), _PSNR_CAP))


def ssim(first: Frames, again: Frames) -> npt.NDArray[np.float64]:
    """Structural similarity of each pair: Wang et al. 2004, equation 13, per colour channel.

    Gaussian window of 11 x 11 and sigma 1.5, K1 = 0.01, K2 = 0.03, population moments; the mean
    over all places where the window lies inside the picture, and over channels.
    """
    from scipy.ndimage import gaussian_filter

    def blurred(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        smooth = gaussian_filter(x, (0, _SIGMA, _SIGMA, 0), radius=(0, _RADIUS, _RADIUS, 0))
        inner = slice(_RADIUS, -_RADIUS)
        return np.asarray(smooth[:, inner, inner])

    x, y = first.astype(np.float64), again.astype(np.float64)
    mean_x, mean_y = blurred(x), blurred(y)
    var_x, var_y = blurred(x * x) - mean_x**2, blurred(y * y) - mean_y**2
    both = blurred(x * y) - mean_x * mean_y
    alike = (2 * mean_x * mean_y + _C1) * (2 * both + _C2)
    alike /= (mean_x**2 + mean_y**2 + _C1) * (var_x + var_y + _C2)
    return np.asarray(alike.mean(axis=(1, 2, 3)))


class Scorer:
    """Mean of each metric over pairs of pictures."""

    def __init__(self, *, with_lpips: bool = True) -> None:
        self._lpips, self.note = _lpips() if with_lpips else (None, "LPIPS was left out")

    def __call__(self, first: Frames, again: Frames) -> dict[str, float]:
        """``psnr`` in dB, ``ssim``, and ``lpips`` where there is one."""
        found = {"psnr": psnr(first, again).mean(), "ssim": ssim(first, again).mean()}
        if self._lpips is not None:
            found["lpips"] = self._lpips(first, again).mean()
        return {name: float(value) for name, value in found.items()}


Distance = Callable[[Frames, Frames], npt.NDArray[np.float64]]


def _lpips() -> tuple[Distance | None, str]:
    """LPIPS (AlexNet), or None and why not."""
    if find_spec("lpips") is None:
        return None, "LPIPS is left out: install the extra worldpager[lpips]"
    import torch
    from lpips import LPIPS

    try:
        network = LPIPS(net="alex", verbose=False).eval()
    except OSError as error:  # its backbone's weights are fetched on first use
        return None, f"LPIPS is left out: its network cannot be loaded ({error})"

    def distance(first: Frames, again: Frames) -> npt.NDArray[np.float64]:
        pair = [torch.from_numpy(x).permute(0, 3, 1, 2).float() / 127.5 - 1 for x in (first, again)]
        large = [torch.nn.functional.interpolate(x, LPIPS_SIDE, mode="bicubic") for x in pair]
        with torch.no_grad():
            return np.asarray(network(*large).flatten().numpy(), dtype=np.float64)

    return distance, ""

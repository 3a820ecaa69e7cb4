"""Draws docs/pictures/revisit.png from a finished demo.

make demo && python benchmarks/revisit_picture.py demo docs/pictures/revisit.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy as np

from worldpager.cli.recording import BASELINE, read_frames
from worldpager.cli.revisits import Revisits, find_revisits, pair_psnr

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SHOWN = 7


def main(run: Path, out: Path) -> None:
    path = np.load(run / "poses.npy", allow_pickle=False)
    revisits = find_revisits(path)
    shown = np.sort(np.random.default_rng(3).choice(len(revisits), SHOWN, replace=False))
    few = Revisits(revisits.first[shown], revisits.again[shown])
    figure, axes = plt.subplots(4, SHOWN, figsize=(1.35 * SHOWN, 6.2), layout="constrained")
    titles = ("first visit", "revisit,\nwith memory", "first visit", "revisit,\nwithout")
    for block, frames in enumerate((read_frames(run), read_frames(run / BASELINE))):
        quality = np.concatenate(list(pair_psnr(frames, few)))
        for column in range(SHOWN):
            for row, numbers in enumerate((few.first, few.again)):
                panel = axes[2 * block + row, column]
                panel.imshow(frames[numbers[column]], interpolation="bicubic")
                panel.set(xticks=[], yticks=[])
                if row:
                    panel.set_xlabel(f"{quality[column]:.1f} dB", fontsize=9)
                if column == 0:
                    panel.set_ylabel(titles[2 * block + row], fontsize=9)
    for column in range(SHOWN):
        lap = (few.again[column] - few.first[column]) // path.shape[1]
        axes[0, column].set_title(f"{lap} chunks later", fontsize=9)
    figure.savefig(out, dpi=90)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

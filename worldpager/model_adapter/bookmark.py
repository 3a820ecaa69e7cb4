"""Where a rollout stands: what another process needs to go on, besides the store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worldpager.model_adapter.frontend import Poses


@dataclass(frozen=True, slots=True)
class Bookmark:
    """``chunk``: the last one that was generated; it need not be stored yet, the next boundary
    takes it. ``start_frame``: its first true frame. ``base``: frames by which the frontend's
    positions are lowered. ``epoch``, ``prompt``: of the prompt that holds, with its embedding where
    one was given. ``poses``: of the chunk, ``[frames, 4, 4]``. ``pose``: camera-to-world ``[4, 4]``
    after it, where the memory goes by controls. ``rollout``: number of the rollout in its store.
    """

    rollout: int
    chunk: int
    start_frame: int
    base: int
    epoch: int = 0
    poses: Poses | None = None
    pose: Poses | None = None
    prompt: npt.NDArray[np.float32] | None = None

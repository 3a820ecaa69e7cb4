"""Where the camera will be.

Prediction is of whole chunks of latent poses, not of one pose per chunk: the place of a predicted
chunk is then averaged exactly as that of a stored one, and a turning chunk is not compared with a
sharper version of itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from scipy.spatial.transform import Rotation

from worldpager.errors import ConfigError
from worldpager.prefetch.poses import Floats


class Extrapolator(Protocol):
    """Predicts the chunks that follow one. Pure."""

    name: str

    def predict(self, current: Floats, previous: Floats | None, chunks: int) -> Floats:
        """Latent poses `[chunks, F, 4, 4]` after ``current`` `[F, 4, 4]`.

        ``previous``: the chunk before it, or None at the start; needed only where one chunk alone
        shows no motion (F = 1).
        """


class Hold:
    """The camera stays where the chunk left it."""

    name = "hold"

    def predict(self, current: Floats, previous: Floats | None, chunks: int) -> Floats:
        return np.broadcast_to(current[-1], (chunks, len(current), 4, 4)).copy()


class ConstantVelocity:
    """The camera keeps its velocity: translation and world rotation vector per latent frame.

    Both are taken from the chunk's own latents, last minus first over F - 1 steps, or with F = 1
    from the step since the previous chunk (none: the camera is held). Latent j after the last is at
    ``t + j v`` and turned by ``exp(j w)`` from the left. Exact for constant motion as long as the
    chunk turns by less than 180 degrees.
    """

    name = "constant-velocity"

    def predict(self, current: Floats, previous: Floats | None, chunks: int) -> Floats:
        frames = len(current)
        first, steps = current[0], frames - 1
        if frames == 1 and previous is not None:
            first, steps = previous[-1], 1
        if steps == 0:
            return Hold().predict(current, previous, chunks)
        last = current[-1]
        velocity = (last[:3, 3] - first[:3, 3]) / steps
        turn = Rotation.from_matrix(last[:3, :3] @ first[:3, :3].T).as_rotvec() / steps
        ahead = np.arange(1, chunks * frames + 1, dtype=np.float64)[:, None]
        out = np.tile(np.eye(4), (chunks * frames, 1, 1))
        out[:, :3, 3] = last[:3, 3] + ahead * velocity
        out[:, :3, :3] = Rotation.from_rotvec(ahead * turn).as_matrix() @ last[:3, :3]
        return out.reshape(chunks, frames, 4, 4)


def poses_ahead(
    extrapolator: Extrapolator,
    current: Floats,
    previous: Floats | None,
    chunks: int,
    known: Sequence[Floats] = (),
) -> Floats:
    """Latent poses `[chunks, F, 4, 4]` of the next chunks: known ones as they are, then predicted.

    ``known``: poses `[F, 4, 4]` of the chunks that follow, as far as the frontend knows them;
    prediction goes on from the last of them. Raises :class:`ConfigError` where F differs.
    """
    sure = [np.asarray(poses, dtype=np.float64) for poses in known[:chunks]]
    for poses in sure:
        if poses.shape != current.shape:
            raise ConfigError(
                f"poses known ahead have shape {list(poses.shape)}, the current chunk's "
                f"{list(current.shape)}; give the latent poses of whole chunks"
            )
    history = [previous, current, *sure]
    last = history[-1]
    assert last is not None
    missing = chunks - len(sure)
    parts = [poses[None] for poses in sure]
    if missing:
        parts.append(extrapolator.predict(last, history[-2], missing))
    return np.concatenate(parts) if parts else np.empty((0, *current.shape))

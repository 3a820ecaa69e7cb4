"""Camera paths for rollouts, by name, and where they come back to.

``yaw-return``  on the spot, 10 degrees a chunk: once round to the right, back, and again
``loop``        a round walk through the room, looking ahead, the same lap again and again
``walk``        a player on keyboard and mouse, from the seed: walks, turns, retraces its steps
``FILE.npy``    latent poses ``[N, 4, 4]`` or ``[N, F, 4, 4]`` in a declared convention

The room is 8 x 8 units around the origin, the camera at height 0 and at least 1.2 units from the
walls. Motion goes on from each frame to the next, across chunks too. Where a path turns back it
rests for one frame, so that a chunk on the way back shows exactly the frames of one on the way out.
Such revisits are equal to the last bit: frames are computed once and repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from worldpager.errors import ConfigError
from worldpager.prefetch.actions import ActionScale, integrate_actions, upright_poses
from worldpager.prefetch.poses import OPENCV, Floats, PoseConvention

REACH = 2.8
"""Largest |x| and |z| of a path: the room's half size less 1.2 units."""

YAW_CHUNKS = 36
YAW_STEP = 10.0

LOOP_CHUNKS = 36
LOOP_RADIUS = 2.4

_WALK_TURN = 12.0
_WALK_SCALE = 0.36
"""Degrees turned and units walked per chunk by the walker of ``walk``."""


def path_names() -> list[str]:
    """Names that :func:`make_path` knows besides files."""
    return list(_PATHS)


def make_path(
    name: str,
    chunks: int,
    frames_per_chunk: int,
    seed: int = 0,
    *,
    convention: PoseConvention = OPENCV,
) -> Floats:
    """Latent poses of a path, float64 `[chunks, frames_per_chunk, 4, 4]`, our convention.

    ``name``: one of :func:`path_names` or a file that ends in ``.npy``. ``seed`` matters to
    ``walk`` only, ``convention`` to files only. Raises :class:`ConfigError` for an unknown name, a
    size below 1, and a file that is missing, not a plain array, of the wrong shape, too short, or
    that holds anything but rigid poses.
    """
    if chunks < 1 or frames_per_chunk < 1:
        raise ConfigError(
            f"a path needs at least one chunk of one frame, not {chunks} of {frames_per_chunk}"
        )
    if name.endswith(".npy"):
        return _from_file(Path(name), chunks, frames_per_chunk, convention)
    try:
        path = _PATHS[name]
    except KeyError:
        known = ", ".join(_PATHS)
        raise ConfigError(f"no camera path {name!r}; known are {known} and FILE.npy") from None
    return path(chunks, frames_per_chunk, seed)


def _yaw_return(chunks: int, frames: int, seed: int) -> Floats:
    out_frames = YAW_CHUNKS * frames
    yaw = np.radians(np.arange(out_frames) * (YAW_STEP / frames))
    out = upright_poses(np.zeros((out_frames, 3)), yaw, np.zeros(out_frames))
    return _repeated(np.concatenate([out, out[::-1]]), chunks, frames)


def _loop(chunks: int, frames: int, seed: int) -> Floats:
    lap = LOOP_CHUNKS * frames
    angle = 2.0 * np.pi * np.arange(lap) / lap
    positions = np.zeros((lap, 3))
    positions[:, 0] = -LOOP_RADIUS * np.cos(angle)
    positions[:, 2] = LOOP_RADIUS * np.sin(angle)
    return _repeated(upright_poses(positions, angle, np.zeros(lap)), chunks, frames)


def _repeated(lap: Floats, chunks: int, frames: int) -> Floats:
    """Chunks cut from a lap of poses `[n, 4, 4]` walked again and again."""
    which = np.arange(chunks * frames) % len(lap)
    return lap[which].reshape(chunks, frames, 4, 4)


_KEYS: dict[str, tuple[int, int, int, int]] = {
    "none": (0, 0, 0, 0),
    "W": (1, 0, 0, 0),
    "S": (0, 1, 0, 0),
    "A": (0, 0, 1, 0),
    "D": (0, 0, 0, 1),
}


def _walk(chunks: int, frames: int, seed: int) -> Floats:
    """Random controls, each held for some chunks; now and then the last chunks in reverse.

    Keys: W 62 %, none 20 %, S, A, D 6 % each. Camera: none, left, right, held independently. A
    chunk that would leave the room becomes a turn on the spot towards the middle.
    """
    rng = np.random.default_rng(seed)
    scale = ActionScale(_WALK_SCALE / frames, _WALK_TURN / frames)
    path = np.empty((chunks, frames, 4, 4))
    pose = upright_poses(np.zeros((1, 3)), np.zeros(1), np.zeros(1))[0]
    key, turn, key_left, turn_left = "none", 0.0, 0, 0
    done = 0
    while done < chunks:
        if done >= 8 and rng.random() < 0.05:
            back = min(int(rng.integers(6, 25)), done, chunks - done)
            path[done : done + back] = path[done - back : done][::-1, ::-1]
            done += back
            pose = path[done - 1, -1]
            continue
        if key_left == 0:
            key = str(rng.choice(list(_KEYS), p=(0.2, 0.62, 0.06, 0.06, 0.06)))
            key_left = int(rng.geometric(1 / 5))
        if turn_left == 0:
            turn = float(rng.choice((0.0, -1.0, 1.0), p=(0.5, 0.25, 0.25)))
            turn_left = int(rng.geometric(1 / 3))
        step = _held(pose, key, turn, frames, scale)
        if np.abs(step[:, (0, 2), 3]).max() > REACH:
            step = _held(pose, "none", _towards_middle(pose), frames, scale)
        path[done] = step
        pose = step[-1]
        done, key_left, turn_left = done + 1, key_left - 1, turn_left - 1
    return path


def _held(pose: Floats, key: str, turn: float, frames: int, scale: ActionScale) -> Floats:
    keyboard = np.tile(np.array(_KEYS[key], dtype=np.float64), (frames, 1))
    mouse = np.tile((0.0, turn), (frames, 1))
    return integrate_actions(pose, keyboard, mouse, scale)


def _towards_middle(pose: Floats) -> float:
    """+1 where a right turn brings the middle of the room into view sooner, else -1."""
    return 1.0 if float(pose[:3, 0] @ pose[:3, 3]) <= 0.0 else -1.0


_PATHS: dict[str, Callable[[int, int, int], Floats]] = {
    "yaw-return": _yaw_return,
    "loop": _loop,
    "walk": _walk,
}


def _from_file(file: Path, chunks: int, frames: int, convention: PoseConvention) -> Floats:
    if not file.is_file():
        raise ConfigError(f"{file} is not a file; give a .npy file of camera poses")
    try:
        # Mapped, so that only the frames asked for are read, however large the file says it is.
        stored = np.load(file, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header also lets numpy's parser errors of all kinds out
        raise ConfigError(f"{file} cannot be read as a plain .npy array: {error}") from None
    if not isinstance(stored, np.ndarray):
        raise ConfigError(f"{file} is an archive of arrays; give a .npy file with one array")
    shape = list(stored.shape)
    if stored.ndim not in (3, 4) or shape[-2:] != [4, 4]:
        raise ConfigError(f"{file} must hold poses [N, 4, 4] or [N, F, 4, 4], not {shape}")
    if stored.ndim == 4 and shape[1] != frames:
        raise ConfigError(f"{file} has {shape[1]} frames a chunk, but the model makes {frames}")
    flat = stored.reshape(-1, 4, 4)
    if len(flat) < chunks * frames:
        raise ConfigError(
            f"{file} has poses for {len(flat) // frames} chunks of {frames} frames, not for "
            f"{chunks}; ask for fewer chunks"
        )
    return convention.to_opencv(flat[: chunks * frames], str(file)).reshape(chunks, frames, 4, 4)


# ---- where a path comes back -----------------------------------------------------------------


def first_visit(
    path: npt.ArrayLike, recent: int = 1, *, units: float = 1e-3, degrees: float = 0.1
) -> npt.NDArray[np.int64]:
    """For each chunk the earliest that showed the same frames, or -1: int64 `[chunks]`.

    ``path``: `[chunks, F, 4, 4]`. The frames may come in the same or in the opposite order and
    differ by up to ``units`` and ``degrees`` each. A first visit among the ``recent`` chunks just
    before does not count: it was never out of sight.
    """
    poses = np.asarray(path, dtype=np.float64)
    same = _earliest(np.stack([poses, poses[:, ::-1]]), units, degrees)
    own = np.arange(len(poses))
    return np.where(same < own - recent, same, -1)


def revisit_pairs(
    path: npt.ArrayLike, recent: int = 1, *, units: float = 1e-3, degrees: float = 0.1
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Frames that show what an earlier one showed: ``((chunk, frame), (first chunk, frame))``.

    As :func:`first_visit`, frame by frame: also where a revisit straddles two chunks.
    """
    poses = np.asarray(path, dtype=np.float64)
    frames = poses.shape[1]
    same = _earliest(poses.reshape(1, -1, 1, 4, 4), units, degrees)
    pairs = []
    for frame, first in enumerate(same.tolist()):
        now, then = divmod(frame, frames), divmod(first, frames)
        if then[0] < now[0] - recent:
            pairs.append((now, then))
    return pairs


def _earliest(views: Floats, units: float, degrees: float) -> npt.NDArray[np.int64]:
    """For each of n items the earliest item like it, or itself.

    ``views`` `[v, n, F, 4, 4]`: each item's poses in the orders that count as the same. Compared
    with the first of each kind only, so a path of few places costs little however long it is.
    """
    _, count, frames = views.shape[:3]
    # |R1 - R2| in the Frobenius norm is 2 sqrt(2) sin(angle / 2).
    turned = 2.0 * np.sqrt(2.0) * np.sin(np.radians(degrees) / 2.0)
    kinds: list[int] = []
    places, rotations = np.empty((count, frames, 3)), np.empty((count, frames, 9))
    same = np.arange(count)
    for item in range(count):
        seen = len(kinds)
        match = np.zeros(seen, dtype=np.bool_)
        for view in views[:, item]:
            moved = np.square(places[:seen] - view[:, :3, 3]).sum(axis=2)
            twist = np.square(rotations[:seen] - view[:, :3, :3].reshape(frames, 9)).sum(axis=2)
            match |= ((moved <= units**2) & (twist <= turned**2)).all(axis=1)
        if match.any():
            same[item] = kinds[int(np.argmax(match))]
        else:
            places[seen] = views[0, item, :, :3, 3]
            rotations[seen] = views[0, item, :, :3, :3].reshape(frames, 9)
            kinds.append(item)
    return same

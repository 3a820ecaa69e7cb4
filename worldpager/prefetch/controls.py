"""Controls while a rollout runs: the pseudo-pose they lead to, and the actions likely to be next.

A frontend hands over ``ChunkStep.control``: ``keyboard`` ``[n, 4 or 2]`` and ``mouse`` ``[n, 2]``,
rows of one chunk as in :mod:`worldpager.prefetch.actions`; optionally ``ahead``, the same for the
chunks that follow as far as they are known, and ``start``, the pose ``[4, 4]`` before the chunk,
where the game moved the camera itself.

What comes next is guessed from habit: how often one action followed another. The counts depend on
the controls alone, so the same log gives the same guesses.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from worldpager.errors import ConfigError
from worldpager.prefetch.actions import ActionScale, integrate_actions, latent_poses
from worldpager.prefetch.poses import Floats, as_poses

Action = tuple[float, ...]
"""One row of controls, keyboard then mouse: what is held at the end of a chunk."""

HELD_AT_FIRST = 2
"""Count that going on as before has before anything was seen: actions last some chunks."""


class Walker:
    """Where the controls have led: one per rollout. ``frames``: latent frames of a chunk."""

    def __init__(self, scale: ActionScale, frames: int, pose: Floats | None = None) -> None:
        self._scale, self._frames = scale, frames
        self.pose: Floats = np.eye(4) if pose is None else pose
        """Camera-to-world after the last chunk walked, `[4, 4]`."""
        self.before: Floats = self.pose
        """The same before that chunk."""
        self._habits = Habits()
        self._walked: int | None = None

    def check(self, control: Mapping[str, Any]) -> None:
        """Raise :class:`ConfigError` where :meth:`walk` or :meth:`ahead` would."""
        self._integrated(self._start(control, self.pose), control)
        self.ahead(control)

    def walk(self, control: Mapping[str, Any], chunk: int | None = None) -> Floats:
        """The latent poses `[frames, 4, 4]` of the chunk that ``control`` drives; the walker goes
        there. The same ``chunk`` again, as after a failed boundary, starts where it did before.
        Raises :class:`ConfigError` for missing or malformed controls, and stays then.
        """
        again = chunk is not None and chunk == self._walked
        start = self._start(control, self.before if again else self.pose)
        latents, end = self._integrated(start, control)
        if not again:
            self._habits.see(_last_row(control))
        self.before, self.pose, self._walked = start, end, chunk
        return latents

    def ahead(self, control: Mapping[str, Any]) -> list[Floats]:
        """Poses of the chunks after the one walked last, as far as ``control['ahead']`` goes."""
        out, pose = [], self.pose
        for following in control.get("ahead", ()):
            latents, pose = self._integrated(pose, following)
            out.append(latents)
        return out

    def branches(self, control: Mapping[str, Any], count: int) -> list[Floats]:
        """Where the ``count`` likeliest next actions would lead, the likeliest first."""
        keyboard, mouse = _rows_of(control)
        rows = 4 * self._frames
        out = []
        for action in self._habits.next(_last_row(control), count):
            held = np.tile(np.array(action), (rows, 1))
            width = np.shape(keyboard)[1]
            turned = None if mouse is None else held[:, width:]
            frames = integrate_actions(self.pose, held[:, :width], turned, self._scale)
            out.append(latent_poses(frames))
        return out

    def _start(self, control: Mapping[str, Any], here: Floats) -> Floats:
        if "start" not in control:
            return here
        start: Floats = as_poses(np.asarray(control["start"], dtype=np.float64)[None], "start")[0]
        return start

    def _integrated(self, start: Floats, control: Mapping[str, Any]) -> tuple[Floats, Floats]:
        keyboard, mouse = _rows_of(control)
        frames = integrate_actions(start, keyboard, mouse, self._scale)
        latents = latent_poses(frames)
        if len(latents) != self._frames:
            raise ConfigError(
                f"{len(frames)} rows of controls make {len(latents)} latent frames, a chunk has "
                f"{self._frames}; give four rows a latent frame, in the first chunk also 4 n - 3"
            )
        return latents, frames[-1]


class Habits:
    """How often each action followed each."""

    def __init__(self) -> None:
        self._after: dict[Action, Counter[Action]] = defaultdict(Counter)
        self._seen: Counter[Action] = Counter()
        self._last: Action | None = None

    def see(self, action: Action) -> None:
        """The chunk just begun holds ``action``."""
        if self._last is not None:
            self._after[self._last][action] += 1
        self._seen[action] += 1
        self._last = action

    def next(self, action: Action, count: int) -> list[Action]:
        """The ``count`` likeliest actions after ``action``, or fewer where fewer were ever seen.

        By how often they followed it (going on has a lead of :data:`HELD_AT_FIRST`), then by how
        often they were seen at all, then in the order of their numbers.
        """
        followed = Counter(self._after.get(action, Counter()))
        followed[action] += HELD_AT_FIRST
        known: Sequence[Action] = [*self._seen, action]
        order = sorted(set(known), key=lambda a: (-followed[a], -self._seen[a], a))
        return order[:count]


def _rows_of(control: Mapping[str, Any]) -> tuple[Any, Any]:
    if "keyboard" not in control:
        raise ConfigError(
            "retrieval by 'action' needs ChunkStep.control with 'keyboard' [n, 4], and 'mouse' "
            "[n, 2] where there is one"
        )
    return control["keyboard"], control.get("mouse")


def _last_row(control: Mapping[str, Any]) -> Action:
    keyboard, mouse = _rows_of(control)
    row = [*np.asarray(keyboard, dtype=np.float64)[-1]]
    if mouse is not None:
        row += [*np.asarray(mouse, dtype=np.float64)[-1]]
    return tuple(float(value) for value in row)

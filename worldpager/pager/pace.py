"""How much of its ahead list a stream begins to load in one step.

A list's first entries, as many as a window has, are what the next window will want: they always
begin. The further ones are speculation and use what is left of the channel, which nothing here can
measure without a clock. So they are admitted a step at a time, in whole loads: as many as arrived
before the next window in the last step that could not finish them all, and one more now and then.
What begins in a step then also ends in it, well before its end, and a speculative load never delays
the next step's urgent one. While windows come before what they want, nothing new begins beside what
is still under way: loads stay in step with windows.

All of it follows from one question a step, what had arrived when the window came. So two runs
whose transfers differ by milliseconds load the same.
"""

from __future__ import annotations

FIRST_PATIENCE = 8
"""Steps that end in time before one load more is tried; doubled by each try that fails."""
LONGEST_PATIENCE = 64
LONGEST_HOLD = 4
"""Lists in a row that may find nothing new begun: a load that hangs must not stop all others."""


class Pace:
    """One stream's."""

    def __init__(self) -> None:
        self._most: int | None = None  # speculative loads in one step; None: no bound was met
        self._patience = FIRST_PATIENCE
        self._calm = 0  # steps in time since the bound was met last
        self._cut = False  # the list had more than was admitted
        self._late = False  # the last window came before what it wanted
        self._held = 0  # lists in a row of which nothing was begun

    def end(self, done: int, left: int) -> None:
        """A step ends: of the admitted speculative loads ``done`` had arrived, ``left`` had not."""
        cut, self._cut = self._cut, False
        if left:
            if self._most is not None:
                self._patience = min(2 * self._patience, LONGEST_PATIENCE)
            self._most, self._calm = done, 0
        elif cut and self._most is not None:
            self._calm += 1
            if self._calm >= self._patience:
                self._most, self._calm = self._most + 1, 0

    def window(self, late: bool) -> None:
        """A window comes. ``late``: something it wants was listed and is not there."""
        self._late = late

    def admit(self, urgent: int, further: int, reading: int) -> tuple[int, int]:
        """How many of the ``urgent`` and of the ``further`` loads of a new list may begin;
        ``reading``: loads of the stream under way.
        """
        hold = self._late and reading > 0 and self._held < LONGEST_HOLD
        self._held = self._held + 1 if hold else 0
        if hold:
            return 0, 0
        if self._late:
            return urgent, 0
        most = further if self._most is None else min(further, max(0, self._most - reading))
        self._cut = most < further
        return urgent, most

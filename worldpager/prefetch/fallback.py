"""What a window gets when not all it wants is resident.

Each policy is a pure answer to one question of the core, which flags the window stale with the
reason given here. Whatever is chosen is resident and stands in time order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from worldpager.errors import ConfigError
from worldpager.pager.policies import Choice, FallbackPolicy

NO_PREVIOUS = "no previous set"
PREVIOUS = "previous set"
NEAREST = "nearest resident"
NONE_RESIDENT = "nothing resident"
WAIT = "waits for reads"


class Stale:
    """The stream's previous set, whole: never a mixture that no camera asked for.

    Before there is one the window is sink and recent only.
    """

    name = "stale"

    def choose(
        self,
        wanted: tuple[int, ...],
        ranking: Sequence[int],
        resident: Callable[[int], bool],
        previous: tuple[int, ...],
    ) -> Choice:
        # The core pins the previous set, so the filter only acts where a chunk was lost meanwhile.
        held = tuple(sorted(chunk for chunk in previous if resident(chunk)))
        return Choice(held, PREVIOUS if held else NO_PREVIOUS)


class Nearest:
    """The wanted chunks that are resident, filled up with the nearest resident others.

    As many chunks as were wanted, as far as there are any. It does not age, as the previous set
    does, and makes better pictures (docs/retrieval.md).
    """

    name = "nearest"

    def choose(
        self,
        wanted: tuple[int, ...],
        ranking: Sequence[int],
        resident: Callable[[int], bool],
        previous: tuple[int, ...],
    ) -> Choice:
        chosen = {chunk for chunk in wanted if resident(chunk)}
        for chunk in ranking:
            if len(chosen) >= len(wanted):
                break
            if chunk not in chosen and resident(chunk):
                chosen.add(int(chunk))
        return Choice(tuple(sorted(chosen)), NEAREST if chosen else NONE_RESIDENT)


class Wait:
    """Waits until everything wanted is resident: the baseline that stalls."""

    name = "wait"

    def choose(
        self,
        wanted: tuple[int, ...],
        ranking: Sequence[int],
        resident: Callable[[int], bool],
        previous: tuple[int, ...],
    ) -> Choice:
        return Choice((), WAIT, wait=True)


_POLICIES: dict[str, type[Stale] | type[Nearest] | type[Wait]] = {
    policy.name: policy for policy in (Nearest, Stale, Wait)
}


def fallback_names() -> list[str]:
    """Names of all fallback policies; the first is the default."""
    return list(_POLICIES)


def get_fallback(name: str) -> FallbackPolicy:
    """The fallback policy called ``name``. Raises :class:`ConfigError` listing the known names."""
    try:
        return _POLICIES[name]()
    except KeyError:
        raise ConfigError(
            f"no fallback policy {name!r}; known are {', '.join(fallback_names())}"
        ) from None

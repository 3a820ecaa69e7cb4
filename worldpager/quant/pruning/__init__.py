"""Token pruning: fewer tokens of a chunk are stored, chosen by name.

A name is ``POLICY`` or ``POLICY:VALUE`` (a keep ratio or a threshold, as the policy says), and
``random/POLICY:VALUE`` and ``reversed/POLICY:VALUE`` are controls that keep as many tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import entry_points

from worldpager.errors import ConfigError
from worldpager.quant.pruning.consistency import CleanPredictions
from worldpager.quant.pruning.policies import (
    Consistency,
    FinishedChunk,
    KeySimilarity,
    PruningPolicy,
    RandomControl,
    ReversedControl,
    Strips,
    TemporalDifference,
)

__all__ = [
    "NONE",
    "CleanPredictions",
    "FinishedChunk",
    "PruningPolicy",
    "get_pruning",
    "pruning_names",
]

NONE = "none"
"""The name under which every token is kept."""

Factory = Callable[..., PruningPolicy]

_CONTROLS: dict[str, Callable[[PruningPolicy], PruningPolicy]] = {
    "random": RandomControl,
    "reversed": ReversedControl,
}


@cache
def _policies() -> dict[str, Factory]:
    found: dict[str, Factory] = {
        "worldkv": KeySimilarity,
        "worldkv-pooled": partial(KeySimilarity, pooled=True),
        "worldkv-paper": partial(KeySimilarity, pooled=True, form="mean"),
        "decoprune": Consistency,
        "decoprune-normalised": partial(Consistency, variant="normalised"),
        "decoprune-chunk": partial(Consistency, variant="chunk-normalised"),
        "decoprune-cosine": partial(Consistency, variant="cosine"),
        "temporal-difference": TemporalDifference,
        "forcingkv": Strips,
    }
    for entry in entry_points(group="worldpager.pruning"):
        if entry.name in found:
            raise ConfigError(
                f"pruning policy {entry.name!r} from {entry.value!r} takes a name that is already "
                "in use; give it another or uninstall its package"
            )
        found[entry.name] = entry.load()
    return found


def pruning_names() -> list[str]:
    """``none`` and the names of all policies, built in and from ``worldpager.pruning`` entry
    points, each of which loads to something callable with the name and, where given, the value.
    """
    return [NONE, *_policies()]


def get_pruning(text: str) -> PruningPolicy | None:
    """The policy that ``text`` names, ``None`` for ``none``.

    Raises :class:`ConfigError` listing the known names, or for a value that the policy refuses.
    """
    if text == NONE:
        return None
    control, slash, rest = text.rpartition("/")
    name, colon, value = rest.partition(":")
    if name not in _policies() or (slash and control not in _CONTROLS):
        raise ConfigError(
            f"no pruning policy {text!r}; known are {', '.join(pruning_names())}, each but none "
            f"also with :VALUE, and after {' or '.join(f'{c}/' for c in _CONTROLS)}"
        )
    try:
        policy = _policies()[name](name, float(value)) if colon else _policies()[name](name)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{value!r} in {text!r} is no number") from None
    return _CONTROLS[control](policy) if slash else policy

"""Which old chunks a new one should see: retrieval policies by name.

A retrieval policy ranks the candidates of a chunk, best first; the first k are its retrieval set.
Policies are pure and found by name: those of WorldPager, and whatever the ``worldpager.retrieval``
entry points add. A name may be followed by options, ``fov:horizontal=75,far=12``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from worldpager.errors import ConfigError
from worldpager.prefetch.content import AttentionMass, PromptThenQuery, QueryBound, QueryMean
from worldpager.prefetch.geometric import (
    ActionDistance,
    CameraDistance,
    FieldOfView,
    Nothing,
    Recent,
)
from worldpager.prefetch.hybrid import Hybrid
from worldpager.prefetch.ranking import (
    Query,
    Ranking,
    RetrievalPolicy,
    Scored,
    Selection,
    candidate_range,
)

__all__ = [
    "CameraDistance",
    "Query",
    "Ranking",
    "RetrievalPolicy",
    "Selection",
    "candidate_range",
    "get_policy",
    "policy_names",
]

_BUILT_IN: tuple[type[Any], ...] = (
    CameraDistance, Recent, Nothing, FieldOfView, ActionDistance, QueryMean, QueryBound,
    AttentionMass, PromptThenQuery, Hybrid,
)  # fmt: skip


@cache
def _policies() -> dict[str, type[Any]]:
    found: dict[str, type[Any]] = {policy.name: policy for policy in _BUILT_IN}
    for entry in entry_points(group="worldpager.retrieval"):
        policy = entry.load()
        if policy.name in found:
            raise ConfigError(
                f"retrieval policy {policy.name!r} from {entry.value!r} takes a name that is "
                "already in use; give it another or uninstall its package"
            )
        found[policy.name] = policy
    return found


def policy_names() -> list[str]:
    """Names of all retrieval policies, built in and from ``worldpager.retrieval`` entry points."""
    return list(_policies())


def get_policy(text: str, heads: int = 0) -> RetrievalPolicy:
    """The retrieval policy that ``NAME`` or ``NAME:OPTION=VALUE,...`` describes.

    A hybrid takes names of policies with their weights beside its options,
    ``hybrid:camera=1,query=0.5,by=ranks``. ``heads``: of the model, for the policy that looks at
    heads one by one and is not told otherwise. Raises :class:`ConfigError` listing the known names
    or options, and for values that make no sense.
    """
    name, _, rest = text.partition(":")
    policy = _policies().get(name)
    if policy is None:
        raise ConfigError(f"no retrieval policy {name!r}; known are {', '.join(policy_names())}")
    given = _pairs(rest, text)
    if policy is Hybrid:
        given = _hybrid_options(given, heads)
    elif policy is AttentionMass:
        given.setdefault("heads", heads)
    made: RetrievalPolicy = policy(**_typed(policy, given))
    return made


def _pairs(rest: str, text: str) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals or not key or key in pairs:
            raise ConfigError(
                f"retrieval {text!r} cannot be read at {item!r}; write NAME:OPTION=VALUE,..."
            )
        pairs[key] = value
    return pairs


def _hybrid_options(given: Mapping[str, Any], heads: int) -> dict[str, Any]:
    """Weights by policy gathered under ``parts``; the rest stays."""
    own = {field.name for field in fields(Hybrid)} - {"parts"}
    parts: dict[Scored, float] = {}
    for key in given.keys() - own:
        part: object = get_policy(key, heads)
        if not isinstance(part, Scored) or isinstance(part, Hybrid):
            raise ConfigError(f"a hybrid cannot contain {key!r}: it gives no distances")
        parts[part] = _value(key, given[key], 0.0)
    ordered = dict(sorted(parts.items(), key=lambda item: list(given).index(item[0].name)))
    return {key: given[key] for key in given.keys() & own} | {"parts": ordered}


def _typed(policy: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with each text turned into its option's type."""
    options: dict[str, Any] = {}
    if is_dataclass(policy):
        options = {field.name: field.default for field in fields(policy)}
    for key in given:
        if key not in options:
            known = ", ".join(options) or "none"
            raise ConfigError(f"retrieval {policy.name!r} has no option {key!r}; known are {known}")
    return {key: _value(key, value, options[key]) for key, value in given.items()}


def _value(key: str, value: Any, default: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False, "1": True, "0": False}[value.lower()]
        if isinstance(default, int | float):
            return type(default)(value)
    except (ValueError, KeyError):
        kind = {bool: "true or false", int: "a whole number"}.get(type(default), "a number")
        raise ConfigError(f"retrieval option {key} must be {kind}, not {value!r}") from None
    return value

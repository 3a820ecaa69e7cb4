"""Retrieval by what chunks hold: keys that the query attends to, prompts that mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from worldpager.errors import ConfigError
from worldpager.prefetch.index import View
from worldpager.prefetch.keys import (
    KeyKind,
    KeyRows,
    Vector,
    head_scores,
    no_rows,
    query_row,
    scores,
)
from worldpager.prefetch.poses import Floats
from worldpager.prefetch.ranking import Query, Scored, nearness_of


@dataclass(frozen=True)
class QueryMean(Scored):
    """The largest product of mean query and mean key of the page first (WorldKV, appendix C)."""

    name: ClassVar[str] = "query"
    keys: ClassVar[KeyKind] = "mean"
    needs_query: ClassVar[bool] = True

    def distances(self, view: View, query: Query) -> Floats:
        return nearness_of(scores(*_keys_and_query(view, query, self.keys, self.name)))


@dataclass(frozen=True)
class QueryBound(QueryMean):
    """Quest: the largest product that any key in the page's range could have first."""

    name: ClassVar[str] = "bound"
    keys: ClassVar[KeyKind] = "bounds"


@dataclass(frozen=True)
class AttentionMass(Scored):
    """The page that heads would attend to most first.

    Each head spreads a softmax of ``q . k / sqrt(head_dim)`` over all candidates; the mean over
    heads counts. So no head decides by the size of its keys alone. ``heads``: of the model; 0 for
    what whoever looks the policy up says.
    """

    name: ClassVar[str] = "attention"
    keys: ClassVar[KeyKind] = "mean"
    needs_query: ClassVar[bool] = True

    heads: int = 0

    def __post_init__(self) -> None:
        Scored.__post_init__(self)
        if self.heads < 0:
            raise ConfigError(f"heads cannot be {self.heads}")

    def distances(self, view: View, query: Query) -> Floats:
        keys, asked = _keys_and_query(view, query, self.keys, self.name)
        heads = self.heads or 1
        rows, products = head_scores(keys, asked, heads)
        mass = np.full(len(view.ids), -np.inf)
        if len(rows):
            products -= products.max(axis=1, keepdims=True)
            products /= np.float32(np.sqrt(len(asked) / heads))
            weights = np.exp(products, out=products)
            weights /= weights.sum(axis=1, keepdims=True)
            mass[rows] = weights.mean(axis=0)
        return nearness_of(mass)


@dataclass(frozen=True)
class PromptThenQuery(Scored):
    """WorldAttention's two stages: prompts by their cosine, then pages by ``q . k / sqrt(H D)``.

    ``stage1``: earlier prompts that are looked into, besides the current one. While the query is
    not known (for what to load ahead) pages follow in the order of the prompts, the newest first.
    Epochs whose prompt has no embedding come last; without one for the current prompt all are let
    through. Unlike WorldAttention's code it never offers what the window shows anyway.
    """

    name: ClassVar[str] = "prompt"
    keys: ClassVar[KeyKind] = "mean"

    stage1: int = 1

    def __post_init__(self) -> None:
        Scored.__post_init__(self)
        if self.stage1 < 0:
            raise ConfigError(f"stage1 cannot be {self.stage1} prompts")

    def distances(self, view: View, query: Query) -> Floats:
        order = self._order(view, query.epoch)
        places = np.array([order.get(epoch, -1) for epoch in range(view.epochs.max(initial=0) + 1)])
        rank = places[view.epochs]
        chosen = rank >= 0
        score = np.full(len(view.ids), -np.inf)
        if query.keys is None:
            newest = np.arange(1, len(view.ids) + 1) / (len(view.ids) + 1)
            score[chosen] = newest[chosen] - rank[chosen]
        else:
            keys, asked = _keys_and_query(view, query, self.keys, self.name)
            if not chosen.all():
                sketch, values, scales = keys
                keys = KeyRows(sketch[chosen], values[chosen], scales[chosen])
            score[chosen] = scores(keys, asked) / np.sqrt(len(asked))
        return nearness_of(score)

    def _order(self, view: View, epoch: int) -> dict[int, int]:
        """Rank by epoch of those whose chunks are candidates."""
        present = np.unique(view.epochs).tolist()
        others = [other for other in present if other != epoch]
        if epoch in view.prompts:
            nearest = prompt_cosines(view.prompts, epoch)
            others.sort(key=lambda other: (-nearest.get(other, -2.0), other))
            others = others[: self.stage1]
        else:
            others.sort(reverse=True)
        return {other: rank for rank, other in enumerate([epoch, *others])}


def prompt_cosines(prompts: Mapping[int, Vector], epoch: int) -> dict[int, float]:
    """Cosine of each epoch's prompt with that of ``epoch``. Raises :class:`ConfigError` where the
    embeddings differ in width.
    """
    own = prompts[epoch]
    for other, prompt in prompts.items():
        if len(prompt) != len(own):
            raise ConfigError(
                f"the prompt of epoch {other} has an embedding of {len(prompt)} numbers, that of "
                f"epoch {epoch} of {len(own)}; embed all prompts of a rollout alike"
            )
    return {other: round(float(prompt @ own), 6) for other, prompt in prompts.items()}


def _keys_and_query(view: View, query: Query, kind: KeyKind, policy: str) -> tuple[KeyRows, Vector]:
    if query.keys is None:
        raise ConfigError(
            f"retrieval by {policy} needs the chunk's mean query; give it or choose another policy"
        )
    asked = query_row(query.keys, kind)
    return (no_rows(len(view.ids), len(asked)) if view.keys is None else view.keys), asked

"""Which key blocks each block of queries attends to: head-adaptive routing, free of training.

Queries and keys are cut into blocks of tokens and averaged; the softmax over the averages says how
much of a query block's attention each key block would get. A head whose weights are concentrated
(large Gini coefficient) keeps more of that mass, a head that looks everywhere keeps less, and each
query block keeps the fewest blocks that reach its head's threshold.

Source: WorldAttention (HSA), adaptive block-sparse branch. Its released code averages the Gini
coefficient over the batch, so that a result depends on what else is in the batch; here every item
has its own unless ``over_batch`` is set.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worldpager.errors import ConfigError

BLOCK = 64
"""Tokens of a block, of queries as of keys, in WorldAttention."""
TAU_MIN, TAU_MAX = 0.35, 1.0
"""Attention mass that a head with Gini coefficient 0 keeps, and one with coefficient 1."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Key blocks chosen for each query block.

    ``order``: key block ids by falling weight, the smaller id first among equals, int64
    ``[B, H, query blocks, key blocks]``. ``count``: how many of these are chosen, int64
    ``[B, H, query blocks]``. ``block``: tokens of a block, the last one may be shorter.
    """

    order: torch.Tensor
    count: torch.Tensor
    block: int

    @property
    def mask(self) -> torch.Tensor:
        """The same as bool ``[B, H, query blocks, key blocks]``: which key blocks are chosen."""
        rank = torch.arange(self.order.shape[-1], device=self.order.device)
        chosen = rank < self.count[..., None]
        return torch.zeros_like(chosen).scatter(-1, self.order, chosen)

    @property
    def density(self) -> float:
        """Share of all pairs of blocks that is chosen, 0 to 1."""
        return float(self.count.double().mean()) / self.order.shape[-1]


def block_means(x: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Mean of each block's tokens: ``[B, tokens, H, D]`` to fp32 ``[B, blocks, H, D]``.

    The last block is averaged over the tokens that it has, not over padding. Raises
    :class:`ConfigError` for no tokens or a block below 1.
    """
    if block < 1 or x.shape[1] < 1:
        raise ConfigError(f"cannot cut {x.shape[1]} tokens into blocks of {block}; both must be >0")
    whole = x.shape[1] // block * block
    parts = [x[:, :whole].float().reshape(len(x), -1, block, *x.shape[2:]).mean(2)] if whole else []
    if whole < x.shape[1]:
        parts.append(x[:, whole:].float().mean(1, keepdim=True))
    return torch.cat(parts, 1)


def block_weights(q: torch.Tensor, k: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Attention between block means, ``softmax(q k^T / sqrt(D))``.

    ``q`` ``[B, queries, H, D]``, ``k`` ``[B, keys, H, D]``; returns fp32
    ``[B, H, query blocks, key blocks]``, rows summing to 1.
    """
    queries, keys = block_means(q, block), block_means(k, block)
    scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys) * q.shape[-1] ** -0.5
    return torch.softmax(scores, -1)


def gini(weights: torch.Tensor, *, over_batch: bool = False) -> torch.Tensor:
    """Gini coefficient of each head's block weights, averaged over query blocks: fp32 ``[B, H]``.

    ``weights``: as from :func:`block_weights`. Of ``N`` weights sorted by falling size, ``p_1`` to
    ``p_N``: ``(1/N) sum_m (N + 1 - 2m) p_m``; 0 where all are equal, ``(N - 1) / N`` where one has
    everything. ``over_batch``: averaged over the batch as well, as WorldAttention's code does.
    """
    n = weights.shape[-1]
    place = n - 1 - 2 * torch.arange(n, device=weights.device)
    ranked = weights.float().sort(-1, descending=True).values
    each = ((ranked * place).sum(-1) / n).mean(-1)
    return each.mean(0, keepdim=True).expand_as(each) if over_batch else each


def thresholds(
    weights: torch.Tensor,
    tau_min: float = TAU_MIN,
    tau_max: float = TAU_MAX,
    *,
    over_batch: bool = False,
) -> torch.Tensor:
    """Attention mass each head keeps: ``tau_min + gini (tau_max - tau_min)``, fp32 ``[B, H]``.

    Raises :class:`ConfigError` unless ``0 <= tau_min <= tau_max <= 1``.
    """
    if not 0 <= tau_min <= tau_max <= 1:
        raise ConfigError(f"0 <= tau_min <= tau_max <= 1 must hold, not {tau_min} and {tau_max}")
    return tau_min + gini(weights, over_batch=over_batch) * (tau_max - tau_min)


def choose_blocks(weights: torch.Tensor, tau: torch.Tensor, block: int = BLOCK) -> Selection:
    """The fewest blocks whose weights reach ``tau``, heaviest first; at least one if ``tau > 0``.

    ``weights`` ``[B, H, query blocks, key blocks]``, ``tau`` ``[B, H]``. A block is kept if the
    mass of those before it is below ``tau``.
    """
    ranked, order = weights.float().sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(-1) - ranked
    before[..., 0] = 0.0
    count = (before < tau[..., None, None]).sum(-1)
    return Selection(order, count, block)


def route(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    block: int = BLOCK,
    tau_min: float = TAU_MIN,
    tau_max: float = TAU_MAX,
    over_batch: bool = False,
) -> Selection:
    """All of the above: which blocks of ``k`` each block of ``q`` attends to."""
    weights = block_weights(q, k, block)
    return choose_blocks(
        weights, thresholds(weights, tau_min, tau_max, over_batch=over_batch), block
    )

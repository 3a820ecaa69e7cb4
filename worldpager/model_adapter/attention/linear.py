"""The low-rank branch of HSA: attention to every frame, each compressed to a few rows.

Source: WorldAttention (HSA), compressed global branch and gated fusion. It needs trained weights,
which belong to a checkpoint; without them there is only the block-sparse branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from worldpager.errors import ConfigError
from worldpager.model_adapter.attention.routing import BLOCK

_NAMES = ("proj_k", "proj_v", "gate.weight", "gate.bias")


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeights:
    """One layer's weights of the linear branch, shared by its heads.

    ``proj_k``, ``proj_v``: ``[rank, length]``, a segment's tokens to its rows; ``length`` is the
    longest segment they can take. ``gate_weight`` ``[D, D]`` and ``gate_bias`` ``[D]``: the gate
    that a query opens. ``block``: tokens that a row stands for, so that a segment of ``n`` tokens
    has ``ceil(n / block)`` rows.
    """

    proj_k: torch.Tensor
    proj_v: torch.Tensor
    gate_weight: torch.Tensor
    gate_bias: torch.Tensor
    block: int = BLOCK

    def __post_init__(self) -> None:
        head_dim = len(self.gate_bias)
        if self.proj_k.dim() != 2 or self.proj_k.shape != self.proj_v.shape:
            raise ConfigError(
                f"HSA's projections must both be [rank, length], not {list(self.proj_k.shape)} "
                f"and {list(self.proj_v.shape)}"
            )
        if self.gate_weight.shape != (head_dim, head_dim):
            raise ConfigError(
                f"HSA's gate must be [D, D] and [D], not {list(self.gate_weight.shape)} and "
                f"{list(self.gate_bias.shape)}"
            )
        if not (self.proj_k.any() and self.proj_v.any()):
            raise ConfigError(
                "HSA's projections are all zero, as before training; load a checkpoint that has "
                "them, or use the block-sparse branch alone"
            )

    @classmethod
    def load(
        cls, state: Mapping[str, torch.Tensor], prefix: str, block: int = BLOCK
    ) -> LinearWeights:
        """The weights called ``prefix`` + ``proj_k``, ``proj_v``, ``gate.weight``, ``gate.bias``.

        Raises :class:`ConfigError` naming those that ``state`` lacks: a model without them would
        quietly compute something else.
        """
        missing = [prefix + name for name in _NAMES if prefix + name not in state]
        if missing:
            raise ConfigError(
                f"the checkpoint has no {', '.join(missing)}: the linear branch is trained; load a "
                "checkpoint that has it, or use the block-sparse branch alone"
            )
        proj_k, proj_v, gate_weight, gate_bias = (state[prefix + name] for name in _NAMES)
        return cls(proj_k, proj_v, gate_weight, gate_bias, block)

    def compress(
        self, x: torch.Tensor, proj: torch.Tensor, segment: int | None = None
    ) -> torch.Tensor:
        """``x`` ``[B, tokens, H, D]`` to fp32 ``[B, rows, H, D]`` with ``proj_k`` or ``proj_v``.

        ``segment``: tokens of a segment (a latent frame), by default the projection's length; the
        last segment may be shorter. Segment by segment, ``proj[:rows, :n] @ x``. Raises
        :class:`ConfigError` for segments longer than the projection.
        """
        rank, length = proj.shape
        segment = length if segment is None else segment
        if not 0 < segment <= length:
            raise ConfigError(
                f"segments of {segment} tokens do not fit projections of {length}; the weights "
                "belong to a model with smaller frames"
            )
        rows = []
        for part in torch.split(x.float(), segment, 1):
            n = part.shape[1]
            kept = min(rank, -(-n // self.block))
            rows.append(torch.einsum("rn,bnhd->brhd", proj[:kept, :n].float(), part))
        return torch.cat(rows, 1)

    def gate(self, q: torch.Tensor) -> torch.Tensor:
        """``sigmoid(W q + b)`` of each query and head: fp32, as ``q`` ``[B, queries, H, D]``."""
        return F.linear(q.float(), self.gate_weight.float(), self.gate_bias.float()).sigmoid()


def attend_rows(q: torch.Tensor, rows_k: torch.Tensor, rows_v: torch.Tensor) -> torch.Tensor:
    """Dense softmax attention over compressed rows, scale ``1 / sqrt(D)``, in fp32.

    ``q`` ``[B, queries, H, D]``, rows ``[B, rows, H, D]``; returns fp32 as ``q``.
    """
    q, k, v = (x.float().transpose(1, 2) for x in (q, rows_k, rows_v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class CompressedTier:
    """The compressed rows of the frames in one layer's cache, kept beside its K and V.

    A frame is compressed when it is written and never again; rows are dropped with the tokens that
    they stand for. All token indices are multiples of a frame's tokens, as those of the cache are.
    Source: WorldAttention (HSA), incremental compressed KV.
    """

    def __init__(self, weights: LinearWeights, tokens_per_frame: int) -> None:
        self._weights = weights
        self._tokens = tokens_per_frame
        self._frames: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def tokens(self) -> int:
        """Cache tokens that the rows stand for."""
        return len(self._frames) * self._tokens

    def write(self, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Compress whole frames ``[B, n T, H, D]`` that the cache now holds from token ``start``.

        What was there before is replaced (each denoising step writes its chunk anew). Raises
        :class:`ConfigError` where ``start`` or the length is no multiple of a frame, or where
        frames before ``start`` are missing; nothing has changed then.
        """
        first, count = self._frame(start, "start"), self._frame(k.shape[1], "length")
        if k.shape != v.shape or first > len(self._frames):
            raise ConfigError(
                f"cannot write K {list(k.shape)} and V {list(v.shape)} at token {start}: they must "
                f"be alike and start at or before token {self.tokens}"
            )
        pairs = zip(*(torch.split(x, self._tokens, 1) for x in (k, v)), strict=True)
        weights = self._weights
        self._frames[first : first + count] = [
            (weights.compress(fk, weights.proj_k), weights.compress(fv, weights.proj_v))
            for fk, fv in pairs
        ]

    def drop(self, start: int, stop: int) -> None:
        """The cache evicted tokens ``start`` to ``stop``; what follows them moves up.

        Raises :class:`ConfigError` where they are not whole frames that are there.
        """
        first, last = self._frame(start, "start"), self._frame(stop, "stop")
        if not 0 <= first <= last <= len(self._frames):
            raise ConfigError(f"no tokens {start} to {stop} to drop: there are {self.tokens}")
        del self._frames[first:last]

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Compressed K and V of all frames in cache order: fp32 ``[B, rows, H, D]`` each.

        Raises :class:`ConfigError` before anything was written.
        """
        if not self._frames:
            raise ConfigError("the compressed tier is empty; write the cache's frames first")
        keys: Sequence[torch.Tensor]
        keys, values = zip(*self._frames, strict=True)
        return torch.cat(list(keys), 1), torch.cat(list(values), 1)

    def _frame(self, token: int, name: str) -> int:
        if token % self._tokens or token < 0:
            raise ConfigError(
                f"{name} {token} is not a multiple of {self._tokens} tokens: the compressed tier "
                "moves with whole frames"
            )
        return token // self._tokens

"""Pruning where a memory meets it: at commit, on the frontend's rows, before they are encoded.

What is pruned is what is stored. The sink and the recent part of a window lie in the frontend's own
cache and stay whole, so a chunk is seen pruned from when it leaves the recent part: compaction is
delayed without anything being written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from worldpager.errors import ConfigError
from worldpager.model_adapter.frontend import ChunkStep, KVSpec
from worldpager.quant.pruning import CleanPredictions, FinishedChunk, get_pruning
from worldpager.quant.pruning.consistency import PROBE_STEP
from worldpager.quant.tokens import Ids

Select = Callable[[Sequence[torch.Tensor]], list[Ids] | None]
"""From the keys of each layer, ``[tokens, heads, head_dim]``, to the tokens that each keeps."""


class ChunkPruning:
    """A pruning policy by name, with the geometry of one cache, and its account.

    ``active``, ``dense``: tokens that the windows so far showed of the past, and what they would
    have shown unpruned, in each layer and head alike.
    """

    def __init__(self, name: str, spec: KVSpec, unit: KVSpec) -> None:
        """``unit``: ``spec`` with what is retrieved in the place of chunks. Raises
        :class:`ConfigError` for an unknown policy, and for any where units are pages.
        """
        self._policy = get_pruning(name)
        if self._policy is not None and unit.tokens_per_chunk != spec.tokens_per_chunk:
            raise ConfigError(
                f"pruning={name!r} chooses from whole chunks, and page_frames stores pages; "
                "use one of the two"
            )
        self._spec, self._unit = spec, unit
        self.active = 0
        self.dense = 0

    @property
    def most_tokens(self) -> int:
        """Tokens that no stored chunk exceeds, those of the sink apart."""
        spec = self._spec
        if self._policy is None:
            return self._unit.tokens_per_chunk
        return self._policy.most_tokens(spec.frames_per_chunk, spec.tokens_per_frame)

    @property
    def ratio(self) -> float:
        """The pruning ratio ``1 - sum(active) / sum(dense)`` so far. Source: DeCoPrune."""
        return 1 - self.active / self.dense if self.dense else 0.0

    def check(self, step: ChunkStep) -> None:
        """Raise :class:`ConfigError` where the finished chunk lacks what the policy scores by."""
        policy = self._policy
        if policy is not None and policy.needs_predictions and self._prunable(step):
            if step.predictions is None:
                raise ConfigError(
                    f"pruning by {policy.name!r} needs the clean predictions of chunk "
                    f"{step.finished}; give ChunkStep.predictions or choose another policy"
                )
            tokens = self._spec.frames_per_chunk, self._spec.tokens_per_frame
            frames, rows, columns = step.predictions.grid
            if (frames, rows * columns) != tokens:
                raise ConfigError(
                    f"clean predictions of {frames} x {rows} x {columns} tokens are not those of a "
                    f"chunk of {tokens[0]} frames of {tokens[1]}"
                )

    def select(self, step: ChunkStep) -> Select | None:
        """What chooses the tokens to store of the chunk just finished; ``None`` for all."""
        policy, chunk = self._policy, step.finished
        if policy is None or chunk is None or not self._prunable(step):
            return None
        frames, predictions = self._spec.frames_per_chunk, step.predictions

        def choose(keys: Sequence[torch.Tensor]) -> list[Ids] | None:
            found = policy.prefer(FinishedChunk(chunk, frames, keys, predictions))
            if found is None:
                return None
            ids = [preference.ids() for preference in found]
            return ids * len(keys) if len(ids) == 1 else ids

        return choose

    def _prunable(self, step: ChunkStep) -> bool:
        # chunk 0 is the first thing anybody saw of this world: DeCoPrune never scores it
        return step.finished is not None and step.finished >= max(1, self._spec.sink_chunks)

    def account(self, step: ChunkStep, retrieved: Sequence[int]) -> tuple[int, int]:
        """Count the window of ``step``, whose retrieved slots hold so many tokens each; its active
        and dense tokens.
        """
        spec, done = self._spec, step.chunk if step.finished is not None else 0
        sink = min(done, spec.sink_chunks)
        whole = (sink + min(done - sink, spec.recent_chunks)) * spec.tokens_per_chunk
        active, dense = whole + sum(retrieved), whole + len(retrieved) * self._unit.tokens_per_chunk
        self.active += active
        self.dense += dense
        return active, dense


class CleanProbe:
    """Collects a chunk's clean predictions as its sampler makes them, which costs nothing.

    A sampler calls it after every step with what it holds to be the clean latents; the loop hands
    :meth:`take` to the next chunk's step. ``cell``: rows and columns of latents that are a token.
    """

    def __init__(self, cell: tuple[int, int] = (2, 2), probe_step: int = PROBE_STEP) -> None:
        self.probe_step = probe_step
        self._cell = cell
        self._probe: torch.Tensor | None = None
        self._final: torch.Tensor | None = None

    def __call__(self, step: int, clean: torch.Tensor) -> None:
        """``step`` from 0; ``clean``: ``[channels, frames, height, width]``, copied at the probe
        step and held at the last one. Step 0 begins a new chunk.
        """
        if step == 0:
            self._probe = self._final = None
        if step == self.probe_step:
            self._probe = clean.clone()
        self._final = clean

    def take(self) -> CleanPredictions | None:
        """Predictions of the chunk just finished, once; ``None`` where it was not probed."""
        probe, final = self._probe, self._final
        self._probe = self._final = None
        if probe is None or final is None:
            return None
        return CleanPredictions(probe, final, self._cell)

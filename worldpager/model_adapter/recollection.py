"""What a memory knows to choose by: places, keys, prompts, controls; of one rollout at a time.

:class:`WorldMemory` moves bytes; this remembers what they are about, asks the retrieval policy, and
says what of it must be stored so that it is known again after a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worldpager.errors import ConfigError, DamagedBlockError, StoreError
from worldpager.model_adapter.bookmark import Bookmark
from worldpager.model_adapter.frontend import ChunkStep, KVSpec
from worldpager.model_adapter.pages import page_row
from worldpager.pager.eviction import Nearness
from worldpager.pager.session import Rollout
from worldpager.prefetch.annex import Annex
from worldpager.prefetch.controls import Walker
from worldpager.prefetch.geometric import ActionDistance
from worldpager.prefetch.keys import StoredRow, Vector
from worldpager.prefetch.poses import Floats
from worldpager.prefetch.ranking import Candidates, key_kind
from worldpager.prefetch.retrieval import get_policy
from worldpager.prefetch.retriever import Retriever
from worldpager.quant.shard import ChunkRecord

log = logging.getLogger("worldpager")


class Recollection:
    """Knows the current rollout. For the model thread, but for what :meth:`plan` returns."""

    def __init__(self, retrieval: str, spec: KVSpec, unit: KVSpec) -> None:
        """``unit``: ``spec`` with units in the place of chunks. Raises :class:`ConfigError` as
        :func:`get_policy`.
        """
        self.policy = get_policy(retrieval, spec.heads)
        self.epoch = 0
        """Of the prompt that the chunk being generated is made under."""
        self._spec, self._unit = spec, unit
        self._kind = key_kind(self.policy)
        self._walker: Walker | None = None
        self._prompts: dict[int, Vector] = {}
        self._switched = False  # another prompt holds from the next chunk on
        self._nearness: dict[int, Nearness] = {}  # by stream
        self.retriever: Retriever

    @property
    def wants_query(self) -> bool:
        """Whether steps should carry ``query``."""
        return bool(self._kind) and self._unit.retrieve_chunks > 0

    @property
    def pages(self) -> int:
        """Units of a chunk."""
        return self._spec.frames_per_chunk // self._unit.frames_per_chunk

    def begin(self, rollout: Rollout, resident: Callable[[], Iterable[int]]) -> None:
        """Take up ``rollout`` with what of it is on disk. ``resident``: asked for the units in the
        DRAM pool.
        """
        self.retriever = Retriever(
            self.policy,
            k=self._unit.retrieve_chunks,
            sink=self._spec.sink_chunks,
            recent=self._spec.recent_chunks,
            pages=self.pages,
            resident=resident,
        )
        prompt = self._prompts.get(self.next_epoch)
        self.epoch, self._prompts, self._switched = 0, {}, False
        pose: Floats | None = None
        for record in rollout.found:
            annex = _stored_annex(rollout, record)
            self._note(record, annex.keys)
            self.epoch = max(self.epoch, record.epoch)
            if annex.prompt is not None:
                self._prompts[record.epoch] = annex.prompt
            pose = annex.pose if annex.pose is not None else pose
        if prompt is not None and not rollout.found:  # the prompt goes on where the world does not
            self._prompts[0] = prompt
        for epoch, embedding in self._prompts.items():
            self.retriever.index.set_prompt(epoch, embedding)
        if isinstance(self.policy, ActionDistance):
            self._walker = Walker(self.policy.scale, self._spec.frames_per_chunk, pose)
        self._nearness[rollout.stream] = self.retriever.index

    def nearness(self, stream: int) -> Nearness | None:
        """What eviction asks about ``stream``."""
        index = self._nearness.get(stream)
        return index if index is not None and len(index) else None  # type: ignore[arg-type]

    def check(self, step: ChunkStep) -> None:
        """Raise :class:`ConfigError` where ``step`` lacks what the policy needs."""
        if step.poses is None and self._walker is None and self.retriever.needs_poses:
            raise ConfigError(
                f"retrieval by {self.policy.name!r} needs the poses of chunk {step.chunk}; "
                "give them or choose retrieval='recent'"
            )
        if step.query is None and self.retriever.needs_query:
            raise ConfigError(
                f"retrieval by {self.policy.name!r} needs the mean query of chunk {step.chunk}; "
                "give ChunkStep.query or choose retrieval='camera'"
            )
        if self._walker is not None:
            self._walker.check(step.control)

    def walked(self, step: ChunkStep) -> ChunkStep:
        """``step`` with poses made from its controls, where the policy goes by them; the walker
        goes there. Raises :class:`ConfigError` for controls that cannot be walked.
        """
        if self._walker is None:
            return step
        poses = self._walker.walk(step.control, step.chunk)
        return replace(step, poses=poses, poses_ahead=self._walker.ahead(step.control))

    # ---- prompts -------------------------------------------------------------------------------

    def switch_prompt(self, embedding: npt.ArrayLike | None, *, begun: bool) -> int:
        """From the next chunk on another prompt holds; its epoch. ``begun``: whether a chunk was
        made under the current one.
        """
        epoch = self.next_epoch + (begun and not self._switched)
        vector = None if embedding is None else np.asarray(embedding, dtype=np.float32)
        if vector is not None and vector.ndim == 2:  # tokens
            vector = vector.mean(axis=0)
        self.retriever.index.set_prompt(epoch, vector)
        self._prompts.pop(epoch, None)
        if vector is not None:
            self._prompts[epoch] = vector
        self._switched = epoch > self.epoch
        return epoch

    @property
    def next_epoch(self) -> int:
        """Of the prompt that the next chunk to begin is made under."""
        return self.epoch + self._switched

    def turn_page(self) -> None:
        """A chunk begins: what was switched to holds."""
        self.epoch, self._switched = self.next_epoch, False

    # ---- going on elsewhere --------------------------------------------------------------------

    def standing(self, *, begun: bool) -> dict[str, Any]:
        """What a :class:`Bookmark` holds of this; ``begun`` as in :meth:`WorldMemory.bookmark`."""
        walker = self._walker
        pose = None if walker is None else walker.before if begun else walker.pose
        return {"epoch": self.epoch, "pose": pose, "prompt": self._prompts.get(self.epoch)}

    def stand(self, bookmark: Bookmark) -> None:
        """Know again what ``bookmark`` holds."""
        self.epoch, self._switched = bookmark.epoch, False
        if bookmark.prompt is not None:
            self._prompts[self.epoch] = bookmark.prompt
            self.retriever.index.set_prompt(self.epoch, bookmark.prompt)
        if self._walker is not None and bookmark.pose is not None:
            self._walker.pose = self._walker.before = bookmark.pose

    # ---- a unit's life -------------------------------------------------------------------------

    def annex(self, k: torch.Tensor, position: float) -> Annex:
        """What must be stored beside a unit whose layer 0 has the keys ``k``, ``[batch, tokens,
        heads, head_dim]``, rotated to ``position``.
        """
        pose = None if self._walker is None else self._walker.before
        return Annex(
            page_row(self._unit, k, position, self._kind), self._prompts.get(self.epoch), pose
        )

    def note(self, record: ChunkRecord, annex: Annex) -> None:
        """A unit is stored."""
        self._note(record, annex.keys)

    def choose(self, step: ChunkStep) -> tuple[tuple[int, ...], Candidates]:
        """As :meth:`Retriever.choose`."""
        return self.retriever.choose(step.chunk, step.poses, step.query, self.epoch)

    def plan(self, step: ChunkStep, previous: Floats | None) -> Callable[[], tuple[int, ...]]:
        """What makes the load list while ``step`` is computed, on any thread."""
        retriever, epoch = self.retriever, self.next_epoch
        keys: list[Vector] = list(step.queries_ahead)
        if not keys and step.query is not None and epoch == self.epoch:
            keys = [step.query]
        branches: list[Floats] = []
        if self._walker is not None and isinstance(self.policy, ActionDistance):
            branches = self._walker.branches(step.control, self.policy.next_actions)
        return lambda: retriever.plan(
            step.chunk, step.poses, previous, step.poses_ahead, keys, epoch, branches
        )

    def _note(self, record: ChunkRecord, keys: StoredRow | None) -> None:
        self.retriever.note(record.chunk, record.place, record.epoch, keys)


def _stored_annex(rollout: Rollout, record: ChunkRecord) -> Annex:
    """What is stored beside a unit; nothing where that is damaged, which makes the unit one that is
    not found by its keys.
    """
    try:
        return Annex.unpack(rollout.store.annex(record))
    except (DamagedBlockError, StoreError) as error:
        log.warning("what retrieval knew of chunk %d is lost: %s", record.chunk, error)
        return Annex()

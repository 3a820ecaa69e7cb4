"""What a memory must know before it opens, its pool's size, its rollout, its identity on disk; and
closing one that nobody closed.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path

from worldpager.errors import BudgetError, ConfigError, WorldPagerError
from worldpager.model_adapter.frontend import KVSpec
from worldpager.pager.session import Session
from worldpager.prefetch.prefetcher import Prefetcher
from worldpager.quant.codec import Codec
from worldpager.quant.shard import ShardLayout
from worldpager.tiers.budget import default_dram_budget
from worldpager.tiers.io_backend import IOBackend
from worldpager.tiers.spec import StoreSpec
from worldpager.tiers.store import ChunkStore
from worldpager.units import format_size

log = logging.getLogger("worldpager")


def pool_bytes(
    dram: int | None,
    codec: Codec,
    sink_codec: Codec,
    spec: KVSpec,
    tokens: int | None = None,
    *,
    shared: bool = False,
) -> int:
    """The pool's size: ``dram``, or the default budget; a quota of a ``shared`` pool must be given.

    ``tokens``: most that a stored chunk has, by default all; the first ones always have all. Raises
    :class:`BudgetError` where it holds less than two windows (the last one stays pinned until the
    next is complete), the chunk being committed and one being read.
    """
    if dram is None and shared:
        raise ConfigError("a shared pool gives each session a quota; set MemoryConfig.dram")
    budget = default_dram_budget() if dram is None else dram
    whole = spec.block_shape
    stored = replace(whole, tokens=tokens or whole.tokens)
    chunk, first = (
        ShardLayout.for_chunk(c, [shape] * spec.layers, whole.tokens).nbytes
        for c, shape in ((codec, stored), (sink_codec if spec.sink_chunks else codec, whole))
    )
    least = (2 * spec.retrieve_chunks + 1) * chunk + max(chunk, first)
    if budget < least:
        raise BudgetError(
            f"a DRAM pool of {format_size(budget)} is too small: two windows of "
            f"{spec.retrieve_chunks} chunks, one being committed and one being read take "
            f"{format_size(least)}; give more DRAM or retrieve fewer chunks"
        )
    return budget


def rollout_name(number: int) -> str:
    """Name of a session's rollout by its number."""
    return f"rollout-{number}"


def latest_rollout(directory: Path, io: IOBackend | None = None) -> int:
    """Number of the newest rollout stored in ``directory``, 0 where there is none."""
    number = 0
    while ChunkStore.exists(directory, rollout_name(number + 1), io=io):
        number += 1
    return number


def store_spec(spec: KVSpec, session: str, rollout: int, codec: Codec, positions: str) -> StoreSpec:
    """Identity of a rollout on disk. ``positions``: name of the position scheme."""
    shape = spec.block_shape
    return StoreSpec(
        session=session,
        rollout=rollout_name(rollout),
        model=spec.model,
        branches=spec.branches,
        layers=spec.layers,
        tokens=shape.tokens,
        heads=shape.heads,
        head_dim=shape.head_dim,
        frames=spec.frames_per_chunk,
        dtype=str(spec.dtype).removeprefix("torch."),
        codecs=(codec.name,),
        positions=positions if spec.rope is None else repr(spec.rope),
    )


def close_dropped(prefetcher: Prefetcher, session: Session) -> None:
    """A memory was dropped without ``close``: close it, on a thread that may wait for locks."""
    if session.pager.closed:
        return

    def close() -> None:
        prefetcher.close()
        try:
            session.close()
        except WorldPagerError as error:
            log.warning("closing a memory that was dropped without close() failed: %s", error)

    log.warning("a memory was dropped without close(); it is closed in the background")
    threading.Thread(target=close, name="worldpager-close", daemon=True).start()

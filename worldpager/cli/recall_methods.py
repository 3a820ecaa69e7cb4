"""The methods that ``worldpager recall`` compares: what each asks of the memory, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldpager.errors import ConfigError

if TYPE_CHECKING:
    from worldpager.model_adapter.frontend import KVSpec
    from worldpager.model_adapter.memory import MemoryConfig

CODECS = ("bf16", "int8", "int4", "int3")
_SPARE_CHUNKS = 8


@dataclass(frozen=True, slots=True)
class Method:
    """One row of the table.

    ``chunks``: retrieved a window, ``None`` for all there are. ``memory``: fields of
    :class:`MemoryConfig` in which it differs from the default. ``against``: the method that it is
    held against, pair by pair.
    """

    name: str
    title: str
    chunks: int | None = 3
    memory: Mapping[str, Any] = field(default_factory=dict)
    against: str | None = "retrieval"

    @property
    def probes(self) -> bool:
        """Whether its pruning looks at the sampler's clean predictions."""
        from worldpager.quant.pruning import NONE, get_pruning

        policy = get_pruning(self.memory.get("pruning", NONE))
        return policy is not None and policy.needs_predictions

    def config(self, store: Path, codec: str, spec: KVSpec, chunks: int) -> MemoryConfig:
        """A memory with a pool for all ``chunks`` of an episode, so that no disk plays a part."""
        from worldpager.model_adapter.memory import MemoryConfig
        from worldpager.quant.codec import get_codec
        from worldpager.quant.shard import ShardLayout

        most = ShardLayout.for_chunk(get_codec("bf16"), [spec.block_shape] * spec.layers).nbytes
        size = ShardLayout.for_chunk(get_codec(codec), [spec.block_shape] * spec.layers).nbytes
        held = max(chunks, 2 * spec.retrieve_chunks) + _SPARE_CHUNKS
        return MemoryConfig(
            store=store,
            dram=held * size + 2 * most,
            codec=codec,
            on_miss="wait",
            prefetch=False,
            **self.memory,
        )


METHODS = {
    method.name: method
    for method in (
        Method("sliding", "sliding window of equal length", memory={"retrieval": "recent"}),
        Method("full", "full KV", chunks=None, memory={"positions": "absolute"}, against=None),
        Method("retrieval", "retrieval by camera, 3 chunks", against="full"),
        Method("six", "retrieval by camera, 6 chunks", chunks=6),
        *(
            Method(name, f"retrieval, positions {name}", memory={"positions": name})
            for name in ("absolute", "moving-best-first", "fractional", "fractional-fast")
        ),
    )
}


def get_method(name: str) -> Method:
    """The method called ``name``. Raises :class:`ConfigError` listing the known names."""
    try:
        return METHODS[name]
    except KeyError:
        raise ConfigError(f"no method {name!r}; known are {', '.join(METHODS)}") from None

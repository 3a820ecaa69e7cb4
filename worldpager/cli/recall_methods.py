"""The methods that ``worldpager recall`` compares: what each asks of the memory, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldpager.errors import ConfigError

if TYPE_CHECKING:
    from worldpager.cli.recall_episodes import Episode
    from worldpager.model_adapter.config import MemoryConfig
    from worldpager.model_adapter.frontend import KVSpec

CODECS = ("bf16", "int8", "int4", "int3")
_SPARE_CHUNKS = 8


GAMMA = {"observed": 0.02, "generated": 0.001}
"""DeCoPrune's threshold by kind of context, for pictures in [-1, 1]. What is seen differs from what
the model expects some twenty times more than what it makes up itself."""


@dataclass(frozen=True, slots=True)
class Method:
    """One row of the table.

    ``chunks``: retrieved a window, ``None`` for all there are. ``memory``: fields of
    :class:`MemoryConfig` in which it differs from the default; ``{gamma}`` in ``pruning`` stands
    for :data:`GAMMA`. ``against``: the method that it is held against, world by world. ``sparse``:
    head-adaptive block-sparse attention instead of dense.
    """

    name: str
    title: str
    chunks: int | None = 3
    memory: Mapping[str, Any] = field(default_factory=dict)
    against: str | None = "retrieval"
    sparse: bool = False

    def pruning(self, kind: str) -> str:
        """The pruning policy's name for a ``kind`` of context."""
        from worldpager.quant.pruning import NONE

        return str(self.memory.get("pruning", NONE)).format(gamma=GAMMA[kind])

    def probes(self, kind: str) -> bool:
        """Whether its pruning looks at the sampler's clean predictions."""
        from worldpager.quant.pruning import get_pruning

        policy = get_pruning(self.pruning(kind))
        return policy is not None and policy.needs_predictions

    def config(self, store: Path, spec: KVSpec, episode: Episode) -> MemoryConfig:
        """A memory with a pool for all chunks of ``episode``, so that no disk plays a part."""
        from worldpager.model_adapter.config import MemoryConfig
        from worldpager.quant.codec import get_codec
        from worldpager.quant.shard import ShardLayout

        sink, size = (
            ShardLayout.for_chunk(get_codec(c), [spec.block_shape] * spec.layers).nbytes
            for c in ("bf16", episode.codec)
        )
        held = max(episode.chunks, 2 * spec.retrieve_chunks) + _SPARE_CHUNKS
        if "page_frames" in self.memory:
            held *= spec.frames_per_chunk  # every page takes whole pages of memory for each layer
        fields = {**self.memory, "pruning": self.pruning(episode.kind)}
        return MemoryConfig(
            store=store,
            dram=held * size + 2 * sink,
            codec=episode.codec,
            on_miss="wait",
            prefetch=False,
            **fields,
        )


def _everything(name: str, title: str, pruning: str, against: str | None) -> Method:
    """A method that shows all that it has kept of all chunks."""
    return Method(name, title, None, {"positions": "absolute", "pruning": pruning}, against)


METHODS = {
    method.name: method
    for method in (
        Method("sliding", "sliding window of equal length", memory={"retrieval": "recent"}),
        _everything("full", "full KV", "none", None),
        Method("retrieval", "retrieval by camera, 3 chunks", against="full"),
        *(
            Method(name, f"retrieval, positions {name}", memory={"positions": name})
            for name in ("absolute", "moving-best-first", "fractional", "fractional-fast")
        ),
        Method("overlap", "retrieval by overlap of views", memory={"retrieval": "fov"}),
        Method("six", "retrieval by camera, 6 chunks", chunks=6),
        Method(
            "compressed",
            "retrieval, 3 chunks in the room of 1.5",
            memory={"pruning": "worldkv:0.25"},
        ),
        Method(
            "six-in-three", "retrieval, 6 chunks in the room of 3", 6, {"pruning": "worldkv:0.25"}
        ),
        Method("pages", "9 frames by camera", memory={"page_frames": 1}),
        Method(
            "pages-by-query", "9 frames by query", memory={"page_frames": 1, "retrieval": "query"}
        ),
        Method(
            "sparse",
            "full KV, sparse attention",
            None,
            {"positions": "absolute"},
            "full",
            sparse=True,
        ),
        _everything("decoprune", "DeCoPrune", "decoprune:{gamma}", "full"),
        _everything("random", "as many tokens at random", "random/decoprune:{gamma}", "decoprune"),
        _everything(
            "reversed",
            "as many tokens, criterion reversed",
            "reversed/decoprune:{gamma}",
            "decoprune",
        ),
        _everything("difference", "temporal difference", "temporal-difference:0.01", "decoprune"),
        Method(
            "streaming", "sink and the last 18 chunks", 18, {"retrieval": "recent"}, "decoprune"
        ),
    )
}


def get_method(name: str) -> Method:
    """The method called ``name``. Raises :class:`ConfigError` listing the known names."""
    try:
        return METHODS[name]
    except KeyError:
        raise ConfigError(f"no method {name!r}; known are {', '.join(METHODS)}") from None

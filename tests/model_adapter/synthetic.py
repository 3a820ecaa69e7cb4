"""A frontend without a model: KV drawn from (session, chunk, layer, kind), so any mix-up shows.

The reference geometry: 4 layers, 2 KV heads of 64, 144 tokens in 3 frames a chunk.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import torch

from worldpager.model_adapter.config import MemoryConfig
from worldpager.model_adapter.frontend import ChunkStep, KVSpec, Poses
from worldpager.model_adapter.memory import WorldMemory
from worldpager.model_adapter.ring_cache import RingCache
from worldpager.prefetch.paths import make_path
from worldpager.quant.codec import get_codec
from worldpager.quant.rope import RopeLayout
from worldpager.quant.shard import ShardLayout

KV = tuple[torch.Tensor, torch.Tensor]


def reference_spec(retrieve: int = 3, batch: int = 1, table: int | None = 1024) -> KVSpec:
    return KVSpec(
        model="synthetic", layers=4, heads=2, head_dim=64, tokens_per_frame=48, frames_per_chunk=3,
        sink_frames=3, recent_frames=3, retrieve_frames=3 * retrieve, batch=batch,
        rope=RopeLayout.wan(64, table_len=table),
    )  # fmt: skip


def chunk_bytes(spec: KVSpec, codec: str) -> int:
    return ShardLayout.for_chunk(get_codec(codec), [spec.block_shape] * spec.layers).nbytes


def made(spec: KVSpec, session: str, chunk: int, layer: int, version: int = 0) -> KV:
    """The KV that "the model" computes for one layer: ``[batch, tokens, H, D]`` each."""
    out = []
    for kind in "kv":
        seed = zlib.crc32(f"{session}/{chunk}/{layer}/{kind}/{version}".encode())
        shape = (spec.batch, spec.tokens_per_chunk, spec.heads, spec.head_dim)
        values = np.random.default_rng(seed).standard_normal(shape, np.float32)
        out.append(torch.from_numpy(values).to(spec.dtype))
    return out[0], out[1]


def stored(spec: KVSpec, codec: str, kv: KV, shift: float) -> KV:
    """What must come back of one layer: its codec round trip, keys moved by ``shift`` frames."""
    coder, shape = get_codec(codec), spec.block_shape
    k, v = (x.permute(1, 0, 2, 3).flatten(1, 2).contiguous() for x in kv)
    payload = np.empty(coder.payload_size(shape), np.uint8)
    coder.encode(k, v, payload, spec.tokens_per_frame)
    out = torch.empty_like(k), torch.empty_like(v)
    assert spec.rope is not None
    coder.decode(payload, shape, *out, spec.rope.temporal_rotation(shift))
    folded = [x.unflatten(1, (spec.batch, spec.heads)).transpose(0, 1) for x in out]
    return folded[0], folded[1]


class SyntheticFrontend:
    """Loop and cache of a pretended world model, with a WorldMemory attached."""

    def __init__(
        self,
        store: Path,
        spec: KVSpec,
        *,
        chunks_in_dram: float,
        codec: str = "int4",
        path: str = "yaw-return",
        chunks: int = 400,
        session: str = "session",
        **options: object,
    ) -> None:
        self.spec, self.codec, self.session = spec, codec, session
        self.path: Poses = make_path(path, chunks, spec.frames_per_chunk)
        config = MemoryConfig(
            store=store, dram=int(chunks_in_dram * chunk_bytes(spec, codec)), codec=codec,
            session=session, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        self.memory = WorldMemory(config, spec)
        capacity = (2 + spec.sink_chunks + spec.retrieve_chunks) * spec.tokens_per_chunk
        self.layers = [
            {
                "k": torch.zeros(spec.batch, capacity, spec.heads, spec.head_dim, dtype=spec.dtype),
                "v": torch.zeros(spec.batch, capacity, spec.heads, spec.head_dim, dtype=spec.dtype),
                "global_end_index": torch.zeros(1, dtype=torch.long),
                "local_end_index": torch.zeros(1, dtype=torch.long),
            }
            for _ in range(spec.layers)
        ]
        self.base = 0
        self.positions: dict[int, int] = {}

    def _lower(self, frames: int) -> None:
        self.base += frames

    def boundary(self, chunk: int, ahead: int = 0) -> tuple[int, ...]:
        """Call the memory as the loop does before ``chunk``."""
        step = ChunkStep(
            chunk=chunk,
            start_frame=chunk * self.spec.frames_per_chunk,
            finished=chunk - 1 if chunk else None,
            poses=self.path[chunk],
            poses_ahead=self.path[chunk + 1 : chunk + 1 + ahead],
        )
        return self.memory.boundary(step, RingCache(self.layers, self.spec, self._lower))

    def append(self, chunk: int, version: int = 0) -> None:
        """What the model's forwards leave behind: the chunk's KV after the window."""
        tokens = self.spec.tokens_per_chunk
        self.positions[chunk] = chunk * self.spec.frames_per_chunk - self.base
        for layer, cache in enumerate(self.layers):
            end = int(cache["local_end_index"])
            k, v = made(self.spec, self.session, chunk, layer, version)
            cache["k"][:, end : end + tokens] = k
            cache["v"][:, end : end + tokens] = v
            cache["local_end_index"] += tokens

    def run(self, chunks: range, ahead: int = 0) -> None:
        for chunk in chunks:
            self.boundary(chunk, ahead)
            self.append(chunk)

    def retrieved(self, index: int) -> list[KV]:
        """K and V of every layer in the window's ``index``-th retrieved slot."""
        start = self.spec.sink_frames * self.spec.tokens_per_frame
        start += index * self.spec.tokens_per_chunk
        rows = slice(start, start + self.spec.tokens_per_chunk)
        return [(cache["k"][:, rows], cache["v"][:, rows]) for cache in self.layers]

    def check_window(self, chunk: int) -> None:
        """Assert that the window of ``chunk`` holds exactly what it says, bit for bit."""
        frames, last = self.spec.frames_per_chunk, self.memory.last
        assert all(other < chunk for other in last.retrieved)
        assert list(last.retrieved) == sorted(set(last.retrieved))
        end = chunk * frames - self.base - self.spec.recent_frames
        for index, other in enumerate(last.retrieved):
            placed = end - (len(last.retrieved) - index) * frames
            for layer, (k, v) in enumerate(self.retrieved(index)):
                want = stored(
                    self.spec, self.codec, made(self.spec, self.session, other, layer),
                    placed - self.positions[other],
                )  # fmt: skip
                assert torch.equal(k, want[0]), (chunk, other, layer)
                assert torch.equal(v, want[1]), (chunk, other, layer)

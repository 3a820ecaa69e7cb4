"""Small chunks with contents that tell which they are, for the tests of the tiers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from worldpager.quant import (
    BlockLabel,
    BlockShape,
    ChunkRecord,
    ShardLayout,
    get_codec,
    write_block,
    write_tail,
)
from worldpager.tiers.directio import aligned_bytes
from worldpager.tiers.spec import StoreSpec

SPEC = StoreSpec(
    session="world",
    rollout="first",
    model="toy 1.0 sha256:0123",
    layers=2,
    tokens=24,
    heads=2,
    head_dim=16,
    frames=3,
    dtype="bfloat16",
    codecs=("bf16",),
    positions="rope t=2 h=3 w=3 theta=10000",
)


def kv(spec: StoreSpec, chunk: int, generation: int = 0, stream: int = 0) -> torch.Tensor:
    """``[layers, 2, tokens, heads, head_dim]`` bf16, another for every argument."""
    seed = chunk * 1_000_003 + generation * 101 + stream
    values = torch.randn(spec.array_shape, generator=torch.Generator().manual_seed(seed))
    return values.to(torch.bfloat16)


def image(
    spec: StoreSpec = SPEC,
    chunk: int = 0,
    generation: int = 0,
    stream: int = 0,
    tokens: int | None = None,
) -> npt.NDArray[np.uint8]:
    """The whole shard image of a chunk, page-aligned."""
    codec = get_codec(spec.codecs[0])
    values = kv(spec, chunk, generation, stream)[:, :, :tokens]
    shape = BlockShape(values.shape[2], spec.heads, spec.head_dim)
    layout = ShardLayout.for_chunk(codec, [shape] * spec.layers)
    out = aligned_bytes(layout.nbytes)
    identity = spec.identity(stream)
    for layer, (k, v) in enumerate(values):
        label = BlockLabel(layer, chunk, generation, spec.frames, 3.0 * chunk, 3 * chunk, identity)
        write_block(out[layout.extent(layer)], codec, label, k, v)
    record = ChunkRecord(
        chunk=chunk,
        generation=generation,
        layers=spec.layers,
        frames=spec.frames,
        start_frame=3 * chunk,
        position=3.0 * chunk,
        created=1e9,
        identity=identity,
    )
    write_tail(out, layout, record)
    return out

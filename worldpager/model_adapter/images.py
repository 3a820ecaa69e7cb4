"""Chunks to shard images and back: a frontend's tensors on one side, bytes on the other."""

from __future__ import annotations

import time

import numpy as np
import torch

from worldpager.errors import CodecError
from worldpager.model_adapter.frontend import FrontendCache, KVSpec
from worldpager.model_adapter.units import FinishedPage
from worldpager.quant.block import BlockLabel, decode_block, read_header, write_block
from worldpager.quant.codec import BlockShape, Bytes, Codec
from worldpager.quant.rope import TemporalRotation
from worldpager.quant.shard import ChunkRecord, ShardLayout, read_tail, write_tail

KV = tuple[torch.Tensor, torch.Tensor]


def _fold(x: torch.Tensor) -> torch.Tensor:
    """``[batch, tokens, heads, head_dim]`` as a block's ``[tokens, batch * heads, head_dim]``: a
    view for a single batch item, else a copy.
    """
    return x[0] if x.shape[0] == 1 else x.permute(1, 0, 2, 3).flatten(1, 2)


class ChunkImage:
    """A finished chunk of a frontend's cache, ready to be written into an extent."""

    def __init__(
        self, cache: FrontendCache | FinishedPage, codec: Codec, *, annex: bytes = b""
    ) -> None:
        """``cache``: its finished chunk is looked at now and copied in :meth:`write`. ``annex``:
        stored with it.
        """
        self._annex = annex
        self._codec = codec
        self._kv: list[KV] = []
        for layer in range(cache.spec.layers):
            k, v = cache.read(layer)
            self._kv.append((_fold(k), _fold(v)))
        shapes = [BlockShape(*k.shape) for k, _ in self._kv]
        self.layout = ShardLayout.for_chunk(codec, shapes, annex=len(annex))

    def write(self, image: Bytes, record: ChunkRecord) -> None:
        """Encode every layer into ``image`` (``layout.nbytes``) and seal it with ``record``."""
        for layer, (k, v) in enumerate(self._kv):
            label = BlockLabel(
                layer=layer,
                chunk=record.chunk,
                generation=record.generation,
                frames=record.frames,
                position=record.position,
                frame=record.start_frame,
                identity=record.identity,
            )
            write_block(image[self.layout.extent(layer)], self._codec, label, k, v)
        write_tail(image, self.layout, record, self._annex)


class StoredImage:
    """A chunk's image in the pool, as a window takes it."""

    def __init__(self, image: Bytes, spec: KVSpec) -> None:
        self._image = image
        self._spec = spec
        self.record, self._layout = read_tail(image, len(image), spec.layers)
        self._headers = [
            read_header(image[self._layout.extent(layer)]) for layer in range(spec.layers)
        ]
        self.tokens = self._headers[0].shape.tokens

    def decode(self, cache: FrontendCache, index: int, shift: float) -> None:
        """Decode every layer into the cache's slot ``index``, keys moved by ``shift`` frames."""
        rope = self._spec.rope
        rotation = rope.temporal_rotation(shift) if rope is not None else None
        for layer, header in enumerate(self._headers):
            k, v = cache.slot(layer, index)
            self._decode_block(layer, header.shape, k, v, rotation)
            if rope is None and shift:
                cache.shift(k, shift)

    def _decode_block(
        self,
        layer: int,
        shape: BlockShape,
        k: torch.Tensor,
        v: torch.Tensor,
        rotation: TemporalRotation | None,
    ) -> None:
        block, header = self._image[self._layout.extent(layer)], self._headers[layer]
        batch, tokens, heads, head_dim = k.shape
        if (tokens, batch * heads, head_dim) != (shape.tokens, shape.heads, shape.head_dim):
            raise CodecError(
                f"layer {layer} of chunk {self.record.chunk} is {shape}, its slot {list(k.shape)}"
            )
        if batch == 1:
            decode_block(block, header, k[0], v[0], rotation)
            return
        k_flat, v_flat = (torch.empty(tokens, batch * heads, head_dim, dtype=k.dtype) for _ in "kv")
        decode_block(block, header, k_flat, v_flat, rotation)
        for out, flat in ((k, k_flat), (v, v_flat)):
            out.copy_(flat.view(tokens, batch, heads, head_dim).transpose(0, 1))


def warm_up(codec: Codec, spec: KVSpec) -> None:
    """Compile ``codec``'s kernels for the frontend's types now, not in the first boundary."""
    k = torch.zeros(1, spec.heads * spec.batch, spec.head_dim, dtype=spec.dtype)
    payload = np.empty(codec.payload_size(BlockShape(*k.shape)), np.uint8)
    codec.encode(k, k, payload)
    rotations = [None, spec.rope.temporal_rotation(1)] if spec.rope else [None]
    for rotation in rotations:
        codec.decode(payload, BlockShape(*k.shape), k.clone(), k.clone(), rotation)


def milliseconds_since(began: float) -> float:
    """Milliseconds since a ``time.perf_counter`` value."""
    return (time.perf_counter() - began) * 1e3

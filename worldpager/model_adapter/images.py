"""Chunks to shard images and back: a frontend's tensors on one side, bytes on the other."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from worldpager.errors import CodecError, DamagedBlockError
from worldpager.model_adapter.attention.segments import PagedWindow, StoredKV
from worldpager.model_adapter.frontend import FrontendCache, KVSpec
from worldpager.model_adapter.pruning import Select
from worldpager.model_adapter.units import FinishedPage
from worldpager.pager.room import SPOILED
from worldpager.pager.runtime import Pager, Window
from worldpager.quant.block import BlockLabel, decode_block, kept_tokens, verify_block, write_block
from worldpager.quant.codec import BlockShape, Bytes, Codec
from worldpager.quant.rope import TemporalRotation
from worldpager.quant.shard import ChunkRecord, ShardLayout, read_tail, write_tail
from worldpager.quant.tokens import Ids, KeptTokens

KV = tuple[torch.Tensor, torch.Tensor]

log = logging.getLogger("worldpager")


def _fold(x: torch.Tensor) -> torch.Tensor:
    """``[batch, tokens, heads, head_dim]`` as a block's ``[tokens, batch * heads, head_dim]``: a
    view for a single batch item, else a copy.
    """
    return x[0] if x.shape[0] == 1 else x.permute(1, 0, 2, 3).flatten(1, 2)


class ChunkImage:
    """A finished chunk of a frontend's cache, ready to be written into an extent."""

    def __init__(
        self,
        cache: FrontendCache | FinishedPage,
        codec: Codec,
        select: Select | None = None,
        *,
        annex: bytes = b"",
    ) -> None:
        """``cache``: its finished chunk is looked at now and copied in :meth:`write`. ``select``:
        chooses the tokens to keep, as many in each layer, by default all. ``annex``: stored with
        it. Raises :class:`CodecError` where layers keep different numbers of tokens.
        """
        self._annex = annex
        self._codec = codec
        self._kv: list[KV] = []
        for layer in range(cache.spec.layers):
            k, v = cache.read(layer)
            self._kv.append((_fold(k), _fold(v)))
        whole = len(self._kv[0][0])
        chosen = None if select is None else select([k for k, _ in self._kv])
        self._kept = None if chosen is None else [KeptTokens(ids, whole) for ids in chosen]
        if self._kept and len({len(kept.ids) for kept in self._kept}) > 1:
            raise CodecError("all layers of a chunk must keep equally many tokens")
        self.tokens = whole if self._kept is None else len(self._kept[0].ids)
        shapes = [BlockShape(self.tokens, *k.shape[1:]) for k, _ in self._kv]
        self.layout = ShardLayout.for_chunk(codec, shapes, whole, annex=len(annex))

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
            kept = self._kept[layer] if self._kept else None
            if kept is not None:
                rows = torch.from_numpy(kept.ids)
                k, v = k.index_select(0, rows), v.index_select(0, rows)
            write_block(image[self.layout.extent(layer)], self._codec, label, k, v, kept)
        write_tail(image, self.layout, record, self._annex)


class StoredImage:
    """A chunk's image in the pool, as a window takes it.

    Checked again, whatever happened to memory since: raises :class:`DamagedBlockError`.
    """

    def __init__(self, image: Bytes, spec: KVSpec) -> None:
        self._image = image
        self._spec = spec
        self.record, self._layout = read_tail(image, len(image), spec.layers)
        self._headers = [
            verify_block(
                image[self._layout.extent(layer)],
                identity=self.record.identity,
                chunk=self.record.chunk,
                layer=layer,
                generation=self.record.generation,
            )
            for layer in range(spec.layers)
        ]
        self.tokens = self._headers[0].shape.tokens
        """Tokens of each of its blocks, the same in all layers."""

    def places(self, layer: int) -> Ids:
        """Where each token of a layer's block stood in the whole chunk: int64 ``[tokens]``."""
        return kept_tokens(self._image[self._layout.extent(layer)], self._headers[layer])

    def decode(
        self, cache: FrontendCache, index: int, moves: Sequence[float], pairs: int | None = None
    ) -> None:
        """Decode every layer into the cache's slot ``index``, keys moved along time.

        ``moves``: by so many frames, one number for the whole chunk or one for each of its frames;
        ``pairs``: turn only that many of the fastest pairs.
        """
        rope = self._spec.rope
        turns = [rope.temporal_rotation(move, pairs) if rope else None for move in moves]
        for layer, header in enumerate(self._headers):
            k, v = cache.slot(layer, index)
            if len(moves) == 1:
                self._decode_block(layer, header.shape, k, v, turns[0])
                if rope is None and moves[0]:
                    cache.shift(k, moves[0])
                continue
            # In fp32 first, so that a key is rounded once however it is turned.
            wide = torch.empty(k.shape, dtype=torch.float32)
            self._decode_block(layer, header.shape, wide, v, None)
            frames = self.places(layer) // self._spec.tokens_per_frame
            ends = np.searchsorted(frames, np.arange(len(moves) + 1))  # tokens are in order
            for frame, (move, turn) in enumerate(zip(moves, turns, strict=True)):
                rows = wide[:, ends[frame] : ends[frame + 1]]
                if turn is not None:
                    turn.apply_(rows)
                elif rope is None and move:
                    cache.shift(rows, move)
            k.copy_(wide)

    def undecoded(self, moves: Sequence[float], pairs: int | None = None) -> tuple[StoredKV, ...]:
        """Every layer's block as attention can read it; ``moves``, ``pairs``: as in :meth:`decode`.

        Raises :class:`CodecError` for codecs that cannot be read so, keys that have no rotation,
        and frames of one chunk moved apart.
        """
        rope, move = self._spec.rope, moves[0]
        if len(moves) > 1:
            raise CodecError(
                "frames of one chunk that move apart cannot be attended to as stored; choose "
                "positions that move whole chunks, or decode windows"
            )
        if rope is None and move:
            raise CodecError("stored keys without a rope layout cannot be moved; decode windows")
        rotation = rope.temporal_rotation(move, pairs) if rope is not None else None
        blocks = (self._image[self._layout.extent(layer)] for layer in range(len(self._headers)))
        return tuple(
            StoredKV(block, header, rotation)
            for block, header in zip(blocks, self._headers, strict=True)
        )

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


def acquire(
    pager: Pager,
    stream: int,
    spec: KVSpec,
    step: int,
    wanted: tuple[int, ...],
    ranking: Sequence[int],
    told: set[str],
) -> tuple[Window, list[StoredImage]]:
    """A pinned window and its images, all checked; a chunk whose bytes changed in memory is a miss.

    As :meth:`Pager.acquire`. ``told``: reasons that were warned about; each further one is counted.
    """
    reason = ""
    while True:
        window = pager.acquire(stream, step, wanted, ranking)
        images, spoiled = [], []
        for chunk in window.chunks:
            try:
                images.append(StoredImage(chunk.image, spec))
            except DamagedBlockError as error:
                spoiled.append(chunk.chunk)
                if SPOILED not in told:
                    told.add(SPOILED)
                    log.warning("chunk %d %s: %s", chunk.chunk, SPOILED, error)
        if not spoiled:
            return replace(window, reason=reason or window.reason), images
        reason = SPOILED
        pager.spoiled(stream, tuple(spoiled))


def paged_window(
    images: Sequence[StoredImage], moves: Sequence[Sequence[float]], pairs: int | None
) -> PagedWindow:
    """The window of ``images``, in time order, keys moved as in :meth:`StoredImage.undecoded`."""
    return PagedWindow([i.undecoded(m, pairs) for i, m in zip(images, moves, strict=True)])


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

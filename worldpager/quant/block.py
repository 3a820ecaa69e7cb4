"""One block on disk and in DRAM: a 64-byte header, the payload, zeros up to a multiple of 4,096.

The header says what the block is (rollout identity, chunk, layer, version, codec, shape, position),
and its checksum covers that as well as the payload. Padding carries nothing: it is written as zeros
and not looked at again. A block that does not hold all tokens of its chunk is of format 2: behind
the payload stands a bitmap of those that it holds, counted and checked as part of the payload.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash

from worldpager.errors import CodecError, DamagedBlockError
from worldpager.quant.codec import BlockShape, Bytes, Codec, codec_by_id
from worldpager.quant.rope import TemporalRotation
from worldpager.quant.tensors import shape_of
from worldpager.quant.tokens import Ids, KeptTokens, bitmap_bytes, read_bitmap

MAGIC = b"WPKV"
FORMAT_VERSION = 1
PRUNED_VERSION = 2
HEADER_BYTES = 64
ALIGNMENT = 4096

_FORMAT = struct.Struct("<4sHHIHHHHIIIdqQQ")
_SEALED = HEADER_BYTES - 8  # header bytes under the checksum: all but the checksum itself


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment of direct I/O."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def identity_hash(fields: Mapping[str, str | int | float]) -> int:
    """64-bit identity of a rollout: XXH3-64 of its fields as JSON with sorted keys, no spaces."""
    text = json.dumps(dict(fields), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return xxhash.xxh3_64_intdigest(text.encode())


@dataclass(frozen=True, slots=True)
class BlockLabel:
    """What a block is, apart from its bytes and codec.

    ``frames``: latent frames of the chunk that the block's tokens came from. ``generation``: counts
    rewrites of one chunk id. ``position``: temporal position that the keys of the first frame were
    rotated to. ``frame``: true index of that frame. ``identity``: :func:`identity_hash`.
    """

    layer: int
    chunk: int
    generation: int
    frames: int
    position: float
    frame: int
    identity: int

    def __post_init__(self) -> None:
        for field, bits in (
            ("layer", 16),
            ("chunk", 32),
            ("generation", 32),
            ("frames", 16),
            ("identity", 64),
        ):
            if not 0 <= getattr(self, field) < 2**bits:
                raise CodecError(
                    f"block {field} must be a {bits}-bit unsigned number, "
                    f"not {getattr(self, field)}"
                )
        if not -(2**63) <= self.frame < 2**63 or not math.isfinite(self.position):
            raise CodecError(
                f"block frame must be a 64-bit number and position finite, "
                f"not {self.frame} and {self.position}"
            )


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """A block's header as read: its label, codec, shape, payload length and checksum.

    ``bitmap_bytes``: length of the bitmap behind the payload, 0 where no token is missing.
    """

    label: BlockLabel
    codec_id: int
    shape: BlockShape
    payload_bytes: int
    checksum: int
    bitmap_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the block without its padding."""
        return HEADER_BYTES + self.payload_bytes + self.bitmap_bytes

    def pack(self) -> bytes:
        """The 64 bytes on disk."""
        tag, shape = self.label, self.shape
        return _FORMAT.pack(
            MAGIC, PRUNED_VERSION if self.bitmap_bytes else FORMAT_VERSION, self.codec_id,
            shape.tokens, shape.heads, shape.head_dim, tag.layer, tag.frames, tag.generation,
            tag.chunk, self.payload_bytes + self.bitmap_bytes, tag.position, tag.frame,
            tag.identity, self.checksum,
        )  # fmt: skip


def block_bytes(codec: Codec, shape: BlockShape, whole: int | None = None) -> int:
    """Header, payload and bitmap: the length under which the shard's index lists a block.

    ``whole``: tokens of the chunk that ``shape`` may be a part of, by default all of it. Raises
    :class:`CodecError` where the codec cannot hold ``shape`` or the payload reaches 4 GiB.
    """
    payload = codec.payload_size(shape) + bitmap_bytes(shape.tokens, whole or shape.tokens)
    if payload >= 2**32:
        raise CodecError(f"a {codec.name} block of {shape} reaches 4 GiB; commit smaller chunks")
    return HEADER_BYTES + payload


def block_size(codec: Codec, shape: BlockShape, whole: int | None = None) -> int:
    """Bytes that a block takes: as :func:`block_bytes`, padded to 4,096."""
    return padded(block_bytes(codec, shape, whole))


def write_block(
    out: Bytes,
    codec: Codec,
    label: BlockLabel,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: KeptTokens | None = None,
) -> BlockHeader:
    """Encode ``k`` and ``v`` ``[tokens, heads, head_dim]`` into ``out`` as a sealed, padded block.

    ``out``: contiguous uint8 of exactly :func:`block_size`. ``kept``: which tokens of the chunk
    these are, by default all. Takes one thread and not the interpreter lock while it encodes and
    hashes. Raises as ``codec.encode`` does; what is in ``out`` is then undefined, and its first
    bytes are cleared so that it cannot pass for a block.
    """
    shape = shape_of(k, v)
    if kept is not None and len(kept.ids) != shape.tokens:
        raise CodecError(f"{shape.tokens} tokens are given and {len(kept.ids)} named")
    nbytes = block_bytes(codec, shape, None if kept is None else kept.whole)
    if out.dtype != np.uint8 or out.ndim != 1 or not out.flags.c_contiguous:
        raise CodecError("a block is written into a contiguous run of bytes")
    if len(out) != padded(nbytes):
        raise CodecError(f"a {codec.name} block of {shape} takes {padded(nbytes)} bytes")
    out[:HEADER_BYTES] = 0
    bitmap = np.empty(0, np.uint8) if kept is None else kept.bitmap()
    payload = out[HEADER_BYTES : nbytes - len(bitmap)]
    codec.encode(k, v, payload, _frame_tokens(label, shape, kept))
    out[nbytes - len(bitmap) : nbytes] = bitmap
    out[nbytes:] = 0
    header = BlockHeader(label, codec.id, shape, len(payload), 0, len(bitmap))
    checksum = _checksum(header.pack()[:_SEALED], out[HEADER_BYTES:nbytes])
    header = replace(header, checksum=checksum)
    out[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
    return header


def _frame_tokens(label: BlockLabel, shape: BlockShape, kept: KeptTokens | None) -> int:
    """Tokens of a frame; 0 where some are missing."""
    every = kept is None or kept.whole == shape.tokens
    whole = every and label.frames > 0 and shape.tokens % label.frames == 0
    return shape.tokens // label.frames if whole else 0


def read_header(data: Bytes) -> BlockHeader:
    """Parse and bounds-check the header at the start of ``data``; the payload is not looked at.

    ``data`` must hold the whole block. Raises :class:`DamagedBlockError` with reason ``size``,
    ``magic``, ``version`` or ``header``, and nothing else whatever the bytes are.
    """
    if len(data) < HEADER_BYTES:
        raise DamagedBlockError("size", f"a block header is 64 bytes; only {len(data)} are there")
    (
        magic, version, codec_id, tokens, heads, head_dim, layer, frames, generation, chunk,
        length, position, frame, identity, checksum,
    ) = _FORMAT.unpack(data[:HEADER_BYTES].tobytes())  # fmt: skip
    if magic != MAGIC:
        raise DamagedBlockError("magic", f"no block here: it starts with {magic!r}, not {MAGIC!r}")
    if version not in (FORMAT_VERSION, PRUNED_VERSION):
        raise DamagedBlockError(
            "version", f"block format {version} is unknown; it is damaged or newer"
        )
    try:
        shape = BlockShape(tokens, heads, head_dim)
        expected = codec_by_id(codec_id).payload_size(shape)
        label = BlockLabel(layer, chunk, generation, frames, position, frame, identity)
    except CodecError as error:
        raise DamagedBlockError("header", f"the block header makes no sense: {error}") from error
    bitmap = length - expected
    if bitmap < 0 or (bitmap == 0) != (version == FORMAT_VERSION) or 0 < 8 * bitmap < tokens:
        raise DamagedBlockError(
            "header", f"the header says {length} payload bytes; its shape takes {expected}"
        )
    if HEADER_BYTES + length > len(data):
        raise DamagedBlockError(
            "size", f"the block is {HEADER_BYTES + length} bytes but only {len(data)} are there"
        )
    return BlockHeader(label, codec_id, shape, expected, checksum, bitmap)


def kept_tokens(data: Bytes, header: BlockHeader) -> Ids:
    """Places in the whole chunk of the tokens of a block whose ``header`` was read from ``data``:
    int64, ascending. Raises :class:`DamagedBlockError` where bitmap and header contradict each
    other, which no verified block does.
    """
    start = HEADER_BYTES + header.payload_bytes
    return read_bitmap(data[start : header.nbytes], header.shape.tokens)


def verify_block(
    data: Bytes,
    *,
    identity: int | None = None,
    chunk: int | None = None,
    layer: int | None = None,
    generation: int | None = None,
) -> BlockHeader:
    """The header of the block in ``data`` after checking its bytes and, where given, what it is.

    Raises :class:`DamagedBlockError`: as :func:`read_header`, then ``checksum`` where header or
    payload bytes changed, then ``identity`` for a sound block of something else. Never allocates
    from an unchecked length; the payload is hashed where it is.
    """
    header = read_header(data)
    found = _checksum(data[:_SEALED].tobytes(), data[HEADER_BYTES : header.nbytes])
    if found != header.checksum:
        raise DamagedBlockError(
            "checksum",
            f"the block's bytes hash to {found:016x}, its header says {header.checksum:016x}",
        )
    kept_tokens(data, header)
    wanted = {"identity": identity, "chunk": chunk, "layer": layer, "generation": generation}
    for field, value in wanted.items():
        stored = getattr(header.label, field)
        if value is not None and stored != value:
            raise DamagedBlockError(
                "identity", f"a sound block, but of {field} {stored} where {value} was expected"
            )
    return header


def decode_block(
    data: Bytes,
    header: BlockHeader,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    rotation: TemporalRotation | None = None,
) -> None:
    """Decode a block whose ``header`` was read from ``data`` into the caller's tensors.

    Verifies nothing: see :func:`verify_block`. Outputs and rotation as ``Codec.decode``.
    """
    payload = data[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    codec_by_id(header.codec_id).decode(payload, header.shape, k_out, v_out, rotation)


def _checksum(head: bytes, payload: Bytes) -> int:
    state = xxhash.xxh3_64(head)
    state.update(payload.data)
    return state.intdigest()

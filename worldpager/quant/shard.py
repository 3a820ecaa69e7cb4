"""A chunk's shard image: exactly the bytes of its file and of its extent in DRAM.

::

    [block of layer 0][block of layer 1]...[tail: chunk record, zeros, Zarr sharding index]

Every block starts at a multiple of 4,096, the tail is whole pages. The index at the very end is
that of Zarr v3's ``sharding_indexed`` codec (``index_location`` ``end``, index codecs ``bytes`` and
``crc32c``): offset and length of each block as little-endian uint64, then a CRC-32C. The record at
the start of the tail describes the chunk, so that listing files and reading tails recovers a store.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import google_crc32c
import numpy as np
import xxhash

from worldpager.errors import CodecError, DamagedBlockError
from worldpager.quant.block import (
    ALIGNMENT,
    HEADER_BYTES,
    BlockHeader,
    block_bytes,
    padded,
    verify_block,
)
from worldpager.quant.codec import BlockShape, Bytes, Codec

RECORD_MAGIC = b"WPCH"
RECORD_VERSION = 1
RECORD_BYTES = 256

_RECORD = struct.Struct("<4sHHIIIIqddQ12d96xQ")
_NO_PLACE = (float("nan"),) * 12


def index_bytes(layers: int) -> int:
    """Length of the sharding index of ``layers`` blocks, checksum included."""
    return 16 * layers + 4


def tail_bytes(layers: int) -> int:
    """Length of the tail: record and index in whole pages."""
    return padded(RECORD_BYTES + index_bytes(layers))


@dataclass(frozen=True)
class ShardLayout:
    """Where the blocks of a chunk lie in its image; ``lengths``: each block's without padding."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.lengths) < 2**16 or min(self.lengths) <= HEADER_BYTES:
            raise CodecError(
                f"a shard holds 1 to 65535 blocks of more than 64 bytes, not {self.lengths}"
            )

    @classmethod
    def for_chunk(
        cls, codec: Codec, shapes: Iterable[BlockShape], whole: int | None = None
    ) -> ShardLayout:
        """The layout of a chunk coded with ``codec``, one block of each of ``shapes`` a layer.

        ``whole``: tokens of the chunk before any were dropped; by default none were.
        """
        return cls(tuple(block_bytes(codec, shape, whole) for shape in shapes))

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return len(self.lengths)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each block starts, and after the last one where the tail does."""
        return tuple(accumulate((padded(length) for length in self.lengths), initial=0))

    @property
    def tail_offset(self) -> int:
        """Where the tail starts: the blocks with their padding."""
        return self.offsets[-1]

    @property
    def nbytes(self) -> int:
        """Length of the image."""
        return self.tail_offset + tail_bytes(self.layers)

    def block(self, layer: int) -> tuple[int, int]:
        """Offset and length (without padding) of a block, as the index lists it."""
        return self.offsets[layer], self.lengths[layer]

    def extent(self, layer: int) -> slice:
        """The bytes of the image that a block and its padding take."""
        return slice(self.offsets[layer], self.offsets[layer + 1])


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """What a chunk is, beside its blocks.

    ``epoch``: counts prompt changes. ``start_frame``: true index of the first frame. ``position``:
    temporal position that frame's keys were rotated to. ``place``: mean camera translation, then
    the mean rotation matrix row by row; twelve NaN without a pose. ``created``: Unix seconds.
    """

    chunk: int
    generation: int
    layers: int
    frames: int
    start_frame: int
    position: float
    created: float
    identity: int
    epoch: int = 0
    place: tuple[float, ...] = _NO_PLACE

    def pack(self) -> bytes:
        """The 256 bytes on disk. Raises :class:`CodecError` for a field out of its range."""
        try:
            body = _RECORD.pack(
                RECORD_MAGIC, RECORD_VERSION, self.layers, self.chunk, self.generation, self.frames,
                self.epoch, self.start_frame, self.position, self.created, self.identity,
                *self.place, 0,
            )[:-8]  # fmt: skip
        except struct.error as error:
            raise CodecError(f"{self} does not fit a chunk record: {error}") from error
        return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))

    @classmethod
    def unpack(cls, data: Bytes) -> ChunkRecord:
        """The record in the first 256 bytes of ``data``.

        Raises :class:`DamagedBlockError` with reason ``record`` or ``version``, nothing else.
        """
        if len(data) < RECORD_BYTES:
            raise DamagedBlockError("record", f"a chunk record is 256 bytes, not {len(data)}")
        raw = data[:RECORD_BYTES].tobytes()
        (
            magic, version, layers, chunk, generation, frames, epoch, start_frame, position,
            created, identity, *rest,
        ) = _RECORD.unpack(raw)  # fmt: skip
        if magic != RECORD_MAGIC or rest[-1] != xxhash.xxh3_64_intdigest(raw[:-8]):
            raise DamagedBlockError("record", "the chunk record's bytes are not what was written")
        if version != RECORD_VERSION:
            raise DamagedBlockError("version", f"chunk record {version} is not {RECORD_VERSION}")
        return cls(
            chunk=chunk, generation=generation, layers=layers, frames=frames,
            start_frame=start_frame, position=position, created=created, identity=identity,
            epoch=epoch, place=tuple(rest[:-1]),
        )  # fmt: skip


def write_tail(image: Bytes, layout: ShardLayout, record: ChunkRecord) -> None:
    """Write record and index behind the blocks of ``image`` (uint8, ``layout.nbytes``)."""
    if len(image) != layout.nbytes:
        raise CodecError(f"this chunk's image is {layout.nbytes} bytes, not {len(image)}")
    if record.layers != layout.layers:
        raise CodecError(f"the record says {record.layers} layers, the layout {layout.layers}")
    table = np.array([layout.block(i) for i in range(layout.layers)], dtype="<u8").tobytes()
    index = table + struct.pack("<I", google_crc32c.value(table))
    tail = image[layout.tail_offset :]
    tail[:RECORD_BYTES] = np.frombuffer(record.pack(), np.uint8)
    tail[RECORD_BYTES : -len(index)] = 0
    tail[-len(index) :] = np.frombuffer(index, np.uint8)


def read_tail(tail: Bytes, image_bytes: int, layers: int) -> tuple[ChunkRecord, ShardLayout]:
    """Record and layout of an image of ``image_bytes`` and ``layers`` from its last bytes.

    ``tail`` must hold :func:`tail_bytes` of ``layers``; more in front is ignored, so a whole image
    will do. Raises :class:`DamagedBlockError` with reason ``size``, ``record``, ``version`` or
    ``index``, and nothing else whatever the bytes are.
    """
    length = tail_bytes(layers)
    if image_bytes % ALIGNMENT or len(tail) < length or image_bytes <= length:
        raise DamagedBlockError(
            "size",
            f"an image of {layers} layers is whole pages of 4096 bytes and ends in a tail of "
            f"{length}; this one is {image_bytes} and {len(tail)} of them were read",
        )
    tail = tail[len(tail) - length :]
    layout = _read_index(tail[length - index_bytes(layers) :].tobytes(), image_bytes, layers)
    record = ChunkRecord.unpack(tail)
    if record.layers != layers:
        raise DamagedBlockError("record", f"the record says {record.layers} layers, not {layers}")
    return record, layout


def verify_image(
    image: Bytes,
    layers: int,
    *,
    identity: int | None = None,
    chunk: int | None = None,
    generation: int | None = None,
) -> tuple[ChunkRecord, ShardLayout, list[BlockHeader]]:
    """Check every byte of a chunk's image that carries something, and what the chunk is.

    Raises :class:`DamagedBlockError` as :func:`read_tail` and ``verify_block``; ``identity`` also
    where record and blocks contradict each other.
    """
    record, layout = read_tail(image, len(image), layers)
    wanted = {"identity": identity, "chunk": chunk, "generation": generation}
    for field, value in wanted.items():
        stored = getattr(record, field)
        if value is not None and stored != value:
            raise DamagedBlockError(
                "identity", f"a sound chunk, but of {field} {stored} where {value} was expected"
            )
    headers = []
    for layer in range(layers):
        header = verify_block(
            image[layout.extent(layer)],
            identity=record.identity,
            chunk=record.chunk,
            layer=layer,
            generation=record.generation,
        )
        if header.nbytes != layout.lengths[layer]:
            raise DamagedBlockError("index", f"the index lists another length for layer {layer}")
        headers.append(header)
    return record, layout, headers


def _read_index(index: bytes, image_bytes: int, layers: int) -> ShardLayout:
    table, stored = index[:-4], struct.unpack("<I", index[-4:])[0]
    if google_crc32c.value(table) != stored:
        raise DamagedBlockError("index", "the sharding index does not match its CRC-32C")
    entries = [(int(a), int(b)) for a, b in np.frombuffer(table, "<u8").reshape(layers, 2)]
    try:
        layout = ShardLayout(tuple(length for _, length in entries))
    except CodecError as error:
        raise DamagedBlockError("index", f"the sharding index makes no sense: {error}") from error
    placed = [layout.block(layer) for layer in range(layers)]
    if placed != entries or layout.nbytes != image_bytes:
        raise DamagedBlockError(
            "index", "the sharding index does not place its blocks one after the other"
        )
    return layout

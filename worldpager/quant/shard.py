"""A chunk's shard image: exactly the bytes of its file and of its extent in DRAM.

::

    [block of layer 0][block of layer 1]...[tail: chunk record, zeros, Zarr sharding index]

Every block starts at a multiple of 4,096, the tail is whole pages. The index at the very end is
that of Zarr v3's ``sharding_indexed`` codec (``index_location`` ``end``, index codecs ``bytes`` and
``crc32c``): offset and length of each block as little-endian uint64, then a CRC-32C. The record at
the start of the tail describes the chunk, so that listing files and reading tails recovers a store.

What retrieval wants to know of a chunk beyond its record, such as mean keys, is its *annex*: bytes
whose meaning is not this module's. They lie behind the record where the tail has room for them and
in whole pages in front of the tail where not, under a hash that the record holds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
RECORD_VERSION = 2
"""Written for a chunk with an annex; one without is as version 1 had it, to the byte."""
RECORD_BYTES = 256
MAX_ANNEX = 65_536

_RECORD = struct.Struct("<4sHHIIIIqddQ12dQI84xQ")
_NO_PLACE = (float("nan"),) * 12


def index_bytes(layers: int) -> int:
    """Length of the sharding index of ``layers`` blocks, checksum included."""
    return 16 * layers + 4


def tail_bytes(layers: int) -> int:
    """Length of the tail: record and index in whole pages."""
    return padded(RECORD_BYTES + index_bytes(layers))


def annex_pages(layers: int, annex: int) -> int:
    """Bytes before the tail that ``annex`` bytes of annex take; 0 where the tail holds them."""
    fits = RECORD_BYTES + annex + index_bytes(layers) <= tail_bytes(layers)
    return 0 if fits else padded(annex)


@dataclass(frozen=True)
class ShardLayout:
    """Where the blocks of a chunk lie in its image; ``lengths``: each block's without padding;
    ``annex``: bytes of its annex.
    """

    lengths: tuple[int, ...]
    annex: int = 0

    def __post_init__(self) -> None:
        if not 0 < len(self.lengths) < 2**16 or min(self.lengths) <= HEADER_BYTES:
            raise CodecError(
                f"a shard holds 1 to 65535 blocks of more than 64 bytes, not {self.lengths}"
            )
        if not 0 <= self.annex <= MAX_ANNEX:
            raise CodecError(f"an annex has at most {MAX_ANNEX} bytes, not {self.annex}")

    @classmethod
    def for_chunk(
        cls,
        codec: Codec,
        shapes: Iterable[BlockShape],
        whole: int | None = None,
        *,
        annex: int = 0,
    ) -> ShardLayout:
        """The layout of a chunk coded with ``codec``, one block of each of ``shapes`` a layer.

        ``whole``: tokens of the chunk before any were dropped; by default none were.
        """
        return cls(tuple(block_bytes(codec, shape, whole) for shape in shapes), annex)

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return len(self.lengths)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each block starts, and where the last one with its padding ends."""
        return tuple(accumulate((padded(length) for length in self.lengths), initial=0))

    @property
    def tail_offset(self) -> int:
        """Where the tail starts: after the blocks with their padding, and after a long annex."""
        return self.offsets[-1] + annex_pages(self.layers, self.annex)

    @property
    def annex_extent(self) -> slice:
        """The bytes of the image that are the annex."""
        inside = annex_pages(self.layers, self.annex) == 0
        start = self.tail_offset + RECORD_BYTES if inside else self.offsets[-1]
        return slice(start, start + self.annex)

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
    ``annex_bytes``, ``annex_hash``: length and XXH3-64 of the annex, both 0 without one.
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
    annex_bytes: int = 0
    annex_hash: int = 0

    def pack(self) -> bytes:
        """The 256 bytes on disk. Raises :class:`CodecError` for a field out of its range."""
        try:
            body = _RECORD.pack(
                RECORD_MAGIC, self._version, self.layers, self.chunk, self.generation, self.frames,
                self.epoch, self.start_frame, self.position, self.created, self.identity,
                *self.place, self.annex_hash, self.annex_bytes, 0,
            )[:-8]  # fmt: skip
        except struct.error as error:
            raise CodecError(f"{self} does not fit a chunk record: {error}") from error
        return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))

    @property
    def _version(self) -> int:
        return RECORD_VERSION if self.annex_bytes else 1

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
        *place, annex_hash, annex_bytes, _ = rest
        if version not in (1, RECORD_VERSION):
            raise DamagedBlockError(
                "version", f"chunk record {version} is not 1 or {RECORD_VERSION}"
            )
        if annex_bytes > MAX_ANNEX or (version == RECORD_VERSION) != (annex_bytes > 0):
            raise DamagedBlockError(
                "record", f"chunk record {version} with an annex of {annex_bytes} bytes"
            )
        return cls(
            chunk=chunk, generation=generation, layers=layers, frames=frames,
            start_frame=start_frame, position=position, created=created, identity=identity,
            epoch=epoch, place=tuple(place), annex_bytes=annex_bytes, annex_hash=annex_hash,
        )  # fmt: skip


def write_tail(image: Bytes, layout: ShardLayout, record: ChunkRecord, annex: bytes = b"") -> None:
    """Write ``annex``, record and index behind the blocks of ``image`` (uint8, ``layout.nbytes``).

    The record's fields about the annex are filled in here.
    """
    if len(image) != layout.nbytes:
        raise CodecError(f"this chunk's image is {layout.nbytes} bytes, not {len(image)}")
    if record.layers != layout.layers:
        raise CodecError(f"the record says {record.layers} layers, the layout {layout.layers}")
    if len(annex) != layout.annex:
        raise CodecError(f"the annex has {len(annex)} bytes, the layout {layout.annex}")
    if annex:
        digest = xxhash.xxh3_64_intdigest(annex)
        record = replace(record, annex_bytes=len(annex), annex_hash=digest)
    table = np.array([layout.block(i) for i in range(layout.layers)], dtype="<u8").tobytes()
    index = table + struct.pack("<I", google_crc32c.value(table))
    image[layout.offsets[-1] : layout.tail_offset] = 0
    tail = image[layout.tail_offset :]
    tail[:RECORD_BYTES] = np.frombuffer(record.pack(), np.uint8)
    tail[RECORD_BYTES : -len(index)] = 0
    tail[-len(index) :] = np.frombuffer(index, np.uint8)
    image[layout.annex_extent] = np.frombuffer(annex, np.uint8)


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
    entries = _read_index(tail[length - index_bytes(layers) :].tobytes(), layers)
    record = ChunkRecord.unpack(tail)
    if record.layers != layers:
        raise DamagedBlockError("record", f"the record says {record.layers} layers, not {layers}")
    return record, _checked_layout(entries, image_bytes, record.annex_bytes)


def read_annex(end: Bytes, record: ChunkRecord) -> bytes:
    """The annex of the chunk that ``record`` is of, out of the last bytes of its image: at least
    its tail, and :func:`annex_pages` before that.

    Raises :class:`DamagedBlockError` (``annex``) where they are not what was written.
    """
    pages = annex_pages(record.layers, record.annex_bytes)
    tail = len(end) - tail_bytes(record.layers)
    start = tail - pages if pages else tail + RECORD_BYTES
    annex = end[start : start + record.annex_bytes].tobytes()
    if record.annex_bytes and xxhash.xxh3_64_intdigest(annex) != record.annex_hash:
        raise DamagedBlockError("annex", f"the annex of chunk {record.chunk} is damaged")
    return annex


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
    read_annex(image, record)
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


def _read_index(index: bytes, layers: int) -> list[tuple[int, int]]:
    """Offset and length of each block."""
    table, stored = index[:-4], struct.unpack("<I", index[-4:])[0]
    if google_crc32c.value(table) != stored:
        raise DamagedBlockError("index", "the sharding index does not match its CRC-32C")
    return [(int(a), int(b)) for a, b in np.frombuffer(table, "<u8").reshape(layers, 2)]


def _checked_layout(entries: list[tuple[int, int]], image_bytes: int, annex: int) -> ShardLayout:
    try:
        layout = ShardLayout(tuple(length for _, length in entries), annex)
    except CodecError as error:
        raise DamagedBlockError("index", f"the sharding index makes no sense: {error}") from error
    placed = [layout.block(layer) for layer in range(layout.layers)]
    if placed != entries or layout.nbytes != image_bytes:
        raise DamagedBlockError(
            "index", "the sharding index does not place its blocks one after the other"
        )
    return layout

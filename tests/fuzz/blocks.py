"""Targets: the parsers of blocks, tails and chunk records.

Checksums would keep a fuzzer out of everything behind them, so the first byte of an input says
whether they are made right before it is parsed.
"""

from __future__ import annotations

import struct

import google_crc32c
import numpy as np
import torch
import xxhash

from worldpager.errors import CodecError, DamagedBlockError
from worldpager.quant.block import HEADER_BYTES, decode_block, read_header, verify_block
from worldpager.quant.codec import Bytes
from worldpager.quant.shard import (
    RECORD_BYTES,
    ChunkRecord,
    index_bytes,
    read_tail,
    tail_bytes,
    verify_image,
)

MOST_ELEMENTS = 1 << 14  # decoding more teaches nothing and takes long


def array(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8).copy()


def seal_block(block: Bytes) -> None:
    """Make a block's checksum right, where its header can be read."""
    try:
        header = read_header(block)
    except DamagedBlockError:
        return
    state = xxhash.xxh3_64(block[: HEADER_BYTES - 8].tobytes())
    state.update(block[HEADER_BYTES : HEADER_BYTES + header.payload_bytes].tobytes())
    block[HEADER_BYTES - 8 : HEADER_BYTES] = array(struct.pack("<Q", state.intdigest()))


def seal_record(record: Bytes) -> None:
    """Make a record's check right."""
    body = record[: RECORD_BYTES - 8].tobytes()
    record[RECORD_BYTES - 8 : RECORD_BYTES] = array(
        struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
    )


def seal_index(image: Bytes, layers: int) -> None:
    """Make the index's check right."""
    table = image[-index_bytes(layers) : -4].tobytes()
    image[-4:] = array(struct.pack("<I", google_crc32c.value(table)))


def seal_image(image: Bytes, layers: int) -> None:
    """Make all checks of a chunk's image right that can be found."""
    if len(image) < tail_bytes(layers):
        return
    seal_index(image, layers)
    seal_record(image[len(image) - tail_bytes(layers) :])
    try:
        _, layout = read_tail(image, len(image), layers)
    except DamagedBlockError:
        return
    for layer in range(layers):
        seal_block(image[layout.extent(layer)])


def block(data: bytes) -> None:
    """A block: flag, then its bytes."""
    given = array(data[1:])
    if data[:1] > b"\x7f":
        seal_block(given)
    header = read_header(given)
    assert header.pack() == given[:HEADER_BYTES].tobytes(), "nothing of a header is lost"
    assert HEADER_BYTES + header.payload_bytes <= len(given)
    assert verify_block(given) == header
    shape = header.shape
    if shape.elements <= MOST_ELEMENTS:
        k, v = (torch.empty(shape.tokens, shape.heads, shape.head_dim) for _ in "kv")
        try:
            decode_block(given, header, k, v)
        except CodecError:
            return


def record(data: bytes) -> None:
    """A chunk record: flag, then its bytes."""
    given = array(data[1:])
    if data[:1] > b"\x7f" and len(given) >= RECORD_BYTES:
        seal_record(given)
    read = ChunkRecord.unpack(given)
    again = ChunkRecord.unpack(array(read.pack()))
    assert repr(again) == repr(read), "what was read can be written"


def tail(data: bytes) -> None:
    """A chunk's image: flag, layers, then its bytes, padded to whole pages if the flag says so."""
    flag, layers = data[:1], 1 + (data[1] % 8 if len(data) > 1 else 0)
    given = array(data[2:])
    if flag > b"\x3f":
        body = given[: max(0, len(given) - tail_bytes(layers))]
        given = np.concatenate([body, np.zeros(-len(body) % 4096, np.uint8), given[len(body) :]])
    if flag > b"\x7f":
        seal_image(given, layers)
    found, layout = read_tail(given, len(given), layers)
    assert layout.nbytes == len(given) and layout.layers == found.layers == layers
    assert all(a + b <= layout.tail_offset for a, b in map(layout.block, range(layers)))
    _, _, headers = verify_image(given, layers)
    assert len(headers) == layers

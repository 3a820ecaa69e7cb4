"""Codecs for one block of KV, the block and shard formats, and the time rotation of keys."""

from __future__ import annotations

from worldpager.quant.absmax import AbsmaxCodec
from worldpager.quant.bf16 import Bf16Codec
from worldpager.quant.block import (
    BlockHeader,
    BlockLabel,
    block_size,
    decode_block,
    identity_hash,
    kept_tokens,
    read_header,
    verify_block,
    write_block,
)
from worldpager.quant.codec import BlockShape, Codec, codec_by_id, codec_names, get_codec
from worldpager.quant.int8 import Int8Codec
from worldpager.quant.rope import RopeLayout, TemporalRotation
from worldpager.quant.rotated import RotatedCodec
from worldpager.quant.shard import (
    ChunkRecord,
    ShardLayout,
    read_tail,
    tail_bytes,
    verify_image,
    write_tail,
)
from worldpager.quant.tokens import KeptTokens

BUILTIN_CODECS: tuple[Codec, ...] = (
    Bf16Codec(),
    Int8Codec(),
    RotatedCodec("int4", 3, bits=4),
    RotatedCodec("int3", 4, bits=3),
    AbsmaxCodec(),
)

__all__ = [
    "BUILTIN_CODECS",
    "BlockHeader",
    "BlockLabel",
    "BlockShape",
    "ChunkRecord",
    "Codec",
    "KeptTokens",
    "RopeLayout",
    "ShardLayout",
    "TemporalRotation",
    "block_size",
    "codec_by_id",
    "codec_names",
    "decode_block",
    "get_codec",
    "identity_hash",
    "kept_tokens",
    "read_header",
    "read_tail",
    "tail_bytes",
    "verify_block",
    "verify_image",
    "write_block",
    "write_tail",
]

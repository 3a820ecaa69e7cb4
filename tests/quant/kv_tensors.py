"""Tensors and blocks that the quantisation tests share."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from worldpager.quant import BlockLabel, BlockShape, Codec, get_codec

CODECS = ("bf16", "int8", "int4", "int3", "int4-absmax")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

head_dims = st.sampled_from([40, 64, 80, 96, 128])
shapes = st.builds(
    BlockShape,
    tokens=st.sampled_from([1, 3, 7, 48, 144]),
    heads=st.sampled_from([1, 2, 12, 40]),
    head_dim=head_dims,
).filter(lambda shape: shape.elements <= 144 * 12 * 128)
small_shapes = st.builds(
    BlockShape,
    tokens=st.sampled_from([1, 3, 7, 17]),
    heads=st.sampled_from([1, 2, 3]),
    head_dim=head_dims,
)
seeds = st.integers(0, 2**32 - 1)


def gaussian(shape: BlockShape, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape.tokens, shape.heads, shape.head_dim, generator=generator).to(dtype)


def encode(codec: str | Codec, k: torch.Tensor, v: torch.Tensor) -> np.ndarray:
    codec = get_codec(codec) if isinstance(codec, str) else codec
    out = np.full(codec.payload_size(BlockShape(*k.shape)), 0xA5, np.uint8)
    codec.encode(k, v, out)
    return out


def decode(
    codec: str, payload: np.ndarray, shape: BlockShape, dtype=torch.float32, rotation=None
) -> tuple[torch.Tensor, torch.Tensor]:
    k = torch.full((shape.tokens, shape.heads, shape.head_dim), torch.nan, dtype=dtype)
    v = k.clone()
    get_codec(codec).decode(payload, shape, k, v, rotation)
    return k, v


def roundtrip(codec: str, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decoded K of a block whose K and V are ``x``; V must come back the same."""
    k, v = decode(codec, encode(codec, x, x), BlockShape(*x.shape), dtype)
    assert torch.equal(k, v)
    return k


def error_energy(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.double(), y.double()
    return float((x - y).square().sum() / x.square().sum())


def label(layer: int = 0, **changes) -> BlockLabel:
    fields = {
        "layer": layer,
        "chunk": 7,
        "generation": 2,
        "frames": 3,
        "position": 21.0,
        "frame": 21,
        "identity": 0x1122334455667788,
    }
    return BlockLabel(**{**fields, **changes})

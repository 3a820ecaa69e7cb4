"""Coding one Matrix-Game 2.0 block (2640 tokens, 12 heads of 128), beside a copy of the same bytes.

Run: ``pytest benchmarks/bench_quant.py --benchmark-only`` (CPU time of the one thread that works;
``payload_GB_s`` is payload over the mean time).
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from worldpager.quant import BlockLabel, BlockShape, RopeLayout, block_size, get_codec, write_block
from worldpager.quant.block import verify_block

SHAPE = BlockShape(2640, 12, 128)
CODECS = ["bf16", "int8", "int4", "int3", "int4-absmax"]
ROTATION = RopeLayout.wan(SHAPE.head_dim).temporal_rotation(-300)

pytestmark = pytest.mark.benchmark(timer=time.thread_time, min_rounds=5, warmup=True)


@pytest.fixture(scope="module")
def kv() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = (SHAPE.tokens, SHAPE.heads, SHAPE.head_dim)
    k, v = (torch.randn(size, generator=generator).bfloat16() for _ in range(2))
    return k, v


def note_speed(benchmark, nbytes: int) -> None:
    benchmark.extra_info["payload_GB_s"] = round(nbytes / benchmark.stats["mean"] / 1e9, 3)


def test_copy_of_the_decoded_block(benchmark, kv) -> None:
    source = torch.cat([x.flatten() for x in kv]).view(torch.int16).numpy()
    target = np.empty_like(source)
    benchmark(np.copyto, target, source)
    note_speed(benchmark, source.nbytes)


@pytest.mark.parametrize("name", CODECS)
def test_encode(benchmark, kv, name: str) -> None:
    codec = get_codec(name)
    payload = np.empty(codec.payload_size(SHAPE), np.uint8)
    benchmark(codec.encode, *kv, payload)
    note_speed(benchmark, len(payload))


@pytest.mark.parametrize("moved", [False, True], ids=["in place", "moved in time"])
@pytest.mark.parametrize("name", CODECS)
def test_decode(benchmark, kv, name: str, moved: bool) -> None:
    codec = get_codec(name)
    payload = np.empty(codec.payload_size(SHAPE), np.uint8)
    codec.encode(*kv, payload)
    outputs = [torch.empty_like(x) for x in kv]
    benchmark(codec.decode, payload, SHAPE, *outputs, ROTATION if moved else None)
    note_speed(benchmark, len(payload))


def test_hash_of_an_int4_block(benchmark, kv) -> None:
    codec = get_codec("int4")
    block = np.empty(block_size(codec, SHAPE), np.uint8)
    write_block(block, codec, BlockLabel(0, 0, 0, 3, 0.0, 0, 0), *kv)
    benchmark(verify_block, block)
    note_speed(benchmark, len(block))

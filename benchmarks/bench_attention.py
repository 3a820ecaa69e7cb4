"""Attention to chosen blocks beside dense attention, and to stored int4 blocks beside decoding them
first: Matrix-Game 2.0's heads (12 of 128) and chunks (2,640 tokens).

``pytest benchmarks/bench_attention.py --benchmark-only`` times single pieces;
``python benchmarks/bench_attention.py`` prints the tables of docs/attention.md, each row's
contestants in turn, medians of ``--rounds``, with peak memory (Linux only). Tables give
processor time of all threads, which others on the machine disturb less than the clock.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from worldpager.model_adapter.attention.paged import attend_segments
from worldpager.model_adapter.attention.routing import BLOCK, Selection, route
from worldpager.model_adapter.attention.segments import DenseKV, StoredKV
from worldpager.model_adapter.attention.sparse import attend_blocks
from worldpager.quant import BlockLabel, BlockShape, RopeLayout, block_size, get_codec, write_block

HEADS, DIM, CHUNK = 12, 128, 2640
FORWARDS = 5
"""Forwards of a chunk that see one window: four denoising steps and the clean pass."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def drawn(tokens: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, tokens, HEADS, DIM, generator=generator).to(dtype)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def selection(queries: int, keys: int, density: float) -> Selection:
    """Random blocks, between half and one and a half times ``density`` of them a query block."""
    shape = [1, HEADS, -(-queries // BLOCK), -(-keys // BLOCK)]
    generator = torch.Generator().manual_seed(1)
    order = torch.rand(shape, generator=generator).argsort(-1)
    share = density * (0.5 + torch.rand(shape[:3], generator=generator))
    return Selection(order, (share * shape[3]).round().clamp(1, shape[3]).long(), BLOCK)


class Window:
    """Sink, recent and current chunk as tensors, ``chunks`` retrieved ones as int4 blocks."""

    def __init__(self, chunks: int, queries: int, dtype: torch.dtype) -> None:
        self.q, self.kept = drawn(queries, dtype), 3 * CHUNK
        tokens = self.kept + chunks * CHUNK
        # A frontend's cache. Slots of retrieved chunks take memory once they are written to.
        self.k, self.v = (torch.empty(1, tokens, HEADS, DIM, dtype=dtype) for _ in "kv")
        for seed, x in enumerate((self.k, self.v)):
            x[:, : self.kept] = drawn(self.kept, dtype, seed)
        self.blocks = [stored_block(3.0 * i) for i in range(chunks)]
        self.slots = [self.kept + i * CHUNK for i in range(chunks)]

    def decode(self) -> None:
        """Every block into its slot, as windows are made by default."""
        for start, block in zip(self.slots, self.blocks, strict=True):
            rows = slice(start, start + CHUNK)
            block.decode_into(self.k[0, rows], self.v[0, rows])

    def attend(self) -> torch.Tensor:
        return dense(self.q, self.k, self.v)

    def decode_then_attend(self) -> torch.Tensor:
        self.decode()
        return self.attend()

    def attend_stored(self) -> torch.Tensor:
        kept = DenseKV(self.k[:, : self.kept], self.v[:, : self.kept])
        return attend_segments(self.q, [kept, *self.blocks])


def stored_block(shift: float) -> StoredKV:
    shape, codec = BlockShape(CHUNK, HEADS, DIM), get_codec("int4")
    block = np.empty(block_size(codec, shape), np.uint8)
    k, v = (drawn(CHUNK, torch.bfloat16, int(shift) + seed)[0] for seed in range(2))
    header = write_block(block, codec, BlockLabel(0, 0, 0, 3, 0.0, 0, 0), k, v)
    return StoredKV(block, header, RopeLayout.wan(DIM).temporal_rotation(shift))


# ---- pieces --------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.05, 0.2, 1.0], ids="{:.0%}".format)
@pytest.mark.parametrize("dtype", DTYPES)
def test_chosen_blocks(benchmark, dtype: str, density: float) -> None:
    """All blocks by dense attention, a share of them by attention to chosen blocks."""
    q, k, v = (drawn(n, DTYPES[dtype], n) for n in (CHUNK, 3 * CHUNK, 3 * CHUNK))
    if density == 1.0:
        benchmark(dense, q, k, v)
    else:
        benchmark(attend_blocks, q, k, v, selection(CHUNK, 3 * CHUNK, density))


@pytest.mark.parametrize("way", ["attend", "decode_then_attend", "attend_stored"])
@pytest.mark.parametrize("queries", [48, CHUNK])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_blocks(benchmark, dtype: str, queries: int, way: str) -> None:
    window = Window(3, queries, DTYPES[dtype])
    window.decode()
    benchmark(getattr(window, way))


# ---- tables --------------------------------------------------------------------------------------


def seconds(contestants: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Median processor time of each, all threads, run in turn after one round to warm up."""
    times: list[list[float]] = [[] for _ in contestants]
    for _ in range(rounds + 1):
        for contestant, taken in zip(contestants, times, strict=True):
            began = time.process_time()
            contestant()
            taken.append(time.process_time() - began)
    return [statistics.median(taken[1:]) for taken in times]


def peak_bytes(contestant: Callable[[], object]) -> int:
    """Most resident memory during a call, beyond what was resident before it."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to what there is now
    before = _resident("VmRSS")
    result = contestant()
    peak = _resident("VmHWM") - before
    del result
    return peak


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {name} in /proc/self/status")


def sparse_contestants(keys: int, dtype: torch.dtype) -> list[Callable[[], object]]:
    """Dense attention, routing, and attention to 5, 10, 20 and 40 % of the blocks."""
    q, k, v = (drawn(n, dtype, n) for n in (CHUNK, keys, keys))
    chosen = [selection(CHUNK, keys, density) for density in (0.05, 0.1, 0.2, 0.4)]
    some = [partial(attend_blocks, q, k, v, blocks) for blocks in chosen]
    return [partial(dense, q, k, v), partial(route, q, k), *some]


def sparse_table(rounds: int) -> None:
    print("| dtype | keys | dense ms | routing ms | 5 % | 10 % | 20 % | 40 % |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, dtype in DTYPES.items():
        for keys in (3 * CHUNK, 6 * CHUNK, 19 * CHUNK):
            every, routing, *some = seconds(sparse_contestants(keys, dtype), rounds)
            cells = [f"{1e3 * s:.0f} ms, {every / (s + routing):.1f}x" for s in some]
            cells = [name, f"{keys:,}", f"{1e3 * every:.0f}", f"{1e3 * routing:.0f}", *cells]
            print("| " + " | ".join(cells) + " |", flush=True)


def stored_table(rounds: int) -> None:
    print(
        "| dtype | queries | int4 chunks | decode ms | attend ms | stored ms | one forward | "
        "a chunk | peak MB decoded | peak MB stored |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, dtype in DTYPES.items():
        for queries, chunks in ((48, 3), (48, 9), (CHUNK, 3), (CHUNK, 9)):
            window = Window(chunks, queries, dtype)
            window.attend_stored()  # compiled and threads begun before memory is looked at
            peaks = [peak_bytes(f) for f in (window.attend_stored, window.decode_then_attend)]
            decode, attend, stored = seconds(
                [window.decode, window.attend, window.attend_stored], rounds
            )
            once = (decode + attend) / stored
            often = (decode + FORWARDS * attend) / (FORWARDS * stored)
            cells = [name, f"{queries:,}", f"{chunks}"]
            cells += [f"{1e3 * x:.0f}" for x in (decode, attend, stored)]
            cells += [f"{once:.2f}x", f"{often:.2f}x"]
            cells += [f"{x / 1e6:.0f}" for x in reversed(peaks)]
            print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=["sparse", "stored"], nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name, table in (("sparse", sparse_table), ("stored", stored_table)):
        if not options.table or name in options.table:
            table(options.rounds)


if __name__ == "__main__":
    main()

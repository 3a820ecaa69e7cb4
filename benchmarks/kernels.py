"""Codec kernels against one core's copy of the same bf16 bytes and against plain torch.

Run: ``python benchmarks/kernels.py [--gib 1.3]``; prints the table of docs/performance.md.

Blocks of Matrix-Game 2.0 (2,640 tokens, 12 heads of 128, 3 frames), so many of them that copying
and coding run past the last cache (give ``--gib`` for a larger one). One thread, methods in turn in
each round, medians over the rounds, CPU time of the thread. Decoding rotates keys in time. Plain
torch is ``worldpager.quant.reference``, the same arithmetic in torch expressions on one thread, on
an eighth of a block's tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from worldpager.quant import BlockShape, RopeLayout, get_codec, reference

SHAPE = BlockShape(2640, 12, 128)
FRAME = 880
ROUNDS = 5
ROTATION = RopeLayout.wan(SHAPE.head_dim).temporal_rotation(-300)


def seconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def blocks(gib: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of KV and room for as many, both written to once."""
    generator = torch.Generator().manual_seed(0)
    size = (2, SHAPE.tokens, SHAPE.heads, SHAPE.head_dim)
    one = torch.randn(size, generator=generator).bfloat16()
    count = max(1, int(gib * 2**30 / one.nbytes))
    kv = one.expand(count, *size).clone()
    return kv, torch.zeros_like(kv)


def rows(gib: float) -> list[tuple[str, float, float]]:
    """``(what, encode, decode)`` in seconds a block, the copy first."""
    kv, room = blocks(gib)
    names = ["int4", "int3", "int8", "int4-absmax", "bf16"]
    payloads = {
        name: np.zeros((len(kv), get_codec(name).payload_size(SHAPE)), np.uint8) for name in names
    }
    source, target = (x.view(torch.int16).numpy() for x in (kv, room))
    work: dict[tuple[str, str], Callable[[], object]] = {
        ("copy", "encode"): lambda: [np.copyto(t, s) for s, t in zip(source, target, strict=True)]
    }
    for name in names:
        codec, out = get_codec(name), payloads[name]
        work[name, "encode"] = lambda codec=codec, out=out: [
            codec.encode(*kv[i], out[i], FRAME) for i in range(len(kv))
        ]
        work[name, "decode"] = lambda codec=codec, out=out: [
            codec.decode(out[i], SHAPE, *room[i], ROTATION) for i in range(len(kv))
        ]
    for what in work.values():
        what()  # compiles, and touches every page
    times = {key: [] for key in work}
    for _ in range(ROUNDS):
        for key, what in work.items():
            times[key].append(seconds(what) / len(kv))
    found = {key: statistics.median(values) for key, values in times.items()}
    return [(n, found[n, "encode"], found.get((n, "decode"), 0.0)) for n in ["copy", *names]]


def torch_seconds() -> dict[str, tuple[float, float]]:
    """Encode and decode of a whole block in plain torch, from an eighth of one."""
    x = torch.randn(SHAPE.tokens // 8, SHAPE.heads, SHAPE.head_dim).bfloat16()
    found = {}
    for name, bits in (("int4", 4), ("int3", 3)):
        codes, scales = reference.encode_rotated(x, bits)
        encode = [seconds(lambda bits=bits: reference.encode_rotated(x, bits)) for _ in range(3)]

        def decode(codes=codes, scales=scales, bits=bits) -> None:
            k = reference.decode_rotated(codes, scales, bits)
            ROTATION.apply_(k).bfloat16()

        back = [seconds(decode) for _ in range(3)]
        found[name] = 16 * statistics.median(encode), 16 * statistics.median(back)
    codes, scales = reference.encode_int8(x)
    found["int8"] = (
        16 * statistics.median(seconds(lambda: reference.encode_int8(x)) for _ in range(3)),
        16 * statistics.median(
            seconds(lambda: ROTATION.apply_(reference.decode_int8(codes, scales)).bfloat16())
            for _ in range(3)
        ),
    )  # fmt: skip
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--gib", type=float, default=1.3, help="bf16 bytes that are worked on")
    torch.set_num_threads(1)
    table = rows(options.parse_args().gib)
    plain = torch_seconds()
    copy = table[0][1]
    print("| codec | encode, decode | of copying | times plain torch |")
    print("| --- | --- | --- | --- |")
    print(f"| copy | {copy * 1e3:.1f} ms | 1 | |")
    for name, encode, decode in table[1:]:
        gain = ""
        if name in plain:
            gain = f"{plain[name][0] / encode:.0f}, {plain[name][1] / decode:.0f}"
        print(
            f"| `{name}` | {encode * 1e3:.1f} ms, {decode * 1e3:.1f} ms "
            f"| {copy / encode:.3f}, {copy / decode:.3f} | {gain} |"
        )


if __name__ == "__main__":
    main()

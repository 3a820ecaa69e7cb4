"""Compare ways to spend about 4 bits on attention keys and values.

Each scheme codes K and V of every chunk and is judged by what attention makes of the result. Run it
on the built-in model (the default), on a file of real caches, or on synthetic keys::

    python benchmarks/quant_layouts.py
    python benchmarks/quant_layouts.py --cache kv.safetensors --chunk 2640
    python benchmarks/quant_layouts.py --synthetic

A cache file (``.npz`` or ``.safetensors``) holds ``k`` and ``v`` ``[layers, tokens, heads,
head_dim]`` and the queries ``q`` ``[layers, n, heads, head_dim]`` that met them; ``--chunk`` tokens
are coded together. Columns: bits per value with all side data; relative L2 error of the attention
output over the context, mean over layers and heads; the same of the worst layer; slope of quantised
against exact scores, less one; error energy of K and of V. With the built-in model also the PSNR of
generated frames against those generated from exact memory, and how far PSNR against the true view
falls.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from worldpager.quant import BlockShape, RopeLayout, get_codec, reference
from worldpager.quant.rotated import LEVELS

Quantiser = Callable[[Tensor], Tensor]
TWO_PLACES = ("bits", "P_ref", "dPSNR")
FRAMES = 3
"""Latent frames of a chunk."""
SEARCHES = {n: np.linspace(1.0, 0.58, n).tolist() if n > 1 else [1.0] for n in (1, 7, 13)}


@dataclass(frozen=True)
class Scheme:
    """A name, bits per value of K and V for ``(tokens, head_dim)``, and what it makes of each."""

    name: str
    bits: Callable[[int, int], float]
    k: Quantiser
    v: Quantiser


def product(name: str, frames: int = FRAMES) -> Scheme:
    """A codec as shipped, for tokens of ``frames``; of 0 it knows nothing."""
    codec = get_codec(name)

    def coded(x: Tensor, which: int) -> Tensor:
        shape = BlockShape(*x.shape)
        payload = np.empty(codec.payload_size(shape), np.uint8)
        codec.encode(x, x, payload, len(x) // frames if frames else 0)
        out = torch.empty_like(x), torch.empty_like(x)
        codec.decode(payload, shape, *out)
        return out[which]

    def bits(tokens: int, dim: int) -> float:
        shape = BlockShape(tokens, 1, dim)
        return codec.payload_size(shape) * 4 / shape.elements

    title = name if frames else f"{name}, values without carrying"
    return Scheme(title, bits, lambda x: coded(x, 0), lambda x: coded(x, 1))


def rotated(bits: int, group: int = 64, search: int = 13, mean: int = 0) -> Quantiser:
    """Hadamard, Lloyd-Max levels, unbiased scales, always with or always without a mean.

    ``search``: clip ratios tried, from 1 to 0.58. ``mean``: bits of a subtracted channel mean, 0
    for none. Groups longer than a head join neighbouring tokens.
    """

    def code(x: Tensor) -> Tensor:
        x = x.float()
        middle = channel_mean(x, mean)
        y = reference.rotate(x - middle).transpose(0, 1).flatten(1)
        short = -y.shape[1] % group
        groups = torch.nn.functional.pad(y, (0, short)).unflatten(1, (-1, group))
        codes, scales = reference.search_group(groups, bits, SEARCHES[search])
        half = torch.tensor(LEVELS[bits])
        z = torch.cat([-half.flip(0), half])[codes.int()] * scales.float()[..., None]
        z = z.flatten(1)[:, : y.shape[1]].unflatten(1, (x.shape[0], x.shape[2]))
        return reference.rotate_back(z.transpose(0, 1)) + middle

    return code


def channel_mean(x: Tensor, bits: int) -> Tensor:
    """Mean over tokens as stored: fp16, or ``bits`` of a symmetric scale a head; 0 for none."""
    mean = x.mean(0, keepdim=True)
    if bits == 0:
        return torch.zeros_like(mean)
    if bits == 16:
        return mean.half().float()
    top = 2 ** (bits - 1) - 1
    step = (mean.abs().amax(-1, keepdim=True) / top).half().float().clamp_min(1e-30)
    return (mean / step).round().clamp(-top, top) * step


def layout(name: str, k: dict[str, int], v: dict[str, int]) -> Scheme:
    """A rotated layout with its own parameters for K and V."""

    def bits(tokens: int, dim: int) -> float:
        def one(bits: int, group: int = 64, search: int = 13, mean: int = 0) -> float:
            return bits + 16 / group + mean / tokens + (16 / dim / tokens if 0 < mean < 16 else 0)

        return (one(**k) + one(**v)) / 2

    return Scheme(name, bits, rotated(**k), rotated(**v))


def schemes() -> list[Scheme]:
    plain = {"bits": 4}
    return [
        *map(product, ("bf16", "int8", "int4", "int3", "int4-absmax")),
        *(product(name, frames=0) for name in ("int4", "int3")),
        *(layout(f"R, {n} clip ratios", *2 * [{**plain, "search": n}]) for n in (13, 7, 1)),
        layout("R, K mean fp16", {**plain, "mean": 16}, plain),
        layout("R, K mean 8 bit", {**plain, "mean": 8}, plain),
        layout("R, K mean 4 bit", {**plain, "mean": 4}, plain),
        layout("R, K g128", {**plain, "group": 128}, plain),
        layout("R, K g128 + mean fp16", {**plain, "group": 128, "mean": 16}, plain),
        layout("R, K and V mean fp16", {**plain, "mean": 16}, {**plain, "mean": 16}),
        layout("R 3 bit, K mean fp16", {"bits": 3, "mean": 16}, {"bits": 3}),
        layout("R, K 4 bit, V 3 bit", plain, {"bits": 3}),
    ]


def by_chunk(quantiser: Quantiser, x: Tensor, chunk: int) -> Tensor:
    """``x`` ``[layers, tokens, heads, dim]`` with each layer's chunks coded on their own."""
    layers = [torch.cat([quantiser(part) for part in layer.split(chunk)]) for layer in x]
    return torch.stack(layers)


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and output of ``q`` over ``k`` and ``v``, ``[layers, heads, ...]``."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores, torch.softmax(scores, -1) @ v


def judge(scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, chunk: int) -> dict[str, float]:
    """The columns that every source of caches has."""
    k2, v2 = by_chunk(scheme.k, k, chunk), by_chunk(scheme.v, v, chunk)
    scores, out = attention(q, k, v)
    scores2, out2 = attention(q, k2, v2)
    error = (out2 - out).flatten(2).norm(dim=-1) / out.flatten(2).norm(dim=-1)
    slope = (scores * scores2).sum() / scores.square().sum() - 1
    energy = [float((a - b).float().square().sum() / a.float().square().sum())
              for a, b in ((k, k2), (v, v2))]  # fmt: skip
    return {
        "bits": scheme.bits(chunk, k.shape[-1]),
        "err": float(error.mean()),
        "worst": float(error.mean(1).max()),
        "slope-1": float(slope),
        "K energy": energy[0],
        "V energy": energy[1],
    }


def table(title: str, rows: Iterator[tuple[str, dict[str, float]]]) -> None:
    """Print rows as they come, as a Markdown table."""
    print(f"\n{title}\n")
    for number, (name, cells) in enumerate(rows):
        if number == 0:
            print("| scheme | " + " | ".join(cells) + " |")
            print("| --- |" + " --- |" * len(cells))
        shown = (f"{x:.2f}" if key in TWO_PLACES else f"{x:.4f}" for key, x in cells.items())
        print(f"| {name} | " + " | ".join(shown) + " |", flush=True)


def synthetic(kind: str, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Smooth, RMS-normed keys under RoPE; outlier channels in S(pread), M(ean) or N(owhere)."""
    layers, heads, dim, frames = 2, 3, 128, FRAMES
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, tokens, heads, dim)
    walk = torch.randn(shape, generator=generator).cumsum(1) / tokens**0.5
    x = 0.7 * walk + 0.7 * torch.randn(shape, generator=generator)
    for layer in range(layers):
        for head in range(heads):
            picked = torch.randperm(dim, generator=generator)[:5]
            strength = torch.linspace(10, 50, 5)
            if kind == "S":
                x[layer, :, head, picked] *= strength
            elif kind == "M":
                x[layer, :, head, picked] += strength
    k = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * 1.5
    spread = k.std(1, keepdim=True).clamp_min(1e-3)
    per_frame = tokens // frames
    for index in range(tokens):
        move = RopeLayout.wan(dim).temporal_rotation(30 + index // max(per_frame, 1))
        if move is not None:
            move.apply_(k[:, index])
    q = torch.randn((layers, 256, heads, dim), generator=generator) / spread * 1.5
    v = torch.randn(shape, generator=generator).cumsum(1) / tokens**0.5
    return q, k, v + torch.randn(shape, generator=generator)


def load(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """``q``, ``k``, ``v`` of a cache file."""
    if path.suffix == ".npz":
        with np.load(path) as file:
            return tuple(torch.from_numpy(file[name]) for name in "qkv")  # type: ignore[return-value]
    from safetensors.torch import load_file

    tensors = load_file(str(path))
    return tensors["q"], tensors["k"], tensors["v"]


class BuiltinStudy:
    """Held-out rooms seen by the built-in model: five context chunks and one view to make again."""

    def __init__(self, worlds: int, seed: int = 10_000) -> None:
        from worldpager.model_adapter.builtin import model as builtin
        from worldpager.model_adapter.builtin import scenes as scene_maker

        self.model, self.denoise = builtin.load_model(), builtin.denoise
        rng = np.random.default_rng(seed)
        count = scene_maker.CHUNKS
        motions = [[scene_maker.anywhere(rng) for _ in range(count - 1)] for _ in range(worlds)]
        wanted = int(rng.integers(1, 4))
        scenes = scene_maker.make_scenes(rng, [[*m, m[wanted]] for m in motions])
        self.chunk = self.model.config.tokens_per_chunk
        self.context = (count - 1) * self.chunk
        frames = scenes.frames.view(worlds, count, -1, *scenes.frames.shape[2:])
        self.poses = scenes.poses.view(worlds, count, -1, 4, 4)
        self.truth = frames[:, -1]
        self.noise = torch.randn(self.truth.shape, generator=torch.Generator().manual_seed(seed))
        self.cache = self.model.new_cache(worlds, count * self.chunk)
        with torch.no_grad():
            for c in range(count - 1):
                self.model(
                    frames[:, c], torch.zeros(worlds), self.poses[:, c],
                    kv_cache=self.cache, current_start=c * self.chunk,
                )  # fmt: skip
        self.queries: list[Tensor] = []
        self.exact = self.make(self.cache, record=True)

    def make(self, cache: list, record: bool = False) -> Tensor:  # type: ignore[type-arg]
        """Denoise the last chunk over ``cache``, optionally recording the first step's queries."""
        from worldpager.model_adapter.builtin.layers import rotate

        def hook(attention, args):  # type: ignore[no-untyped-def]
            x, cos, sin = args[:3]
            q = attention.qkv(x).unflatten(-1, (3, attention.heads, -1))[:, :, 0]
            self.queries.append(rotate(attention.norm_q(q), cos, sin))

        handles = [b.self_attn.register_forward_pre_hook(hook) for b in self.model.blocks if record]
        copies = [{name: t.clone() for name, t in layer.items()} for layer in cache]
        with torch.no_grad():
            made = self.denoise(self.model, self.noise, self.poses[:, -1], copies, self.context)
        for handle in handles:
            handle.remove()
        return made

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """``q``, ``k``, ``v`` of the context, worlds folded into heads."""
        layers = len(self.cache)
        q = torch.stack(self.queries[:layers])
        k, v = (torch.stack([c[n][:, : self.context] for c in self.cache]) for n in "kv")
        return tuple(x.transpose(1, 2).flatten(2, 3) for x in (q, k, v))  # type: ignore[return-value]

    def judge(self, scheme: Scheme) -> dict[str, float]:
        q, k, v = self.tensors()
        cells = judge(scheme, q, k, v, self.chunk)
        worlds = self.truth.shape[0]
        cache = [dict(layer) for layer in self.cache]
        for name, x, code in (("k", k, scheme.k), ("v", v, scheme.v)):
            coded = by_chunk(code, x, self.chunk).unflatten(2, (worlds, -1)).transpose(1, 2)
            for layer, rows in zip(cache, coded, strict=True):
                layer[name] = layer[name].clone()
                layer[name][:, : self.context] = rows
        made = self.make(cache)
        cells["P_ref"] = psnr(made, self.exact)
        cells["dPSNR"] = psnr(made, self.truth) - psnr(self.exact, self.truth)
        return cells


def psnr(made: Tensor, truth: Tensor) -> float:
    """PSNR in dB of values in [-1, 1]."""
    return float(-10 * ((made - truth).double().square().mean() / 4 + 1e-12).log10())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cache", type=Path, help="file of recorded caches")
    parser.add_argument("--chunk", type=int, help="tokens coded together (default: all)")
    parser.add_argument("--synthetic", action="store_true", help="made-up keys, D 128")
    parser.add_argument("--worlds", type=int, default=32, help="held-out rooms (built-in model)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.cache:
        q, k, v = load(options.cache)
        chunk = options.chunk or k.shape[1]
        rows = ((s.name, judge(s, q, k, v, chunk)) for s in schemes())
        table(f"{options.cache}: {list(k.shape)}, chunks of {chunk} tokens", rows)
    elif options.synthetic:
        for kind in "SMN":
            q, k, v = synthetic(kind, 1056)
            rows = ((s.name, judge(s, q, k, v, 1056)) for s in schemes())
            table(f"synthetic, outlier channels: {kind}", rows)
    else:
        study = BuiltinStudy(options.worlds)
        exact = psnr(study.exact, study.truth)
        table(
            f"built-in model, {options.worlds} rooms; exact memory {exact:.2f} dB to the truth",
            ((s.name, study.judge(s)) for s in schemes()),
        )


if __name__ == "__main__":
    main()

"""The codecs' arithmetic in plain torch: slow, on any device, the text that kernels are held to.

Every fp32 operation happens in the same order as in the kernels, so codes, scales and decoded
values agree bit for bit on the CPU. Sums run over a group one value after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worldpager.quant.groups import group_ends, hadamard_blocks, signs
from worldpager.quant.rotated import CARRY, CLIPS, LEVELS


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Unnormalised block-diagonal Hadamard over the last axis of ``x`` (fp32, copied)."""
    parts = []
    for part in torch.split(x.float(), hadamard_blocks(x.shape[-1]).tolist(), dim=-1):
        half, size = 1, part.shape[-1]
        while half < size:
            pairs = part.reshape(*part.shape[:-1], size // (2 * half), 2, half)
            low, high = pairs[..., 0, :], pairs[..., 1, :]
            part = torch.stack([low + high, low - high], dim=-2).flatten(-3)
            half *= 2
        parts.append(part)
    return torch.cat(parts, dim=-1)


def weights(head_dim: int) -> torch.Tensor:
    """Sign over the root of the Hadamard block size, per channel."""
    blocks = torch.from_numpy(hadamard_blocks(head_dim))
    norms = (1 / blocks.double().sqrt()).float().repeat_interleave(blocks)
    return torch.from_numpy(signs(head_dim)) * norms


def rotate(x: torch.Tensor) -> torch.Tensor:
    """``H (e * x)`` over the last axis, orthonormal."""
    return hadamard(x.float() * weights(x.shape[-1]))


def rotate_back(y: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`rotate`."""
    return hadamard(y) * weights(y.shape[-1])


def running_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis, one value after the other in fp32."""
    total = torch.zeros(x.shape[:-1])
    for i in range(x.shape[-1]):
        total = total + x[..., i]
    return total


def search_group(
    y: torch.Tensor, bits: int, clips: Sequence[float] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8, as ``y``) and fp16 scales (``y`` without its last axis) of groups ``y``.

    The nearest levels of ``y / step``, then ``s = <y, y> / <y, level>``; least error wins. Steps
    put the top level at each of ``clips`` (the encoder's own by default) of the largest magnitude.
    """
    levels = torch.tensor(LEVELS[bits])
    middles = (levels[1:] + levels[:-1]) / 2
    most, energy = y.abs().amax(-1), running_sum(y * y)
    best = torch.full_like(most, torch.inf)
    scales = torch.zeros_like(most, dtype=torch.float16)
    codes = torch.full_like(y, len(levels), dtype=torch.uint8)
    for clip in CLIPS[bits] if clips is None else clips:
        step = most * (torch.tensor(clip, dtype=torch.float32) / levels[-1])
        size = (y.abs()[..., None] >= middles * step[..., None, None]).sum(-1)
        level = levels[size]
        dot, square = running_sum(y.abs() * level), running_sum(level * level)
        scale = (energy / dot).half()
        wide = scale.float()
        rest = energy - 2 * wide * dot + wide * wide * square
        better = rest < best
        best = torch.where(better, rest, best)
        scales = torch.where(better, scale, scales)
        found = torch.where(y < 0, len(levels) - 1 - size, len(levels) + size).to(torch.uint8)
        codes = torch.where(better[..., None], found, codes)
    return codes, scales


def channel_means(x: torch.Tensor) -> torch.Tensor:
    """fp16 means over the tokens of ``x`` as fp32 ``[heads, head_dim]``; zero in heads that are not
    nearer to zero without them.
    """
    total = torch.zeros(x.shape[1:], dtype=torch.float64)
    for token in x:
        total = total + token
    mean = (total / len(x)).clamp(-65504, 65504).float().half().float()
    before, after = running_sum(x.float().square()), running_sum((x.float() - mean).square())
    gain = torch.zeros(x.shape[1], dtype=torch.float64)
    for ratio in (after / before).double():
        gain = gain + (1 - ratio)
    return torch.where((gain > 0)[:, None], mean, 0)


def spread_means(mean: torch.Tensor, tokens: int, groups: int) -> torch.Tensor:
    """The sign bits of key scales, bool ``[tokens, heads, groups]``, that carry ``mean``.

    Bit ``j`` of channel ``i`` of a head goes to that head's scale number ``16 i + j``.
    """
    words = mean.half().view(torch.int16).int()
    bits = (words[..., None] >> torch.arange(16)) & 1
    signs_of_head = torch.zeros(len(mean), tokens * groups, dtype=torch.bool)
    signs_of_head[:, : bits[0].numel()] = bits.flatten(1).bool()
    return signs_of_head.view(len(mean), tokens, groups).transpose(0, 1)


def encode_rotated(
    x: torch.Tensor, bits: int, frame_tokens: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[tokens, heads, head_dim]`` and fp16 scales ``[tokens, heads, groups]`` of ``x``.

    ``frame_tokens``: for values in frames of so many, each made up for its part of the error of the
    one before.
    """
    found, lost = [], torch.zeros(())
    for frame in torch.split(rotate(x), frame_tokens or len(x)):
        wanted = torch.where((frame != 0).any(-1, keepdim=True), frame + CARRY * lost, frame)
        groups = wanted.tensor_split(group_ends(x.shape[-1])[:-1].tolist(), dim=-1)
        coded = [search_group(group, bits) for group in groups]
        codes, scales = torch.cat([c for c, _ in coded], -1), torch.stack([s for _, s in coded], -1)
        lost = wanted - _scaled(codes, scales, bits)
        found.append((codes, scales))
    return torch.cat([c for c, _ in found]), torch.cat([s for _, s in found])


def decode_rotated(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """fp32 values from the output of :func:`encode_rotated`."""
    return rotate_back(_scaled(codes, scales, bits))


def _scaled(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    half = torch.tensor(LEVELS[bits])
    levels = torch.cat([-half.flip(0), half])[codes.int()]
    return levels * _spread(scales.float(), codes.shape[-1])


def encode_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes as ``x`` and bf16 scales ``[tokens, heads, groups]``, rounded up."""
    x = x.float()
    groups = x.abs().tensor_split(group_ends(x.shape[-1])[:-1].tolist(), dim=-1)
    exact = torch.stack([group.amax(-1) for group in groups], -1) / 127
    scales = ((exact.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
    wide = _spread(scales.float(), x.shape[-1])
    return torch.where(wide > 0, x / wide, 0).round().to(torch.int8), scales


def decode_int8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 values from the output of :func:`encode_int8`."""
    return codes.float() * _spread(scales.float(), codes.shape[-1])


def encode_absmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``-7..7`` (int8) as ``x`` and fp16 scales ``[tokens, heads, groups]``."""
    x = x.float()
    groups = x.abs().tensor_split(group_ends(x.shape[-1])[:-1].tolist(), dim=-1)
    scales = (torch.stack([group.amax(-1) for group in groups], -1) / 7).half()
    wide = _spread(scales.float(), x.shape[-1])
    return torch.where(wide > 0, x / wide, 0).round().clamp(-7, 7).to(torch.int8), scales


def decode_absmax(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 values from the output of :func:`encode_absmax`."""
    return codes.float() * _spread(scales.float(), codes.shape[-1])


def _spread(scales: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Each group's scale at each of its channels."""
    ends = torch.from_numpy(group_ends(head_dim))
    sizes = torch.diff(ends, prepend=torch.zeros(1, dtype=ends.dtype))
    return scales.repeat_interleave(sizes, dim=-1)

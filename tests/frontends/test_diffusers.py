"""The real classes of diffusers with tiny random weights; skipped where it is not installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from worldpager.model_adapter.frontends.base import WindowOptions
from worldpager.model_adapter.frontends.sana_wm import RefinerCache, SanaRefiner
from worldpager.testing import CHECKS, Case

pytest.importorskip("diffusers", reason="the optional extra 'diffusers' is not installed")
pytest.importorskip("transformers", reason="diffusers' pipelines need transformers")

from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.transformers.transformer_sana_wm_refiner import (
    SanaWMLTX2RefinerTransformer3DModel,
    SanaWMRefinerKVCache,
    apply_interleaved_rotary_emb,
    apply_split_rotary_emb,
)
from diffusers.pipelines.sana_wm.refiner import SanaWMLTX2Refiner

HEADS, HEAD_DIM, LAYERS, SIDE, BLOCK = 2, 32, 2, 2, 3


def refiner(dtype: torch.dtype, rope_type: str = "interleaved") -> Any:
    """As released in everything but its sizes; the prompt is encoded already."""
    torch.manual_seed(0)
    width = HEADS * HEAD_DIM
    model = SanaWMLTX2RefinerTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=HEADS, attention_head_dim=HEAD_DIM,
        cross_attention_dim=width, audio_in_channels=4, audio_out_channels=4,
        audio_num_attention_heads=HEADS, audio_attention_head_dim=HEAD_DIM,
        audio_cross_attention_dim=width, num_layers=LAYERS, caption_channels=8,
        rope_type=rope_type,
    )  # fmt: skip
    model = model.eval().requires_grad_(False)
    for block in model.transformer_blocks:
        block.attn1.to_out[0].weight.mul_(4)
    pipeline = SanaWMLTX2Refiner(
        transformer=model.to(dtype), connectors=None, tokenizer=None, text_encoder=None,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
    )  # fmt: skip
    made = torch.Generator().manual_seed(3)
    prompt = torch.randn(1, 4, 8, generator=made).to(dtype), torch.ones(1, 4)
    pipeline._encode_prompt = lambda *_, **__: prompt
    pipeline.set_progress_bar_config(disable=True)
    pipeline.shown = 11
    return pipeline


def refine(pipeline: Any, chunks: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(4)
    latents = torch.randn(1, 4, 1 + chunks * BLOCK, SIDE, SIDE, generator=made)
    refined = pipeline(
        latents, "a street", fps=16.0, block_size=BLOCK, kv_max_frames=pipeline.shown,
        generator=torch.Generator().manual_seed(5), output_type="latent",
    )  # fmt: skip
    return list(refined[:, :, 1:].split(BLOCK, dim=2))


def attend_everything(pipeline: Any) -> None:
    pipeline.shown = 1000


@pytest.mark.parametrize("rope_type", ["interleaved", "split"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_sana_wm_refiner(
    check: Callable[[Case, Path], str], rope_type: str, tmp_path: Path
) -> None:
    case = Case(
        make=lambda dtype: refiner(dtype, rope_type),
        run=refine,
        attend_everything=attend_everything,
        chunks=8,
        options={"window": {"tokens_per_frame": SIDE * SIDE}},
    )
    print(check(case, tmp_path))


@pytest.mark.parametrize("rope_type", ["interleaved", "split"])
@pytest.mark.parametrize("frames", [5.0, -3.0])
def test_a_key_is_moved_to_where_the_refiner_itself_would_put_it(
    rope_type: str, frames: float
) -> None:
    pipeline = refiner(torch.float32, rope_type)
    model, adapter = pipeline.transformer, SanaRefiner(pipeline, WindowOptions())
    size = {"batch_size": 1, "height": SIDE, "width": SIDE, "device": "cpu", "fps": 16.0}
    adapter._build, adapter._size = model.build_rotary_emb_for_absolute_positions, size
    k = torch.randn(1, SIDE * SIDE, HEADS * HEAD_DIM)
    rotate = apply_split_rotary_emb if rope_type == "split" else apply_interleaved_rotary_emb
    here, there = (
        rotate(k, adapter._build(frame_positions=[at], **size)) for at in (20.0, 20.0 + frames)
    )
    keys = here.clone().view(1, SIDE * SIDE, HEADS, HEAD_DIM)
    cache = SanaWMRefinerKVCache(LAYERS)
    RefinerCache(cache, adapter.spec, adapter).shift(keys, frames)
    torch.testing.assert_close(keys.flatten(2), there, atol=2e-2, rtol=0)
    assert (here - there).abs().max() > 1

"""The real classes of diffusers with tiny random weights; skipped where it is not installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import worldpager
from worldpager.model_adapter.frontends.base import WindowOptions
from worldpager.model_adapter.frontends.sana_wm import RefinerCache, SanaRefiner
from worldpager.testing import CHECKS, Case

pytest.importorskip("diffusers", reason="the optional extra 'diffusers' is not installed")
pytest.importorskip("transformers", reason="diffusers' pipelines need transformers")

from diffusers import (
    AnyFlowFARPipeline,
    AnyFlowFARTransformer3DModel,
    FlowMapEulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from diffusers.models.transformers.transformer_anyflow_far import (
    AnyFlowCausalAttnProcessor,
)
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


class ExactStore(AnyFlowCausalAttnProcessor):
    """Attends to all chunks that are no longer in full, as they were when they were finished.

    Keys are kept before rotation and rotated with all others, at the frames they are of.
    """

    def __init__(self, full: int) -> None:
        super().__init__()
        self.full, self.chunks, self.seen = full, [], 0

    def __call__(self, attn: Any, hidden_states: Any, **kwargs: Any) -> Any:
        flag = kwargs.get("kv_cache_flag")
        if flag is None or flag["is_cache_step"]:
            return super().__call__(attn, hidden_states, **kwargs)
        held, done = kwargs["kv_cache"], flag["num_cached_chunks"]
        if done < self.seen:
            self.chunks, self.seen = [], 0
        size = CHUNK * PLACES
        if done > self.seen:
            end = flag["num_cached_full_tokens"]
            self.chunks.append(held["full_cache"][:, :, :, end - size : end].clone())
            self.seen = done
        old = self.chunks[: max(0, len(self.chunks) - self.full)]
        if old:
            keep, rotary = flag["num_cached_compressed_tokens"], kwargs["rotary_emb"]["key"]
            places = self.frequencies[:, :, : len(old) * size]
            packed = held["compressed_cache"][:, :, :, :keep]
            kwargs["kv_cache"] = {**held, "compressed_cache": torch.cat([packed, *old], dim=3)}
            more = keep + len(old) * size
            kwargs["kv_cache_flag"] = {**flag, "num_cached_compressed_tokens": more}
            key = torch.cat([rotary[:, :, :keep], places, rotary[:, :, keep:]], dim=2)
            kwargs["rotary_emb"] = {**kwargs["rotary_emb"], "key": key}
        return super().__call__(attn, hidden_states, **kwargs)


CHUNK, GRID = 2, 4
PLACES = (GRID // 2) ** 2


def anyflow(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = AnyFlowFARTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, in_channels=4, out_channels=4,
        text_dim=8, freq_dim=16, ffn_dim=32, num_layers=LAYERS, chunk_partition=(CHUNK,) * 6,
    )  # fmt: skip
    model = model.eval().requires_grad_(False)
    for block in model.blocks:
        block.attn1.to_out[0].weight.mul_(8)
    pipeline = AnyFlowFARPipeline(
        tokenizer=None, text_encoder=None, transformer=model.to(dtype), vae=None,
        scheduler=FlowMapEulerDiscreteScheduler(),
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def flow(pipeline: Any, chunks: int, lead: int = 0, guidance: float = 1.0) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(4)
    frames, dtype = lead + chunks * CHUNK, pipeline.transformer.dtype
    latents = torch.randn(1, 4, frames, GRID, GRID, generator=made)
    prompt, other = torch.randn(2, 1, 4, 8, generator=made).to(dtype)
    partition = ([lead] if lead else []) + [CHUNK] * chunks
    made = pipeline(
        prompt_embeds=prompt, negative_prompt_embeds=other if guidance > 1 else None,
        latents=latents, num_frames=4 * (frames - 1) + 1, height=8 * GRID, width=8 * GRID,
        num_inference_steps=2, guidance_scale=guidance, chunk_partition=partition,
        output_type="latent", return_dict=False,
    )[0]  # fmt: skip
    return [made] if lead else list(made.split(CHUNK, dim=2))


def keep_exactly(pipeline: Any) -> None:
    model = pipeline.transformer
    rotary = model.rope(
        far_cfg={
            "total_frames": 40, "num_compressed_frames": 0,
            "full_frame_shape": (GRID // 2, GRID // 2), "compressed_frame_shape": (1, 1),
        },
        device=torch.device("cpu"),
    )["key"]  # fmt: skip
    for block in model.blocks:
        store = ExactStore(model.config.full_chunk_limit - 1)
        store.frequencies = rotary
        block.attn1.set_processor(store)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_anyflow_far(check: Callable[[Case, Path], str], tmp_path: Path) -> None:
    case = Case(
        make=anyflow,
        run=flow,
        attend_everything=keep_exactly,
        chunks=6,
        options={"window": {"tokens_per_frame": PLACES}},
    )
    print(check(case, tmp_path))


@pytest.mark.parametrize(("lead", "guidance"), [(1, 1.0), (0, 3.0)])
def test_anyflow_far_with_a_first_chunk_of_another_size_or_guidance(
    lead: int, guidance: float, tmp_path: Path
) -> None:
    want = flow(anyflow(torch.bfloat16), 6, lead, guidance)
    window = {"tokens_per_frame": PLACES, "batch": 2 if guidance > 1 else 1}
    for retrieve in (0, 2):
        pipeline, counts = anyflow(torch.bfloat16), []
        with worldpager.attach(
            pipeline, store=tmp_path / str(retrieve), dram="64MiB", on_miss="wait",
            retrieve=retrieve, window=window,
        ) as attachment:  # fmt: skip
            attachment.listeners.append(
                lambda step, report, _, counts=counts: counts.append(report.retrieved)
            )
            got = flow(pipeline, 6, lead, guidance)
        same = all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert same == (retrieve == 0)
        assert [len(ids) for ids in counts] == ([0, 0, 0, 1, 2, 2] if retrieve else [0] * 6)

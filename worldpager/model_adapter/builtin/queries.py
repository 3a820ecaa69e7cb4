"""The mean query of a chunk that is about to be generated, for retrieval by keys."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from worldpager.model_adapter.builtin.layers import modulate
from worldpager.model_adapter.builtin.pipeline import RolloutPipeline
from worldpager.model_adapter.pages import mean_query
from worldpager.prefetch.keys import Vector


@torch.no_grad()
def chunk_query(pipeline: RolloutPipeline, chunk: int, poses: NDArray[np.floating]) -> Vector:
    """What layer 0 will ask in the first forward of ``chunk`` at ``poses`` ``[frames, 4, 4]``.

    float32 ``[heads * head_dim]``. Its input is the chunk's own noise and pose, normed and turned
    by the noise level as the block does it. WorldAttention's code leaves that out, and its models
    have no pose, which makes its query nearly free of content.
    """
    model = pipeline.model
    level = torch.full((1, 1), pipeline.levels[0])
    where = torch.as_tensor(np.asarray(poses), dtype=torch.float32)[None]
    x, embedded = model.embed(pipeline.noise(chunk), level, where)
    block = model.blocks[0]
    shift, scale = block.modulation(embedded).chunk(6, dim=-1)[:2]
    attention = block.self_attn
    q = attention.qkv(modulate(block.norm1(x), shift, scale)).chunk(3, dim=-1)[0]
    return mean_query(attention.norm_q(q.unflatten(-1, (attention.heads, attention.head_dim))))

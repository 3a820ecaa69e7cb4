"""Pruned chunks from end to end: chosen at commit, exact through all tiers, counted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.model_adapter.synthetic import KV, SyntheticFrontend, chunk_bytes, made, reference_spec
from worldpager.errors import BudgetError, ConfigError
from worldpager.model_adapter.config import MemoryConfig
from worldpager.model_adapter.frontend import ChunkStep, KVSpec
from worldpager.model_adapter.memory import WorldMemory
from worldpager.model_adapter.pruning import CleanProbe
from worldpager.model_adapter.ring_cache import RingCache
from worldpager.quant.codec import BlockShape, get_codec
from worldpager.quant.pruning import CleanPredictions, FinishedChunk, get_pruning
from worldpager.quant.rope import RopeLayout
from worldpager.quant.shard import ShardLayout

SCHEDULE = json.loads(
    (Path(__file__).parents[1] / "quant" / "vectors" / "decoprune_mask.json").read_text()
)["compaction_schedule"]


def predictions(chunk: int) -> CleanPredictions:
    """Of 3 frames of 6 x 8 tokens; another share of them is unsure in each chunk."""
    rng = np.random.default_rng(chunk)
    final = torch.zeros(2, 3, 12, 16)
    noise = torch.from_numpy(rng.standard_normal((2, 3, 12, 16), np.float32))
    return CleanPredictions(final + float(rng.uniform(0.1, 0.6)) * noise, final)


class PrunedFrontend(SyntheticFrontend):
    """Hands out clean predictions, and knows which tokens each stored chunk must have."""

    def __init__(self, store: Path, spec: KVSpec, *, pruning: str, **options) -> None:
        super().__init__(store, spec, pruning=pruning, **options)
        self.pruning = pruning

    def boundary(self, chunk: int, ahead: int = 0) -> tuple[int, ...]:
        step = ChunkStep(
            chunk=chunk,
            start_frame=chunk * self.spec.frames_per_chunk,
            finished=chunk - 1 if chunk else None,
            poses=self.path[chunk],
            poses_ahead=self.path[chunk + 1 : chunk + 1 + ahead],
            finished_poses=self.path[chunk - 1] if chunk else None,
            predictions=predictions(chunk - 1) if chunk else None,
        )
        return self.memory.boundary(step, RingCache(self.layers, self.spec, self._lower))

    def kept(self, chunk: int) -> list[np.ndarray]:
        """Tokens that each layer of a stored chunk has."""
        spec, policy = self.spec, get_pruning(self.pruning)
        assert policy is not None
        keys = [made(spec, self.session, chunk, i)[0] for i in range(spec.layers)]
        folded = [k.permute(1, 0, 2, 3).flatten(1, 2) for k in keys]
        finished = FinishedChunk(chunk, spec.frames_per_chunk, folded, predictions(chunk))
        ids = [preference.ids() for preference in policy.prefer(finished) or ()]
        return ids * spec.layers if len(ids) == 1 else ids

    def check_window(self, chunk: int) -> None:
        spec, last = self.spec, self.memory.last
        at = spec.sink_frames * spec.tokens_per_frame
        end = chunk * spec.frames_per_chunk - self.base - spec.recent_frames
        for index, other in enumerate(last.retrieved):
            kept = self.kept(other)
            shift = end - (len(last.retrieved) - index) * spec.frames_per_chunk
            shift -= self.positions[other]
            rows = slice(at, at + len(kept[0]))
            for layer, cache in enumerate(self.layers):
                want = coded(
                    spec, self.codec, made(spec, self.session, other, layer), kept[layer], shift
                )
                assert torch.equal(cache["k"][:, rows], want[0]), (chunk, other, layer)
                assert torch.equal(cache["v"][:, rows], want[1]), (chunk, other, layer)
            at = rows.stop
        shown = spec.tokens_per_chunk * (chunk > spec.sink_chunks)  # the recent chunk
        if chunk >= spec.sink_chunks:
            assert int(self.layers[0]["local_end_index"]) == at + shown


def coded(spec: KVSpec, codec: str, kv: KV, ids: np.ndarray, shift: float) -> KV:
    """What must come back: rows chosen, then coded, then keys turned once."""
    k, v = (x.permute(1, 0, 2, 3).flatten(1, 2)[torch.from_numpy(ids)] for x in kv)
    shape = BlockShape(*k.shape)
    payload = np.empty(get_codec(codec).payload_size(shape), np.uint8)
    get_codec(codec).encode(k, v, payload)
    out = torch.empty_like(k), torch.empty_like(v)
    assert spec.rope is not None
    get_codec(codec).decode(payload, shape, *out, spec.rope.temporal_rotation(shift))
    folded = [x.unflatten(1, (spec.batch, spec.heads)).transpose(0, 1) for x in out]
    return folded[0], folded[1]


@pytest.mark.parametrize(
    ("pruning", "codec", "pool"),
    [
        ("worldkv:0.25", "int4", 8.3),
        ("decoprune", "int4", 11),
        ("decoprune", "bf16", 8.3),
        ("random/decoprune", "int3", 12),
    ],
)
def test_every_window_is_exact_through_all_tiers(
    tmp_path: Path, pruning: str, codec: str, pool: float
) -> None:
    spec = reference_spec(table=96)  # the base moves twice
    frontend = PrunedFrontend(
        tmp_path / "s", spec, chunks_in_dram=pool, codec=codec, pruning=pruning
    )
    with frontend.memory:
        for chunk in range(50):
            frontend.boundary(chunk)
            frontend.check_window(chunk)
            frontend.append(chunk)
            frontend.memory.settle()
        stats = frontend.memory.stats
        assert stats.bytes_read > 0 and stats.evictions > 0 and stats.fetched > 0
        assert not frontend.memory.status().problems
    sizes = {file.stat().st_size for file in (tmp_path / "s").rglob("*.0.0.0.0.0")}
    assert len(sizes) > 5 if pruning == "decoprune" else len(sizes) >= 2


def test_batch_items_keep_the_same_tokens(tmp_path: Path) -> None:
    frontend = PrunedFrontend(
        tmp_path / "s", reference_spec(batch=2), chunks_in_dram=9, pruning="worldkv"
    )
    with frontend.memory:
        frontend.run(range(6))
        frontend.boundary(6)
        frontend.check_window(6)


def test_what_was_kept_survives_reopening(tmp_path: Path) -> None:
    spec, options = reference_spec(), {"chunks_in_dram": 11, "pruning": "decoprune"}
    first = PrunedFrontend(tmp_path / "s", spec, **options)
    with first.memory:
        first.run(range(30))
    again = PrunedFrontend(tmp_path / "s", spec, on_miss="wait", **options)
    again.layers, again.positions = first.layers, first.positions
    with again.memory:
        for chunk in range(30, 40):
            assert len(again.boundary(chunk)) == 3
            again.check_window(chunk)
            again.append(chunk)


def test_the_pool_counts_bytes(tmp_path: Path) -> None:
    spec, pool = reference_spec(), 14.5
    spilled = {}
    for pruning in ("worldkv:1", "worldkv:0.25"):
        frontend = PrunedFrontend(tmp_path / pruning, spec, chunks_in_dram=pool, pruning=pruning)
        with frontend.memory:
            frontend.run(range(40))
            spilled[pruning] = frontend.memory.stats.spill_chunk
    whole, sink = chunk_bytes(spec, "int4"), chunk_bytes(spec, "bf16")
    half = ShardLayout.for_chunk(
        get_codec("int4"), [BlockShape(72, 2, 64)] * 4, spec.tokens_per_chunk
    ).nbytes
    assert half < 0.65 * whole
    for pruning, size in (("worldkv:1", whole), ("worldkv:0.25", half)):
        assert spilled[pruning] == 2 + (int(pool * whole) // 4096 * 4096 - sink) // size


def test_a_frontend_with_room_for_three_chunks_takes_six_pruned_ones(tmp_path: Path) -> None:
    spec = reference_spec(retrieve=6)
    frontend = PrunedFrontend(tmp_path / "s", spec, chunks_in_dram=20, pruning="worldkv:0.25")
    narrow = (2 + spec.sink_chunks + 3) * spec.tokens_per_chunk
    for cache in frontend.layers:
        cache["k"], cache["v"] = cache["k"][:, :narrow].clone(), cache["v"][:, :narrow].clone()
    with frontend.memory:
        for chunk in range(12):
            frontend.boundary(chunk)
            frontend.append(chunk)
            frontend.memory.settle()
        assert len(frontend.boundary(12)) == 6
        frontend.check_window(12)


def test_the_least_pool_is_that_of_pruned_chunks(tmp_path: Path) -> None:
    spec = reference_spec(retrieve=6)
    options = MemoryConfig(store=tmp_path / "s", dram=int(12 * chunk_bytes(spec, "int4")))
    with pytest.raises(BudgetError):
        WorldMemory(options, spec)
    WorldMemory(replace(options, pruning="worldkv:0.25"), spec).close()


def test_the_pruning_ratio_is_of_what_windows_show(tmp_path: Path) -> None:
    frontend = PrunedFrontend(
        tmp_path / "s", reference_spec(), chunks_in_dram=20, pruning="worldkv:0.25"
    )
    active = dense = 0
    with frontend.memory:
        for chunk in range(12):
            got = frontend.boundary(chunk)
            whole = min(chunk, 2)  # the sink and the recent chunk
            active += 144 * whole + 72 * len(got)
            dense += 144 * (whole + len(got))
            last = frontend.memory.last
            assert last.stored_tokens == (0 if chunk == 0 else 144 if chunk == 1 else 72)
            frontend.append(chunk)
        ratio = frontend.memory.status().pruning_ratio
    assert ratio == pytest.approx(1 - active / dense)
    assert 0.2 < ratio < 0.5


def test_a_window_of_two_recent_chunks_keeps_the_papers_schedule(tmp_path: Path) -> None:
    """A token's V is its id, so the cache itself says what is alive."""
    tokens = SCHEDULE["tokens_per_chunk"]
    spec = KVSpec(
        model="ids", layers=2, heads=1, head_dim=8, tokens_per_frame=tokens, frames_per_chunk=1,
        sink_frames=1, recent_frames=2, retrieve_frames=6, rope=RopeLayout.wan(8),
    )  # fmt: skip
    early = torch.tensor(SCHEDULE["scores_each_chunk"]).sqrt().view(2, 2)
    early = early.repeat_interleave(2, 0).repeat_interleave(2, 1)[None, None]
    seen = CleanPredictions(early, torch.zeros_like(early))
    layers = [
        {
            "k": torch.zeros(1, 40, 1, 8, dtype=spec.dtype),
            "v": torch.zeros(1, 40, 1, 8, dtype=spec.dtype),
            "global_end_index": torch.zeros(1, dtype=torch.long),
            "local_end_index": torch.zeros(1, dtype=torch.long),
        }
        for _ in range(2)
    ]
    config = MemoryConfig(
        store=tmp_path / "s", dram=2**20, codec="bf16", retrieval="recent", pruning="decoprune"
    )
    with WorldMemory(config, spec) as memory:
        rows = SCHEDULE["rows"]
        for chunk in range(len(rows) + 1):
            finished = chunk - 1 if chunk else None
            step = ChunkStep(chunk, chunk, finished, predictions=seen)
            memory.boundary(step, RingCache(layers, spec, lambda frames: None))
            end = int(layers[0]["local_end_index"])
            if chunk:
                for cache in layers:
                    alive = cache["v"][0, :end, 0, 0].int().tolist()
                    assert alive == rows[chunk - 1]["live_ids_after_clean"]
            for cache in layers:
                ids = torch.arange(chunk * tokens, (chunk + 1) * tokens)
                cache["k"][0, end : end + tokens] = 1
                cache["v"][0, end : end + tokens] = ids[:, None, None].to(spec.dtype)
                cache["local_end_index"] += tokens


def test_missing_or_foreign_predictions_are_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    spec = reference_spec()
    frontend = PrunedFrontend(tmp_path / "s", spec, chunks_in_dram=12, pruning="decoprune")
    with frontend.memory:
        frontend.run(range(4))
        commits = frontend.memory.stats.commits
        step = ChunkStep(4, 12, 3, poses=frontend.path[4])
        cache = RingCache(frontend.layers, spec, lambda frames: None)
        with pytest.raises(ConfigError, match="needs the clean predictions of chunk 3"):
            frontend.memory.boundary(step, cache)
        wrong = CleanPredictions(*torch.zeros(2, 2, 3, 12, 12))
        with pytest.raises(ConfigError, match="not those of a chunk of 3 frames of 48"):
            frontend.memory.boundary(replace(step, predictions=wrong), cache)
        assert frontend.memory.stats.commits == commits
        frontend.boundary(4)
        frontend.check_window(4)


def test_a_value_that_is_not_finite_does_not_hide_behind_pruning(tmp_path: Path) -> None:
    frontend = PrunedFrontend(
        tmp_path / "s", reference_spec(), chunks_in_dram=12, pruning="worldkv:0"
    )
    with frontend.memory:
        frontend.run(range(4))
        end = int(frontend.layers[1]["local_end_index"])
        frontend.layers[1]["k"][0, end - 1, 0, 0] = math.nan
        frontend.boundary(4)
        assert frontend.memory.rejected == {"non-finite": 1}


def test_a_probe_keeps_the_probe_step_and_the_last_one() -> None:
    probe = CleanProbe(cell=(1, 1), probe_step=1)
    for step in range(3):
        probe(step, torch.full((1, 1, 1, 1), float(step)))
    taken = probe.take()
    assert taken is not None
    assert (taken.probe.item(), taken.final.item()) == (1, 2)
    assert probe.take() is None, "each chunk's are handed out once"
    probe(0, torch.zeros(1, 1, 1, 1))
    assert probe.take() is None, "a chunk that never came to the probe step has none"

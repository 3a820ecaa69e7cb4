"""The built-in model attends to stored blocks as they are: the same world, nothing decoded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from worldpager.errors import CodecError, ConfigError
from worldpager.model_adapter.attention.segments import DenseKV
from worldpager.model_adapter.builtin import RolloutPipeline, load_model
from worldpager.model_adapter.frontend import FrontendCache, PagedCache
from worldpager.model_adapter.images import StoredImage
from worldpager.model_adapter.memory import WorldMemory
from worldpager.model_adapter.ring_cache import PagedRingCache, RingCache
from worldpager.model_adapter.rollout import MemoryHook, RolloutConfig, builtin_spec, run_rollout
from worldpager.prefetch.paths import make_path

CHUNKS = 9


def config(folder: Path, **changes: object) -> RolloutConfig:
    """A turn back and forth, so that later chunks retrieve; what is retrieved is waited for."""
    path = make_path("yaw-return", CHUNKS, 3, 0)
    base = RolloutConfig(
        chunks=CHUNKS, path=path, dram_bytes=2 << 20, store_dir=folder / "store", out_dir=folder,
        on_miss="wait",
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def film(folder: Path, **changes: object) -> torch.Tensor:
    """The frames of a rollout, uint8 as float."""
    folder.mkdir()
    retrieved = [m.retrieved for m in run_rollout(config(folder, **changes))]
    assert any(retrieved) == (changes.get("retrieve") != 0)
    raw = (folder / "frames.bin").read_bytes()
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).float()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return film(tmp_path_factory.mktemp("dense") / "run")


@pytest.fixture(scope="module")
def noticeable(dense: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Mean square by which the same rollout differs where nothing is retrieved."""
    without = film(tmp_path_factory.mktemp("without") / "run", retrieve=0)
    return float((without - dense).square().mean())


def test_stored_blocks_give_the_frames_of_decoded_ones(
    tmp_path: Path, dense: torch.Tensor, noticeable: float
) -> None:
    """Decoded slots are rounded to bf16, and that difference is all there is."""
    direct = film(tmp_path / "direct", attention="int4")
    assert float((direct - dense).square().mean()) < 0.02 * noticeable


def test_sparse_attention_to_all_the_mass_is_dense(
    tmp_path: Path, dense: torch.Tensor, noticeable: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worldpager.model_adapter.rollout.SPARSE_MASS", 1.0)
    everything = film(tmp_path / "all", attention="sparse")
    assert float((everything - dense).square().mean()) < 0.02 * noticeable


def test_an_attached_window_is_what_slots_would_hold(tmp_path: Path) -> None:
    """Both kinds of cache after the same chunks: the same keys and values at the same positions.

    In the first layer, whose keys and values do not depend on what was attended to before.
    """
    model, settings = load_model(), config(tmp_path)
    spec = builtin_spec(model.config, 3, "test")
    caches: dict[type[RingCache], list] = {}
    for kind in (RingCache, PagedRingCache):
        store = replace(settings.memory(), store=tmp_path / kind.__name__)
        with WorldMemory(store, spec) as memory:
            pipeline = RolloutPipeline(
                model, 0, before_chunk=MemoryHook(memory, settings.path, cache=kind)
            )
            for chunk in range(CHUNKS - 1):
                frames = torch.full((3, 32, 32, 3), chunk / CHUNKS)
                pipeline.observe(chunk, settings.path[chunk], frames)
            pipeline.before_chunk(CHUNKS - 1, pipeline)  # type: ignore[misc]
            tokens = spec.tokens_per_chunk
            if kind is RingCache:
                end = int(pipeline.kv_cache[0]["local_end_index"])
                assert end == 5 * tokens
                rows = slice(tokens, 4 * tokens)
                caches[kind] = [pipeline.kv_cache[0][n][:, rows].clone() for n in ("k", "v")]
            else:
                assert int(pipeline.kv_cache[0]["local_end_index"]) == 2 * tokens
                blocks = pipeline.kv_cache[0]["memory"]
                assert memory.last.decode_ms == 0 and len(blocks) == len(memory.last.retrieved) == 3
                pairs = [block.decode(1, torch.bfloat16) for block in blocks]
                caches[kind] = [torch.cat([pair[i] for pair in pairs], 1) for i in range(2)]
    for ours, theirs in zip(caches[PagedRingCache], caches[RingCache], strict=True):
        assert torch.equal(ours, theirs) and ours.any()


def test_a_cache_chooses_by_what_it_offers() -> None:
    assert issubclass(PagedRingCache, RingCache)
    spec = builtin_spec(load_model().config, 3, "test")
    layers = load_model().new_cache(1, 6 * 48)
    plain: FrontendCache = RingCache(layers, spec, lambda frames: None)
    assert not isinstance(plain, PagedCache)
    assert isinstance(PagedRingCache(layers, spec, lambda frames: None), PagedCache)


def test_keys_without_a_rope_layout_cannot_be_moved(tmp_path: Path) -> None:
    spec = replace(builtin_spec(load_model().config, 3, "test"), rope=None)
    image = StoredImage.__new__(StoredImage)
    image._spec = spec
    with pytest.raises(CodecError, match="rope"):
        image.undecoded([3.0])


@pytest.mark.parametrize("wrong", [{"attention": "flash"}, {"attention": "int4", "codec": "bf16"}])
def test_combinations_that_cannot_work_are_refused(tmp_path: Path, wrong: dict) -> None:
    with pytest.raises(ConfigError, match="attention"):
        config(tmp_path, **wrong)
    assert not list(tmp_path.iterdir())


def test_dense_segments_are_views() -> None:
    k, v = torch.zeros(2, 1, 4, 2, 16)
    segment = DenseKV(k, v)
    assert segment.k.data_ptr() == k.data_ptr() and segment.v.data_ptr() == v.data_ptr()

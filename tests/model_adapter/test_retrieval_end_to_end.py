"""Retrieval through the whole memory: pages, keys, prompts, controls, restarts, replays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.model_adapter.synthetic import SyntheticFrontend, made, reference_spec, stored
from worldpager.errors import ConfigError
from worldpager.model_adapter.frontend import ChunkStep
from worldpager.model_adapter.images import StoredImage
from worldpager.model_adapter.ring_cache import RingCache
from worldpager.prefetch.distance import camera_distances
from worldpager.prefetch.poses import place_of
from worldpager.prefetch.retrieval import get_policy
from worldpager.prefetch.retriever import Retriever

PAGES = 3


class Frontend(SyntheticFrontend):
    """A frontend that says more in its steps; ``extra`` goes into each."""

    def step(self, chunk: int, **extra: object) -> ChunkStep:
        return ChunkStep(
            chunk=chunk,
            start_frame=3 * chunk,
            finished=chunk - 1 if chunk else None,
            poses=self.path[chunk],
            **extra,  # type: ignore[arg-type]
        )

    def go(self, chunk: int, **extra: object) -> tuple[int, ...]:
        cache = RingCache(self.layers, self.spec, self._lower)
        step = self.step(chunk)
        return self.memory.boundary(replace(step, **extra), cache)  # type: ignore[arg-type]

    def check_pages(self, chunk: int) -> None:
        """The window of ``chunk`` holds exactly the pages that it says, bit for bit."""
        spec, got = self.spec, self.memory.last.retrieved
        assert list(got) == sorted(set(got))
        end = 3 * chunk - self.base - spec.recent_frames
        for slot, unit in enumerate(got):
            other, page = divmod(unit, PAGES)
            assert 0 < other < chunk
            rows = slice(48 * page, 48 * page + 48)
            start = spec.sink_frames * 48 + slot * 48
            moved = end - (len(got) - slot) - (self.positions[other] + page)
            for layer, cache in enumerate(self.layers):
                k, v = made(spec, self.session, other, layer)
                page_spec = replace(spec, frames_per_chunk=1)
                want = stored(page_spec, self.codec, (k[:, rows], v[:, rows]), moved)
                assert torch.equal(cache["k"][:, start : start + 48], want[0]), (chunk, unit)
                assert torch.equal(cache["v"][:, start : start + 48], want[1]), (chunk, unit)


def query_at(spec, chunk: int, page: int, session: str = "session") -> np.ndarray:
    """A query that points at one page: its own mean key in layer 0, with the rotation removed.

    The synthetic keys are noise, so no other page is near it.
    """
    k = made(spec, session, chunk, 0)[0][:, 48 * page : 48 * page + 48].float()
    rotation = spec.rope.temporal_rotation(-(3 * chunk + page))
    mean = k.mean(1, keepdim=True)
    if rotation is not None:
        rotation.apply_(mean)
    return mean.flatten().numpy()


# ---- pages -----------------------------------------------------------------------------------


def test_by_page_only_the_chosen_pages_are_read_decoded_and_placed(tmp_path: Path) -> None:
    spec = reference_spec(retrieve=1)
    frontend = Frontend(
        tmp_path / "s", spec, chunks_in_dram=5, retrieval="query", page_frames=1, on_miss="wait",
        prefetch=False,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    with frontend.memory as memory:
        for chunk in range(30):
            target = int(rng.integers(1, max(2, chunk - 2)))
            query = query_at(spec, target, chunk % PAGES)
            got = frontend.go(chunk, query=query)
            if chunk > 4:
                assert target * PAGES + chunk % PAGES in got and len(got) == 3
            frontend.check_pages(chunk)
            frontend.append(chunk)
        stats = memory.stats
        page_file = next((tmp_path / "s").rglob("kv/30.0.0.0.0.0")).stat().st_size
        assert stats.reads > 20 and stats.bytes_read == stats.reads * page_file
        assert stats.commits == 29 * PAGES


def test_a_camera_chooses_pages_by_where_their_own_frames_were_seen(tmp_path: Path) -> None:
    spec, parted = reference_spec(2), 0
    frontend = Frontend(tmp_path / "s", spec, chunks_in_dram=10, page_frames=1, on_miss="wait")
    frames = frontend.path.reshape(-1, 1, 4, 4)
    with frontend.memory as memory:
        for chunk in range(45):
            got = frontend.go(chunk)
            seen = np.arange(3, 3 * max(1, chunk - 1))  # neither sink nor recent
            distance = camera_distances(place_of(frames[seen]), place_of(frontend.path[chunk]))
            best = seen[np.lexsort((seen, distance))[:6]]
            assert got == tuple(sorted(best.tolist()))
            parted += len({page // 3 for page in got}) > 2
            frontend.check_pages(chunk)
            frontend.append(chunk)
            memory.settle()
        assert memory.stats.bytes_read > 0
    assert parted > 5, "sets of pages are not sets of chunks"


def test_pages_cross_the_horizon_and_survive_a_restart(tmp_path: Path) -> None:
    spec = reference_spec(retrieve=1, table=48)
    first = Frontend(tmp_path / "s", spec, chunks_in_dram=8, page_frames=1, on_miss="wait")
    with first.memory:
        for chunk in range(30):
            first.go(chunk)
            first.check_pages(chunk)
            first.append(chunk)
        assert first.base > 0
    second = Frontend(tmp_path / "s", spec, chunks_in_dram=8, page_frames=1, on_miss="wait")
    with second.memory:
        second.positions, second.layers, second.base = first.positions, first.layers, first.base
        second.memory._base = first.base
        assert len(second.go(30, finished_poses=first.path[29])) == 3
        second.check_pages(30)


def test_pages_that_do_not_divide_a_chunk_are_refused(tmp_path: Path) -> None:
    for bad in (0, 2, 4, -1):
        with pytest.raises(ConfigError, match="do not divide"):
            Frontend(tmp_path / "s", reference_spec(), chunks_in_dram=12, page_frames=bad)


def test_a_store_of_pages_is_not_one_of_chunks(tmp_path: Path) -> None:
    with Frontend(tmp_path / "s", reference_spec(), chunks_in_dram=12, page_frames=1).memory:
        pass
    with pytest.raises(Exception, match="tokens"):
        Frontend(tmp_path / "s", reference_spec(), chunks_in_dram=12)


# ---- keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retrieval", "page_frames"),
    [("query", None), ("query", 1), ("bound", 1), ("attention", None), ("prompt:stage1=9", 1)],
)
def test_a_restart_changes_no_choice(
    tmp_path: Path, retrieval: str, page_frames: int | None
) -> None:
    spec = reference_spec(retrieve=1)
    options = {"retrieval": retrieval, "page_frames": page_frames, "on_miss": "wait"}
    straight = Frontend(tmp_path / "a", spec, chunks_in_dram=10, **options)
    broken = Frontend(tmp_path / "b", spec, chunks_in_dram=10, **options)
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((60, 128)).astype(np.float32)
    with straight.memory:
        for frontend in (straight, broken):
            for chunk in range(12):
                frontend.go(chunk, query=queries[chunk])
                frontend.append(chunk)
        broken.memory.close()
        again = Frontend(tmp_path / "b", spec, chunks_in_dram=10, **options)
        with again.memory:
            again.layers = broken.layers
            for chunk in range(12, 18):
                extra = {"query": queries[chunk], "finished_poses": broken.path[chunk - 1]}
                assert again.go(chunk, **extra) == straight.go(chunk, **extra), chunk
                again.append(chunk)
                straight.append(chunk)


def test_without_a_query_retrieval_by_keys_is_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    frontend = Frontend(tmp_path / "s", reference_spec(), chunks_in_dram=12, retrieval="query")
    with frontend.memory as memory:
        assert memory.wants_query
        frontend.go(0, query=np.ones(128, np.float32))
        frontend.append(0)
        with pytest.raises(ConfigError, match=r"give ChunkStep\.query"):
            frontend.go(1)
        assert memory.stats.commits == 0


def test_a_prediction_of_the_next_query_has_its_pages_ready(tmp_path: Path) -> None:
    spec = reference_spec(retrieve=1)
    frontend = Frontend(tmp_path / "s", spec, chunks_in_dram=8, retrieval="query")
    rng = np.random.default_rng(0)
    targets = [int(rng.integers(1, max(2, chunk - 2))) for chunk in range(42)]
    queries = [query_at(spec, target, 1) for target in targets]
    with frontend.memory as memory:
        for chunk in range(40):
            ahead = queries[chunk + 1 : chunk + 3]
            frontend.go(chunk, query=queries[chunk], queries_ahead=ahead)
            assert not memory.last.stale, chunk
            frontend.append(chunk)
            memory.settle()
        assert memory.stats.fetched > 15


# ---- prompts ---------------------------------------------------------------------------------

CASTLE, BEACH, RUIN = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [[0.9, 0.1, 0.0], [0.9, -0.1, 0.1]]


def test_a_prompt_switch_archives_everything_and_installs_what_its_kin_left(tmp_path: Path) -> None:
    spec = reference_spec(retrieve=1)
    frontend = Frontend(
        tmp_path / "s", spec, chunks_in_dram=8, retrieval="prompt", on_miss="wait", page_frames=1
    )
    rng = np.random.default_rng(0)
    with frontend.memory as memory:
        assert memory.switch_prompt(CASTLE) == 0, "nothing was made yet: this is the first prompt"
        for chunk in range(30):
            if chunk == 10:
                assert memory.switch_prompt(BEACH) == 1
            if chunk == 20:
                assert memory.switch_prompt() == 2
                assert memory.switch_prompt(RUIN) == 2, "said twice before a chunk, switched once"
            before = memory.last.epoch
            got = frontend.go(chunk, query=rng.standard_normal(128).astype(np.float32))
            frontend.check_pages(chunk)
            if chunk in (10, 20):
                assert memory.last.epoch == before + 1
            if chunk == 20:
                assert {unit // 3 for unit in got} <= set(range(1, 10)), (
                    "the castle's, not the beach's"
                )
                assert len(got) == 3
            frontend.append(chunk)
        assert memory.stats.commits == 29 * 3, "each chunk once, nothing again under a newer prompt"
        records = {}
        memory.flush()
        for stored_chunk in memory._session.rollout.store.contents():
            records[stored_chunk.chunk] = stored_chunk.record.epoch
    assert set(records) == set(range(29 * 3)), "the whole history, not only windows at switches"
    assert all(epoch == unit // 30 for unit, epoch in records.items())


def test_prompts_survive_a_restart(tmp_path: Path) -> None:
    spec = reference_spec(retrieve=1)
    options = {"retrieval": "prompt", "on_miss": "wait"}
    first = Frontend(tmp_path / "s", spec, chunks_in_dram=8, **options)
    with first.memory:
        for chunk in range(20):
            if chunk in (0, 10):
                first.memory.switch_prompt(CASTLE if chunk == 0 else BEACH)
            first.go(chunk)
            first.append(chunk)
    second = Frontend(tmp_path / "s", spec, chunks_in_dram=8, **options)
    with second.memory as memory:
        second.layers = first.layers
        assert memory.switch_prompt(RUIN) == 2
        assert second.go(20, finished_poses=first.path[19]) == (9,), "the castle's newest"


def test_a_switch_loads_what_the_new_prompt_may_want_before_its_query_is_known(
    tmp_path: Path,
) -> None:
    spec = reference_spec(retrieve=1)
    frontend = Frontend(tmp_path / "s", spec, chunks_in_dram=8, retrieval="prompt")
    with frontend.memory as memory:
        memory.switch_prompt(CASTLE)
        for chunk in range(40):
            if chunk == 10:
                memory.switch_prompt(BEACH)
            frontend.go(chunk)
            frontend.append(chunk)
            memory.settle()
        reads = memory.stats.reads
        memory.switch_prompt(RUIN)
        memory.settle()
        assert memory.stats.reads > reads
        # the newest castle page is among what was loaded, and it is what the query wants
        assert frontend.go(40, query=query_at(spec, 9, 0)) == (9,)
        assert not memory.last.stale


def test_the_sink_and_the_recent_chunk_stay_through_a_switch(tmp_path: Path) -> None:
    """WorldAttention's install zeroes the whole cache, sink included."""
    spec = reference_spec(retrieve=1)
    frontend = Frontend(tmp_path / "s", spec, chunks_in_dram=8, retrieval="prompt", on_miss="wait")
    with frontend.memory as memory:
        for chunk in range(12):
            frontend.go(chunk)
            frontend.append(chunk)
        memory.switch_prompt(BEACH)
        frontend.go(12)
        for layer, cache in enumerate(frontend.layers):
            sink, _ = made(spec, "session", 0, layer)
            recent, _ = made(spec, "session", 11, layer)
            assert torch.equal(cache["k"][:, :144], sink)
            assert torch.equal(cache["k"][:, 288:432], recent)


def test_chunks_of_another_prompt_can_be_left_out(tmp_path: Path) -> None:
    frontend = Frontend(
        tmp_path / "s", reference_spec(), chunks_in_dram=12, retrieval="camera:other_prompt=inf",
        on_miss="wait",
    )  # fmt: skip
    with frontend.memory as memory:
        for chunk in range(30):
            if chunk == 15:
                memory.switch_prompt()
            got = frontend.go(chunk)
            assert all((other >= 15) == (chunk >= 15) for other in got)
            frontend.append(chunk)
        assert len(got) == 3


def test_a_prompt_that_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    frontend = Frontend(tmp_path / "s", reference_spec(), chunks_in_dram=12, retrieval="prompt")
    with frontend.memory as memory:
        for bad in ([0.0, 0.0], [np.nan], 3.0):
            with pytest.raises(ConfigError, match="embedding"):
                memory.switch_prompt(bad)
        assert frontend.go(0) == () and memory.last.epoch == 0


# ---- a chunk committed again ---------------------------------------------------------------------


def test_a_rewritten_chunk_comes_back_new_from_disk(tmp_path: Path) -> None:
    """WorldAttention's tier keeps the stale backup of an id that is put again."""
    spec, options = reference_spec(retrieve=1), {"on_miss": "wait", "retrieval": "recent"}
    first = Frontend(tmp_path / "s", spec, chunks_in_dram=8, **options)
    with first.memory:
        first.run(range(8))
    second = Frontend(tmp_path / "s", spec, chunks_in_dram=8, **options)
    with second.memory:
        second.layers = first.layers
        for cache in second.layers:
            cache["local_end_index"].fill_(288)
        second.append(5, version=1)  # taken up again before chunk 5, which turns out otherwise
        second.go(6, finished_poses=first.path[5])
        second.memory.flush()
    third = Frontend(tmp_path / "s", spec, chunks_in_dram=8, **options)
    with third.memory as memory:
        stream = memory._session.rollout.stream
        (found,) = memory._session.pager.acquire(stream, 9, (5,), (5,)).chunks
        third.layers[0]["local_end_index"].fill_(0)
        cache = RingCache(third.layers, spec, third._lower)
        cache.open([144])
        StoredImage(found.image, spec).decode(cache, 0, [0.0])
        want = stored(spec, "int4", made(spec, "session", 5, 2, version=1), 0)
        assert torch.equal(cache.slot(2, 0)[1], want[1])


# ---- controls --------------------------------------------------------------------------------

KEYS = {"forward": (1, 0, 0, 0), "back": (0, 1, 0, 0), "still": (0, 0, 0, 0)}


def held(key: str, yaw: float = 0.0) -> dict[str, object]:
    return {"keyboard": np.tile(KEYS[key], (12, 1)), "mouse": np.tile((0.0, yaw), (12, 1))}


def test_a_model_without_cameras_finds_its_way_back_by_its_controls(tmp_path: Path) -> None:
    frontend = Frontend(
        tmp_path / "s", reference_spec(), chunks_in_dram=12, retrieval="action", on_miss="wait"
    )
    turns = [0.1] * 12 + [-0.1] * 12
    with frontend.memory:
        for chunk in range(24):
            got = frontend.go(chunk, poses=None, control=held("still", turns[chunk]))
            frontend.check_window(chunk)
            if 15 <= chunk < 23:
                assert 23 - chunk in got, "the same turn was seen on the way out"
            frontend.append(chunk)


def test_the_walker_goes_on_where_it_stood_after_a_restart(tmp_path: Path) -> None:
    options = {"retrieval": "action", "on_miss": "wait"}
    spec = reference_spec()
    straight = Frontend(tmp_path / "a", spec, chunks_in_dram=12, **options)
    broken = Frontend(tmp_path / "b", spec, chunks_in_dram=12, **options)
    rng = np.random.default_rng(1)
    moves = [
        held(str(rng.choice(list(KEYS))), float(rng.choice((-0.1, 0, 0.1)))) for _ in range(50)
    ]
    with straight.memory:
        for frontend in (straight, broken):
            for chunk in range(14):
                frontend.go(chunk, poses=None, control=moves[chunk])
                frontend.append(chunk)
        last = broken.memory._step
        broken.memory.close()
        again = Frontend(tmp_path / "b", spec, chunks_in_dram=12, **options)
        with again.memory:
            again.layers = broken.layers
            start = {"start": broken.memory._recollection._walker.pose}  # type: ignore[union-attr]
            for chunk in range(14, 22):
                control = moves[chunk] | (start if chunk == 14 else {})
                extra = {"finished_poses": last.poses} if chunk == 14 and last else {}
                got = again.go(chunk, poses=None, control=control, **extra)
                assert got == straight.go(chunk, poses=None, control=moves[chunk]), chunk
                again.append(chunk)
                straight.append(chunk)


def test_controls_that_cannot_be_walked_are_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    frontend = Frontend(tmp_path / "s", reference_spec(), chunks_in_dram=12, retrieval="action")
    with frontend.memory as memory:
        frontend.go(0, poses=None, control=held("still"))
        frontend.append(0)
        for bad, why in (({}, "keyboard"), ({"keyboard": np.zeros((8, 4))}, "make 2 latent")):
            with pytest.raises(ConfigError, match=why):
                frontend.go(1, poses=None, control=bad)
        assert memory.stats.commits == 0
        frontend.go(1, poses=None, control=held("still"))


# ---- replay ----------------------------------------------------------------------------------


def test_the_same_log_gives_the_same_choices(tmp_path: Path) -> None:
    """With the bonus a choice depends on what is resident, and so on timing; the log has both."""
    retrieval = "camera:prefer_resident=true"
    frontend = Frontend(
        tmp_path / "s", reference_spec(), chunks_in_dram=12, retrieval=retrieval, path="walk",
        read_limit=2_000_000, on_miss="nearest", chunks=100,
    )  # fmt: skip
    log = []
    with frontend.memory as memory:
        for chunk in range(100):
            frontend.go(chunk)
            frontend.append(chunk)
            log.append((memory.last.preferred, memory.last.wanted))
    assert any(preferred for preferred, _ in log)
    for text in (retrieval, "camera"):
        lines = iter(log)
        replayed = Retriever(
            get_policy(text), k=3, sink=1, recent=1, resident=lambda rest=lines: next(rest)[0]
        )
        choices = []
        for chunk, poses in enumerate(frontend.path[:100]):
            if chunk:
                record = frontend.memory._recollection.retriever.index.place(chunk - 1)
                replayed.note(chunk - 1, record)
            choices.append(replayed.choose(chunk, poses)[0])
        same = choices == [wanted for _, wanted in log]
        assert same == (text == retrieval), "the bonus must have changed something"

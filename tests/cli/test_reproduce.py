"""``worldpager reproduce``: the published figures, simulated; the measured side in miniature."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from worldpager.cli.frontends import kv_spec
from worldpager.cli.reproduce import NAMES, experiment, save
from worldpager.cli.reproduction import held_out
from worldpager.cli.reproduction.base import (
    Case,
    Lab,
    Reproduction,
    Row,
    Value,
    last,
    there_and_back,
)
from worldpager.cli.reproduction.synchronous import SynchronousMemory
from worldpager.model_adapter.driving import path_step
from worldpager.model_adapter.synthetic import SyntheticFrontend
from worldpager.prefetch.paths import first_visit
from worldpager.sim.predictions import read_prediction

Command = Callable[..., tuple[int, str, str]]
SCALE = Fraction(1, 6000)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(True, False, SCALE, 1e-3, tmp_path / "out", lambda line: None)


def small(**options: object) -> Case:
    case = Case(40, 12 * Case(1, 1).stored)
    return replace(case, **options)  # type: ignore[arg-type]


def simulated(made: Reproduction) -> dict[str, Value]:
    return {row.what: row.simulated for row in made.rows}


def test_designs_stop_where_published(lab: Lab) -> None:
    for row in experiment("stops")(lab).rows:
        assert row.simulated == (492 if row.what == "DRAM int4, 64 GiB" else row.paper)


def test_lingbot_reads_and_writes_within_a_chunk_of_the_paper(lab: Lab) -> None:
    rows = experiment("lingbot")(lab).rows
    compared = [r for r in rows if r.unit == "chunk" and r.paper is not None]
    assert len(compared) == 6
    for row in compared:
        assert isinstance(row.simulated, int)
        assert isinstance(row.paper, int)
        slack = 0 if "write" in row.what else 1
        assert abs(row.simulated - row.paper) <= slack, row.what
    waits = [r.simulated for r in rows if "World" in r.what and "wait" in r.what]
    assert set(waits) == {0.0}


def test_the_sata_class_meets_its_criteria(lab: Lab) -> None:
    assert simulated(experiment("sata")(lab))["criteria met"] == "10/10"


def test_stalls_follow_the_published_pattern(lab: Lab) -> None:
    made = experiment("bandwidth")(lab)
    found = simulated(made)
    for rate in ("250MB/s", "500MB/s", "1GB/s", "2GB/s", "5GB/s"):
        for figure in ("median", "P99"):
            assert found[f"{rate}, prefetched, waits: {figure} stall"] == 0
        assert found[f"{rate}, prefetched, never waits: stale windows"] == 0
        assert found[f"{rate}, on demand: median stall"] > 0  # type: ignore[operator]
    assert found["100MB/s, prefetched, waits: median stall"] == pytest.approx(82, abs=1)
    lines = {line.label: line for line in made.charts[0].series}
    for design in ("prefetched, waits", "on demand"):
        said, seen = (lines[f"{design}: {how}"].y for how in ("predicted", "simulated"))
        assert seen[:-1] == pytest.approx(said[:-1], rel=0.01, abs=0.1)
        # at 5 GB/s the published disk, not the limit, decides
        assert seen[-1] >= said[-1]


def test_write_back_hides_what_synchronous_eviction_shows(lab: Lab) -> None:
    rows = [row for row in experiment("write-back")(lab).rows if row.unit == "ms"]
    assert len(rows) == 6
    for row in rows:
        if row.what.startswith("background"):
            assert row.simulated == 0
        else:
            assert row.simulated == pytest.approx(row.paper, abs=0.1)


def test_costs_and_session_are_those_of_the_paper(lab: Lab) -> None:
    costs = simulated(experiment("costs")(lab))
    assert costs["synchronous, DRAM bf16: stall, median"] == pytest.approx(58.2, rel=0.02)
    assert costs["synchronous, DRAM int4: stall, median"] == pytest.approx(15.8, rel=0.02)
    assert costs["tiers int4: stall, P99"] == 0
    session = simulated(experiment("session")(lab))
    assert session["chunks reached"] == 3000
    assert session["of video"] == 37.5
    assert session["stale windows"] == session["stall, P99"] == 0


def test_the_path_returns_over_places_it_saw_once() -> None:
    for chunks in (37, 256, 2000):
        path = there_and_back(chunks, 3)
        assert path.shape == (chunks, 3, 4, 4)
        first, half = first_visit(path, 0), -(-chunks // 2)
        assert (first[:half] == -1).all()
        back = np.arange(half, chunks)
        assert first[half:].tolist() == (2 * half - 1 - back).tolist()


# ---- the measured side -----------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["int4", "bf16"])
@pytest.mark.parametrize("model", ["matrix-game-2", "lingbot-world-1.3b"])
def test_a_scaled_run_spills_where_the_published_one_does(model: str, codec: str, lab: Lab) -> None:
    stored = Case(1, 1, model=model, codec=codec).stored
    case = Case(20, 13 * stored + stored // 2, model=model, codec=codec)
    measured, said = lab.measure(case, "test"), lab.simulate(case)
    assert last(measured, "spill_chunk") == last(said, "spill_chunk") == 14
    assert list(lab.folder.iterdir()) == []


def test_bandwidths_and_times_scale_together(lab: Lab) -> None:
    case = small(on_miss="wait", prefetch=False, read_bandwidth=0.5e9)
    said, ahead = lab.simulate(case), lab.foresee(case)
    waited = said["stall_ms"].max()
    assert waited == pytest.approx(1e3 * case.stored / 0.5e9, rel=0.01)
    assert ahead["stall_ms"].max() == pytest.approx(waited, rel=0.02)
    assert ahead["chunk_reads_total"][-1] == said["chunk_reads_total"][-1] > 0


def test_predictions_are_registered_before_their_runs(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(held_out, "_cases", lambda: [("a 0.5 GB/s", small(read_bandwidth=5e8))])
    run = Lab.run

    def spied(self: Lab, case: Case, label: str) -> object:
        order.extend(p.name for p in self.folder.rglob("*.json"))
        return run(self, case, label)

    monkeypatch.setattr(Lab, "run", spied)
    made = held_out.reproduce(replace(lab, measured=True))
    assert order == ["a-0.5-GB-per-s.json"]
    (file,) = lab.folder.rglob("*.json")
    assert read_prediction(file).inputs.model == f"matrix-game-2@{SCALE}"
    found = {row.what: row.measured for row in made.rows}
    assert found["spill chunk exact"] == "1/1"
    assert str(found["spill point and first read within 1 chunk"]).endswith("/2")


def test_the_synchronous_memory_keeps_what_it_was_given(lab: Lab, tmp_path: Path) -> None:
    case = lab.smaller(small(codec="bf16"))
    spec = kv_spec(case.geometry, 3)
    frontend = SyntheticFrontend(spec)
    tokens, waits, made = spec.tokens_per_chunk, [], []
    memory = SynchronousMemory(spec, "bf16", tmp_path / "s", 10 * case.stored, None, None)
    with closing(memory):
        for chunk in range(case.chunks):
            waits.append(memory.boundary(path_step(spec, case.path, chunk), frontend.cache))
            window = frontend.kv_cache[0]["v"]
            for index in range(min(3, max(0, chunk - 1))):
                held = window[0, index * tokens : (index + 1) * tokens]
                assert sum(torch.equal(held, v) for v in made) == 1
            frontend.generate(chunk)
            end = int(frontend.kv_cache[0]["local_end_index"])
            made.append(window[0, end - tokens : end].clone())
    assert waits[:11] == [0.0] * 11
    assert all(wait > 0 for wait in waits[11:20])


# ---- the command -----------------------------------------------------------------------------


def test_the_list_names_everything(worldpager: Command) -> None:
    status, printed, _ = worldpager("reproduce", "list")
    assert status == 0
    assert [line.split()[0] for line in printed.splitlines()] == list(NAMES)
    for name in NAMES:
        assert callable(experiment(name))


def test_a_reproduction_leaves_data_table_and_figure(worldpager: Command, tmp_path: Path) -> None:
    status, printed, _ = worldpager("reproduce", "stops", "--simulated", "--out", tmp_path)
    assert status == 0
    assert "DRAM int4, 32 GiB" in printed
    made = Reproduction.model_validate_json((tmp_path / "stops.json").read_text())
    assert {row.simulated for row in made.rows} >= {21, 60, 226, 492, 341}
    assert "| DRAM int4, 32 GiB | chunk | 226 | 226 |  |" in (tmp_path / "stops.md").read_text()
    assert (tmp_path / "stops.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in tmp_path.iterdir()} == {"stops.json", "stops.md", "stops.png"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["everything"], ["everything", "write-back"]),
        (["stops", "--scale", "big"], ["big", "1/30"]),
        (["stops", "--scale", "2"], ["2"]),
        (["stops", "--chunk-time", "0"], ["--chunk-time"]),
    ],
)
def test_a_bad_option_is_one_clear_line(
    options: list[str], words: list[str], worldpager: Command, tmp_path: Path
) -> None:
    status, printed, message = worldpager("reproduce", *options, "--out", tmp_path / "out")
    assert status == 2
    assert not printed
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message
    assert not (tmp_path / "out").exists()


def test_rows_without_numbers_can_be_drawn(tmp_path: Path) -> None:
    made = Reproduction(
        name="none", title="Nothing", source="-", settings={}, rows=[Row(what="a", paper="b")]
    )
    save(made, tmp_path)
    assert json.loads((tmp_path / "none.json").read_text())["rows"][0]["measured"] is None

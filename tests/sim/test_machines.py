"""Machine profiles: what they say, what they are refused for, and the published machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from worldpager.errors import ConfigError
from worldpager.quant.codec import get_codec
from worldpager.sim.closed_form import chunk_bytes, spill_chunk
from worldpager.sim.machines import BLOCK_BYTES, MACHINES, HostProfile, Spread, load_machine
from worldpager.sim.presets import PRESETS, get_preset

PUBLISHED = MACHINES["rtx4090-32gib"]


@pytest.mark.parametrize(
    ("machine", "codec", "chunk"),
    [("rtx4090-32gib", "bf16", 60), ("rtx4090-32gib", "int4", 226), ("rtx4090-64gib", "int4", 492)],
)
def test_the_published_machines_spill_where_published(machine: str, codec: str, chunk: int) -> None:
    size = chunk_bytes(PRESETS["matrix-game-2"], get_codec(codec)).stored
    assert spill_chunk(MACHINES[machine].pool_bytes, size) == chunk


def test_the_published_gpu_is_full_at_chunk_21() -> None:
    size = chunk_bytes(PRESETS["matrix-game-2"], get_codec("bf16")).payload
    assert PUBLISHED.gpu_kv_bytes is not None
    assert spill_chunk(PUBLISHED.gpu_kv_bytes, size) == 21


def test_the_published_disk_explains_the_published_eviction() -> None:
    size = chunk_bytes(PRESETS["matrix-game-2"], get_codec("int4")).stored
    disk = PUBLISHED.disk_model()
    assert 1e3 * size / disk.write_bandwidth == pytest.approx(102.0, abs=0.5)
    assert 1e3 * size / disk.read_bandwidth == pytest.approx(33.8, abs=0.5)


def test_blocks_of_a_preset_follow_from_its_latency() -> None:
    disk = MACHINES["sata"].disk
    seconds = disk.read_seconds.median + BLOCK_BYTES / disk.read_bandwidth
    assert disk.read_block.median == pytest.approx(BLOCK_BYTES / seconds)


def test_the_host_costs_by_bytes() -> None:
    geometry = get_preset("matrix-game-2@1/30")
    host = HostProfile(encode_bandwidth=1e9, decode_bandwidth=2e9)
    model = PUBLISHED.model_copy(update={"host": host}).host_model(geometry)
    assert model.encode_seconds == pytest.approx(2 * geometry.kv_elements_per_chunk / 1e9)
    assert model.decode_seconds == pytest.approx(model.encode_seconds / 2)
    assert PUBLISHED.host_model(geometry).encode_seconds == 0


@pytest.mark.parametrize("name", MACHINES)
def test_each_preset_survives_its_file(name: str, tmp_path: Path) -> None:
    MACHINES[name].save(tmp_path / "m.json")
    assert load_machine(str(tmp_path / "m.json")) == MACHINES[name] == load_machine(name)


def document(**changes: object) -> str:
    return json.dumps({**json.loads(PUBLISHED.model_dump_json()), **changes})


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (document(memory_bytes=-1), "memory_bytes"),
        (document(memory_bytes="32GiB"), "memory_bytes"),
        (document(extra=1), "extra"),
        (document(kind="prediction"), "kind"),
        (document(format_version=2), "format_version"),
        (document(disk={}), "disk"),
        (document(disk={**PUBLISHED.disk.model_dump(), "read_block": {}}), "disk.read_block"),
        ("[]", "m.json"),
        ("{", "m.json"),
        ("\x00", "m.json"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_with_the_field(
    text: str, word: str, tmp_path: Path
) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(ConfigError, match=word):
        load_machine(str(tmp_path / "m.json"))


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for name, word in (
        ("rtx5090", "nvme-pcie5"),
        (str(tmp_path / "none.json"), "No such file"),
        (str(tmp_path), "cannot read"),
        (str(tmp_path / "binary.json"), "cannot read"),
    ):
        with pytest.raises(ConfigError, match=word):
            load_machine(name)


def test_a_spread_is_the_median_of_its_repeats() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=3.0, repeats=3)
    assert Spread.of([4.0, 1.0, 2.0, 3.0]).median == 2.5
    assert Spread.rated(5.0) == Spread(median=5.0, low=5.0, high=5.0, repeats=0)
    for values in ({"low": 2.0}, {"high": 0.5}, {"median": float("nan")}):
        with pytest.raises(ValidationError):
            Spread(**{"median": 1.0, "low": 1.0, "high": 1.0, **values})


# ---- scaled geometries, which measured runs on a smaller machine use -----------------------------


@pytest.mark.parametrize(
    ("name", "layers", "tokens"),
    [
        ("matrix-game-2@1/30", 1, 880),
        ("matrix-game-2@1/600", 1, 44),
        ("matrix-game-2@0.1", 3, 880),
        ("matrix-game-2@1/20", 2, 660),
        ("matrix-game-2@1", 30, 880),
    ],
)
def test_a_scaled_model_has_fewer_layers_then_fewer_tokens(
    name: str, layers: int, tokens: int
) -> None:
    whole, small = get_preset("matrix-game-2"), get_preset(name)
    assert (small.layers, small.tokens_per_frame) == (layers, tokens)
    assert small.frames_per_chunk == whole.frames_per_chunk
    assert small.compute_seconds == whole.compute_seconds
    assert get_preset(small.name) == small


@pytest.mark.parametrize("name", ["matrix-game-2@0", "builtin@2", "builtin@x", "doom@1/2"])
def test_other_scales_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        get_preset(name)

"""``worldpager plan``: the same answers for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

Command = Callable[..., tuple[int, str, str]]


def test_json_answers_the_published_question(worldpager: Command) -> None:
    status, printed, _ = worldpager(
        "plan", "--model", "matrix-game-2", "--host-memory", "32GiB", "--codec", "int4-absmax",
        "--json",
    )  # fmt: skip
    assert status == 0
    answer = json.loads(printed)
    assert answer["spill_chunk"] == answer["payload_spill_chunk"] == 226
    assert answer["payload_chunk_bytes"] == 129_254_400
    assert answer["positional_horizon_chunks"] == 341
    assert round(answer["required_write_bandwidth"] / 1e6, 1) == 106.8
    assert round(answer["session_bytes"] / 1e9, 1) == 387.8
    assert answer["zero_stall_read_bandwidth"] == pytest.approx(
        3 * answer["chunk_bytes"] / answer["chunk_seconds"]
    )
    assert answer["spill_seconds"] == 169.5


def test_people_see_the_formulas(worldpager: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    status, printed, _ = worldpager(
        "plan", "--model", "matrix-game-2", "--host-memory", "32GiB", "--codec", "int4",
        "--read-bandwidth", "0.25GB/s", "--write-bandwidth", "1GB/s",
    )  # fmt: skip
    assert status == 0
    for words in ("1 + floor(P / B)", "chunk 226", "106.8MB/s", "387.8 GB", "341 chunks", "yes"):
        assert words in printed


def test_the_pool_may_be_given_itself(worldpager: Command) -> None:
    printed = worldpager("plan", "--dram", "1MiB", "--json")[1]
    assert json.loads(printed)["pool_bytes"] == 2**20
    printed = worldpager("plan", "--host-memory", "8GiB", "--reserve", "1GiB", "--json")[1]
    assert json.loads(printed)["pool_bytes"] == 7 * 2**30


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "doom"], ["doom", "longlive"]),
        (["--codec", "zip"], ["zip", "int4-absmax"]),
        (["--dram", "1GiB", "--host-memory", "2GiB"], ["--dram", "--host-memory"]),
        (["--host-memory", "2GiB"], ["reserve"]),
        (["--chunks", "0"], ["chunks"]),
        (["--host-memory", "many"], ["--host-memory", "many"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_bad_option_is_one_clear_line(
    options: list[str], words: list[str], worldpager: Command
) -> None:
    status, printed, message = worldpager("plan", *options)
    assert status == 2
    assert not printed
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message


def test_walls_speed_and_wear(worldpager: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    status, printed, _ = worldpager(
        "plan", "--model", "matrix-game-2", "--host-memory", "32GiB", "--endurance", "600TB"
    )
    assert status == 0
    for words in ("341 chunks", "2500 chunks", "0.62 x real time", "9.23 TB", "65 days"):
        assert words in printed

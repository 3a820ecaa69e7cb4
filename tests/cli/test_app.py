"""The program itself: help, version, and errors nobody foresaw by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from worldpager.cli import plan

Command = Callable[..., tuple[int, str, str]]


def test_no_command_shows_help(worldpager: Command) -> None:
    status, printed, message = worldpager()
    assert (status, message) == (0, "")
    for command in ("plan", "rollout", "inspect", "verify"):
        assert f"  {command}  " in printed


@pytest.mark.parametrize("command", ["plan", "rollout", "inspect", "verify"])
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_every_command_has_help(command: str, option: str, worldpager: Command) -> None:
    status, printed, _ = worldpager(command, option)
    assert status == 0
    assert printed.startswith("Usage:")


def test_version(worldpager: Command) -> None:
    status, printed, _ = worldpager("--version")
    assert status == 0
    assert printed.startswith("worldpager ")


@pytest.mark.parametrize(("arguments", "word"), [(["fly"], "fly"), (["verify"], "DIR")])
def test_misuse_is_one_clear_line(arguments: list[str], word: str, worldpager: Command) -> None:
    status, printed, message = worldpager(*arguments)
    assert (status, printed) == (2, "")
    assert word in message
    assert len(message.splitlines()) == 1


def test_an_error_of_the_system_names_the_file(
    worldpager: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise OSError(28, "No space left on device", "/disk/file")

    monkeypatch.setattr(plan, "_show", full)
    assert worldpager("plan", "--dram", "1MiB") == (
        2,
        "",
        "worldpager: No space left on device: /disk/file\n",
    )


def test_ctrl_c_is_no_error(worldpager: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "_show", interrupted)
    status, _, message = worldpager("plan", "--dram", "1MiB")
    assert status == 130
    assert not message.strip()

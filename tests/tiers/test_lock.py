from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from worldpager.errors import ForeignDirectoryError, StoreLockedError
from worldpager.tiers import lock
from worldpager.tiers.lock import NAME, DirectoryLock, Owner


@pytest.fixture(params=["flock", "no flock"])
def _mechanism(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no flock":
        _without_flock(monkeypatch)


def _without_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def dead_owner() -> Owner:
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return Owner.current().model_copy(update={"pid": pid})


@pytest.mark.usefixtures("_mechanism")
class TestBothWays:
    def test_one_holder_at_a_time_named(self, tmp_path: Path) -> None:
        first = DirectoryLock(tmp_path)
        assert first.held
        with pytest.raises(StoreLockedError, match=f"in use by process {os.getpid()} on "):
            DirectoryLock(tmp_path)
        first.release()
        assert list(tmp_path.iterdir()) == []
        second = DirectoryLock(tmp_path)
        first.release()
        assert second.held
        assert (tmp_path / NAME).exists()
        second.release()

    def test_another_process_is_kept_out(self, tmp_path: Path, in_child) -> None:
        held = DirectoryLock(tmp_path)

        def other() -> None:
            assert not held.held, "a forked child must not own its parent's lock"
            held.release()
            with pytest.raises(StoreLockedError, match=f"in use by process {os.getppid()} on "):
                DirectoryLock(tmp_path)

        in_child(other)
        assert held.held
        assert (tmp_path / NAME).exists()
        held.release()

    def test_a_crashed_owner_is_taken_over(self, tmp_path: Path, in_child) -> None:
        in_child(lambda: DirectoryLock(tmp_path))
        assert (tmp_path / NAME).exists()
        taken = DirectoryLock(tmp_path)
        assert Owner.model_validate_json((tmp_path / NAME).read_bytes()).pid == os.getpid()
        taken.release()
        assert list(tmp_path.iterdir()) == []

    def test_a_child_that_outlives_its_parent_does_not_keep_it(self, tmp_path: Path) -> None:
        stay, go = os.pipe()
        if (parent := os.fork()) == 0:
            _held = DirectoryLock(tmp_path)
            if os.fork() == 0:  # the orphan: waits for us to be done
                os.close(go)
                os.read(stay, 1)
            os._exit(0)
        os.waitpid(parent, 0)
        DirectoryLock(tmp_path).release()
        os.close(go)
        os.close(stay)

    @pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
    def test_the_name_must_be_a_file(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / NAME
        if kind == "link":
            path.symlink_to(tmp_path / "victim")
        elif kind == "folder":
            path.mkdir()
        else:
            os.mkfifo(path)
        with pytest.raises(ForeignDirectoryError, match="is not a lock file; remove it"):
            DirectoryLock(tmp_path)
        assert not (tmp_path / "victim").exists()


class TestWithoutFlock:
    """Only the owner's life can be asked about."""

    @pytest.fixture(autouse=True)
    def _no_flock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _without_flock(monkeypatch)

    @pytest.mark.parametrize("change", [{}, {"boot": "another"}, {"start": 1}])
    def test_stale_owners(self, tmp_path: Path, change: dict[str, object]) -> None:
        owner = Owner.current() if change else dead_owner()
        (tmp_path / NAME).write_text(owner.model_copy(update=change).model_dump_json())
        DirectoryLock(tmp_path).release()
        assert list(tmp_path.iterdir()) == []

    def test_an_owner_on_another_machine_may_live(self, tmp_path: Path) -> None:
        owner = dead_owner().model_copy(update={"host": "elsewhere"})
        (tmp_path / NAME).write_text(owner.model_dump_json())
        with pytest.raises(StoreLockedError, match="on elsewhere; close it there, or remove"):
            DirectoryLock(tmp_path)

    @pytest.mark.parametrize("content", [b"", b"{", b"\xff" * 9000, b'{"pid": "1"}'])
    def test_an_owner_that_cannot_be_read_may_live(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / NAME).write_bytes(content)
        with pytest.raises(StoreLockedError, match="in use by another process"):
            DirectoryLock(tmp_path)
        assert (tmp_path / NAME).read_bytes() == content

    def test_two_finding_the_same_dead_owner_do_not_both_win(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / NAME
        path.write_text(dead_owner().model_dump_json())
        winners: list[DirectoryLock] = []
        read = lock._read_owner

        def quicker(fd: int) -> Owner | None:
            owner = read(fd)
            monkeypatch.setattr(lock, "_read_owner", read)
            winners.append(DirectoryLock(tmp_path))
            return owner

        monkeypatch.setattr(lock, "_read_owner", quicker)
        with pytest.raises(StoreLockedError):
            DirectoryLock(tmp_path)
        assert winners[0].held
        assert Owner.model_validate_json(path.read_bytes()).pid == os.getpid()
        winners[0].release()
        assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DirectoryLock(tmp_path / "missing")

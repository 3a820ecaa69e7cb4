"""Child processes that are killed, or that end in their own way."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

ROOT = Path(__file__).resolve().parents[2]

Say = Callable[[str], None]


class Forked:
    """``job(say)`` in a forked process; what it says arrives line by line, also after its death."""

    def __init__(self, job: Callable[[Say], object]) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read)
            _run(job, write)
        os.close(write)
        self._pipe = read
        self._heard = b""

    def wait_for(self, line: str, timeout: float = 60) -> None:
        """Return once the child has said ``line``."""
        deadline = time.monotonic() + timeout
        while line.encode() not in self._heard.splitlines():
            assert select.select([self._pipe], [], [], max(0, deadline - time.monotonic()))[0], line
            assert self._listen(), f"the child ended without {line!r}: {self._heard!r}"

    def kill(self, number: int = signal.SIGKILL) -> list[str]:
        """Kill it; all that it said."""
        os.kill(self.pid, number)
        return self.end()

    def end(self) -> list[str]:
        """Wait until it has ended; all that it said."""
        while self._listen():
            pass
        os.close(self._pipe)
        os.waitpid(self.pid, 0)
        return self._heard.decode().splitlines()

    def _listen(self) -> bool:
        heard = os.read(self._pipe, 65536)
        self._heard += heard
        return bool(heard)


def moment(seconds: float) -> None:
    """Let so much time pass: the moment is what is random here, and sleeping is too coarse."""
    after = time.monotonic() + seconds
    while time.monotonic() < after:
        pass


def _run(job: Callable[[Say], object], write: int) -> NoReturn:
    try:
        torch.set_num_threads(1)
        job(lambda line: os.write(write, f"{line}\n".encode()) and None)
    except BaseException:
        os.write(write, traceback.format_exc().encode())
    finally:
        os._exit(0)


def _interruptible() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background inherits "ignore"


def script(
    code: str, *arguments: object, env: dict[str, str] | None = None, limit: str = ""
) -> subprocess.Popen[str]:
    """A fresh interpreter that runs ``code``; ``limit``: an ``ulimit`` option for it."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    if limit:
        command = ["sh", "-c", f'ulimit {limit}; exec "$@"', "sh", *command]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=_interruptible,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})},
    )  # fmt: skip

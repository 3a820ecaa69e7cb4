"""The DRAM pool's memory: one anonymous mapping, there from the first moment, never growing.

Direct I/O turns each stretch of physically contiguous memory into one segment, so the mapping is
aligned to and advised for 2 MiB pages (a third faster reads than with 4 KiB pages, measured). All
pages are populated at once: resident memory is the budget from the start, and no first touch falls
into a rollout. A forked child finds the mapping empty (``MADV_WIPEONFORK``): copied on write, the
pool would double the memory of whoever forks, and writes under way might land in the wrong copy;
taken away altogether, its addresses would be free for a pool of the child's own, which the
inherited mapping object would unmap when it goes.
"""

from __future__ import annotations

import errno
import logging
import mmap
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from worldpager.errors import BudgetError, ClosedError, ConfigError
from worldpager.tiers import pinning
from worldpager.tiers.budget import check_budget
from worldpager.tiers.extents import PAGE
from worldpager.units import format_size

if TYPE_CHECKING:
    import torch

log = logging.getLogger("worldpager")

Bytes = npt.NDArray[np.uint8]

HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module names neither this yet
_MADV_WIPEONFORK = 18  # Linux 4.14, nor this
_POPULATE_STEP = 64 << 20  # per call, since the interpreter lock is held meanwhile


class Arena:
    """``nbytes`` of page-aligned memory, rounded down to whole pages: that is the budget.

    Any thread may use it; it has no state but open and closed. Blocks while it populates (about
    0.2 s a GiB, more where a virtual machine must get the pages back from its host).
    """

    def __init__(self, nbytes: int) -> None:
        """Raises :class:`BudgetError` where the memory is not there, before touching any of it, and
        :class:`ConfigError` for less than a page.
        """
        if nbytes < PAGE:
            raise ConfigError(f"a pool of {nbytes} bytes holds no page; give at least {PAGE} bytes")
        self.nbytes = nbytes // PAGE * PAGE
        """Usable bytes."""
        self.pinned_bytes = 0
        """Bytes page-locked for CUDA: all or none."""
        self.pin_reason = "not asked for: the compute device is the CPU"
        """Why :attr:`pinned_bytes` is 0; empty where it is not."""
        self.pin_failed = False
        """Whether :meth:`pin` was asked for and could not do it."""
        check_budget(self.nbytes)
        self._memory: Bytes | None = _map(self.nbytes)

    def view(self, offset: int, nbytes: int) -> Bytes:
        """The bytes ``[offset, offset + nbytes)`` without a copy, uint8, writable.

        ``offset`` is a multiple of the page size; then so is the address. The view keeps the
        mapping alive. Raises :class:`ConfigError` for a range outside the pool,
        :class:`ClosedError` after :meth:`close`.
        """
        if self._memory is None:
            raise ClosedError("the DRAM pool was closed; open the session again")
        if offset % PAGE or offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ConfigError(
                f"bytes {offset} to {offset + nbytes} are no page-aligned range of a pool of "
                f"{self.nbytes} bytes"
            )
        return self._memory[offset : offset + nbytes]

    def pin(self, device: torch.device) -> bool:
        """Page-lock the pool for copies to ``device`` (a CUDA device); best effort.

        Returns whether it is locked now; where not, :attr:`pin_reason` says why and the pool works
        as before, only with slower copies. Blocks for about as long as populating did.
        """
        memory = self.view(0, self.nbytes)
        if not self.pinned_bytes:
            self.pin_reason = pinning.register(memory, device)
            self.pinned_bytes = 0 if self.pin_reason else self.nbytes
            self.pin_failed = bool(self.pin_reason)
            if self.pin_failed:
                log.warning("the DRAM pool is not page-locked: %s", self.pin_reason)
        return self.pinned_bytes > 0

    def close(self) -> None:
        """Give the memory up; idempotent.

        It returns to the system at once, or, where views still exist, with the last of them: a view
        never turns into a dangling pointer. Transfers under way must have ended.
        """
        if self._memory is None:
            return
        if self.pinned_bytes:
            pinning.unregister(self._memory)
            self.pinned_bytes, self.pin_reason = 0, "the pool was closed"
        self._memory = None


def _map(nbytes: int) -> Bytes:
    """A populated anonymous mapping; 2 MiB aligned where it is large enough to matter."""
    slack = HUGE_PAGE if nbytes >= HUGE_PAGE else 0  # never touched, so it costs no memory
    try:
        mapping = mmap.mmap(-1, nbytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError) as error:
        raise BudgetError(
            f"the system refused to map a DRAM budget of {format_size(nbytes)} ({nbytes} bytes): "
            f"{error}; ask for less or raise the limit on address space (ulimit -v)"
        ) from error
    whole = np.frombuffer(mapping, dtype=np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE if slack else 0
    if slack:
        _advise(mapping, mmap.MADV_HUGEPAGE, start, nbytes)
    _advise(mapping, _MADV_WIPEONFORK, start, nbytes)
    for at in range(start, start + nbytes, _POPULATE_STEP):
        step = min(_POPULATE_STEP, start + nbytes - at)
        if not _advise(mapping, _MADV_POPULATE_WRITE, at, step):
            whole[at : at + step : PAGE] = 0  # older kernels: touch each page
    return whole[start : start + nbytes]


def _advise(mapping: mmap.mmap, advice: int, start: int, nbytes: int) -> bool:
    """Advise the kernel; False where it does not know this advice."""
    try:
        mapping.madvise(advice, start, nbytes)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS):
            return False
        raise BudgetError(
            f"the system could not provide {format_size(nbytes)} of the DRAM budget: {error}; "
            "ask for less"
        ) from error
    return True

"""From the DRAM pool to where the model computes: chunk images made ready ahead of their use.

One protocol for all devices. On the CPU nothing has to move and :class:`HostStaging` hands out the
pool's own bytes; on a GPU the same calls drive a ring of device buffers and a copy stream.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import torch

from worldpager.errors import ClosedError, WorldPagerError
from worldpager.tiers.io_backend import Bytes


class Staging(Protocol):
    """Images staged under keys: ``stage``, then ``take`` any number of times, then ``release``.

    All calls come from the thread that runs the model, and none waits for a transfer. Order between
    streams is by events: an implementation that copies records one behind each copy, lets the
    current stream wait for it in :meth:`take`, and records one on the current stream in
    :meth:`release`, behind which alone a buffer is written again. So the consumer's kernels, queued
    between ``take`` and ``release`` on the current stream, always see the whole image.
    """

    @property
    def budget(self) -> int:
        """Bytes of memory of its own that it may hold."""

    @property
    def used(self) -> int:
        """Bytes of it in use, by images under way and staged."""

    @property
    def keeps_source(self) -> bool:
        """Whether a source must stay unchanged until ``release`` (no copy is made); otherwise until
        :meth:`ready`.
        """

    def stage(self, key: Hashable, image: Bytes) -> bool:
        """Begin to make ``image`` (uint8, in the pool) available under ``key``.

        False where no buffer is free: nothing was done, and after a ``release`` it may succeed. A
        key that is staged already stays as it is. The caller keeps the source as
        :attr:`keeps_source` says.
        """

    def ready(self, key: Hashable) -> bool:
        """Whether ``key`` is staged and its transfer has ended; False for an unknown key."""

    def take(self, key: Hashable) -> torch.Tensor:
        """The staged image, uint8 ``[nbytes]`` on the compute device, for reading; valid until
        ``release``. May be called before :meth:`ready`. Raises :class:`WorldPagerError` for a key
        that is not staged.
        """

    def release(self, key: Hashable) -> None:
        """Give the image up, in whatever state; does nothing for an unknown key."""

    def close(self) -> None:
        """Give everything up and free the buffers; idempotent."""


class HostStaging:
    """:class:`Staging` where the compute device is the CPU: the pool's own bytes, no copy."""

    budget = 0
    used = 0
    keeps_source = True

    def __init__(self) -> None:
        self._images: dict[Hashable, Bytes] = {}
        self._closed = False

    def stage(self, key: Hashable, image: Bytes) -> bool:
        """Note where the image is; always possible. Raises :class:`ClosedError` once closed."""
        if self._closed:
            raise ClosedError("staging was closed; open the session again")
        self._images.setdefault(key, image)
        return True

    def ready(self, key: Hashable) -> bool:
        """Whether ``key`` is staged."""
        return key in self._images

    def take(self, key: Hashable) -> torch.Tensor:
        """The pool's bytes as a tensor that shares them; ``.numpy()`` shares them again."""
        try:
            return torch.from_numpy(self._images[key])
        except KeyError:
            raise WorldPagerError(f"{key!r} is not staged; stage it before taking it") from None

    def release(self, key: Hashable) -> None:
        """Forget ``key``."""
        self._images.pop(key, None)

    def close(self) -> None:
        """Forget all."""
        self._closed = True
        self._images.clear()

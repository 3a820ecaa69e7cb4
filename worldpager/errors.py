"""Every error WorldPager raises on purpose.

Each names the cause, the offending value and the remedy in its message, so that a caller can print
it as it is. All derive from :class:`WorldPagerError`; the second base is the builtin a caller would
expect for that kind of mistake.
"""

from __future__ import annotations


class WorldPagerError(Exception):
    """Base of all errors raised by WorldPager."""


class ConfigError(WorldPagerError, ValueError):
    """An option, size or combination of options cannot be used."""


class BudgetError(ConfigError):
    """A memory or disk budget cannot be met; raised before anything is allocated."""


class FrontendError(WorldPagerError, TypeError):
    """An object is no frontend that is known, or does not behave as the one it looks like."""


class CodecError(WorldPagerError, ValueError):
    """A tensor cannot be encoded or a payload cannot be decoded by the codec asked to."""


class NonFiniteError(CodecError):
    """A K or V tensor holds NaN or infinity, which no block may carry."""


class PositionError(WorldPagerError, ValueError):
    """A temporal position lies outside what the model's position table can express."""


class DamagedBlockError(WorldPagerError):
    """Stored bytes are not what was written.

    ``reason`` is a short stable word for counters: ``missing``, ``size``, ``magic``, ``version``,
    ``header``, ``index``, ``record``, ``annex``, ``identity`` or ``checksum``.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class StoreError(WorldPagerError, OSError):
    """The disk tier failed to read, write, publish or list."""


class StoreFullError(StoreError):
    """No space: the disk cap, the free-space floor or the file system itself said no."""


class ForeignDirectoryError(StoreError):
    """A directory is not a WorldPager store, or holds something that must not be followed."""


class StoreLockedError(StoreError):
    """Another live process or session writes to this directory."""


class IdentityError(WorldPagerError):
    """A stored rollout was written under another identity; ``field`` names what differs."""

    def __init__(self, field: str, stored: object, wanted: object) -> None:
        super().__init__(
            f"the store was written with {field}={stored!r}, but {field}={wanted!r} was asked for; "
            "open it with the stored value or choose another directory"
        )
        self.field = field
        self.stored = stored
        self.wanted = wanted


class ClosedError(WorldPagerError):
    """The object was closed; open it again to go on."""


class ConcurrencyError(WorldPagerError, RuntimeError):
    """A call was made while another thread is within one that it cannot be made beside."""


class BackgroundError(WorldPagerError):
    """Work that went on in the background failed and nobody had been told yet."""

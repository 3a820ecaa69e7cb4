"""Sizes, rates and durations as people write them: ``24GiB``, ``0.25GB/s``, ``1.5s``."""

from __future__ import annotations

import math
import re

from worldpager.errors import ConfigError

_FACTORS = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000 ** (i + 1) for i, p in enumerate("kMGTP")},
    **{f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGTP")},
}
_LOOKUP = {name.lower(): factor for name, factor in _FACTORS.items()}
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Bytes of ``"24GiB"``, ``"1.5 GB"``, ``"640KiB"`` or a plain number.

    Decimal prefixes are powers of 1000, binary ones (with an ``i``) powers of 1024; case is
    ignored. Raises :class:`ConfigError` for anything else, for zero and for negative sizes.
    """
    if isinstance(text, int):
        size = text
    else:
        match = _SIZE.fullmatch(text)
        if match is None or match[2].lower() not in _LOOKUP:
            raise ConfigError(
                f"cannot read {text!r} as a size; write it like 24GiB, 640KiB or 1.5GB"
            )
        wanted = float(match[1]) * _LOOKUP[match[2].lower()]
        size = round(wanted) if wanted < 2**63 else 2**63
    if not 0 < size < 2**63:
        raise ConfigError(f"a size must be positive and below 8EiB, not {text!r}")
    return size


def parse_rate(text: str | int) -> int:
    """Bytes per second of ``"0.25GB/s"`` or of a size read as per second."""
    return parse_size(text.strip().removesuffix("/s") if isinstance(text, str) else text)


def parse_duration(text: str | float) -> float:
    """Seconds of ``"250ms"``, ``"1.5s"``, ``"30min"``, ``"2h"`` or a plain number.

    Raises :class:`ConfigError` for anything else and for negative durations.
    """
    if isinstance(text, str):
        match = _SIZE.fullmatch(text)
        if match is None or match[2].lower() not in _SECONDS:
            raise ConfigError(
                f"cannot read {text!r} as a duration; write it like 250ms, 1.5s or 30min"
            )
        seconds = float(match[1]) * _SECONDS[match[2].lower()]
    else:
        seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"a duration cannot be {text!r}")
    return seconds


def format_size(nbytes: float) -> str:
    """``25769803776`` as ``"24GiB"``: binary prefix, at most four significant digits."""
    value, sign = abs(float(nbytes)), "-" if nbytes < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    digits = f"{value:.4g}" if value < 1000 else f"{value:.0f}"
    return f"{sign}{digits}{unit}"


def format_rate(bytes_per_second: float) -> str:
    """``106.8e6`` as ``"106.8MB/s"``: decimal prefix, as drives are sold."""
    value = float(bytes_per_second)
    for unit in ("B/s", "kB/s", "MB/s", "GB/s"):
        if value < 1000 or unit == "GB/s":
            break
        value /= 1000
    return f"{value:.4g}{unit}"


def format_duration(seconds: float) -> str:
    """``169.5`` as ``"2 min 50 s"``, ``0.0158`` as ``"15.8 ms"``, ``1.2105`` as ``"1.21 s"``."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"

"""Errors as one line for a person."""

from __future__ import annotations


def one_line(error: Exception) -> str:
    """What went wrong, without error numbers, line breaks or class names."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename is not None else ""
        text = f"{error.strerror}{where}"
    return " ".join(text.split())

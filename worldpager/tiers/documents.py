"""The small files of a store: Zarr v3 metadata documents and the data of small arrays.

Written whole under a temporary name and renamed, so a reader sees the old or the new one; read with
a limit on their size and parsed strictly, since nobody vouches for what lies in a directory.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from worldpager.errors import ConfigError, ForeignDirectoryError, StoreError
from worldpager.tiers.io_backend import IOBackend
from worldpager.tiers.spec import FORMAT_VERSION, StoreSpec

DOCUMENT = "zarr.json"
STATUS = ".worldpager.status.json"
"""What a run says of itself while it lasts; beside the lock, where no Zarr reader looks."""
STATUS_BYTES = 2048
"""Most that a status takes."""
MAX_DOCUMENT = 1 << 20
"""Bytes beyond which a document is not read: ours have a few thousand."""

ROWS = 64
"""Rows in one file of a small array: little is padded, and little is rewritten when rows come."""

_TEMPORARY = re.compile(r"\.[A-Za-z0-9._-]+\.([0-9]+)\.[0-9]+\.tmp", re.ASCII)
_DATA = re.compile(r"[0-9]+(\.[0-9]+)*", re.ASCII)
_serial = itertools.count()


class _Attributes(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    worldpager: dict[str, JsonValue]


class GroupDocument(BaseModel):
    """A group's ``zarr.json``. Other members, such as consolidated metadata, are let be."""

    model_config = ConfigDict(strict=True, extra="ignore")
    zarr_format: Literal[3]
    node_type: Literal["group"]
    attributes: _Attributes


def temporary(target: Path) -> Path:
    """A name next to ``target`` that no other write uses, now or in a process before."""
    return target.with_name(f".{target.name}.{os.getpid()}.{next(_serial)}.tmp")


def is_temporary(name: str) -> bool:
    """Whether a file of this name is ours, from a write that is under way or never ended."""
    return _TEMPORARY.fullmatch(name) is not None


def is_data(name: str) -> bool:
    """Whether a file of this name holds a part of an array: its key, indices with dots between."""
    return _DATA.fullmatch(name) is not None


def sweep(io: IOBackend, folder: Path, *, shared: bool = False) -> None:
    """Remove the temporary files in a folder; where it is ``shared``, those of dead processes."""
    for name in io.list_folder(folder):
        match = _TEMPORARY.fullmatch(name)
        if match and not (shared and Path(f"/proc/{match[1]}").exists()):
            with suppress(FileNotFoundError):
                io.unlink(folder / name)


def is_folder(io: IOBackend, path: Path) -> bool:
    """Whether ``path`` is a folder itself; a symbolic link to one is not."""
    try:
        return stat.S_ISDIR(io.stat(path).st_mode)
    except FileNotFoundError:
        return False


def real_folder(io: IOBackend, path: Path) -> bool:
    """Whether ``path`` is a folder; False where nothing is there.

    Raises :class:`ForeignDirectoryError` for anything else: a file, or a symbolic link, which is
    not followed.
    """
    try:
        mode = io.stat(path).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(mode):
        raise ForeignDirectoryError(
            errno.ENOTDIR, f"{path} is not a folder; move it out of the way"
        )
    return True


def read_document(io: IOBackend, path: Path) -> bytes | None:
    """The bytes of a small file; None where there is none.

    Raises :class:`ForeignDirectoryError` for what is not a regular file or too large to be ours,
    :class:`OSError` where reading fails.
    """
    try:
        fd = io.open_read(path, direct=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise foreign(path, "is not a regular file") from error
        raise
    try:
        status = io.stat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise foreign(path, "is not a regular file")
        if status.st_size > MAX_DOCUMENT:
            raise foreign(path, f"has {status.st_size} bytes, too many for a metadata document")
        data = np.empty(status.st_size, dtype=np.uint8)
        done = 0
        while done < data.nbytes:
            if (moved := io.pread(fd, data[done:], done)) == 0:
                break
            done += moved
        return data[:done].tobytes()
    finally:
        io.close(fd)


def write_document(io: IOBackend, path: Path, content: bytes) -> None:
    """Put ``content`` (mode 0600) in the place of ``path`` in one durable step.

    Raises :class:`OSError`; the old document is then still there, and no temporary file.
    """
    temp = temporary(path)
    try:
        fd = io.open_new(temp, direct=False)
        try:
            data, done = np.frombuffer(content, dtype=np.uint8), 0
            while done < data.nbytes:
                if (moved := io.pwrite(fd, data[done:], done)) == 0:
                    raise OSError(errno.ENOSPC, "the file system took no more bytes", str(path))
                done += moved
            io.sync(fd)
        finally:
            io.close(fd)
        io.rename(temp, path)
    except BaseException:
        with suppress(OSError):
            io.unlink(temp)
        raise
    io.sync_folder(path.parent)


def group_bytes(own: Mapping[str, object], attributes: Mapping[str, JsonValue]) -> bytes:
    """A group's document with our own attributes under ``worldpager`` beside the caller's.

    Raises :class:`ConfigError` where it could not be read again: attributes that are not JSON, or
    more than :data:`MAX_DOCUMENT`.
    """
    try:
        content = to_json(
            {
                "zarr_format": 3,
                "node_type": "group",
                "attributes": {**attributes, "worldpager": dict(own)},
            }
        )
        GroupDocument.model_validate_json(content)
    except ValidationError as error:
        raise ConfigError(f"attributes cannot be stored ({first_problem(error)})") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"attributes cannot be stored as JSON: {error}") from None
    if len(content) > MAX_DOCUMENT:
        raise ConfigError(
            f"attributes and identity take {len(content)} bytes, more than the {MAX_DOCUMENT} that "
            "are read again; store large things as arrays"
        )
    return content


def parse_group(path: Path, content: bytes) -> GroupDocument:
    """A group's document. Raises :class:`ForeignDirectoryError` where it is not one of ours."""
    try:
        return GroupDocument.model_validate_json(content)
    except ValidationError as error:
        raise foreign(path, f"is no WorldPager metadata ({first_problem(error)})") from error


def first_problem(error: ValidationError) -> str:
    """The first thing wrong with a document, in one line: where, and what."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'document'}: {first['msg']}"


def session_bytes(session: str) -> bytes:
    """The document of a session's group."""
    own = {"format_version": FORMAT_VERSION, "kind": "session", "session": session}
    return group_bytes(own, {})


def kv_array_bytes(spec: StoreSpec, chunks: int) -> bytes:
    """The document of a KV array with room for chunk ids below ``chunks``.

    One shard a chunk, holding one inner chunk a layer. The chunk key encoding puts the shard of
    chunk ``i`` into the array's own folder as ``i.0.0.0.0.0``: one folder to list, sync and rename
    in. Chunks that are not there read as NaN.
    """
    layers, *rest = spec.array_shape
    return to_json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [chunks, layers, *rest],
            "data_type": "float32",
            "chunk_grid": _regular([1, layers, *rest]),
            "chunk_key_encoding": _FLAT_KEYS,
            "fill_value": "NaN",
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        "chunk_shape": [1, 1, *rest],
                        "codecs": [{"name": "worldpager.kvblock"}],
                        "index_codecs": [_LITTLE_ENDIAN, {"name": "crc32c"}],
                        "index_location": "end",
                    },
                }
            ],
            "attributes": {},
            "dimension_names": ["chunk", "layer", "kv", "token", "head", "channel"],
            "storage_transformers": [],
        }
    )


def small_array_files(values: npt.NDArray[np.generic]) -> dict[str, bytes]:
    """File names and contents of an ordinary array, uncompressed, :data:`ROWS` rows a file.

    The document comes last: written in this order, a reader never sees rows that are not there yet.
    Raises :class:`ConfigError` for a data type that Zarr v3 has no plain name for.
    """
    kind = values.dtype.name
    if values.ndim == 0 or re.fullmatch(r"bool|u?int(8|16|32|64)|float(32|64)", kind) is None:
        raise ConfigError(f"metadata arrays are of numbers or bools and have rows, not {kind}")
    values = values.astype(values.dtype.newbyteorder("<"), copy=False)
    fill: JsonValue = False if kind == "bool" else 0
    if kind.startswith("float"):
        fill = "NaN"
    rest = list(values.shape[1:])
    files: dict[str, bytes] = {}
    for at in range(0, len(values), ROWS):
        rows = np.full((ROWS, *rest), np.nan if fill == "NaN" else fill, dtype=values.dtype)
        part = values[at : at + ROWS]
        rows[: len(part)] = part
        files[".".join(["0"] * values.ndim).replace("0", str(at // ROWS), 1)] = rows.tobytes()
    files[DOCUMENT] = to_json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(values.shape),
            "data_type": kind,
            "chunk_grid": _regular([ROWS, *rest]),
            "chunk_key_encoding": _FLAT_KEYS,
            "fill_value": fill,
            "codecs": [_LITTLE_ENDIAN],
            "attributes": {},
            "storage_transformers": [],
        }
    )
    return files


_FLAT_KEYS = {"name": "v2", "configuration": {"separator": "."}}
_LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}


def _regular(shape: list[int]) -> dict[str, object]:
    return {"name": "regular", "configuration": {"chunk_shape": shape}}


def to_json(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, indent=1, allow_nan=False).encode()


def foreign(path: Path, what: str) -> StoreError:
    """The error for a document that is not one of ours or cannot be understood."""
    return ForeignDirectoryError(
        errno.EINVAL, f"{path} {what}; nothing was touched: choose another directory or restore it"
    )

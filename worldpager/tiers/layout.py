"""Finding and making the folders of a store: session, rollout, one array a stream.

::

    <path>/zarr.json                       the session's group
    <path>/<rollout>/zarr.json             the rollout's group: its identity
    <path>/<rollout>/<stream>/zarr.json    a KV array
    <path>/<rollout>/<stream>/7.0.0.0.0.0  the shard of chunk 7
    <path>/<rollout>/poses/...             small arrays of metadata

Looking never writes. A store is made from the outside in, the rollout's document last: without it
there is no rollout yet, and making one begins again.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import JsonValue, ValidationError

from worldpager.errors import (
    ConfigError,
    ForeignDirectoryError,
    IdentityError,
    StoreLockedError,
)
from worldpager.tiers import documents, lock
from worldpager.tiers.io_backend import IOBackend
from worldpager.tiers.metadata import rollout_files
from worldpager.tiers.recovery import chunk_of
from worldpager.tiers.spec import FORMAT_VERSION, SpecDocument, StoreSpec, check_name


def load_session(io: IOBackend, path: Path) -> str | None:
    """Name of the session stored at ``path``; None where a new one can be made.

    Raises :class:`ForeignDirectoryError` where other things are there, :class:`IdentityError` for
    another format version.
    """
    if not documents.real_folder(io, path):
        return None
    content = documents.read_document(io, path / documents.DOCUMENT)
    if content is None:
        if all(documents.is_temporary(name) for name in io.list_folder(path)):
            return None
        raise ForeignDirectoryError(
            errno.ENOTEMPTY,
            f"{path} is not empty and no WorldPager store; nothing was touched: choose another",
        )
    own = _own_attributes(path, content, "session")
    return str(own.get("session"))


def load_rollout(io: IOBackend, path: Path, rollout: str) -> StoreSpec | None:
    """The stored identity of a rollout; None where there is none.

    Raises as :func:`load_session`.
    """
    folder = path / check_name("rollout", rollout)
    if load_session(io, path) is None or not documents.real_folder(io, folder):
        return None
    content = documents.read_document(io, folder / documents.DOCUMENT)
    if content is None:
        return None
    own = _own_attributes(folder, content, "rollout")
    try:
        return SpecDocument.model_validate_json(documents.to_json(own)).spec()
    except (ValidationError, ConfigError) as error:
        what = documents.first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise documents.foreign(
            folder / documents.DOCUMENT, f"holds no identity ({what})"
        ) from error


def rollout_names(io: IOBackend, path: Path) -> list[str]:
    """Names of the rollouts stored at ``path``, sorted. Raises as :func:`load_session`."""
    if load_session(io, path) is None:
        return []
    found = []
    for name in sorted(io.list_folder(path)):
        try:
            if load_rollout(io, path, name) is not None:
                found.append(name)
        except (ConfigError, ForeignDirectoryError):
            continue  # a file or folder of someone else's is no rollout
    return found


def rollout_folders(io: IOBackend, path: Path) -> list[Path]:
    """All folders of a session's directory: its rollouts, whatever state they are in."""
    return [path / name for name in io.list_folder(path) if documents.is_folder(io, path / name)]


def check_identity(io: IOBackend, path: Path, spec: StoreSpec) -> bool:
    """Whether the rollout of ``spec`` is stored at ``path``.

    Raises :class:`IdentityError` where it, or its session, was written under another identity.
    """
    session = load_session(io, path)
    if session is not None and session != spec.session:
        raise IdentityError("session", session, spec.session)
    stored = load_rollout(io, path, spec.rollout)
    if stored is None:
        return False
    spec.check_same(stored)
    for stream in spec.streams:
        documents.real_folder(io, path / spec.rollout / stream)
    return True


def make_folders(io: IOBackend, path: Path, spec: StoreSpec) -> None:
    """Make what is missing of a rollout's folders and the session's document; durable.

    Raises :class:`ForeignDirectoryError` where the rollout's folder has contents that no
    unfinished attempt leaves behind.
    """
    for parent in reversed([path, *path.parents]):
        _make(io, parent)
    if documents.read_document(io, path / documents.DOCUMENT) is None:
        documents.sweep(io, path, shared=True)
        content = documents.session_bytes(spec.session)
        documents.write_document(io, path / documents.DOCUMENT, content)
    folder = path / spec.rollout
    for child in (folder, *(folder / stream for stream in spec.streams)):
        _make(io, child)
    for occupant in _occupants(io, folder, spec):
        if documents.read_document(io, folder / documents.DOCUMENT) is None:  # else: made meanwhile
            raise ForeignDirectoryError(
                errno.ENOTEMPTY,
                f"{occupant} is in the way of a new rollout and not recognised; move it or choose "
                "another name",
            )


def _occupants(io: IOBackend, folder: Path, spec: StoreSpec) -> Iterator[Path]:
    """What lies in a rollout's folders that no unfinished attempt to make one leaves behind."""
    for name in io.list_folder(folder):
        if name not in spec.streams and not documents.is_temporary(name):
            yield folder / name
    for stream in spec.streams:
        for name in io.list_folder(folder / stream):
            known = name in (documents.DOCUMENT, documents.STATUS)
            expected = known or name.startswith(lock.NAME)
            if not expected and not documents.is_temporary(name):
                yield folder / stream / name


def make_streams(io: IOBackend, path: Path, spec: StoreSpec) -> None:
    """Make the stream folders that a stored rollout has lost; durable."""
    for stream in spec.streams:
        _make(io, path / spec.rollout / stream)


def sweep(io: IOBackend, root: Path) -> None:
    """Remove temporary files from all folders of a rollout whose lock we hold."""
    for folder in (root, *(root / name for name in io.list_folder(root))):
        if documents.is_folder(io, folder):
            documents.sweep(io, folder)


def tidy(io: IOBackend, root: Path) -> None:
    """Remove what a killed process left in a rollout: its lock and temporary files.

    Does nothing where there is no lock, or where its owner lives.
    """
    for name in io.list_folder(root):
        folder = root / name
        if documents.is_folder(io, folder) and lock.NAME in io.list_folder(folder):
            with suppress(StoreLockedError, ForeignDirectoryError):
                left = lock.DirectoryLock(folder)
                try:
                    sweep(io, root)
                finally:
                    left.release()


def remove_files(io: IOBackend, root: Path) -> None:
    """Delete a rollout's files but its lock, chunks first and its own document last, and then the
    folders that this leaves empty, except the one that holds the lock. Files that no store makes
    stay, and their folders with them.
    """
    files = [file for file, _ in rollout_files(io, root) if _is_ours(file.name)]
    for file in sorted(files, key=lambda file: (file.parent == root, chunk_of(file.name) is None)):
        io.unlink(file)
    for name in io.list_folder(root):
        if documents.is_folder(io, root / name) and not io.list_folder(root / name):
            io.remove_folder(root / name)


def _make(io: IOBackend, folder: Path) -> None:
    if documents.real_folder(io, folder):
        return
    try:
        io.make_folder(folder)
    except FileExistsError:  # another process made it meanwhile
        documents.real_folder(io, folder)
    io.sync_folder(folder.parent)


def _own_attributes(folder: Path, content: bytes, kind: str) -> dict[str, JsonValue]:
    """Our attributes of a group's document, their kind and format version checked."""
    path = folder / documents.DOCUMENT
    own = documents.parse_group(path, content).attributes.worldpager
    version = own.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise IdentityError("format_version", version, FORMAT_VERSION)
    if own.get("kind") != kind:
        raise ForeignDirectoryError(
            errno.EINVAL, f"{path} is the document of a {own.get('kind')}, not of a {kind}"
        )
    return own


def _is_ours(name: str) -> bool:
    known = (documents.is_data, documents.is_temporary)
    return name in (documents.DOCUMENT, documents.STATUS) or any(
        is_known(name) for is_known in known
    )

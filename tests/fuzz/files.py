"""Targets: names and values from callers, and the files that commands read."""

from __future__ import annotations

import functools
import io
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from tests.cli.fake_run import fake_metrics
from tests.fuzz.folders import valid_spec
from tests.fuzz.memory_io import MemoryIO
from worldpager.cli.runs import METRICS, POSES, SUMMARY, read_run
from worldpager.errors import ConfigError, WorldPagerError
from worldpager.prefetch.paths import make_path
from worldpager.sim.machines import MACHINES, load_machine
from worldpager.sim.predictions import Inputs, Outcome, poses_hash, predict, read_prediction
from worldpager.sim.traces import Trace
from worldpager.tiers import documents, layout
from worldpager.tiers.metadata import Metadata
from worldpager.tiers.spec import StoreSpec, check_name
from worldpager.units import format_duration, format_size, parse_duration, parse_rate, parse_size

FRAMES = 3


def _text(data: bytes) -> str:
    """Any text, unpaired surrogates included."""
    return data.decode("utf-8", errors="surrogateescape")


def name(data: bytes) -> None:
    """A name for a session, rollout, stream or array, and any text for a model."""
    text = _text(data)
    _spec_with(text)
    for parse, show in ((parse_size, format_size), (parse_rate, format_size),
                        (parse_duration, format_duration)):  # fmt: skip
        with suppress(ConfigError):
            show(parse(text))  # type: ignore[arg-type]
    checked = check_name("rollout", text)
    assert len(Path("/store", checked).parts) == 3 and checked not in (".", "..")
    assert Path("/store", checked).name == checked and checked.isascii()
    assert not documents.is_temporary(checked)
    spec = valid_spec()
    store = MemoryIO({"zarr.json": documents.session_bytes(spec.session)})
    if checked != documents.DOCUMENT:
        assert layout.load_rollout(store, Path("/store"), checked) is None


def _spec_with(text: str) -> None:
    """An identity with this text in it can be read again once it is written, or is refused."""
    base = valid_spec()
    fields = {name: getattr(base, name) for name in StoreSpec.__dataclass_fields__}
    for changed in ({"model": text}, {"positions": text}, {"dtype": text}, {"codecs": (text,)}):
        try:
            spec = StoreSpec(**{**fields, **changed})  # type: ignore[arg-type]
            spec.identity()
        except ConfigError:
            continue
        store = MemoryIO({"zarr.json": documents.session_bytes(spec.session)})
        Metadata(store, Path("/store") / spec.rollout, spec).write_group({})
        try:
            assert layout.check_identity(store, Path("/store"), spec)
        except WorldPagerError as error:
            raise AssertionError(f"stored, and not to be opened again: {error}") from error


def machine(data: bytes) -> None:
    """A machine's profile."""
    with _written(data, "machine.json") as path:
        found = load_machine(str(path))
        with suppress(WorldPagerError):
            _ = found.pool_bytes
        found.disk_model()


def prediction(data: bytes) -> None:
    """A prediction's file; with a high first byte its hash is made right."""
    content = data[1:]
    if data[:1] > b"\x7f":
        with suppress(ValueError, TypeError, RecursionError):
            content = _rehashed(content)
    with _written(content, "prediction.json") as path:
        found = read_prediction(path)
        found.judge(Outcome.of(_columns()))
        assert found.created < datetime.now(UTC) or found.created.year > 2000


def _rehashed(content: bytes) -> bytes:
    from worldpager.sim.predictions import Prediction

    found = Prediction.model_validate_json(content)
    return found.model_copy(update={"hash": found.digest()}).model_dump_json().encode()


def path(data: bytes) -> None:
    """A camera path in a ``.npy`` file."""
    with _written(data, "path.npy") as file:
        poses = make_path(str(file), 2, FRAMES)
        assert poses.shape == (2, FRAMES, 4, 4) and np.isfinite(poses).all()


def run(data: bytes) -> None:
    """A finished rollout's folder, one file of which is the input's."""
    names = (METRICS, SUMMARY, POSES)
    which = names[data[0] % 3 if data else 0]
    with tempfile.TemporaryDirectory() as folder:
        for file, content in {**valid_run(), which: data[1:]}.items():
            Path(folder, file).write_bytes(content)
        found = read_run(Path(folder))
        assert found.path.ndim == 4 and np.isfinite(found.path).all()
        Trace.of(found.inputs, found.path, found.metrics)
        Outcome.of(found.metrics)
        assert found.late_chunks >= 0


@contextmanager
def _written(content: bytes, name: str) -> Iterator[Path]:
    """A file with this content, for a while."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        yield path


def _npy(values: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, values, allow_pickle=False)
    return out.getvalue()


def _columns() -> dict[str, list[object]]:
    rows = [fake_metrics(chunk).as_dict() for chunk in range(4)]
    return {name: [row[name] for row in rows] for name in rows[0]}


@functools.cache
def valid_run() -> dict[str, bytes]:
    """The files of a finished rollout of four chunks."""
    lines = [json.dumps(fake_metrics(chunk).as_dict()) + "\n" for chunk in range(4)]
    options = {"model": "builtin", "chunks": 4, "path": "yaw-return", "dram_bytes": 1 << 20,
               "codec": "int4", "retrieve": 3, "seed": 0, "chunk_time": 0.1}  # fmt: skip
    summary = {"status": "complete", "wall_seconds": 1.0, "options": options,
               "started": "2026-01-01T00:00:00+00:00"}  # fmt: skip
    return {
        METRICS: "".join(lines).encode(),
        SUMMARY: json.dumps(summary).encode(),
        POSES: _npy(make_path("yaw-return", 4, FRAMES)),
    }


@functools.cache
def valid_prediction() -> bytes:
    poses = make_path("yaw-return", 8, FRAMES)
    inputs = Inputs(chunks=8, path="yaw-return", poses=poses_hash(poses), dram_bytes=1 << 22)
    return predict(inputs, poses).model_dump_json().encode()


def valid_machine() -> bytes:
    return MACHINES["sata"].model_dump_json().encode()


def valid_path() -> bytes:
    return _npy(make_path("yaw-return", 2, FRAMES).reshape(-1, 4, 4))

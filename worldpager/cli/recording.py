"""Runs a rollout and writes down everything about it, however it ends."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from worldpager.cli.frontends import Rollout
from worldpager.cli.messages import one_line
from worldpager.cli.metrics import MetricsLog, read_metrics
from worldpager.cli.pictures import comparisons, has_pyav, write_film
from worldpager.cli.progress import RolloutProgress
from worldpager.cli.report import write_report
from worldpager.cli.revisits import Frames, find_revisits, psnr
from worldpager.cli.summary import Revisit, Status, Summary, summarise, write_summary
from worldpager.errors import ConfigError, ForeignDirectoryError, StoreError, WorldPagerError
from worldpager.model_adapter.builtin.rooms import IMAGE_SIZE
from worldpager.model_adapter.rollout import RolloutConfig, run_rollout
from worldpager.quant.codec import get_codec
from worldpager.sim.closed_form import chunk_bytes
from worldpager.sim.presets import ModelGeometry
from worldpager.tiers import lock

METRICS, SUMMARY, REPORT, FILM = "metrics.jsonl", "summary.json", "report.html", "video.gif"
MP4 = "video.mp4"
FRAMES = "frames.bin"
"""Raw frames as the rollout made them: uint8 ``[frames, side, side, 3]``, RGB."""
BASELINE = "without-memory"
POSES = "poses.npy"
"""The camera path as it was asked for: float64 ``[chunks, frames, 4, 4]``, camera-to-world."""
_RESULTS = (METRICS, SUMMARY, REPORT, FILM, MP4, FRAMES, POSES, "store", BASELINE)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for a new rollout's results; an earlier rollout's are removed first.

    Raises :class:`ForeignDirectoryError` where it holds anything but a rollout's results,
    :class:`StoreLockedError` while another rollout writes there, and :class:`StoreError` where it
    cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = {entry.name for entry in folder.iterdir()} - {lock.NAME}
        if held and METRICS not in held:
            raise ForeignDirectoryError(
                f"{folder} holds files that are not a rollout's; choose a new or empty folder"
            )
        owned = lock.DirectoryLock(folder)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"{folder} is not a folder; choose another name") from None
    except PermissionError as error:
        raise StoreError(f"cannot write to {error.filename or folder}: permission denied") from None
    try:
        for name in held.intersection(_RESULTS):
            entry = folder / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        (folder / METRICS).touch()
        yield
    finally:
        owned.release()


def read_frames(folder: Path) -> Frames:
    """All whole frames in ``folder``, mapped, not read: uint8 ``[frames, side, side, 3]``."""
    path, shape = folder / FRAMES, (IMAGE_SIZE, IMAGE_SIZE, 3)
    count = path.stat().st_size // (IMAGE_SIZE * IMAGE_SIZE * 3) if path.exists() else 0
    if not count:
        return np.empty((0, *shape), dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r", shape=(count, *shape))


class Recording:
    """One rollout and its results in ``config.out_dir``.

    ``rollout``: what runs it, :func:`run_rollout` for the built-in model. One without pictures
    leaves no film, and nothing to compare.
    """

    def __init__(
        self,
        config: RolloutConfig,
        path_name: str,
        geometry: ModelGeometry,
        rollout: Rollout | None = None,
    ) -> None:
        self._config = config
        self._rollout = rollout or run_rollout
        self._out = Path(config.out_dir)
        self._path_name = path_name
        self._geometry = geometry

    def run(self, *, compare: bool) -> Summary:
        """Run to the end, to Ctrl-C or to an error, and write the results in each case.

        ``compare``: run once more with retrieval switched off. An error is raised again once the
        results are written; an interruption shows in the summary's status.
        """
        status: Status = "complete"
        failure: WorldPagerError | OSError | None = None
        started, self._started = time.monotonic(), datetime.now(UTC)
        wall_seconds = None
        with _terminated_like_interrupted():
            try:
                self._drive()
                wall_seconds = time.monotonic() - started
                if compare:
                    self._drive_without_memory()
            except KeyboardInterrupt:
                status = "interrupted"
            except (WorldPagerError, OSError) as error:
                status, failure = "failed", error
            wall_seconds = wall_seconds or time.monotonic() - started
            try:
                summary = self._write_results(status, failure, wall_seconds)
            except OSError as error:  # what stopped the rollout may stop its results too
                raise failure or error from None
        if failure is not None:
            raise failure
        return summary

    def _drive(self) -> None:
        config = self._config
        np.save(self._out / POSES, config.path, allow_pickle=False)
        with (
            MetricsLog(self._out / METRICS) as log,
            RolloutProgress("rollout", config.chunks, config.dram_bytes) as progress,
            closing(self._rollout(config)) as steps,
        ):
            for metrics in steps:
                log.write(metrics.as_dict())
                progress.update(metrics)

    def _drive_without_memory(self) -> None:
        folder = self._out / BASELINE
        folder.mkdir()
        config = replace(
            self._config,
            retrieve=0,
            chunk_time=None,
            read_limit=None,
            write_limit=None,
            out_dir=folder,
            store_dir=folder / "store",
        )
        with (
            RolloutProgress("without memory", config.chunks, config.dram_bytes) as progress,
            closing(self._rollout(config)) as steps,
        ):
            for metrics in steps:
                progress.update(metrics)
        shutil.rmtree(folder / "store", ignore_errors=True)

    def _write_results(
        self, status: Status, failure: Exception | None, wall_seconds: float
    ) -> Summary:
        metrics = read_metrics(self._out / METRICS)
        frames, others = read_frames(self._out), read_frames(self._out / BASELINE)
        without = others if len(others) == len(frames) else None
        done = len(frames) // self._geometry.frames_per_chunk
        revisits = find_revisits(self._config.path[:done])
        summary = summarise(
            metrics,
            status=status,
            error=None if failure is None else one_line(failure),
            chunk_bytes=chunk_bytes(self._geometry, get_codec(self._config.codec)).stored,
            video_seconds_per_chunk=self._geometry.video_seconds_per_chunk,
            wall_seconds=wall_seconds,
            revisit=Revisit(
                pairs=len(revisits),
                psnr=psnr(frames, revisits),
                psnr_without_memory=None if without is None else psnr(without, revisits),
            ),
            options=self._options(),
            started=self._started.isoformat(),
        )
        write_summary(summary, self._out / SUMMARY)
        write_film(frames, without, self._out / FILM)
        if has_pyav():
            write_film(frames, without, self._out / MP4)
        pictures = comparisons(frames, revisits)
        other = [] if without is None else comparisons(without, revisits)
        write_report(summary, metrics, pictures, other, self._out / REPORT)
        return summary

    def _options(self) -> dict[str, object]:
        config = self._config
        return {
            "model": self._geometry.name,
            "chunks": config.chunks,
            "path": self._path_name,
            "dram_bytes": config.dram_bytes,
            "disk_bytes": config.disk_bytes,
            "store": os.fspath(config.store_dir),
            "codec": config.codec,
            "retrieve": config.retrieve,
            "retrieval": config.retrieval,
            "pruning": config.pruning,
            "page_frames": config.page_frames,
            "eviction": config.eviction,
            "known_ahead": config.known_ahead,
            "prefetch": config.prefetch,
            "write_back": asdict(config.write_back),
            "on_miss": config.on_miss,
            "attention": config.attention,
            "read_limit": config.read_limit,
            "write_limit": config.write_limit,
            "chunk_time": config.chunk_time,
            "seed": config.seed,
        }


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Within, SIGTERM ends a rollout as Ctrl-C does: cleanly, with the summary written."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

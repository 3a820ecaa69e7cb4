"""One episode of ``worldpager recall``: a world, a path through it, and a memory; what came back.

``observed``: the way out is seen, not generated: frames of a random room become memory, and what is
generated on the way back is held against those frames. ``generated``: the model makes up all of
it, and a revisit is held against its own first visit.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from worldpager.cli.recall_methods import Method
from worldpager.cli.recall_paths import FRAMES, GAPS, recall_path
from worldpager.cli.recall_scores import Scorer
from worldpager.cli.revisits import Revisits, find_revisits

if TYPE_CHECKING:
    from worldpager.model_adapter.builtin import WorldModel
    from worldpager.model_adapter.frontend import KVSpec

KINDS = ("observed", "generated")
_ROOMS = 50_000
"""Seeds of rooms from here on: training and its own tests draw theirs elsewhere."""


@dataclass(frozen=True, slots=True)
class Episode:
    """What is run. ``seed`` decides the world and the path. Equal episodes give equal frames."""

    method: str
    codec: str
    kind: str
    path: str
    seed: int
    chunks: int = 144


@dataclass(slots=True)
class Outcome:
    """What an episode showed.

    ``scores``: by gap class, the mean of each metric over the revisited frames, and their number.
    ``window_tokens``: tokens that the last window brought back. ``chunk_bytes``: as stored, without
    the sink. ``chunk_ms``, ``boundary_ms``: medians over the generated chunks.
    """

    episode: Episode
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    window_tokens: float = 0.0
    chunk_bytes: float = 0.0
    chunk_ms: float = 0.0
    boundary_ms: float = 0.0

    def line(self) -> str:
        """The outcome as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, line: str) -> Outcome:
        """Inverse of :meth:`line`."""
        fields: dict[str, Any] = json.loads(line)
        return cls(**{**fields, "episode": Episode(**fields["episode"])})


def run_episode(
    model: WorldModel, method: Method, episode: Episode, scorer: Scorer, folder: Path
) -> Outcome:
    """Run ``episode``; its store lies in ``folder`` for as long as it takes."""
    from worldpager.model_adapter.builtin import RolloutPipeline, Room, render
    from worldpager.model_adapter.memory import WorldMemory
    from worldpager.model_adapter.pruning import CleanProbe
    from worldpager.model_adapter.rollout import (
        SPARSE_MASS,
        MemoryHook,
        builtin_spec,
        weights_identity,
    )

    path = recall_path(episode.path, episode.chunks, episode.seed)
    seen = episode.chunks // 2 if episode.kind == "observed" else 0
    room = Room.random(_ROOMS + episode.seed)
    spec = builtin_spec(
        model.config, episode.chunks if method.chunks is None else method.chunks, weights_identity()
    )
    model.set_sparse(SPARSE_MASS if method.sparse else None)
    film = np.empty((episode.chunks, FRAMES, 32, 32, 3), np.uint8)
    costs = []
    with tempfile.TemporaryDirectory(dir=folder) as store:
        config = method.config(Path(store) / "store", spec, episode)
        with WorldMemory(config, spec) as memory:
            pipeline = RolloutPipeline(
                model,
                episode.seed,
                retrieve_chunks=spec.retrieve_chunks,
                before_chunk=MemoryHook(memory, path),
                probe=CleanProbe((model.config.patch,) * 2)
                if method.probes(episode.kind)
                else None,
            )
            for chunk, poses in enumerate(path):
                began = time.perf_counter()
                if chunk < seen:
                    frames = render(room, poses)
                    pipeline.observe(chunk, poses, frames)
                else:
                    frames = pipeline.generate(chunk, poses).numpy()
                    costs.append((time.perf_counter() - began, memory.last.boundary_ms / 1e3))
                film[chunk] = np.rint(frames * 255)
        outcome = Outcome(episode)
        outcome.chunk_bytes = _stored_bytes(config.store, spec)
    others = (spec.sink_chunks + spec.recent_chunks + 1) * spec.tokens_per_chunk
    outcome.window_tokens = float(pipeline.kv_cache[0]["local_end_index"]) - others
    outcome.chunk_ms, outcome.boundary_ms = (np.median(costs, axis=0) * 1e3).tolist()
    outcome.scores = _by_gap(film.reshape(-1, 32, 32, 3), find_revisits(path), seen, scorer)
    return outcome


def _stored_bytes(store: Path, spec: KVSpec) -> float:
    """Bytes stored of a chunk on average, headers and payload, by the indices of the files."""
    from worldpager.quant.shard import read_tail

    total, chunks = 0, set()
    for file in store.glob("rollout-*/kv/[0-9]*"):
        image = np.fromfile(file, np.uint8)
        record, layout = read_tail(image, len(image), spec.layers)
        if record.start_frame >= spec.sink_frames:
            total += sum(layout.lengths)
            chunks.add(record.start_frame // spec.frames_per_chunk)
    return total / len(chunks)


def _by_gap(
    film: npt.NDArray[np.uint8], revisits: Revisits, seen: int, scorer: Scorer
) -> dict[str, dict[str, float]]:
    """Scores of the revisits that were generated, by the chunks since the first visit."""
    gaps = revisits.again // FRAMES - revisits.first // FRAMES
    made = revisits.again >= seen * FRAMES
    out = {}
    for name, (least, end) in GAPS.items():
        rows = made & (gaps >= least) & (gaps < end)
        if rows.any():
            found = scorer(film[revisits.first[rows]], film[revisits.again[rows]])
            out[name] = {**found, "pairs": int(rows.sum())}
    return out

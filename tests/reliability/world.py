"""The scenarios' words in ours: a pretended world model around a :class:`WorldMemory`.

==============  ================================================================================
open            ``World(directory, ...)``
write(chunk)    ``World.write``: the chunk's KV stands in the frontend's cache; the next
                ``retrieve`` takes it
retrieve(pose)  ``World.retrieve(chunk)``: the boundary before that chunk, at its pose
flush, close    ``World.memory.flush``, ``World.memory.close``
status          ``World.memory.status()``
verify          ``verify(directory)``: ``worldpager verify`` as a user runs it
present         ``World.present()``: chunks that can be asked for
==============  ================================================================================

KV is drawn from (session, chunk, layer, K or V, version), so that any mix-up shows. The oracle is
the codec round trip of that, computed from the tensors alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from worldpager.model_adapter.config import SINK_CODEC, MemoryConfig
from worldpager.model_adapter.frontend import ChunkStep, KVSpec, Poses
from worldpager.model_adapter.images import StoredImage
from worldpager.model_adapter.memory import WorldMemory
from worldpager.model_adapter.ring_cache import RingCache
from worldpager.pager.room import SPOILED
from worldpager.prefetch.paths import make_path
from worldpager.quant.codec import BlockShape, get_codec
from worldpager.quant.rope import RopeLayout
from worldpager.quant.shard import ShardLayout
from worldpager.tiers.io_backend import IOBackend

_LACKING = ("absent", SPOILED)  # reasons why even the previous set may not be there as a whole

CLI = "from worldpager.cli.app import main; main()"

KV = tuple[torch.Tensor, torch.Tensor]


def reference_spec(
    retrieve: int = 3, batch: int = 1, table: int | None = 1024, **changes: object
) -> KVSpec:
    """Reference configuration T."""
    fields: dict[str, object] = {
        "model": "synthetic", "layers": 4, "heads": 2, "head_dim": 64, "tokens_per_frame": 48,
        "frames_per_chunk": 3, "sink_frames": 3, "recent_frames": 3,
        "retrieve_frames": 3 * retrieve, "batch": batch,
    } | changes  # fmt: skip
    head_dim = fields["head_dim"]
    assert isinstance(head_dim, int)
    fields.setdefault("rope", RopeLayout.wan(head_dim, table_len=table))
    return KVSpec(**fields)  # type: ignore[arg-type]


def chunk_bytes(spec: KVSpec, codec: str = "int4") -> int:
    """Bytes of a chunk, in DRAM as on disk."""
    return ShardLayout.for_chunk(get_codec(codec), [spec.block_shape] * spec.layers).nbytes


@lru_cache(maxsize=4096)
def made(spec: KVSpec, session: str, chunk: int, layer: int, version: int = 0) -> KV:
    """What "the model" computes for one layer: K and V ``[batch, tokens, heads, head_dim]``.

    Each batch item has its own seed, so that the first is the same whatever the batch.
    """
    out = []
    for kind in "kv":
        items = []
        for item in range(spec.batch):
            seed = zlib.crc32(f"{session}/{chunk}/{layer}/{kind}/{version}/{item}".encode())
            shape = (spec.tokens_per_chunk, spec.heads, spec.head_dim)
            items.append(np.random.default_rng(seed).standard_normal(shape, np.float32))
        out.append(torch.from_numpy(np.stack(items)).to(spec.dtype))
    return out[0], out[1]


def folded(x: torch.Tensor) -> torch.Tensor:
    """``[batch, tokens, heads, head_dim]`` as a block has it, batch items as further heads."""
    return x.permute(1, 0, 2, 3).flatten(1, 2).contiguous()


@lru_cache(maxsize=4096)
def _payload(
    spec: KVSpec, codec: str, session: str, chunk: int, layer: int, version: int
) -> np.ndarray:
    coder = get_codec(codec)
    payload = np.empty(coder.payload_size(spec.block_shape), np.uint8)
    coder.encode(*(folded(x) for x in made(spec, session, chunk, layer, version)), payload)
    return payload


def expected(
    spec: KVSpec, codec: str, session: str, chunk: int, layer: int, shift: float, version: int = 0
) -> KV:
    """What must come back: the codec round trip, keys moved by ``shift`` frames."""
    shape: BlockShape = spec.block_shape
    payload = _payload(spec, codec, session, chunk, layer, version)
    k, v = (torch.empty(shape.tokens, shape.heads, shape.head_dim, dtype=spec.dtype) for _ in "kv")
    rotation = spec.rope.temporal_rotation(shift) if spec.rope else None
    get_codec(codec).decode(payload, shape, k, v, rotation)
    out = [x.unflatten(1, (spec.batch, spec.heads)).transpose(0, 1) for x in (k, v)]
    return out[0], out[1]


def forget_oracle() -> None:
    """Give the memory of what was computed back, where the memory is what is measured."""
    made.cache_clear()
    _payload.cache_clear()


@dataclass(frozen=True, slots=True)
class Result:
    """What one ``retrieve`` gave: chunk ids in time order, whether stale, and the reason."""

    chunks: tuple[int, ...]
    stale: bool
    reason: str


class World:
    """Loop and cache of a pretended world model, and its memory."""

    def __init__(
        self,
        directory: Path,
        *,
        spec: KVSpec | None = None,
        dram: float = 40,
        codec: str = "int4",
        session: str = "session",
        path: str = "yaw-return",
        chunks: int = 400,
        io: IOBackend | None = None,
        **options: object,
    ) -> None:
        """``dram``: chunks that the pool holds; ``options``: of :class:`MemoryConfig`.

        The fallback is the previous set unless another is given: it can be told in full what that
        must hold.
        """
        self.spec = spec or reference_spec()
        self.codec, self.session = codec, session
        self.path: Poses = make_path(path, chunks, self.spec.frames_per_chunk)
        config = MemoryConfig(
            store=directory, dram=int(dram * chunk_bytes(self.spec, codec)), codec=codec,
            session=session, **{"on_miss": "stale", **options},  # type: ignore[arg-type]
        )  # fmt: skip
        self.memory = WorldMemory(config, self.spec, io=io)
        tokens = (2 + self.spec.sink_chunks + self.spec.retrieve_chunks) * (
            self.spec.tokens_per_chunk
        )
        shape = (self.spec.batch, tokens, self.spec.heads, self.spec.head_dim)
        self.layers = [
            {
                "k": torch.zeros(shape, dtype=self.spec.dtype),
                "v": torch.zeros(shape, dtype=self.spec.dtype),
                "global_end_index": torch.zeros(1, dtype=torch.long),
                "local_end_index": torch.zeros(1, dtype=torch.long),
            }
            for _ in range(self.spec.layers)
        ]
        self.base = 0
        self.begun: int | None = None  # the chunk that stands in the cache unfinished
        self.positions: dict[int, int] = {}
        self.versions: dict[int, int] = {}  # of chunks written more than once, the newest
        self.last = Result((), False, "")
        self.previous = self.last

    def _lower(self, frames: int) -> None:
        self.base += frames

    def cache(self) -> RingCache:
        return RingCache(self.layers, self.spec, self._lower)

    # ---- the scenarios' calls ------------------------------------------------------------------

    def retrieve(self, chunk: int, ahead: int = 0) -> Result:
        """The boundary before ``chunk``: takes the chunk written before, fills the window."""
        before = chunk - 1 if self.begun is None else self.begun
        step = ChunkStep(
            chunk=chunk,
            start_frame=chunk * self.spec.frames_per_chunk,
            finished=before if chunk else None,
            poses=self.path[chunk],
            poses_ahead=self.path[chunk + 1 : chunk + 1 + ahead],
        )
        got = self.memory.boundary(step, self.cache())
        self.begun = chunk
        self.previous = self.last
        self.last = Result(got, self.memory.last.stale, self.memory.last.stale_reason)
        return self.last

    def write(self, chunk: int, version: int = 0) -> None:
        """The model's forwards leave the chunk's KV behind the window."""
        tokens = self.spec.tokens_per_chunk
        self.versions[chunk] = version
        self.positions[chunk] = chunk * self.spec.frames_per_chunk - self.base
        for layer, cache in enumerate(self.layers):
            end = int(cache["local_end_index"])
            k, v = made(self.spec, self.session, chunk, layer, version)
            cache["k"][:, end : end + tokens] = k
            cache["v"][:, end : end + tokens] = v
            cache["local_end_index"] += tokens

    def step(self, chunk: int, ahead: int = 0, *, check: bool = True, version: int = 0) -> Result:
        """One chunk of the rollout: retrieve, check what came back, write."""
        result = self.retrieve(chunk, ahead)
        if check:
            self.check(chunk)
        self.write(chunk, version)
        return result

    def run(self, chunks: range, ahead: int = 0, *, check: bool = True, version: int = 0) -> None:
        """Chunk after chunk; a range that begins before the last one rewinds the world."""
        for chunk in chunks:
            self.step(chunk, ahead, check=check, version=version)

    def remember(self, other: World) -> None:
        """Know what ``other`` wrote into the same directory."""
        self.positions, self.versions = dict(other.positions), dict(other.versions)

    def load(self, chunk: int) -> bool:
        """Ask for one chunk by its id; whether it came fresh. Asserts that it is exact."""
        session = self.memory._session
        stream = session.rollout.stream
        window = session.pager.acquire(stream, 0, (chunk,), (chunk,))
        if window.stale:
            session.pager.acquire(stream, 0, (), ())  # pins nothing, so that there is room
            session.pager.ahead(stream, (chunk,))
            return False
        (got,) = window.chunks
        image = StoredImage(got.image, self.spec)
        assert image.record.chunk == chunk
        target = _OneSlot(self.spec)
        image.decode(target, 0, (0.0,))
        codec = SINK_CODEC if chunk < self.spec.sink_chunks else self.codec
        for layer in range(self.spec.layers):
            version = self.versions.get(chunk, 0)
            want = expected(self.spec, codec, self.session, chunk, layer, 0, version)
            for a, b in zip(target.slot(layer, 0), want, strict=True):
                assert torch.equal(a, b), (chunk, layer)
        return True

    def load_patiently(self, chunk: int, attempts: int = 3) -> bool:
        """:meth:`load` until it comes, all transfers ended in between."""
        for _ in range(attempts):
            if self.load(chunk):
                return True
            self.memory._session.pager.settle()
        return False

    def present(self) -> set[int]:
        """Chunks of the current rollout that are in some tier."""
        stream = self.memory._session.rollout.stream
        return {key.chunk for key in self.memory._session.pager.core.table.pages
                if key.stream == stream}  # fmt: skip

    # ---- the oracle ----------------------------------------------------------------------------

    def check(self, chunk: int) -> None:
        """Assert that the window of ``chunk`` holds exactly what it says, and the stale rule."""
        frames, last = self.spec.frames_per_chunk, self.last
        assert last.stale or all(other < chunk for other in last.chunks)
        assert list(last.chunks) == sorted(set(last.chunks))
        if last.stale and self.memory.config.on_miss == "stale" and last.reason not in _LACKING:
            assert last.chunks == self.previous.chunks, (chunk, last, self.previous)
        if not last.stale:
            wanted = self.memory._recollection.retriever.choose(chunk, self.path[chunk])[0]
            assert last.chunks == wanted, "not flagged, so it is what the pose asks for"
        end = chunk * frames - self.base - self.spec.recent_frames
        for index, other in enumerate(last.chunks):
            placed = end - (len(last.chunks) - index) * frames
            if self.memory.config.positions == "absolute":
                placed = self.positions[other]
            for layer, got in enumerate(self.retrieved(index)):
                want = expected(
                    self.spec, self.codec, self.session, other, layer,
                    placed - self.positions[other], self.versions.get(other, 0),
                )  # fmt: skip
                for a, b in zip(got, want, strict=True):
                    assert torch.equal(a, b), (chunk, other, layer)

    def retrieved(self, index: int) -> list[KV]:
        """K and V of every layer in the window's ``index``-th retrieved slot."""
        start = self.spec.sink_frames * self.spec.tokens_per_frame
        start += index * self.spec.tokens_per_chunk
        rows = slice(start, start + self.spec.tokens_per_chunk)
        return [(cache["k"][:, rows], cache["v"][:, rows]) for cache in self.layers]


class _OneSlot:
    """As much of a frontend's cache as decoding one chunk needs."""

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec
        shape = (spec.batch, spec.tokens_per_chunk, spec.heads, spec.head_dim)
        self._kv = [
            (torch.zeros(shape, dtype=spec.dtype), torch.zeros(shape, dtype=spec.dtype))
            for _ in range(spec.layers)
        ]

    def slot(self, layer: int, index: int) -> KV:
        return self._kv[layer]

    def shift(self, k: torch.Tensor, frames: float) -> None:
        raise AssertionError("spec.rope says how")


def image_bytes(directory: Path, rollout: int = 0) -> dict[int, int]:
    """Sizes of the chunk files of a rollout, by chunk."""
    folder = directory / f"rollout-{rollout}" / "kv"
    return {int(p.name.split(".")[0]): p.stat().st_size for p in folder.glob("*.0.0.0.0.0")}


def chunk_file(directory: Path, chunk: int, rollout: int = 0) -> Path:
    return directory / f"rollout-{rollout}" / "kv" / f"{chunk}.0.0.0.0.0"


def verify(directory: Path) -> tuple[int, dict[str, str]]:
    """``worldpager verify``: its exit status, and the damaged chunks with their reasons."""
    done = subprocess.run(
        [sys.executable, "-c", CLI, "verify", str(directory), "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = json.loads(done.stdout)["damaged"] if done.stdout else []
    return done.returncode, {entry["chunk"]: entry["reason"] for entry in found}


def folder_bytes(directory: Path) -> int:
    """Bytes of all regular files below a folder."""
    return sum(p.lstat().st_size for p in directory.rglob("*") if p.is_file())


def leftovers(directory: Path) -> list[Path]:
    """Temporary files and locks below a folder."""
    return [*directory.rglob("*.tmp"), *directory.rglob(".worldpager.lock*")]

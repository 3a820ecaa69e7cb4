"""``worldpager.attach``: a memory under a pipeline as it is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from worldpager.errors import ConfigError, FrontendError
from worldpager.model_adapter.config import BoundaryReport, MemoryConfig
from worldpager.model_adapter.frontend import ChunkStep, FrontendCache, Poses
from worldpager.model_adapter.frontends.base import Begin, FrontendAdapter, WindowOptions
from worldpager.model_adapter.frontends.saved import Saved
from worldpager.model_adapter.memory import WorldMemory
from worldpager.pager.pool import MemoryPool
from worldpager.prefetch.planner import PATH_AHEAD
from worldpager.units import parse_size

BUILT_IN: tuple[str, ...] = (
    "matrix_game:MatrixGame",
    "lingbot:LingBot",
    "self_forcing:SelfForcing",
)
"""Adapters of this package, tried in this order, ``module:class``."""

PoseSource = Poses | Callable[[int], Poses | None] | None
ControlSource = Callable[[int], Mapping[str, Any]] | None
Listener = Callable[[ChunkStep, BoundaryReport, FrontendCache], None]

_attached: weakref.WeakSet[Any] = weakref.WeakSet()


class Attachment:
    """A memory attached to a pipeline; closes and detaches at the end of its ``with``.

    ``memory``: the :class:`WorldMemory`, for its status. ``frontend``: name of the adapter.
    ``listeners``: called after each boundary with the step, its report and the cache.
    """

    def __init__(
        self,
        adapter: FrontendAdapter,
        memory: WorldMemory,
        poses: PoseSource,
        control: ControlSource,
    ) -> None:
        self.frontend = adapter.name
        self.memory = memory
        self.listeners: list[Listener] = []
        self.extra: Mapping[str, torch.Tensor] = {}
        """What the caller gave :meth:`save`, in a session that was resumed."""
        self._adapter = adapter
        self._given = poses
        self._control = control
        self._last: int | None = None
        self._begun = False  # in a listener: the chunk has begun and nothing of it exists
        self._detached = False
        self._undo = ExitStack()
        with ExitStack() as undo:  # undone at once where installing fails
            undo.callback(memory.close)
            _attached.add(adapter.hooked)
            undo.callback(_attached.discard, adapter.hooked)
            adapter.install(undo, self._begin)
            self._undo = undo.pop_all()

    def detach(self, timeout: float = 60.0) -> None:
        """Leave the pipeline as it was and close the memory. May be called twice.

        Waits up to ``timeout`` seconds until all is durable. All is undone even where it raises, as
        :meth:`WorldMemory.flush` and :meth:`WorldMemory.close` do.
        """
        undo, self._undo = self._undo, ExitStack()
        with undo:
            if not self._detached:
                self._detached = True
                self.memory.flush(timeout)

    def save(self, path: str | Path, **extra: torch.Tensor) -> None:
        """Write what a new process needs to go on after the chunk generated last, besides the
        store; ``extra``: what the caller's loop needs, such as the state of its generators.

        Call it between two chunks, or in a listener: then the chunk that begins is the one to go on
        with. Waits until all chunks are durable. Raises :class:`ConfigError` where none was
        generated, :class:`FrontendError` for a frontend that cannot be saved.
        """
        bookmark = self.memory.bookmark(begun=self._begun)
        state = self._adapter.state(begun=self._begun)
        self.memory.flush()
        Saved(self.frontend, self.memory.spec, bookmark, state, extra).write(Path(path))

    def resume(self, path: str | Path) -> int:
        """Go on from a saved session; the chunk that the loop must begin with. ``extra`` has what
        was saved with it. Also back to an earlier chunk of this rollout: what came after it is
        overwritten as it goes on. Raises as :meth:`Saved.read`, and :class:`ConfigError` where the
        store's newest rollout is not the one saved.
        """
        saved = Saved.read(Path(path), self.frontend, self.memory.spec)
        book, frames = saved.bookmark, self.memory.spec.frames_per_chunk
        self.memory.go_on(book)
        self._adapter.restore(saved.state, book.start_frame + frames, book.base)
        self._last, self.extra = book.chunk, saved.extra
        return book.chunk + 1

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    @property
    def chunk(self) -> int | None:
        """The chunk being generated, ``None`` before the first."""
        return self._last

    def _begin(self, begin: Begin) -> None:
        frames = self.memory.spec.frames_per_chunk
        chunk, odd = divmod(begin.start_frame, frames)
        if odd:
            raise FrontendError(
                f"a chunk begins at latent frame {begin.start_frame}, which is no multiple of the "
                f"{frames} frames of a chunk; models with a first chunk of another size are not "
                "supported"
            )
        if chunk and self._last is None:
            raise FrontendError(
                f"the first chunk seen is number {chunk}; attach before a rollout begins, or "
                "resume one that was saved"
            )
        step = ChunkStep(
            chunk=chunk,
            start_frame=begin.start_frame,
            finished=chunk - 1 if chunk else None,
            poses=self._poses_of(chunk),
            poses_ahead=self._ahead(chunk),
            control=begin.control if self._control is None else self._control(chunk),
        )
        self.memory.boundary(step, begin.cache)
        self._last = chunk
        self._begun = True
        try:
            for listener in self.listeners:
                listener(step, self.memory.last, begin.cache)
        finally:
            self._begun = False

    @property
    def _poses(self) -> PoseSource:
        """The caller's, else what the frontend knows."""
        return self._given if self._given is not None else self._adapter.path()

    def _poses_of(self, chunk: int) -> Poses | None:
        source = self._poses
        if source is None or callable(source):
            return source(chunk) if callable(source) else None
        if chunk >= len(source):
            raise ConfigError(
                f"chunk {chunk} begins, but poses= has those of {len(source)} chunks; give "
                "all, or a function that is asked for each"
            )
        poses: Poses = source[chunk]
        return poses

    def _ahead(self, chunk: int) -> Sequence[Poses]:
        source = self._poses
        if source is None or callable(source):
            return ()
        return tuple(source[chunk + 1 : chunk + 1 + max(PATH_AHEAD)])


def attach(
    target: object,
    *,
    store: str | Path,
    dram: int | str | None = None,
    retrieve: int = 3,
    recent: int | None = None,
    retrieval: str | None = None,
    poses: PoseSource = None,
    control: ControlSource = None,
    frontend: str | None = None,
    pool: MemoryPool | None = None,
    window: Mapping[str, Any] | None = None,
    **config: Any,
) -> Attachment:
    """Put a memory under ``target``, a pipeline or its model, until it is detached.

    ``store``: folder of the session. ``dram``: bytes, or text such as ``"32GiB"``. ``retrieve``:
    old chunks that each window gets; ``recent``: as in :class:`WindowOptions`, whose other fields
    go into ``window``. ``retrieval``: the policy; by default by controls or by camera, whichever
    there is, else the most recent. ``poses``: camera-to-world ``[chunks, frames, 4, 4]`` known
    beforehand, or a function that is asked for each chunk as it begins. ``control``: keys and
    mouse, asked for as each chunk begins, for a frontend that does not tell them itself: see
    ``ChunkStep.control``. ``frontend``: take ``target`` for this one. ``pool``: to share with other
    sessions. ``config``: further fields of :class:`MemoryConfig`: ``codec``,
    ``positions``, ``on_miss``, ``disk``, ...

    Raises :class:`FrontendError` for an object that no adapter knows or that is attached already,
    and as :class:`WorldMemory`; nothing is changed then.
    """
    adapter_class = adapter_for(target, frontend)
    options = WindowOptions(retrieve=retrieve, recent=recent, **(window or {}))
    adapter = adapter_class(target, options)
    if adapter.hooked in _attached:
        raise FrontendError(
            f"this {type(target).__name__} has a memory already; detach it before attaching another"
        )
    if retrieval is None:
        retrieval = adapter.retrieval if poses is None else "camera"
    memory = WorldMemory(
        MemoryConfig(
            store=Path(store),
            dram=parse_size(dram) if isinstance(dram, str) else dram,
            retrieval=retrieval,
            **config,
        ),
        adapter.spec,
        pool=pool,
    )
    return Attachment(adapter, memory, poses, control)


@cache
def adapters() -> dict[str, type[FrontendAdapter]]:
    """All adapters by name: those of WorldPager, then those of ``worldpager.frontends`` entry
    points. Raises :class:`ConfigError` where two have one name.
    """
    found: dict[str, type[FrontendAdapter]] = {}
    for place in BUILT_IN:
        module, _, name = place.partition(":")
        adapter = getattr(import_module(f"{__package__}.{module}"), name)
        found[adapter.name] = adapter
    for entry in entry_points(group="worldpager.frontends"):
        adapter = entry.load()
        if adapter.name in found:
            raise ConfigError(
                f"frontend {adapter.name!r} from {entry.value!r} takes a name that is already in "
                "use; give it another or uninstall its package"
            )
        found[adapter.name] = adapter
    return found


def adapter_for(target: object, name: str | None = None) -> type[FrontendAdapter]:
    """The adapter called ``name``, or the first that knows ``target``. Raises
    :class:`FrontendError` naming what each looked for.
    """
    known = adapters()
    if name is not None:
        if name not in known:
            raise FrontendError(f"no frontend {name!r}; known are {', '.join(known)}")
        return known[name]
    for adapter in known.values():
        if adapter.matches(target):
            return adapter
    looked = "; ".join(f"{adapter.name}: {adapter.looks_for}" for adapter in known.values())
    kind = type(target)
    raise FrontendError(
        f"{kind.__module__}.{kind.__qualname__} is no frontend that is known. Looked for {looked}. "
        "Give the pipeline itself, or write an adapter (docs/frontends/README.md)"
    )


__all__ = ["Attachment", "adapter_for", "adapters", "attach"]

"""What an adapter for a frontend is: the base class for the next model.

An adapter knows one family of pipelines by its objects. It says what the cache looks like
(:attr:`FrontendAdapter.spec`), widens the window and hooks the model (:meth:`install`), and calls
``begin`` before the first forward of each chunk. All that it changes it registers on the
``ExitStack`` it is given, so that detaching undoes it. :mod:`worldpager.testing` holds an adapter
to what must be true of every one.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
import xxhash

from worldpager.errors import FrontendError
from worldpager.model_adapter.frontend import FrontendCache, KVSpec, Poses

_SAMPLED = 64
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class WindowOptions:
    """What the caller wants of the window. ``retrieve``, ``recent``: chunks; ``recent`` ``None``
    for as many as the model shows by itself; ``sink`` likewise, of a rollout's first chunks.
    ``batch``, ``dtype``: of the cache, ``dtype`` ``None`` for that of the weights. ``model``:
    identity of the weights, ``None`` for :func:`fingerprint`.
    ``tokens_per_frame``, ``frames_per_chunk``: for a bare model, which does not know them.
    """

    retrieve: int = 3
    recent: int | None = None
    sink: int | None = None
    batch: int = 1
    dtype: torch.dtype | None = None
    model: str | None = None
    tokens_per_frame: int | None = None
    frames_per_chunk: int | None = None


@dataclass(frozen=True, slots=True)
class Begin:
    """A chunk is about to be generated.

    ``start_frame``: its first true latent frame; 0 begins a new rollout. ``cache``: holds the
    chunk before it. ``control``: keys and mouse, as in ``ChunkStep.control``.
    """

    start_frame: int
    cache: FrontendCache
    control: Mapping[str, Any] = field(default_factory=dict)


class OnBegin(Protocol):
    """What :meth:`FrontendAdapter.install` calls before each chunk: the memory's part."""

    def __call__(self, chunk: Begin, /) -> None: ...


class FrontendAdapter(ABC):
    """One family of pipelines.

    Subclasses are listed in :mod:`.attach` or come from the entry points ``worldpager.frontends``.
    """

    name: ClassVar[str]
    """As in ``attach(frontend=...)`` and the docs."""
    looks_for: ClassVar[str]
    """What :meth:`matches` looks for, for the message where nothing matches."""
    retrieval: ClassVar[str] = "recent"
    """The policy for a caller who names none and gives no poses."""

    def __init__(self, target: Any, options: WindowOptions) -> None:
        """Read ``target`` and change nothing. Raises :class:`FrontendError` where its parts are not
        as the family has them, :class:`ConfigError` for a window it cannot have.
        """
        self.target = target
        self.options = options

    @classmethod
    @abstractmethod
    def matches(cls, target: object) -> bool:
        """Whether ``target`` is of this family, by its attributes; never by its file's name."""

    @property
    @abstractmethod
    def spec(self) -> KVSpec:
        """Geometry of the cache and of the window once widened."""

    @property
    @abstractmethod
    def hooked(self) -> object:
        """The object that can be attached only once, usually the transformer."""

    def path(self) -> Poses | None:
        """Camera-to-world ``[chunks, frames, 4, 4]`` of the rollout that runs, where the frontend
        knows its path beforehand.
        """
        return None

    @abstractmethod
    def install(self, undo: ExitStack, begin: OnBegin) -> None:
        """Widen the window and hook the model. What is changed is registered on ``undo`` before it
        is changed; attributes by :func:`put`, hooks by ``undo.callback(handle.remove)``.
        """

    def state(self, *, begun: bool) -> dict[str, torch.Tensor]:
        """What the memory does not hold of the rollout after its last chunk: the window's own
        tokens, further caches. ``begun``: the memory has done its work before the chunk after that
        one. Raises :class:`FrontendError` where this frontend cannot tell.
        """
        raise FrontendError(f"sessions of {self.name} cannot be saved")

    def restore(self, state: Mapping[str, torch.Tensor], start_frame: int, base: int) -> None:
        """Go on from ``state`` with the chunk at ``start_frame``, positions lowered by ``base``:
        fill the caches before its first forward. Raises :class:`FrontendError` there where the loop
        begins elsewhere.
        """
        raise FrontendError(f"sessions of {self.name} cannot be resumed")


def put(undo: ExitStack, target: Any, name: str, value: object) -> None:
    """Set an attribute, and have ``undo`` put back what was there, or nothing where nothing was."""
    before = vars(target).get(name, _ABSENT)

    def back() -> None:
        if before is _ABSENT:
            vars(target).pop(name, None)
        else:
            setattr(target, name, before)

    undo.callback(back)
    setattr(target, name, value)


def wrap(undo: ExitStack, target: Any, name: str, around: Callable[..., Any]) -> None:
    """Have ``target.name(...)`` call ``around(original, ...)``, until ``undo``."""
    original = getattr(target, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    put(undo, target, name, wrapped)


class Arguments:
    """Finds arguments of a module's ``forward`` by name, however they are passed."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._names = list(inspect.signature(module.forward).parameters)

    def get(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The argument, or ``None`` where it is not passed."""
        if name in kwargs:
            return kwargs[name]
        index = self._names.index(name) if name in self._names else len(args)
        return args[index] if index < len(args) else None

    def replaced(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], values: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``args`` and ``kwargs`` with the arguments in ``values`` exchanged."""
        positional, named = list(args), dict(kwargs)
        for name, value in values.items():
            index = self._names.index(name) if name in self._names else len(args)
            if name not in named and index < len(args):
                positional[index] = value
            else:
                named[name] = value
        return tuple(positional), named


def attribute(target: object, path: str) -> Any:
    """``target.a.b`` for ``"a.b"``, or ``None`` where a part of the way is missing or ``None``."""
    found: Any = target
    for name in filter(None, path.split(".")):
        found = getattr(found, name, None)
        if found is None:
            return None
    return found


def fingerprint(model: torch.nn.Module) -> str:
    """Identity of a model's weights: names, shapes and some values of every parameter."""
    digest = xxhash.xxh3_64()
    for name, value in model.named_parameters():
        digest.update(f"{name} {tuple(value.shape)}".encode())
        if value.device.type != "meta" and value.numel():
            step = max(1, value.numel() // _SAMPLED)
            some = value.detach().reshape(-1)[::step][:_SAMPLED]
            digest.update(some.float().cpu().numpy().tobytes())
    return f"{type(model).__name__}-{digest.hexdigest()}"


def whole_chunks(frames: int, frames_per_chunk: int) -> int:
    """``frames`` rounded up to whole chunks."""
    return -(-frames // frames_per_chunk) * frames_per_chunk


def need(value: Any, what: str, name: str) -> Any:
    """``value``, or :class:`FrontendError` saying that frontend ``name`` lacks ``what``."""
    if value is None:
        raise FrontendError(f"this looks like {name}, but has no {what}; attach the whole pipeline")
    return value

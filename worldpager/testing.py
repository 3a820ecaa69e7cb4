"""Holds a frontend's adapter to what must be true of every one: the conformance kit.

A :class:`Case` says how to make the pipeline, run it, and have it attend to all its past by itself.
Tiny random weights on a CPU are enough. Then, in pytest::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_conformance(check, tmp_path):
        check(my_case(), tmp_path)

or :func:`conformance`, which runs them all and tells what came out.

An error is measured as a fraction of the damage that it does to drop what was retrieved. Relative
to the outputs it would say nothing: with random weights all of the past changes them little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from worldpager.errors import PositionError
from worldpager.model_adapter.frontends.attach import Attachment, attach

LOSS = 0.25
"""Largest share of the damage of dropping the chunks that int4 may do."""

Outputs = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One frontend.

    ``make(dtype)``: a fresh pipeline, with the same weights each time. ``run(pipeline, chunks)``:
    its own loop, with the same noise each time; one output a chunk. ``attend_everything``: makes
    the pipeline's own window as large as a rollout of ``chunks``. ``lengthen``: makes the model's
    position table longer, to compare with beyond its end; where ``None``, a rollout past
    ``beyond`` chunks need only come out finite. ``beyond``: chunks that no longer fit the table;
    ``None`` where the model has none. ``chunks``: so many that some leave the window. ``options``:
    further arguments of :func:`attach`.
    """

    make: Callable[[torch.dtype], Any]
    run: Callable[[Any, int], Outputs]
    attend_everything: Callable[[Any], None]
    chunks: int = 6
    beyond: int | None = None
    lengthen: Callable[[Any], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """What a check found: its name, whether it passed, and a figure or the reason."""

    check: str
    passed: bool
    detail: str


def nothing_retrieved(case: Case, folder: Path) -> str:
    """With nothing retrieved, the rollout is bit for bit the pipeline's own."""
    for dtype in (torch.float32, torch.bfloat16):
        want = case.run(case.make(dtype), case.chunks)
        got, _ = _attached(case, folder / str(dtype), dtype, retrieve=0)
        _same(got, want, "with nothing retrieved")
    return f"{case.chunks} chunks bit-identical"


def everything_retrieved(case: Case, folder: Path) -> str:
    """With every chunk brought back as it was, it is bit for bit the pipeline's full-KV rollout."""
    pipeline = case.make(torch.bfloat16)
    case.attend_everything(pipeline)
    want = case.run(pipeline, case.chunks)
    got, retrieved = _attached(case, folder, torch.bfloat16, retrieve=case.chunks, codec="bf16")
    assert retrieved, "nothing was ever retrieved; run more chunks"
    _same(got, want, "with everything retrieved")
    dropped, _ = _attached(case, folder / "dropped", torch.bfloat16, retrieve=0)
    assert _distance(dropped, want) > 0, "dropping chunks changes nothing, so this shows nothing"
    return f"{case.chunks} chunks bit-identical, {retrieved} blocks brought back"


def int4_loss(case: Case, folder: Path) -> str:
    """int4 does at most :data:`LOSS` of the damage of dropping the chunks."""
    loss = _loss(case, folder)
    assert loss <= LOSS, f"int4 does {loss:.3f} of the damage of dropping, at most {LOSS} allowed"
    return f"{loss:.3f} of the damage of dropping"


def wrong_heads(case: Case, folder: Path) -> str:
    """The control: the same with the retrieved keys' heads exchanged must fail."""
    loss = _loss(case, folder, spoil=_turn_heads)
    assert loss > LOSS, f"keys of the wrong heads do only {loss:.3f} of the damage of dropping"
    return f"{loss:.3f} of the damage of dropping"


def past_the_table(case: Case, folder: Path) -> str:
    """``moving`` goes on where ``absolute`` is refused, and comes out as with a longer table."""
    if case.beyond is None:
        return "the model has no table"
    try:
        _attached(case, folder / "absolute", torch.float32, chunks=case.beyond, retrieve=0)
    except PositionError:
        pass
    else:
        raise AssertionError(f"'absolute' ran {case.beyond} chunks; do they leave the table?")
    got, _ = _attached(
        case, folder, torch.float32, chunks=case.beyond, retrieve=2, positions="moving"
    )
    assert all(bool(x.isfinite().all()) for x in got), "an output past the table is not finite"
    if case.lengthen is None:
        return f"{case.beyond} chunks"
    pipeline = case.make(torch.float32)
    case.lengthen(pipeline)
    want = case.run(pipeline, case.beyond)
    got, _ = _attached(
        case, folder / "none", torch.float32, chunks=case.beyond, retrieve=0, positions="moving"
    )
    error = _distance(got, want) / _distance([torch.zeros_like(x) for x in want], want)
    assert error < 1e-4, f"past the table the outputs differ by {error:.1e} of their size"
    return f"{case.beyond} chunks, {error:.1e} from those of a longer table"


def detaching(case: Case, folder: Path) -> str:
    """Detaching leaves the pipeline as it was, and its own rollout bit for bit the same."""
    pipeline = case.make(torch.float32)
    want = case.run(pipeline, case.chunks)
    before = _state(pipeline)
    with _attach(case, pipeline, folder, torch.float32, retrieve=2) as attachment:
        case.run(pipeline, case.chunks)
    attachment.detach()  # a second time does nothing
    after = _state(pipeline)
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert not changed, f"detaching left changed: {', '.join(sorted(changed)[:8])}"
    _same(case.run(pipeline, case.chunks), want, "after detaching")
    return "the same attributes, hooks, sizes and outputs"


CHECKS: tuple[Callable[[Case, Path], str], ...] = (
    nothing_retrieved, everything_retrieved, int4_loss, wrong_heads, past_the_table, detaching,
)  # fmt: skip


def conformance(case: Case, folder: Path) -> list[Result]:
    """Run every check, each with a store of its own below ``folder``."""
    results = []
    for check in CHECKS:
        try:
            results.append(Result(check.__name__, True, check(case, folder / check.__name__)))
        except Exception as error:
            results.append(Result(check.__name__, False, f"{type(error).__name__}: {error}"))
    return results


# ---- parts --------------------------------------------------------------------------------------


def _attach(
    case: Case, pipeline: Any, folder: Path, dtype: torch.dtype, **options: Any
) -> Attachment:
    window = {"dtype": dtype, **case.options.get("window", {})}
    given = {
        "dram": "64MiB", "positions": "absolute", "on_miss": "wait", "retrieval": "recent",
        **case.options, **options, "window": window,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    return attach(pipeline, store=folder / "store", **given)


def _attached(
    case: Case,
    folder: Path,
    dtype: torch.dtype,
    *,
    chunks: int | None = None,
    spoil: Callable[[Any, int], None] | None = None,
    **options: Any,
) -> tuple[Outputs, int]:
    """Outputs of an attached rollout, and how many chunks were retrieved in all.

    ``spoil``: does its worst to a cache whose window has so many retrieved chunks.
    """
    pipeline = case.make(dtype)
    counts: list[int] = []
    with _attach(case, pipeline, folder, dtype, **options) as attachment:
        attachment.listeners.append(lambda _, report, __: counts.append(len(report.retrieved)))
        if spoil is not None:
            attachment.listeners.append(lambda _, r, cache: spoil(cache, len(r.retrieved)))
        return list(case.run(pipeline, chunks or case.chunks)), sum(counts)


def _loss(case: Case, folder: Path, spoil: Callable[[Any, int], None] | None = None) -> float:
    pipeline = case.make(torch.float32)
    case.attend_everything(pipeline)
    full = case.run(pipeline, case.chunks)
    dropped, _ = _attached(case, folder / "dropped", torch.float32, retrieve=0)
    got, retrieved = _attached(
        case, folder / "kept", torch.float32, retrieve=case.chunks, codec="int4", spoil=spoil
    )
    assert retrieved, "nothing was ever retrieved; run more chunks"
    return _distance(got, full) / _distance(dropped, full)


def _turn_heads(cache: Any, slots: int) -> None:
    for layer in range(cache.spec.layers):
        for slot in range(slots):
            k, _ = cache.slot(layer, slot)
            k.copy_(k.roll(1, dims=2))


def _distance(got: Outputs, want: Outputs) -> float:
    pairs = zip(got, want, strict=True)
    return math.sqrt(sum(float((a.double() - b.double()).square().sum()) for a, b in pairs))


def _same(got: Outputs, want: Outputs, when: str) -> None:
    assert len(got) == len(want), f"{when}: {len(got)} chunks instead of {len(want)}"
    for chunk, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), (
            f"{when}: chunk {chunk} differs by up to {(a - b).abs().max():.2e}"
        )


def _state(target: Any) -> dict[str, object]:
    """What must be as before: attributes, hooks and sizes of a pipeline and all its modules."""
    parts: list[tuple[str, Any]] = [("pipeline", target)]
    for name, value in list(vars(target).items()):
        if isinstance(value, torch.nn.Module):
            parts += [(f"{name}.{path}", module) for path, module in value.named_modules()]
    if isinstance(target, torch.nn.Module):
        parts += [(f"module.{path}", module) for path, module in target.named_modules()]
    return {
        f"{part}.{name}": _plain(value)
        for part, owner in parts
        for name, value in vars(owner).items()
    }


def _plain(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, int | float | str | bool | type(None)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return type(value).__qualname__

"""The walls: imports go only downward, and the drawings in the docs are those of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import worldpager
from worldpager.pager.states import diagram

ROOT = Path(worldpager.__file__).parent
DOCS = ROOT.parent / "docs"
# from the top down; a part may import itself and what stands below it
LAYERS = [
    "cli", "testing", "model_adapter", "sim", "prefetch", "pager", "tiers", "quant", "units",
    "errors",
]  # fmt: skip
CORE = (
    "core", "eviction", "events", "pace", "policies", "room", "spill", "states", "stats", "stream",
    "table",
)  # fmt: skip
MODULES = sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Parts of worldpager that a module imports, wherever in the module it does."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        parts |= {name.split(".")[1] for name in names if name.startswith("worldpager.")}
    return parts & set(LAYERS)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_only_downward(path: Path) -> None:
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if part == "__init__":  # the public face
        return
    assert part in LAYERS, f"{part} is no part of the drawing"
    above = set(LAYERS[: LAYERS.index(part)])
    assert not imported(path) & above


def test_nothing_but_the_cli_uses_the_simulator() -> None:
    users = {p for p in MODULES if "sim" in imported(p)}
    assert {p.relative_to(ROOT).parts[0] for p in users} <= {"cli", "sim"}


def test_the_core_knows_no_thread_clock_file_or_tensor() -> None:
    forbidden = {"threading", "time", "os", "pathlib", "torch", "queue", "asyncio", "io"}
    for name in CORE:
        tree = ast.parse((ROOT / "pager" / f"{name}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not {alias.name.split(".")[0] for alias in node.names} & forbidden
            if isinstance(node, ast.ImportFrom) and node.module:
                assert node.module.split(".")[0] not in forbidden


def test_the_state_diagram_is_current() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    drawn = re.search(r"<!-- states: begin -->\n```mermaid\n(.*?)```", text, re.DOTALL)
    assert drawn is not None
    assert drawn[1].strip() == diagram(), "copy the output of worldpager.pager.states.diagram()"


def test_no_file_is_too_long_to_read() -> None:
    long = {
        str(p.relative_to(ROOT)): n for p in MODULES if (n := len(p.read_text().split("\n"))) > 420
    }
    assert not long

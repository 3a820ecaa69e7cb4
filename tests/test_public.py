"""The public names exist, and importing the package alone costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import worldpager


@pytest.mark.parametrize("name", worldpager.__all__)
def test_each_public_name_resolves(name: str) -> None:
    assert getattr(worldpager, name).__module__.startswith("worldpager.")


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Pagerr'"):
        worldpager.Pagerr  # noqa: B018


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, worldpager; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

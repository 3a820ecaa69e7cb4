"""Settings all tests share: markers, and property tests that are the same on every run."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Triton decides when it is first imported: its kernels then run on CPU tensors.
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(PROFILE)


def pytest_report_header() -> str:
    seeded = "the same examples on every run" if PROFILE == "ci" else "new examples on every run"
    return f"hypothesis profile {PROFILE}: {seeded} (HYPOTHESIS_PROFILE=ci|explore)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)

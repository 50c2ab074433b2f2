"""Tests that need an NVIDIA GPU; elsewhere they are skipped, saying why. One GPU is enough: ranks share it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def why_not() -> str:
    """Return why nothing can run on a GPU here, or ""."""
    for package in ("torch", "cupy"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    import torch
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    if not mine:
        return
    reason = why_not()
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU: {reason}"))

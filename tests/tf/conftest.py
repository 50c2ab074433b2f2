"""Tests with Keras on one backend share what is imported (tests/warm.py), so they are one group; see tests/conftest.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents or item.path.name == "test_gpu.py":
            continue
        backend = item.callspec.params.get("backend", "tensorflow") if hasattr(item, "callspec") else "tensorflow"
        item.add_marker(pytest.mark.xdist_group(f"keras on {backend}"))
        missing = [name for name in (backend, "keras") if importlib.util.find_spec(name) is None]
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"{' and '.join(missing)} not installed"))

"""What every test of Keras needs is marked here; see also tests/conftest.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.slow)
        backend = item.callspec.params.get("backend", "tensorflow") if hasattr(item, "callspec") else "tensorflow"
        missing = [name for name in (backend, "keras") if importlib.util.find_spec(name) is None]
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"{' and '.join(missing)} not installed"))

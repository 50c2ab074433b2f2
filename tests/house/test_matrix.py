"""The environments of `make matrix` (`.ci/matrix.py`), its records, and README's table of versions."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType
from typing import Any

import pytest

from tests.worlds import ROOT

UNTESTED = {"cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cuda-nvrtc",
            "nvidia-cuda-runtime", "nvidia-ml-py"}
"""Packages that need a GPU."""


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("matrix", ROOT / ".ci/matrix.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["matrix"] = importlib.util.module_from_spec(spec)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_chosen_tests_exist(matrix: ModuleType) -> None:
    for name, environment in matrix.ENVIRONMENTS.items():
        assert environment.tests and all((ROOT / path).exists() for path in environment.tests), name


def allowed() -> dict[str, str]:
    """Return the oldest versions that setup.py allows of what users install."""
    text, _, _ = (ROOT / "setup.py").read_text(encoding="utf-8").partition("HUGGING_FACE")
    text += (ROOT / "setup.py").read_text(encoding="utf-8").partition("install_requires")[2]
    return {name: oldest for name, oldest in re.findall(r'"([\w-]+)>=([\d.]+)', text) if name not in UNTESTED}


def is_of(version: str, bound: str) -> bool:
    return f"{version}.0.0".startswith(f"{bound}.")


def test_an_environment_has_the_oldest_version_that_setup_py_allows(matrix: ModuleType) -> None:
    bounds = allowed()
    assert {"numpy", "torch", "tensorflow", "keras", "lightning", "mpi4py", "ray", "pyspark", "optuna"} <= set(bounds)
    pinned = {(package.removesuffix("-cpu"), version) for environment in matrix.ENVIRONMENTS.values()
              for package, _, version in (pin.partition("==") for pin in environment.packages)}
    for package, bound in bounds.items():
        assert any(name == package and is_of(version, bound) for name, version in pinned), f"{package}>={bound}"
    python = re.search(r'python_requires=">=([\d.]+)"', (ROOT / "setup.py").read_text(encoding="utf-8"))
    assert python and python[1] in {environment.python for environment in matrix.ENVIRONMENTS.values()}


def test_a_record_is_of_its_environment(matrix: ModuleType) -> None:
    records: dict[str, dict[str, Any]] = matrix.read()
    assert set(records) <= {*matrix.ENVIRONMENTS, matrix.SUITE}
    for name in set(records) - {matrix.SUITE}:
        environment, installed = matrix.ENVIRONMENTS[name], records[name].get("versions", {})
        assert not installed or is_of(installed["python"], environment.python.removesuffix("t")), name
        for package, _, version in (pin.partition("==") for pin in environment.packages):
            assert not version or installed.get(package.removesuffix("-cpu"), version).startswith(version), (name, package)


def test_readmes_table_is_that_of_the_records(matrix: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert matrix.with_table(readme, matrix.table(matrix.read())) == readme, "run python .ci/matrix.py --table"


def test_the_table_has_what_passed(matrix: ModuleType) -> None:
    def passed(date: str, **versions: str) -> dict[str, object]:
        return {"outcome": "passed", "date": date, "versions": versions}

    records = {
        "core-oldest": passed("2026-01-31", python="3.10.13", numpy="1.24.0"),
        "core-3.13": passed("2026-02-01", python="3.13.0", numpy="2.4.6"),
        "core-3.14t": passed("2026-01-30", python="3.14.1", numpy="2.4.6"),
        "core-3.14": {"outcome": "not run", "date": "2026-03-01", "why": "there is no Python 3.14 here"},
        "torch-newest": {"outcome": "failed", "date": "2026-03-01", "versions": {"python": "3.12.1", "torch": "2.15.0"}},
        "keras-oldest-torch": passed("2026-01-31", python="3.11.7", torch="2.13.0+cpu", keras="3.8.0"),
        "of another time": passed("2026-03-01", python="3.9.1"),
        matrix.SUITE: {"versions": {"python": "3.11.7", "torch": "2.13.0+cpu"}},
    }
    rows = matrix.table(records).splitlines()[2:]
    assert len(rows) == len(matrix.ROWS)
    assert rows[:4] == ["| Python, the core alone | 3.10, 3.13, 3.14t | 3.11 | 2026-02-01 |",
                        "| Python, with PyTorch or TensorFlow |  | 3.11 |  |",
                        "| NumPy | 1.24, 2.4 |  | 2026-02-01 |", "| PyTorch (CPU) |  | 2.13 |  |"]
    assert "| Keras | 3.8 |  | 2026-01-31 |" in rows


def test_a_page_gets_the_table_in_its_place(matrix: ModuleType) -> None:
    page = f"Text.\n\n{matrix.BEGIN}| old |\n{matrix.END}\n## More\n"
    assert matrix.with_table(page, "| new |\n") == page.replace("old", "new")
    with pytest.raises(ValueError, match="the page has no"):
        matrix.with_table("Text.\n", "| new |\n")

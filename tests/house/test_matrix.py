"""The environments of `make matrix` (`.ci/matrix.py`)."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

import pytest

from tests.worlds import ROOT


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


def test_the_oldest_environments_have_the_oldest_versions_that_setup_py_allows(matrix: ModuleType) -> None:
    allowed = dict(re.findall(r'"([\w-]+)>=([\d.]+)', (ROOT / "setup.py").read_text(encoding="utf-8")))
    allowed["tensorflow-cpu"] = allowed["tensorflow"]
    pins = [pin for name in matrix.ENVIRONMENTS if name.endswith("-oldest") for pin in matrix.ENVIRONMENTS[name].packages]
    pinned = [pin.partition("==")[::2] for pin in pins]
    oldest: dict[str, str] = {}
    for package, version in sorted(pinned, key=lambda pin: [int(part) for part in pin[1].split(".") if part], reverse=True):
        if package in allowed and version:
            oldest[package] = version
    assert {"numpy", "ml_dtypes", "msgspec", "cloudpickle", "pyyaml", "mpi4py", "torch", "tensorflow-cpu"} <= set(oldest)
    for package, version in oldest.items():
        assert f"{version}.0".startswith(f"{allowed[package]}."), (package, version, allowed[package])


def test_the_table_has_what_passed(matrix: ModuleType) -> None:
    results = {
        "core-oldest": {"outcome": "passed", "versions": {"python": "3.10.13", "numpy": "1.24.0"}},
        "core-3.13": {"outcome": "passed", "versions": {"python": "3.13.0", "numpy": "2.4.6"}},
        "core-3.14": {"outcome": "not run", "why": "there is no Python 3.14 here"},
        "torch-newest": {"outcome": "failed", "versions": {"python": "3.12.1", "torch": "2.15.0"}},
        "keras-oldest-torch": {"outcome": "passed",
                               "versions": {"python": "3.11.7", "torch": "2.13.0+cpu", "keras": "3.8.0"}},
    }
    rows = matrix.table(results | {"core-3.9": {"outcome": "passed", "versions": {"python": "3.9.1"}}})  # of another time
    assert rows == ["| Python, with PyTorch or TensorFlow | 3.11 |", "| Python, the core alone | 3.10, 3.13 |",
                    "| PyTorch (CPU) | 2.13 |", "| Keras | 3.8 |", "| NumPy, the core alone | 1.24, 2.4 |"]
    page = f"Text.\n\n{matrix.HEAD}| Python, the core alone | 3.9 |\n| Lightning | 2.6 |\n\n## More\n"
    assert matrix.with_table(page, rows[1:3]) == (
        f"Text.\n\n{matrix.HEAD}| Python, the core alone | 3.10, 3.13 |\n| Lightning | 2.6 |\n| PyTorch (CPU) | 2.13 |\n\n"
        "## More\n")


def test_the_readmes_table_gets_its_versions_and_says_nothing_twice(matrix: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert matrix.with_table(readme, []) == readme
    installed = dict.fromkeys(matrix.SHOWN.values(), "99.1.2")
    rows = matrix.table({name: {"outcome": "passed", "versions": installed} for name in matrix.ENVIRONMENTS})
    assert rows == [f"| {title} | 99.1 |" for title in matrix.SHOWN]
    before, after = _titles(matrix, readme), _titles(matrix, matrix.with_table(readme, rows))
    assert set(before) - set(matrix.SHOWN) == {"Lightning", "PyTorch (CPU), the backend of `torch.distributed`"}
    assert len(set(after)) == len(after) and set(after) == set(before) | set(matrix.SHOWN)
    assert after[:len(before)] == before


def _titles(matrix: ModuleType, page: str) -> list[str]:
    table = page.partition(matrix.HEAD)[2].partition("\n\n")[0]
    return [line.removeprefix("| ").partition(" | ")[0] for line in table.splitlines()]


def test_environments_of_the_newest_versions_are_made_again(matrix: ModuleType) -> None:
    for name, environment in matrix.ENVIRONMENTS.items():
        assert not matrix.is_made(name, environment, "")
        assert matrix.is_made(name, environment, repr(environment)) is not name.endswith("-newest")

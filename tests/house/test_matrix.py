"""The environments of `make matrix` (`.ci/matrix.py`), its records, and README's table of versions."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement

from hvdlite_tf.versions import OLDEST, OLDEST_JAX
from tests.worlds import ROOT

NOT_RUN = {
    "needs a GPU": ("cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cuda-nvrtc",
                    "nvidia-cuda-runtime", "nvidia-ml-py"),
    "tests/training/test_checkpoints.py ran with it by hand, on 2026-11-27": ("safetensors",),
    "checks and builds this repository": ("ruff", "mypy", "import-linter", "mkdocs-material", "mkdocstrings", "build",
                                          "twine", "check-wheel-contents"),
}
"""Packages of setup.py whose lower bounds have no record, by the reason."""
WITHOUT_BOUND = {"nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12"}
"""Packages with the major version of CUDA in their names, of which any version will do."""
BACKEND = "PyTorch (CPU), the backend of `torch.distributed`"


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


@pytest.fixture(scope="module")
def bounds() -> dict[str, str]:
    """The lower bounds of setup.py, by the names of packages, and those that importing or using a part of hvdlite checks."""
    pytest.importorskip("torch")
    from hvdlite_torch.distributed.registration import OLDEST_TORCH
    given: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(setuptools, "setup", given.update)
        patched.chdir(ROOT)
        runpy.run_path("setup.py")
    required = set(map(Requirement, {*given["install_requires"], *itertools.chain(*given["extras_require"].values()),
                                     f"python{given['python_requires']}"}))
    lowest = [(requirement.name, clause.version) for requirement in required
              for clause in requirement.specifier if clause.operator == ">="]
    assert {requirement.name for requirement in required} == {name for name, _ in lowest} | WITHOUT_BOUND
    assert len(dict(lowest)) == len(lowest), "two bounds of one package"
    return {**dict(lowest), "jax": ".".join(map(str, OLDEST_JAX["jax"])), BACKEND: ".".join(map(str, OLDEST_TORCH))}


def unproven(matrix: ModuleType, bounds: Mapping[str, str], records: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Return the bounds for which no record of passed tests has exactly that version.

    For a package with rows in README's table, each row counts: its tests must have passed with the bound. A row's title may
    have a bound of its own.
    """
    found, named = set(), {name for title, package, _ in matrix.ROWS for name in (title, package)}
    for title, package, groups in [*matrix.ROWS, *((name, name, ((),)) for name in bounds if name not in named)]:
        bound = bounds.get(title, bounds.get(package))
        versions = [version for version, _, _ in matrix.passed(records, package.replace("-", "_"), groups)]
        if bound is not None and not any(is_of(version, bound if "." in bound else f"{bound}.0") for version in versions):
            found.add(f"{package}>={bound}")
    return sorted(found)


def is_of(version: str, bound: str) -> bool:
    return f"{version.partition('+')[0]}.0.0".startswith(f"{bound}.")


def test_each_lower_bound_has_a_record(matrix: ModuleType, bounds: dict[str, str]) -> None:
    assert {"python", "numpy", "torch", "tensorflow", "keras", "ray", "pytest", "transformers", "jax"} <= set(bounds)
    assert {name: bounds[name] for name in OLDEST if name in bounds} == {
        name: ".".join(map(str, oldest)) for name, oldest in OLDEST.items() if name in bounds}
    not_run = list(itertools.chain(*NOT_RUN.values()))
    assert unproven(matrix, bounds, matrix.read()) == sorted(f"{name}>={bounds[name]}" for name in not_run), \
        "run .ci/matrix.py with an environment that has the version, or raise the bound"


def test_no_environment_has_failed(matrix: ModuleType) -> None:
    assert not [name for name, record in matrix.read().items() if record.get("outcome") == "failed"]


def test_a_bound_without_a_record_is_found(matrix: ModuleType) -> None:
    records = {name: {"outcome": "passed", "date": "2026-01-31", "versions": versions} for name, versions in {
        "core-oldest": {"python": "3.10.13", "numpy": "1.24.0", "pyyaml": "6.0"},
        "torch-oldest": {"python": "3.10.13", "torch": "2.4.0+cpu", "numpy": "2.2.6", "pyyaml": "6.1"}}.items()}
    records["distributed-oldest"] = {"outcome": "passed", "date": "2026-01-31", "versions": {"torch": "2.13.0"}}
    proven = {"python": "3.10", "numpy": "1.24", "pyyaml": "6", "torch": "2.4", BACKEND: "2.13"}
    assert unproven(matrix, proven, records) == []
    assert unproven(matrix, {"torch": "2.4"}, records) == ["torch>=2.4"], "the tests of the backend did not run with 2.4"
    lowered = {"python": "3.9", "numpy": "1.23", "pyyaml": "5", "torch": "2.3", "ray": "2.9"}
    assert unproven(matrix, lowered, records) == sorted(f"{name}>={bound}" for name, bound in lowered.items())
    assert unproven(matrix, {**proven, "torch": "2.4.1", "numpy": "2.2"}, records) == ["numpy>=2.2", "torch>=2.4.1"], \
        "the tests of NumPy did not run with 2.2"
    for outcome in ("failed", "not run"):
        records["torch-oldest"]["outcome"] = outcome
        assert unproven(matrix, {"torch": "2.4", BACKEND: "2.13", "numpy": "1.24"}, records) == ["torch>=2.4"]


def test_a_record_is_of_its_environment(matrix: ModuleType) -> None:
    records: dict[str, dict[str, Any]] = matrix.read()
    assert set(records) <= {*matrix.ENVIRONMENTS, matrix.SUITE}
    for name in set(records) - {matrix.SUITE}:
        environment, installed = matrix.ENVIRONMENTS[name], records[name].get("versions", {})
        assert not installed or is_of(installed["python"], environment.python.removesuffix("t")), name
        for package, _, version in (pin.partition("==") for pin in environment.packages):
            assert not version or installed.get(package.removesuffix("-cpu"), version).startswith(version), (name, package)


def test_an_environment_that_was_left_is_upgraded(matrix: ModuleType, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        if command[2] == "venv":
            Path(command[3]).mkdir()
        return SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setattr(matrix, "BUILD", tmp_path)
    monkeypatch.setattr(matrix, "find_python", "/bin/python{}".format)
    monkeypatch.setattr(matrix, "subprocess", SimpleNamespace(run=run, PIPE=-1, STDOUT=-2))
    environment = matrix.Environment("3.13", ("torch",), ())
    for each in (environment, environment, dataclasses.replace(environment, python="3.14")):
        assert matrix.make("torch-newest", each, Path("hvdlite.whl")) == ""
    first, install, again, other, _ = commands
    assert first[:3] == ["/bin/python3.13", "-m", "venv"] and other[:3] == ["/bin/python3.14", "-m", "venv"]
    assert again == install and " ".join(again).find("pip install -q") > 0 and {"torch", "hvdlite.whl"} < set(again)
    assert " ".join(again).find("--upgrade --upgrade-strategy eager") > 0


def test_readmes_table_is_that_of_the_records(matrix: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert matrix.with_table(readme, matrix.table(matrix.read())) == readme, "run python .ci/matrix.py --table"


def test_the_table_has_what_passed(matrix: ModuleType) -> None:
    def passed(date: str, **versions: str) -> dict[str, object]:
        return {"outcome": "passed", "date": date, "versions": versions}

    records = {
        "core-oldest": passed("2026-01-31", python="3.10.13", numpy="1.24.0"),
        "core-3.13": passed("2026-02-01", python="3.13.0", numpy="2.4.6"),
        "jax-oldest": passed("2026-01-31", python="3.11.7", jax="0.4.36"),
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
    assert "| JAX, as Keras' backend | 0.4.36 |  | 2026-01-31 |" in rows


def test_a_page_gets_the_table_in_its_place(matrix: ModuleType) -> None:
    page = f"Text.\n\n{matrix.BEGIN}| old |\n{matrix.END}\n## More\n"
    assert matrix.with_table(page, "| new |\n") == page.replace("old", "new")
    with pytest.raises(ValueError, match="the page has no"):
        matrix.with_table("Text.\n", "| new |\n")

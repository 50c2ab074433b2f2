"""The reference: every public name is on its page, every parameter has a description, and the examples run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.tf.support import ENVIRONMENT, imported
from tests.worlds import NUMPY, TORCH, processes


@pytest.mark.slow
@pytest.mark.parametrize(("package", "framework", "least"), [
    ("hvdlite", "numpy", 15), ("hvdlite_torch", "torch", 40), ("hvdlite_tf", "tensorflow", 5),
    ("hvdlite_tf.keras", "tensorflow", 15)])
def test_public_names_are_documented_and_examples_run(package: str, framework: str, least: int, tmp_path: Path) -> None:
    if importlib.util.find_spec(framework) is None or importlib.util.find_spec("griffe") is None:
        pytest.skip(f"{framework} or griffe is not installed")
    first = {"numpy": NUMPY, "torch": TORCH, "tensorflow": imported("tensorflow")}[framework]
    ended = processes(1, "tests.house.programs.public_names:check", package, str(tmp_path), imported=first,
                      environment=ENVIRONMENT if framework == "tensorflow" else None)
    found = ended[0].result
    assert found["checked"] > 30 and found["examples"] >= least
    assert not found["undocumented"], "describe these parameters in Args, or say \"Like `name`\" of a function that does"
    assert not found["internal"] and not found["failed"], ended[0].stdout
    assert not found["not on the page"] and not found["twice"], "add names to a group in docs/reference"

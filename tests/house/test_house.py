"""What must stay true of the tree itself."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import hvdlite
from hvdlite import diagnose
from hvdlite.core import errors
from hvdlite.core.config import Config, environment_name
from hvdlite.core.types import Collective
from hvdlite.planes.selection import operations

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("hvdlite", "hvdlite_torch", "hvdlite_tf", "runner")
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
CROWDED = {"hvdlite/bootstrap", "hvdlite/core", "hvdlite/diagnostics", "hvdlite/engine", "hvdlite/groups",
           "hvdlite/negotiation", "hvdlite/planes", "hvdlite/runtime", "hvdlite_tf", "hvdlite_tf/keras"}
"""Folders with more loose files than others may have; no more are to come."""


def test_importing_needs_no_framework_and_no_engine() -> None:
    code = ("import sys, hvdlite; found = {'torch', 'tensorflow', 'keras', 'cupy', 'mpi4py'} & set(sys.modules); "
            "assert not found, found")
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_importing_the_frontend_for_torch_loads_nothing() -> None:
    code = ("import sys, typing; before = set(sys.modules); import hvdlite_torch; found = set(sys.modules) - before; "
            "assert found == {'hvdlite_torch'}, found")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_public_names_exist_and_are_listed() -> None:
    """What all frontends offer stands in one list, `hvdlite.frontend`."""
    torch = importlib.import_module("hvdlite_torch") if _has("torch") else None
    keras = importlib.import_module("hvdlite_tf.keras") if _has("tensorflow") else None
    for module in filter(None, (hvdlite, torch, keras)):
        assert sorted(module.__all__) == sorted(set(module.__all__))
        assert set(module.__all__) <= set(dir(module))
        for name in module.__all__:
            assert hasattr(module, name), name
        listed = {name for name, value in vars(module).items() if not name.startswith("_") and not inspect.ismodule(value)}
        listed -= {"TYPE_CHECKING", "Any", "annotations"}
        assert listed <= set(module.__all__), listed - set(module.__all__)
        assert set(hvdlite.frontend.__all__) <= set(module.__all__)


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def test_tensorflows_names_exist_or_say_what_is_missing() -> None:
    import hvdlite_tf
    for name in hvdlite_tf.__all__:
        if _has("tensorflow"):
            assert getattr(hvdlite_tf, name) is not None
    code = ("import sys; sys.modules['tensorflow'] = None\nimport hvdlite_tf\nassert hvdlite_tf.size\n"
            "try:\n    hvdlite_tf.allreduce\nexcept ImportError as error:\n"
            "    assert \"needs tensorflow: pip install 'hvdlite[tensorflow]'\" in str(error), error\n"
            "else:\n    raise SystemExit('no error')")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_public_function_is_documented() -> None:
    packages = ["hvdlite", *["hvdlite_torch"] * _has("torch"), *["hvdlite_tf", "hvdlite_tf.keras"] * _has("tensorflow")]
    for module in map(importlib.import_module, packages):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value) or inspect.isclass(value):
                assert inspect.getdoc(value), f"{module.__name__}.{name}"


def test_every_error_is_documented_and_tested() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, errors.HvdliteError):
            assert inspect.getdoc(value)
            assert value is errors.HvdliteError or re.search(rf"\b{name}\b", tests), f"no test mentions {name}"


def test_the_tables_of_the_documentation_follow_the_code() -> None:
    subprocess.run([sys.executable, str(ROOT / "docs/generate.py"), "--check"], check=True)
    page = (ROOT / "docs/knobs.md").read_text(encoding="utf-8")
    for field in dataclasses.fields(Config):
        assert field.metadata["help"] and f"`{environment_name(field.name)}`" in page, field.name


def test_the_table_of_operations_is_what_the_core_does() -> None:
    cells = dict(operations())
    assert all(cells["allreduce Sum"][plane] == "all but bool" for plane in ("loopback", "shm", "gloo"))
    assert cells["allreduce Adasum"]["shm"] == "floats" and "reducescatter Adasum" not in cells
    assert cells["allreduce Min"]["shm"] == "all but complex" and cells["send"]["shm"] == "all dtypes"
    listed = {name.split()[0] for name in cells}
    negotiated = {each.name.lower() for each in Collective if not each.name.endswith("PROCESS_SET")}
    assert listed == negotiated


def test_the_diagnosis_for_people_and_for_programs() -> None:
    told = subprocess.run([sys.executable, "-m", "hvdlite_runner.cli", "--check-build", "--verbose"], check=True,
                          capture_output=True, text=True).stdout
    assert "[X] shm (cpu)" in told and "allreduce Average" in told
    assert "allreduce Average" not in diagnose.text(diagnose.build({}), with_operations=False)
    facts = json.loads(subprocess.run([sys.executable, "-m", "hvdlite_runner.cli", "--check-build", "--json"], check=True,
                                      capture_output=True, text=True).stdout)
    assert facts["planes"]["loopback"]["missing"] == "" and facts["hvdlite"] == hvdlite.__version__


def test_links_lead_somewhere() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_files_fit_a_sitting() -> None:
    for path in [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 410, path


def test_a_folder_has_few_loose_files() -> None:
    """Whoever opens a folder reads its files' names at a glance, and finds more in folders that say what is inside."""
    loose = Counter(path.parent.relative_to(ROOT).as_posix() for path in SOURCES)
    full = {folder: count for folder, count in loose.items() if count > 12 and folder not in CROWDED}
    assert not full, f"more than 12 files in one folder: {full}; put those that belong together into a folder of their own"

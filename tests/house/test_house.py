"""What must stay true of the tree itself."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hvdlite
from hvdlite.core import errors
from hvdlite.core.config import Config, environment_name
from hvdlite.core.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = [path for folder in ("hvdlite", "hvdlite_torch", "runner") for path in (ROOT / folder).rglob("*.py")]


def test_importing_needs_no_framework_and_no_engine() -> None:
    code = ("import sys, hvdlite; found = {'torch', 'tensorflow', 'keras', 'cupy', 'mpi4py'} & set(sys.modules); "
            "assert not found, found")
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_public_names_exist_and_are_listed() -> None:
    torch = pytest.importorskip("hvdlite_torch") if _has_torch() else None
    for module in filter(None, (hvdlite, torch)):
        assert sorted(module.__all__) == sorted(set(module.__all__))
        for name in module.__all__:
            assert hasattr(module, name), name
        listed = {name for name, value in vars(module).items() if not name.startswith("_") and not inspect.ismodule(value)}
        assert listed <= set(module.__all__), listed - set(module.__all__)


def _has_torch() -> bool:
    import importlib.util
    return importlib.util.find_spec("torch") is not None


def test_every_public_function_is_documented() -> None:
    for name in hvdlite.__all__:
        value = getattr(hvdlite, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert inspect.getdoc(value), name


def test_every_error_is_documented_and_tested() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, errors.HvdliteError):
            assert inspect.getdoc(value)
            assert value is errors.HvdliteError or re.search(rf"\b{name}\b", tests), f"no test mentions {name}"


def test_every_knob_is_documented() -> None:
    page = (ROOT / "docs/knobs.md").read_text(encoding="utf-8")
    for field in dataclasses.fields(Config):
        assert field.metadata["help"] and f"`{environment_name(field.name)}`" in page, field.name


def test_knobs_are_read_with_their_aliases_and_precedence() -> None:
    config = Config.from_environment({"HOROVOD_FUSION_THRESHOLD": "7", "HVDLITE_SHM_SLOT": "2M", "HOME": "/"})
    assert (config.fusion_threshold, config.shm_slot) == (7, 2 << 20)
    both = {"HOROVOD_FUSION_THRESHOLD": "7", "HVDLITE_FUSION_THRESHOLD": "8"}
    assert Config.from_environment(both).fusion_threshold == 8
    assert Config.from_environment(both, fusion_threshold=9).fusion_threshold == 9
    assert Config.from_environment({"HVDLITE_LOG_LEVEL": "trace"}).log_level == "DEBUG"
    for name, value in (("FUSION_THRESHOLD", "-1"), ("LOG_LEVEL", "loud"), ("CONTROL", "smoke"), ("SHM_SLOT", "")):
        with pytest.raises(ConfigError, match=f"HVDLITE_{name}"):
            Config.from_environment({f"HVDLITE_{name}": value})


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_files_fit_a_sitting() -> None:
    for path in SOURCES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 600, path


@pytest.mark.slow
def test_the_wheel_is_pure_and_complete(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path),
                    str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"hvdlite/py.typed", "hvdlite_torch/py.typed", "hvdlite_runner/cli.py", "hvdlite_runner/guardian.py",
            "hvdlite/runtime/runtime.py"} <= names
    assert not any(name.startswith(("tests/", "runner/", "examples/")) for name in names)

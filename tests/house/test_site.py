"""The documentation as a site: it is built without a warning, and its reference has every public name."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REFERENCES = {"hvdlite.frontend": "core", "hvdlite_torch": "torch", "hvdlite_tf": "tensorflow", "hvdlite_tf.keras": "keras"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="the site needs mkdocs-material")
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    built = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)], cwd=ROOT,
                           env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-4000:]
    return folder


@pytest.mark.parametrize("module", REFERENCES)
def test_the_reference_has_every_public_function_and_class(site: Path, module: str) -> None:
    text = "".join((site / "reference" / f"{REFERENCES[each]}.html").read_text() for each in {module, "hvdlite.frontend"})
    public = importlib.import_module(module)
    values = [getattr(public, name) for name in public.__all__]
    expected = {f"{value.__module__}.{value.__qualname__}" for value in values
                if inspect.isclass(value) or inspect.isfunction(value)}
    assert len(expected) > 20
    assert not [name for name in expected if f'id="{name}"' not in text]


def test_pictures_and_figures_are_part_of_the_site(site: Path) -> None:
    assert (site / "results" / "collectives-2.png").exists() and (site / "images" / "step.svg").exists()
    assert 'src="results/collectives-2.png"' in (site / "performance.html").read_text()
    assert 'href="results/NOTES.html"' in (site / "performance.html").read_text()

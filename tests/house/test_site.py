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


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_has_every_public_name(tmp_path: Path) -> None:
    """One test: other processes that run tests would build it again."""
    pytest.importorskip("material", reason="the site needs mkdocs-material")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    built = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)], cwd=ROOT,
                           env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-4000:]
    for module, page in REFERENCES.items():
        text = "".join((tmp_path / "reference" / f"{each}.html").read_text() for each in {page, "core"})
        public = importlib.import_module(module)
        values = [getattr(public, name) for name in public.__all__ if not name.endswith(("_built", "_enabled"))]
        expected = {f"{value.__module__}.{value.__qualname__}" for value in values
                    if inspect.isclass(value) or inspect.isfunction(value)}
        assert len(expected) > 20
        assert not [name for name in expected if f'id="{name}"' not in text]
        assert "ranks that take part" in text, "descriptions that functions share"
    assert (tmp_path / "results" / "collectives-2.png").exists() and (tmp_path / "images" / "step.svg").exists()
    examples = (tmp_path / "examples" / "index.html").read_text()
    for path in (ROOT / "examples").iterdir():
        if path.suffix in (".py", ".ipynb", ".yaml", ".sbatch") or path.name == "Dockerfile":
            assert (tmp_path / "examples" / path.name).read_bytes() == path.read_bytes()
            assert f'href="{path.name}"' in examples, path
    assert "<td><code>area.py</code></td>" in (tmp_path / "files.html").read_text()
    figures = (tmp_path / "performance.html").read_text()
    assert 'src="results/collectives-2.png"' in figures and 'href="results/NOTES.html"' in figures

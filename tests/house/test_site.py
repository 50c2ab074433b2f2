"""The documentation as a site: it is built without a warning, its reference is whole, and each page says what it is."""

from __future__ import annotations

import html
import importlib
import inspect
import json
import os
import re
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
    is_described(tmp_path)
    is_found(tmp_path)


def is_described(site: Path) -> None:
    """Check that each page has an address and a description of its own, and a page that does not exist leads to others."""
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    address = re.search(r"<loc>(.*)/index\.html</loc>", (site / "sitemap.xml").read_text())
    assert address and address[1].startswith("https://")
    missing = pages.pop("404.html")
    links = re.findall(r'<li><a href="/[^/]+/([\w/]+\.html)">', missing)
    assert len(links) > 4 and set(links) <= set(pages), links
    described = {page: re.findall(r'<meta name="description" content="([^"]+)">', text) for page, text in pages.items()}
    assert all(len(texts) == 1 and len(html.unescape(texts[0])) <= 160 for texts in described.values()), described
    assert len({texts[0] for texts in described.values()}) == len(pages)
    assert all(f'<link rel="canonical" href="{address[1]}/{page}">' in text for page, text in pages.items())
    assert not list(site.rglob("__pycache__")) and not list(site.rglob("theme"))


def is_found(site: Path) -> None:
    """Check that the search ranks guides above decisions, and that their page has all of them."""
    documents = json.loads((site / "search/search_index.json").read_text())["docs"]
    boosts = {each["location"].partition("#")[0]: each.get("boost", 1) for each in documents}
    decisions = {page for page in boosts if page.startswith("decisions/0")}
    assert len(decisions) > 70
    assert max(boosts[page] for page in decisions) < 1 < min(boosts[page] for page in ("pytorch.html", "faq.html"))
    listed = re.findall(r'href="(0[^"]+)"', (site / "decisions/index.html").read_text())
    assert decisions <= {f"decisions/{link}" for link in listed}

"""What the pages of docs/ promise about the code, and what the code cites of them."""

from __future__ import annotations

import re
from pathlib import Path

import hvdlite
import hvdlite_torch
from hvdlite import frontend

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("hvdlite", "hvdlite_torch", "hvdlite_tf", "runner")
CITED = re.compile(r"protocol\.md((?:,? ?#[\w-]+)+)")


def _sources(*folders: str) -> list[str]:
    return [path.read_text(encoding="utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py")]


def _cited(*folders: str) -> set[str]:
    return set(re.findall(r"#([\w-]+)", " ".join(anchors for text in _sources(*folders) for anchors in CITED.findall(text))))


def _anchors(page: Path, level: str = "#+") -> list[str]:
    """Return the anchors that a page's headings have."""
    headings = re.findall(rf"^{level} (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings]


def test_every_rule_that_is_cited_exists_and_every_rule_has_a_test() -> None:
    rules = _anchors(ROOT / "docs/protocol.md", "###")
    assert len(rules) == len(set(rules))
    assert _cited(*PACKAGES, "tests") <= set(rules)
    assert set(rules) <= _cited("tests")


def test_links_to_a_section_lead_to_it() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for path, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
            assert anchor in _anchors(page.parent / path if path else page), f"{page.name}: {path}#{anchor}"


def test_every_class_in_the_glossary_exists() -> None:
    page = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    meanings = [line.split(" | ")[1] for line in page.splitlines() if line.startswith("| ")]
    classes = {name for text in _sources(*PACKAGES) for name in re.findall(r"^class (\w+)", text, re.MULTILINE)}
    named = {name for meaning in meanings for name in re.findall(r"`([A-Z][a-z]\w+)`", meaning)}
    assert named
    assert named <= classes, f"docs/glossary.md names classes that do not exist: {sorted(named - classes)}"


def test_the_page_of_files_has_a_table_of_every_package() -> None:
    """The site fills the tables, with every file."""
    tables = re.findall(r"<!-- files of ([\w/]+) -->", (ROOT / "docs/files.md").read_text(encoding="utf-8"))
    packages = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "hvdlite").glob("*/__init__.py")}
    assert packages - set(tables) == {"hvdlite/horovod_compat"}
    assert set(PACKAGES) <= set(tables)


def test_files_that_pages_name_exist() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for path in re.findall(r"`(\w+/[\w/]+\.py)`", page.read_text(encoding="utf-8")):
            found = any((ROOT / folder / path).exists() for folder in (".", *PACKAGES))
            assert found, f"{page.name}: {path}"


def test_every_error_that_the_page_names_is_a_name_of_every_frontend() -> None:
    named = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs/errors.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert len(named) > 15
    assert named <= set(frontend.__all__), sorted(named - set(frontend.__all__))
    assert all(issubclass(getattr(frontend, name), Exception) for name in named)
    assert set(frontend.__all__) <= set(hvdlite_torch.__all__) & set(hvdlite.__all__)

"""The checks before a release (`.ci/release.py`), and the forms for issues."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from hvdlite_runner.options import parser
from tests.worlds import ROOT

SCRIPT = ROOT / ".ci/release.py"


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_stands_in_one_place(release: ModuleType) -> None:
    own = {"hvdlite/_version.py": '"""The version."""\n\n__version__ = "1.2.3"\n'}
    assert release.version_of({**own, "setup.py": "version=VERSION"}) == "1.2.3"
    for text in ('version="1.2.3"', "version: 1.2.3", 'version = "1.2.3"'):
        with pytest.raises(release.Failure, match=r"setup\.py has the version too"):
            release.version_of({**own, "setup.py": text})
    with pytest.raises(release.Failure, match="must have a line"):
        release.version_of({"hvdlite/_version.py": '__version__ = "next"\n'})


def test_the_changelog_begins_with_the_version(release: ModuleType) -> None:
    dated, undated = "# Changelog\n\n## 1.2.3 (2026-01-31)\n\n## 1.2.2 (2025-01-31)\n", "## 1.2.3 (unreleased)\n"
    assert release.check_changelog(dated, "1.2.3", rehearse=False) == "1.2.3 (2026-01-31)"
    assert release.check_changelog(undated, "1.2.3", rehearse=True) == "1.2.3 (unreleased)"
    for text, version in ((undated, "1.2.3"), (dated, "1.2.2"), ("", "1.2.3")):
        with pytest.raises(release.Failure, match=rf"must be '## {version} \(YYYY-MM-DD\)'"):
            release.check_changelog(text, version, rehearse=False)


def test_the_wheel_has_the_files_of_the_repository(release: ModuleType) -> None:
    tracked = ["setup.py", "hvdlite/api.py", "runner/cli.py", "runner/ssh_config", "tests/worlds.py"]
    inside = ["hvdlite/api.py", "hvdlite_runner/cli.py", "hvdlite_runner/ssh_config", "hvdlite-1.2.3.dist-info/RECORD"]
    name = "hvdlite-1.2.3-py3-none-any.whl"
    assert release.check_wheel(name, inside, tracked) == "3 files"
    with pytest.raises(release.Failure, match=r"lacks \['hvdlite_runner/ssh_config'\], and has \[\]"):
        release.check_wheel(name, inside[:2], tracked)
    with pytest.raises(release.Failure, match=r"lacks \[\], and has \['hvdlite/stale\.py'\]"):
        release.check_wheel(name, [*inside, "hvdlite/stale.py"], tracked)
    with pytest.raises(release.Failure, match="something was compiled"):
        release.check_wheel("hvdlite-1.2.3-cp311-cp311-linux_x86_64.whl", inside, tracked)


def test_the_source_distribution_is_the_repository(release: ModuleType) -> None:
    tracked = ["setup.py", "CHANGELOG.md", "tests/worlds.py"]
    assert release.check_source([*tracked, "PKG-INFO", "setup.cfg", "hvdlite.egg-info/SOURCES.txt"], tracked) == "3 files"
    with pytest.raises(release.Failure, match=r"lacks \['CHANGELOG\.md'\], and has \['tests/stale\.pyc'\]"):
        release.check_source(["setup.py", "tests/worlds.py", "tests/stale.pyc"], tracked)


def test_links_of_the_readme_lead_somewhere_on_the_package_index(release: ModuleType) -> None:
    told = subprocess.run([sys.executable, "-W", "ignore", "setup.py", "-q", "--version", "--url", "--long-description"],
                          cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    version, repository, text = told.split("\n", 2)
    fields = "Author: a\nProject-URL: b\nSummary: c\nRequires-Python: d\n\n"
    assert int(release.check_description(fields + text, rehearse=True).split()[0]) > 30
    installed = re.search(r"^pip install 'hvdlite\[torch\]( @ git\+(\S+))?'", text, re.MULTILINE)
    assert installed and installed[2] in (None, repository), "README.md installs from where the project is"
    with pytest.raises(release.Failure, match=r"installs from the repository"):
        release.check_description(fields + "git+https://host/hvdlite", rehearse=False)
    links = re.findall(rf"\]\({re.escape(repository)}/blob/v{re.escape(version)}/([^)#]+)", text)
    assert len(links) > 30 and all((ROOT / link).exists() for link in links)
    with pytest.raises(release.Failure, match=r"lead nowhere on the package index: \['docs/start\.md'\]"):
        release.check_description(fields + "[start](docs/start.md)", rehearse=False)
    with pytest.raises(release.Failure, match=r"lacks \['Author', 'Project-URL'\]"):
        release.check_description("Summary: c\nRequires-Python: d\n\n", rehearse=False)
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert setup.count(repository) == 1, "the address stands in one place"


def test_the_workflow_runs_what_a_clone_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)
    assert os.access(ROOT / ".ci/run", os.X_OK)


@pytest.mark.slow
def test_packages_are_built_installed_in_an_empty_environment_and_used() -> None:
    missing = [name for name in ("build", "twine", "check_wheel_contents") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install 'hvdlite[dev]'")
    ended = subprocess.run([sys.executable, str(SCRIPT), "--rehearse", "--no-isolation"], stdout=subprocess.PIPE, text=True)
    if "Failed to establish a new connection" in ended.stdout or "No matching distribution found" in ended.stdout:
        pytest.skip("no package index can be reached")
    assert ended.returncode == 0 and "10/10 installed in an empty environment: two ranks ran" in ended.stdout, ended.stdout


def test_forms_for_issues_are_valid_and_name_commands_that_exist() -> None:
    flags = parser()._option_string_actions
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.name == "config.yml":
            assert set(form) <= {"blank_issues_enabled", "contact_links"}
            continue
        assert set(form) == {"name", "description", "labels", "body"}, path
        ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert len(ids) == len(set(ids)) and all(part["attributes"].get("label") for part in form["body"] if "id" in part)
        assert {part["type"] for part in form["body"]} <= {"markdown", "textarea", "dropdown", "checkboxes", "input"}
        text = path.read_text(encoding="utf-8")
        assert {word.strip("`.,;()") for word in text.split() if word.startswith("--")} <= set(flags), path
        for link in (word.partition("main/")[2].partition(")")[0] for word in text.split() if "/blob/main/" in word):
            assert Path(ROOT / link).exists(), link

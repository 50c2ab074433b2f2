"""Walk through the checks before a release; stop at the first one that fails: `make release-check`.

    python .ci/release.py               # all of them
    python .ci/release.py --rehearse    # at any time: nothing has to be committed, and the changelog needs no date

It builds the packages, and installs the wheel in an empty environment, for which it needs a package index. It publishes
nothing; the last lines say what is left to do.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"hvdlite": "hvdlite", "hvdlite_tf": "hvdlite_tf", "hvdlite_torch": "hvdlite_torch", "runner": "hvdlite_runner"}
"""Folders, and the names under which they are installed."""
USE = """
import numpy as np, hvdlite as hvd
hvd.init()
assert (hvd.allreduce(np.full(5, hvd.rank() + 1.0), op=hvd.Sum) == 3).all()
print(f"rank {hvd.rank()} of {hvd.size()} uses {hvd.__file__}")
"""


class Failure(Exception):
    """A check has failed; the message says what to do."""


def run(*command: str | Path, **options: object) -> str:
    """Run a command and return what it prints.

    Raises:
        Failure: when it fails, with its output.
    """
    ended = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                           **{"cwd": ROOT, **options})  # type: ignore[call-overload]
    if ended.returncode:
        raise Failure(f"{' '.join(map(str, command))} ended with code {ended.returncode}:\n{ended.stdout.rstrip()}")
    return str(ended.stdout)


def version_of(texts: dict[str, str]) -> str:
    """Return the version, which must stand in `hvdlite/_version.py` only.

    Args:
        texts: the contents of files by their paths.
    """
    found = re.search(r'^__version__ = "([^"]*)"$', texts["hvdlite/_version.py"], re.MULTILINE)
    if found is None or not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", found[1]):
        raise Failure('hvdlite/_version.py must have a line __version__ = "1.2.3" (or 1.2.3rc1)')
    for path, text in texts.items():
        if path != "hvdlite/_version.py" and re.search(rf"\bversion\b.{{0,8}}{re.escape(found[1])}", text):
            raise Failure(f"{path} has the version too; it belongs to hvdlite/_version.py only")
    return found[1]


def check_changelog(text: str, version: str, *, rehearse: bool) -> str:
    """Return the heading of the changelog's first section, which must be that of the version, with a date."""
    heading = next((line for line in text.splitlines() if line.startswith("## ")), "")
    dated = re.fullmatch(rf"## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading)
    if not dated and not (rehearse and heading == f"## {version} (unreleased)"):
        raise Failure(f"CHANGELOG.md begins with {heading!r}; it must be '## {version} (YYYY-MM-DD)'")
    return heading.removeprefix("## ")


GENERATED = re.compile(r"PKG-INFO|setup\.cfg|[^/]+\.egg-info/.*")
"""What a source distribution has beyond the repository."""


def check_source(found: Collection[str], tracked: Collection[str]) -> str:
    """Compare the files in a source distribution with those of the repository, both relative to its top."""
    inside = {path for path in found if not GENERATED.fullmatch(path)}
    expected = set(tracked)
    if inside != expected:
        raise Failure(f"the source distribution lacks {sorted(expected - inside)}, and has {sorted(inside - expected)} "
                      "beyond the repository: see MANIFEST.in, and commit new files")
    return f"{len(inside)} files"


def check_description(metadata: str, *, rehearse: bool) -> str:
    """Check what the package index will show: every link leads somewhere from there, and the project can be found."""
    if "git+https" in metadata and not rehearse:
        raise Failure("README.md installs from the repository: write pip install 'hvdlite[torch]' there, in docs/start.md "
                      "and in docs/gpus.md")
    links = re.findall(r"\]\(([^)]+)\)", metadata)
    relative = [link for link in links if not link.startswith(("https://", "#"))]
    if relative:
        raise Failure(f"the description has links that lead nowhere on the package index: {relative}; see setup.py")
    fields = set(re.findall(r"^([A-Za-z-]+): ", metadata.partition("\n\n")[0], re.MULTILINE))
    missing = {"Author", "Project-URL", "Summary", "Requires-Python"} - fields
    if missing:
        raise Failure(f"the metadata lacks {sorted(missing)}: see setup.py")
    return f"{len(links)} links"


def check_wheel(name: str, found: Collection[str], tracked: Collection[str]) -> str:
    """Compare the files in a wheel with those of the repository.

    Args:
        name: of the wheel.
        found: the files in it.
        tracked: all files of the repository.
    """
    if not name.endswith("-py3-none-any.whl"):
        raise Failure(f"{name} is not for all Pythons and systems: something was compiled")
    expected = {f"{PACKAGES[folder]}/{rest}" for folder, _, rest in (path.partition("/") for path in tracked)
                if folder in PACKAGES and rest}
    inside = {path for path in found if ".dist-info/" not in path}
    if inside != expected:
        raise Failure(f"the wheel lacks {sorted(expected - inside)}, and has {sorted(inside - expected)} beyond the "
                      "repository: see packages and package_data in setup.py, and commit new files")
    return f"{len(inside)} files"


def build(folder: Path, *, isolated: bool) -> tuple[Path, Path]:
    """Return the source distribution and the wheel; the wheel is built from the source distribution."""
    run(sys.executable, "-m", "build", *([] if isolated else ["--no-isolation"]), "--outdir", folder, ROOT)
    (source,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return source, wheel


def files_of(source: Path) -> list[str]:
    """Return the files of a source distribution, relative to its top."""
    with tarfile.open(source) as archive:
        return [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]


def metadata_of(wheel: Path) -> str:
    """Return what a wheel tells the package index."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(path for path in archive.namelist() if path.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def check_metadata(source: Path, wheel: Path) -> str:
    """Check what the index will show, and the wheel's layout."""
    run(sys.executable, "-m", "twine", "check", "--strict", source, wheel)
    run(sys.executable, "-m", "check_wheel_contents", wheel)
    return "twine and check-wheel-contents"


def use(wheel: Path, folder: Path, version: str) -> str:
    """Install the wheel in an empty environment, and run two ranks there."""
    environment, script = folder / "empty", folder / "use.py"
    venv.create(environment)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HVDLITE_", "HOROVOD_"))}
    python = environment / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    run(*pip, "install", "-q", wheel, cwd=folder, env=environ)
    run(*pip, "check", cwd=folder, env=environ)
    hvdrun = environment / "bin/hvdrun"
    if run(hvdrun, "--version", cwd=folder, env=environ).strip() != version:
        raise Failure("hvdrun --version of the installed wheel is not the version")
    run(hvdrun, "--check-build", cwd=folder, env=environ)
    script.write_text(USE, encoding="utf-8")
    said = run(hvdrun, "-np", "2", "--no-prefix", python, script, cwd=folder, env=environ)
    for rank in range(2):
        if f"rank {rank} of 2 uses {environment}" not in said:
            raise Failure(f"rank {rank} did not run with the installed wheel:\n{said}")
    return "two ranks ran"


def tracked_files() -> list[str]:
    """Return the files of the repository that exist, committed or about to be."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    return [path for path in listed if (ROOT / path).is_file()]


def check_git(version: str, *, rehearse: bool) -> str:
    """Check that everything is committed, and that the version is a new one."""
    if run("git", "tag", "--list", f"v{version}").strip():
        raise Failure(f"v{version} has been released: raise the version in hvdlite/_version.py")
    changed = run("git", "status", "--porcelain").rstrip()
    if changed and not rehearse:
        raise Failure(f"commit or remove:\n{changed}")
    return "not all is committed" if changed else "everything is committed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return 0 if all of them pass, else 1."""
    parser = argparse.ArgumentParser(description="Check that a release can be made.")
    parser.add_argument("--rehearse", action="store_true", help="accept what is not committed, and a changelog without date")
    parser.add_argument("--no-isolation", action="store_true", help="build with the setuptools of this environment")
    options = parser.parse_args(arguments)
    read: Callable[[str], str] = lambda path: (ROOT / path).read_text(encoding="utf-8")  # noqa: E731
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built: list[Path] = []
        version = ""

        def find_version() -> str:
            nonlocal version
            version = version_of({path: read(path) for path in ("hvdlite/_version.py", "setup.py", "pyproject.toml",
                                                                "CITATION.cff", "README.md")})
            return version

        def build_packages() -> str:
            built.extend(build(folder / "dist", isolated=not options.no_isolation))
            return ", ".join(path.name for path in built)
        steps: list[tuple[str, Callable[[], str]]] = [
            ("the version stands in one place", find_version),
            ("the changelog has it", lambda: check_changelog(read("CHANGELOG.md"), version, rehearse=options.rehearse)),
            ("git", lambda: check_git(version, rehearse=options.rehearse)),
            ("tables of docs/", lambda: run(sys.executable, "docs/generate.py", "--check").strip() or "up to date"),
            ("source distribution and wheel", build_packages),
            ("metadata and layout", lambda: check_metadata(*built)),
            ("description for the package index", lambda: check_description(
                metadata_of(built[1]), rehearse=options.rehearse)),
            ("the source distribution is the repository", lambda: check_source(files_of(built[0]), tracked_files())),
            ("the wheel has the repository's files", lambda: check_wheel(
                built[1].name, zipfile.ZipFile(built[1]).namelist(), tracked_files())),
            ("installed in an empty environment", lambda: use(built[1], folder, version)),
        ]
        for number, (what, step) in enumerate(steps, 1):
            try:
                print(f"{number}/{len(steps)} {what}: {step()}", flush=True)
            except Failure as error:
                print(f"{number}/{len(steps)} {what}: FAILED\n{error}", flush=True)
                return 1
    print(f"\nStill to do for {version}:\n"
          "  make test && make long                              # on two machines, if you have them\n"
          "  make bench                                          # compare with benchmarks/results; figures of README.md\n"
          "  python -m benchmarks.gpu_check                      # on a GPU; or say in docs/gpus.md that it was not run\n"
          f"  git tag -s v{version} && git push origin v{version}\n"
          f"  python -m build --outdir build/release-{version}\n"
          f"  python -m twine upload {' '.join(f'build/release-{version}/{path.name}' for path in built)}\n"
          f"  pip install hvdlite=={version}                          # in an empty environment, from the package index")
    return 0


if __name__ == "__main__":
    sys.exit(main())

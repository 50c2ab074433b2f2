"""Run a chosen part of the tests with several versions of Python and of the packages, in an environment of its own for each.

    make matrix                                     # all; an hour or more, and gigabytes of downloads
    python .ci/matrix.py core-oldest keras-oldest   # some
    python .ci/matrix.py --table --readme           # the results so far, into the README's table

Packages are installed from package indexes, and hvdlite as a package, so an environment also shows that pip finds versions
that fit together. The tests run with this tree. Results are in build/matrix/results.json. A Python that is not installed
here, and an environment that pip cannot make, are named as not run. PyTorch's builds for CPUs are not on PyPI: where there
is no other index, older versions come with CUDA's libraries.
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/matrix"
RESULTS = BUILD / "results.json"
TEST_PACKAGES = ("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.5", "hypothesis>=6.100")
CORE = ("tests/core", "tests/memory", "tests/handoff", "tests/negotiation", "tests/control",
        "tests/planes/test_contract_collectives.py", "tests/planes/test_contract_reductions.py",
        "tests/runtime/test_threads.py", "tests/runner/test_options.py")
MPI = ("tests/planes/test_mpi.py",)
TORCH = ("tests/torch/test_ops.py", "tests/torch/test_optimizer.py", "tests/torch/test_buckets.py",
         "tests/torch/test_state.py", "tests/torch/test_sync_batch_norm.py", "tests/torch/test_hooks.py")
KERAS = ("tests/tf/test_keras.py", "tests/tf/test_mirrored_losses.py")
TENSORFLOW = ("tests/tf/test_ops.py", "tests/tf/test_errors.py", "tests/tf/test_graph_names.py", *KERAS)
HEAD = "| | tested with |\n|---|---|\n"
SHOWN = {"Python, with PyTorch or TensorFlow": "python", "Python, the core alone": "python", "PyTorch (CPU)": "torch",
         "TensorFlow (CPU)": "tensorflow", "Keras": "keras", "JAX, as Keras' backend": "jax",
         "NumPy, with PyTorch or TensorFlow": "numpy", "NumPy, the core alone": "numpy", "mpi4py": "mpi4py"}
"""Rows of the README's table, and the packages they are about."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """What is installed, and the tests that run with it.

    Attributes:
        python: a version, such as "3.12"; "3.14t" is free-threaded.
        packages: beside hvdlite and what tests need.
        tests: files and folders.
        options: of pytest.
        beside: packages that tests need and that the table is not about.
    """

    python: str
    packages: tuple[str, ...]
    tests: tuple[str, ...]
    options: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


ENVIRONMENTS: dict[str, Environment] = {
    "core-oldest": Environment(
        "3.10", ("numpy==1.24.0", "ml_dtypes==0.3.1", "msgspec==0.18.0", "cloudpickle==2.2.0", "pyyaml==6.0"), CORE),
    "core-3.12": Environment("3.12", (), CORE),
    "core-3.13": Environment("3.13", (), CORE),
    "core-3.14": Environment("3.14", (), CORE),
    "core-3.14t": Environment("3.14t", (), CORE),
    "mpi-oldest": Environment("3.11", ("mpi4py==4.1.0", "mpich"), MPI),  # the first one with wheels
    "mpi-newest": Environment("3.13", ("mpi4py", "mpich"), MPI),
    "torch-oldest": Environment("3.11", ("torch==2.1.0", "numpy<2"), TORCH),
    "torch-newest": Environment("3.13", ("torch",), TORCH),
    "tensorflow-oldest": Environment("3.11", ("tensorflow-cpu==2.16.1", "keras==3.8.0"), TENSORFLOW),
    "tensorflow-newest": Environment("3.13", ("tensorflow-cpu", "keras"), TENSORFLOW),
    "keras-oldest-torch": Environment("3.11", ("keras==3.8.0", "torch==2.13.0"), KERAS, ("-k", "torch"),
                                      ("tensorflow-cpu==2.18.0",)),
    "jax-oldest": Environment("3.11", ("jax==0.4.30", "keras==3.10.0"), ("tests/tf/test_mirrored_losses.py",),
                              ("-m", "long", "-k", "jax"), ("tensorflow-cpu==2.18.0",)),
}


def find_python(version: str) -> str | None:
    """Return an interpreter of a version, from PATH or of pyenv; None without one."""
    root = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    numbers, free_threaded = version.removesuffix("t"), "t" if version.endswith("t") else ""
    candidates = [shutil.which(f"python{version}"),
                  *sorted(glob.glob(f"{root}/versions/{numbers}.*[0-9]{free_threaded}/bin/python"), reverse=True)]
    for candidate in filter(None, candidates):
        if subprocess.run([candidate, "-c", ""], stderr=subprocess.DEVNULL, check=False).returncode == 0:  # a shim may fail
            return candidate
    return None


def is_made(name: str, environment: Environment, made: str) -> bool:
    """Return whether an environment that was made is the wanted one; the newest packages may be others each time.

    Args:
        made: what was wanted when the environment was made; "" if it was not.
    """
    return made == repr(environment) and not name.endswith("-newest")


def make(name: str, environment: Environment) -> str:
    """Make an environment, unless it is there (or its versions are the newest ones); return why not, or ""."""
    folder = BUILD / name
    done = folder / "made"
    wanted = repr(environment)
    if is_made(name, environment, done.read_text(encoding="utf-8") if done.is_file() else ""):
        return ""
    interpreter = find_python(environment.python)
    if interpreter is None:
        return f"there is no Python {environment.python} here"
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    ended = subprocess.run([*pip, *TEST_PACKAGES, *environment.packages, *environment.beside, str(ROOT)],
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        lines = [line for line in ended.stdout.splitlines() if "ERROR" in line or "conflict" in line or "depends on" in line]
        return "pip: " + " ".join(lines[:6])
    done.write_text(wanted, encoding="utf-8")
    return ""


def versions(name: str) -> dict[str, str]:
    """Return what is installed in an environment: versions by package, and Python's."""
    code = ("import importlib.metadata as m, json, platform; print(json.dumps({'python': platform.python_version()} | "
            "{d.metadata['Name'].lower(): d.version for d in m.distributions()}))")
    told: dict[str, str] = json.loads(subprocess.run([str(BUILD / name / "bin/python"), "-I", "-c", code], check=True,
                                                     stdout=subprocess.PIPE, text=True).stdout)
    return told | ({"tensorflow": told["tensorflow-cpu"]} if "tensorflow-cpu" in told else {})


def run(name: str, environment: Environment, workers: int) -> dict[str, object]:
    """Make an environment and run its tests; return what happened."""
    why = make(name, environment)
    if why:
        return {"outcome": "not run", "why": why}
    python = BUILD / name / "bin/python"
    runner = ROOT / "build/typing"
    runner.mkdir(parents=True, exist_ok=True)
    link = runner / "hvdlite_runner"
    if not link.is_symlink():
        link.symlink_to("../../runner")
    ended = subprocess.run([str(python), "-m", "pytest", "-q", "-n", str(workers), "--no-header", "-p", "no:cacheprovider",
                            *environment.options, *environment.tests], cwd=ROOT, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True,
                           env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{runner}", "OMP_NUM_THREADS": "1"})
    (BUILD / f"{name}.log").write_text(ended.stdout, encoding="utf-8")
    counted = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error|skipped)", ended.stdout[-400:])}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    is_passed = ended.returncode == 0 and counted.get("passed", 0) > 0
    return {"outcome": "passed" if is_passed else "failed", "counts": counted, "failed": failed, "versions": versions(name)}


def table(results: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Return rows of the README's table: the versions with which all chosen tests have passed."""
    rows = []
    for title, package in SHOWN.items():
        seen = set()
        for name, result in results.items():
            installed = result.get("versions", {})
            assert isinstance(installed, dict)
            if name in ENVIRONMENTS and result["outcome"] == "passed" and package in installed and _is_about(name, title):
                seen.add(re.sub(r"^(\d+\.\d+).*", r"\1", installed[package]))
        if seen:
            rows.append(f"| {title} | {', '.join(sorted(seen, key=lambda each: [int(part) for part in each.split('.')]))} |")
    return rows


def _is_about(name: str, title: str) -> bool:
    """Return whether a row of the table is about what an environment tests."""
    environment, package = ENVIRONMENTS[name], SHOWN[title]
    if package in ("python", "numpy"):
        is_core = environment.tests == CORE
        return is_core if title.endswith("the core alone") else not is_core and environment.tests != MPI
    return any(re.split("[=<>]", each)[0].removesuffix("-cpu") == package for each in environment.packages)


def with_table(page: str, rows: Sequence[str]) -> str:
    """Return a page whose table of versions has these rows; rows about something else stay.

    Raises:
        ValueError: for a page without the table.
    """
    before, head, rest = page.partition(HEAD)
    if not head:
        raise ValueError("the page has no table of versions")
    new = {row.split(" | ")[0]: row for row in rows}
    lines, _, after = rest.partition("\n\n")
    kept = [new.pop(line.split(" | ")[0], line) for line in lines.splitlines()]
    return before + head + "\n".join([*kept, *new.values()]) + "\n\n" + after


def main(arguments: Sequence[str] | None = None) -> int:
    """Run environments; return 1 if tests have failed in one of them, else 0."""
    parser = argparse.ArgumentParser(description="Run chosen tests with several versions.")
    parser.add_argument("names", nargs="*", metavar="environment", help=f"default: all of {', '.join(ENVIRONMENTS)}")
    parser.add_argument("--table", action="store_true", help="print the rows for the README, and run nothing")
    parser.add_argument("--readme", action="store_true", help="also write them to README.md")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="test processes")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(ENVIRONMENTS)
    if unknown:
        parser.error(f"there is no environment {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    if not options.table:
        for name in options.names or ENVIRONMENTS:
            print(f"{name}: ", end="", flush=True)
            results[name] = run(name, ENVIRONMENTS[name], options.workers)
            counts = ", ".join(f"{count} {word}" for word, count in results[name].get("counts", {}).items())
            print(" ".join(filter(None, [results[name]["outcome"], counts, results[name].get("why", "")])), flush=True)
            for each in results[name].get("failed", []):
                print(f"    {each}")
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(HEAD + "\n".join(table(results)))
    if options.readme:
        page = ROOT / "README.md"
        page.write_text(with_table(page.read_text(encoding="utf-8"), table(results)), encoding="utf-8")
    return int(any(result["outcome"] == "failed" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())

"""Run chosen tests with several versions of Python and of the packages, in an environment of its own for each.

    make matrix                                       # all; hours, and gigabytes of downloads
    python .ci/matrix.py core-oldest torch-newest     # some
    python .ci/matrix.py --keep torch-oldest          # and leave the environment in build/matrix; the next run upgrades it

Packages are installed from package indexes, and hvdlite as a package, so an environment also shows that pip finds versions
that fit together. The tests run with this tree. What was seen is recorded in `.ci/matrix.json`, and README's table of
versions is written from those records. A Python that is not installed here (PATH, pyenv), and an environment that pip
cannot make, are recorded as not run. PyTorch's builds for CPUs are not on PyPI: where there is no other index, torch comes
with CUDA's libraries.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/matrix"
RECORDS = ROOT / ".ci/matrix.json"
SUITE = "make test"
"""The record of the environment that this runs in, and the whole suite with it."""
DEPENDENCIES = ("numpy", "ml_dtypes", "msgspec", "cloudpickle", "pyyaml")
TEST_PACKAGES = ("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.5", "hypothesis>=6.100")

CORE = ("tests/core", "tests/memory", "tests/handoff", "tests/control", "tests/groups",
        "tests/planes/test_contract_collectives.py", "tests/planes/test_contract_reductions.py",
        "tests/runtime/test_threads.py", "tests/runner/test_options.py")
MPI = ("tests/planes/test_mpi.py",)
TORCH = ("tests/torch/test_ops.py", "tests/torch/test_optimizer.py", "tests/torch/test_buckets.py",
         "tests/torch/test_state.py", "tests/torch/test_sync_batch_norm.py", "tests/torch/test_hooks.py")
DISTRIBUTED = ("tests/torch/distributed/test_operations.py", "tests/torch/distributed/test_work.py",
               "tests/torch/distributed/test_processes.py", "tests/torch/distributed/test_launchers.py",
               "tests/torch/distributed/test_store.py")
LIGHTNING = ("tests/torch/test_lightning.py",)
KERAS = ("tests/tf/test_keras.py", "tests/tf/test_mirrored.py", "tests/tf/test_mirrored_losses.py",
         "tests/tf/test_mirrored_models.py", "tests/tf/test_keras_examples.py")
TENSORFLOW = ("tests/tf/test_ops.py", "tests/tf/test_errors.py", "tests/tf/test_graph_names.py", *KERAS)
JAX = ("tests/tf/test_mirrored_losses.py",)
RAY = ("tests/launch/test_ray.py",)
SPARK = ("tests/launch/test_spark.py",)
AUTOTUNE = ("tests/engine/test_autotune.py",)
PLOT = ("tests/runner/test_watching.py",)
EXAMPLES = ("tests/house/test_examples.py", "tests/house/test_distributed_examples.py")

BEGIN, END = "<!-- python .ci/matrix.py --table -->\n", "<!-- end -->\n"
ROWS: tuple[tuple[str, str, tuple[tuple[str, ...], ...]], ...] = (
    ("Python, the core alone", "python", (CORE,)),
    ("Python, with PyTorch or TensorFlow", "python", (TORCH, TENSORFLOW)),
    ("NumPy", "numpy", (CORE,)),
    ("PyTorch (CPU)", "torch", (TORCH,)),
    ("PyTorch (CPU), the backend of `torch.distributed`", "torch", (DISTRIBUTED,)),
    ("Lightning", "lightning", (LIGHTNING,)),
    ("TensorFlow (CPU)", "tensorflow", (TENSORFLOW,)),
    ("Keras", "keras", (KERAS,)),
    ("JAX, as Keras' backend", "jax", (JAX,)),
    ("mpi4py", "mpi4py", (MPI,)),
    ("Ray", "ray", (RAY,)),
    ("Spark", "pyspark", (SPARK,)),
    ("Optuna, for autotuning", "optuna", (AUTOTUNE,)),
    ("Matplotlib, for plots", "matplotlib", (PLOT,)),
)
"""Rows of README's table: a title, the package, and the tests one group of which an environment must have run to count."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """What is installed, and the tests that run with it.

    Attributes:
        python: a version, such as "3.12"; "3.14t" is free-threaded.
        packages: beside hvdlite and what tests need.
        tests: files and folders.
        options: of pytest.
    """

    python: str
    packages: tuple[str, ...]
    tests: tuple[str, ...]
    options: tuple[str, ...] = ()


ENVIRONMENTS: dict[str, Environment] = {
    "core-oldest": Environment(
        "3.10", ("numpy==1.24.0", "ml_dtypes==0.3.1", "msgspec==0.18.0", "cloudpickle==2.2.0", "pyyaml==6.0"), CORE),
    "core-3.12": Environment("3.12", (), CORE),
    "core-3.13": Environment("3.13", (), CORE),
    "core-3.14": Environment("3.14", (), CORE),
    "core-3.15": Environment("3.15", (), CORE),
    "core-3.14t": Environment("3.14t", (), CORE),
    "mpi-oldest": Environment("3.10", ("mpi4py==4.1.0", "mpich==4.2.3"), MPI),  # the first ones with wheels
    "mpi-newest": Environment("3.13", ("mpi4py", "mpich"), MPI),
    "torch-oldest": Environment("3.10", ("torch==2.4.0", "lightning==2.2.0"), (*TORCH, *LIGHTNING)),
    "torch-newest": Environment("3.14", ("torch", "lightning"), (*TORCH, *LIGHTNING, *DISTRIBUTED)),
    "distributed-oldest": Environment("3.11", ("torch==2.13.0",), DISTRIBUTED),
    "tensorflow-oldest": Environment("3.10", ("tensorflow-cpu==2.16.1", "keras==3.8.0"), TENSORFLOW),
    "tensorflow-newest": Environment("3.13", ("tensorflow-cpu", "keras"), TENSORFLOW),
    "keras-oldest-torch": Environment(
        "3.11", ("keras==3.8.0", "torch==2.13.0", "tensorflow-cpu==2.18.0"), KERAS, ("-k", "torch")),
    "jax-oldest": Environment(
        "3.11", ("jax==0.4.36", "keras==3.14.0", "tensorflow-cpu==2.18.0"), JAX, ("-m", "long", "-k", "jax")),
    "ray-oldest": Environment("3.10", ("ray==2.9.0",), RAY),
    "ray-newest": Environment("3.13", ("ray",), RAY),
    "spark-oldest": Environment("3.10", ("pyspark==3.4.0",), SPARK),
    "spark-newest": Environment("3.13", ("pyspark",), SPARK),
    "tools-oldest": Environment("3.10", ("optuna==3.6.0", "matplotlib==3.7.0", "numpy<2"), (*AUTOTUNE, *PLOT)),
    "tests-oldest": Environment(
        "3.10", ("pytest==8.0.0", "pytest-timeout==2.3.1", "pytest-xdist==3.5.0", "hypothesis==6.100.0"), CORE),
    "examples-oldest": Environment(
        "3.11", ("torch==2.13.0", "accelerate==1.4.0", "transformers==5.0.0", "nbclient==0.10.0", "ipykernel==6.29.0"),
        EXAMPLES, ("-k", "accelerate or hugging_face or the_notebook")),
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


def build() -> Path:
    """Return hvdlite's wheel, made from a copy of the tree: several such programs may run at a time."""
    BUILD.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="wheel-", dir=BUILD))
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    for path in filter(None, listed.splitlines()):
        if (ROOT / path).is_file():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / path)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, folder],
                   check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def make(name: str, environment: Environment, wheel: Path) -> str:
    """Make an environment, or upgrade what has been left of it; return why that cannot be, or ""."""
    folder, done = BUILD / name, BUILD / name / "made"
    made_from = f"{environment}\n{(ROOT / 'setup.py').read_text(encoding='utf-8')}"
    if not done.is_file() or done.read_text(encoding="utf-8") != made_from:
        interpreter = find_python(environment.python)
        if interpreter is None:
            return f"there is no Python {environment.python} here"
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check",
           "--upgrade", "--upgrade-strategy", "eager"]
    ended = subprocess.run([*pip, *TEST_PACKAGES, *environment.packages, str(wheel)],
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (BUILD / f"{name}.pip.log").write_text(ended.stdout, encoding="utf-8")
    lines = [line for line in ended.stdout.splitlines() if "ERROR" in line or "conflict" in line or "depends on" in line]
    if ended.returncode:
        return f"pip: {' '.join(lines[:6])}"
    done.write_text(made_from, encoding="utf-8")
    return ""


def versions(python: str | Path, packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python, of what hvdlite depends on, and of `packages`, as they are installed."""
    code = ("import importlib.metadata as m, json, platform; print(json.dumps({'python': platform.python_version()} | "
            "{d.metadata['Name'].lower().replace('-', '_'): d.version for d in m.distributions()}))")
    told: dict[str, str] = json.loads(subprocess.run([str(python), "-I", "-c", code], check=True, stdout=subprocess.PIPE,
                                                     text=True).stdout)
    wanted = ("python", *DEPENDENCIES, *(re.split("[=<>]", package)[0].replace("-", "_") for package in packages))
    return {name.removesuffix("_cpu"): told[name] for name in sorted(wanted) if name in told}


def run(name: str, environment: Environment, wheel: Path, workers: int) -> dict[str, object]:
    """Make an environment and run its tests; return the record."""
    today = datetime.date.today().isoformat()
    why = make(name, environment, wheel)
    if why:
        return {"date": today, "outcome": "not run", "why": why}
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
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", ended.stdout, re.MULTILINE)
    is_passed = ended.returncode == 0 and counted.get("passed", 0) > 0
    return {"date": today, "outcome": "passed" if is_passed else "failed", "counts": counted,
            **({"failed": failed} if failed else {}), "versions": versions(python, environment.packages)}


def table(records: Mapping[str, Mapping[str, object]]) -> str:
    """Return README's table: the versions with which all chosen tests have passed, and those of `make test`."""
    lines = ["| | chosen tests pass with | all tests run with | last run |", "|---|---|---|---|"]
    suite = records.get(SUITE, {}).get("versions", {})
    assert isinstance(suite, dict)
    for title, package, groups in ROWS:
        seen: dict[str, str] = {}
        for version, day, environment in passed(records, package, groups):
            short = _short(version) + "t" * (package == "python" and environment.python.endswith("t"))
            seen[short] = max(seen.get(short, ""), day)
        ordered = sorted(seen, key=lambda each: [int(part) for part in re.findall(r"\d+", each)] + [each])
        cells = (title, ", ".join(ordered), _short(suite.get(package, "")), max(seen.values(), default=""))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def passed(records: Mapping[str, Mapping[str, object]], package: str,
           groups: Sequence[Sequence[str]]) -> Iterator[tuple[str, str, Environment]]:
    """Yield the version of a package, the day and the environment of each record in which one of some groups has passed."""
    for name, environment in ENVIRONMENTS.items():
        record = records.get(name, {})
        installed = record.get("versions", {})
        assert isinstance(installed, dict)
        is_about = any(set(group) <= set(environment.tests) for group in groups)
        if is_about and record.get("outcome") == "passed" and package in installed:
            yield installed[package], str(record["date"]), environment


def _short(version: str) -> str:
    """Return the numbers of a version that can change what it does: two of 2.16.1, three of 0.4.36."""
    return re.sub(r"^(0\.\d+\.\d+|\d+\.\d+).*", r"\1", version)


def with_table(page: str, table: str) -> str:
    """Return a page with this table.

    Raises:
        ValueError: for a page that has no place for it.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN.strip()} ... {END.strip()}")
    return before + begin + table + end + after


def save(records: Mapping[str, object]) -> None:
    """Write the records, a line for each, and README's table."""
    lines = [f" {json.dumps(name)}: {json.dumps(records[name])}" for name in (*ENVIRONMENTS, SUITE) if name in records]
    RECORDS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read() -> dict[str, dict[str, object]]:
    """Return the records by the names of environments."""
    records: dict[str, dict[str, object]] = json.loads(RECORDS.read_text(encoding="utf-8")) if RECORDS.is_file() else {}
    return records


def main(arguments: Sequence[str] | None = None) -> int:
    """Run environments; return 1 if tests have failed in one of them, else 0."""
    parser = argparse.ArgumentParser(description="Run chosen tests with several versions; write README's table of versions.")
    parser.add_argument("names", nargs="*", metavar="environment", help=f"default: all of {', '.join(ENVIRONMENTS)}")
    parser.add_argument("--table", action="store_true", help="run nothing: write the table from the records only")
    parser.add_argument("--keep", action="store_true", help="leave the environments in build/matrix")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="test processes")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(ENVIRONMENTS)
    if unknown:
        parser.error(f"there is no environment {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    names = () if options.table else options.names or tuple(ENVIRONMENTS)
    has_failed = False
    wheel = build() if names else Path()
    for name in names:
        print(f"{name}: ", end="", flush=True)
        record = run(name, ENVIRONMENTS[name], wheel, options.workers)
        counts = ", ".join(f"{count} {word}" for word, count in record.get("counts", {}).items())
        print(" ".join(filter(None, [record["outcome"], counts, record.get("why", "")])), flush=True)
        for each in record.get("failed", []):
            print(f"    {each}")
        has_failed |= record["outcome"] == "failed"
        suite = {"versions": versions(sys.executable, [package for _, package, _ in ROWS] + ["tensorflow-cpu"])}
        save(read() | {name: record, SUITE: suite})  # read again: another process may have run others
        if not options.keep:
            shutil.rmtree(BUILD / name, ignore_errors=True)
    if names:
        shutil.rmtree(wheel.parent)
    page = ROOT / "README.md"
    page.write_text(with_table(page.read_text(encoding="utf-8"), table(read())), encoding="utf-8")
    print(table(read()), end="")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())

"""torch's own tests of process groups and of DDP, on hvdlite and on Gloo: `python -m tests.torch.distributed.torch_suite`.

They are in torch's wheel (`torch/testing/_internal/distributed/distributed_test.py`) and need the package `expecttest`.
torch's test files, which are in its source only, can be named with `--files` (torch_files.py).
Ranks are forked, so a test takes a second and not ten. Where torch's tests ask whether the backend is Gloo, hvdlite counts
as it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import types
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

MODULE = "torch.testing._internal.distributed.distributed_test"
SECONDS = 180
"""For one test."""
BACKENDS = ("hvdlite", "gloo")

def main() -> None:
    """Run the tests for both backends, and print a table and the tests that differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", default="", help="a regular expression of tests' names")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    parser.add_argument("--results", type=Path, help="a file for the outcome of each test, as JSON")
    parser.add_argument("--files", nargs="+", default=[MODULE], help="test files of torch's source, not of its wheel")
    arguments = parser.parse_args()
    if importlib.util.find_spec("expecttest") is None:
        parser.error("torch's tests need another package: pip install expecttest")
    outcomes = {file: {backend: run(backend, arguments.ranks, arguments.only, file) for backend in arguments.backends}
                for file in arguments.files}
    if arguments.results is not None:
        arguments.results.write_text(json.dumps(outcomes, indent=1), encoding="utf-8")
    print(table(outcomes[MODULE]) if arguments.files == [MODULE] else table_of_files(outcomes))


def run(backend: str, ranks: int, only: str, file: str) -> dict[str, list[str]]:
    """Return the outcome and its reason of each test on a backend, in a process of its own; `file` may be `MODULE`."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        environment = os.environ | {
            "BACKEND": backend, "WORLD_SIZE": str(ranks), "TEMP_DIR": folder, "OMP_NUM_THREADS": "1", "ONLY": only,
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(SECONDS), "RESULTS": str(results), "INIT_METHOD": f"file://{folder}/shared_init_file"}
        results.touch()
        subprocess.run([sys.executable, "-m", __spec__.name, "--one", file], env=environment, check=False)
        lines = results.read_text(encoding="utf-8").splitlines()
    return {name: outcome for name, *outcome in map(json.loads, lines)}


def table(outcomes: dict[str, dict[str, list[str]]]) -> str:
    """Return the numbers of tests by outcome, and the tests that do not pass somewhere."""
    kinds = ("passed", "failed", "skipped")
    lines = ["| backend | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    for backend, tests in outcomes.items():
        counts = Counter(kind for kind, _ in tests.values())
        lines.append(f"| {backend} | " + " | ".join(str(counts[kind]) for kind in kinds) + " |")
    for name in sorted({name for tests in outcomes.values() for name in tests}):
        found = {backend: tests.get(name, ["absent", ""]) for backend, tests in outcomes.items()}
        if any(kind == "failed" for kind, _ in found.values()) or len({kind for kind, _ in found.values()}) > 1:
            lines += [f"{name}: " + "; ".join(f"{backend} {kind} {reason}" for backend, (kind, reason) in found.items())]
    return "\n".join(lines)


def table_of_files(outcomes: dict[str, dict[str, dict[str, list[str]]]]) -> str:
    """Return for each file how many of its tests pass on each backend, and the tests that fail on hvdlite alone."""
    lines = ["| file | " + " | ".join(BACKENDS) + " | failed only with hvdlite |", "|---" * (len(BACKENDS) + 2) + "|"]
    alone = []
    for file, tests in outcomes.items():
        passed = {backend: _passed(tests.get(backend, {})) for backend in BACKENDS}
        names = sorted(passed["gloo"] - passed["hvdlite"])
        counts = [f"{len(passed[backend])}/{len(tests.get(backend, {}))}" for backend in BACKENDS]
        lines.append(" | ".join(["| " + file, *counts, f"{len(names)} |"]))
        alone += [f"{file} {name}: {' '.join(tests['hvdlite'].get(name, ['absent']))}" for name in names]
    return "\n".join(lines + alone)


def _passed(tests: dict[str, list[str]]) -> set[str]:
    return {name for name, (kind, _) in tests.items() if kind == "passed"}


def _module() -> types.ModuleType:
    """Return torch's tests as a module in which hvdlite counts as Gloo."""
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    source = re.sub(r'BACKEND != "gloo"', 'BACKEND not in ("gloo", "hvdlite")', source)
    source = re.sub(r'BACKEND != "mpi",(\s*)"Only MPI', r'BACKEND == "nccl",\1"Only MPI', source)  # Gloo can do it, too, now
    source = re.sub(r'BACKEND == "gloo"', 'BACKEND in ("gloo", "hvdlite")', source)
    source = source.replace('require_backend_is_available({"gloo"})', 'require_backend_is_available({"gloo", "hvdlite"})')
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    module.__dict__["__file__"] = spec.origin
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - of an installed package
    return module


class _Recorder(unittest.TestResult):
    """Appends the outcome of each test to a file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def _record(self, test: unittest.TestCase, kind: str, reason: str = "") -> None:
        name = ".".join(test.id().split(".")[-2:])
        print(kind, name, reason[:200], flush=True)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps([name, kind, reason]) + "\n")

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._record(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._record(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._record(test, "failed", _last_line(err[1]))

    addError = addFailure


def _last_line(error: BaseException) -> str:
    told = [line.strip() for line in str(error).splitlines() if re.match(r"\w*(Error|Exception)\b", line.strip())]
    return (told or str(error).splitlines() or [type(error).__name__])[-1]


def _run_one_backend() -> None:
    import torch
    import torch.distributed as dist

    from hvdlite_torch import distributed

    torch.set_num_threads(1)
    from torch.testing._internal import common_distributed

    backend = os.environ["BACKEND"]
    for feature, backends in common_distributed.DistTestCases.backend_feature.items():
        if "gloo" in backends or feature == "plugin":
            backends.add("hvdlite")
    if backend == "hvdlite":
        dist.monitored_barrier = distributed.monitored_barrier  # torch's function refuses other backends than Gloo
    module = _module()

    class Tests(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[name-defined, misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    suite = unittest.TestSuite(Tests(name) for name in unittest.TestLoader().getTestCaseNames(Tests)
                               if re.search(os.environ["ONLY"], name))
    suite.run(_Recorder(os.environ["RESULTS"]))


def _run_one_file(file: str) -> None:
    from tests.torch.distributed import torch_files

    torch_files.tests(Path(file), os.environ["BACKEND"], os.environ["ONLY"]).run(_Recorder(os.environ["RESULTS"]))


if __name__ == "__main__":
    if sys.argv[1:] == ["--one", MODULE]:
        _run_one_backend()
    elif sys.argv[1:2] == ["--one"]:
        _run_one_file(sys.argv[2])
    else:
        main()

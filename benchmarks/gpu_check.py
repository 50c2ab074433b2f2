"""Everything that needs a GPU, in three parts of less than nine minutes each: `python -m benchmarks.gpu_check`.

One GPU is enough; with several, the ranks get one each. It needs torch built for CUDA, CuPy for the same CUDA version,
NCCL (torch brings it), numpy, msgspec, ml_dtypes, cloudpickle and PyYAML; pytest for the tests (with pytest-xdist they run
four at a time). Nothing is downloaded: on a machine without a network, bring what is missing as wheels (`--wheels`).

Every check is a process of its own with a time limit; what fails is recorded with its traceback and output, and the others
go on. The record is written before and after every check, so that a run that is cut short leaves what it had. A table comes
at the end.

    python -m benchmarks.gpu_check                      all parts, one after the other
    python -m benchmarks.gpu_check --part 1             what is right: several ranks against one, and the tests
    python -m benchmarks.gpu_check --part 2             one rank: the kernels, and what training costs the host and the GPU
    python -m benchmarks.gpu_check --part 3             several ranks' figures, and the kernels under compute-sanitizer
    python -m benchmarks.gpu_check --only pack,host     some, in this order
    python -m benchmarks.gpu_check --list               what there is
    python -m benchmarks.gpu_check --show FILE FILE     the table of earlier records
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path

from benchmarks.gpu_report import Record, merged, read, summary, table, write
from benchmarks.gpu_sheet import ARTIFACTS

ROOT = Path(__file__).resolve().parent.parent
TAIL = 6000
"""Characters of a failed check's output that are kept."""
PACKAGES = ("hvdlite", "torch", "numpy", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "msgspec",
            "ml_dtypes", "cloudpickle", "pyyaml", "pytest", "pytest-xdist", "pytest-timeout", "torchvision")
NEEDED = {"torch": "torch", "cupy": "cupy-cuda13x", "numpy": "numpy", "msgspec": "msgspec", "ml_dtypes": "ml_dtypes",
          "cloudpickle": "cloudpickle", "yaml": "pyyaml"}
"""The packages that have to be there, by their modules."""
WHEELS_LIMIT = 64 << 20
"""Bytes of wheels."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing to find out.

    Attributes:
        limit: in seconds.
        ranks: if several: at least; one for each GPU.
        tests: runs pytest there instead of a function.
        module: has the function.
        under: a program that runs the check's process, and its arguments; without it the check is skipped.
    """

    name: str
    what: str
    limit: float
    part: int
    ranks: int = 1
    tests: str = ""
    module: str = "benchmarks.gpu_checks"
    under: tuple[str, ...] = ()


UNSUPPORTED = "Device not supported"
"""What compute-sanitizer says, under some virtual machines."""
SANITIZER = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all")
CHECKS = (
    Check("environment", "GPUs, versions, which NCCL, what opens", 90, 1),
    Check("two ranks", "equal to one rank, also with delays in every place; the kernels of a step", 60, 1, ranks=2),
    Check("device tests", "memory, streams, events, the kernel", 60, 1, tests="tests/gpu/test_device.py"),
    Check("rank tests", "collectives and dtypes on 1 to 4 ranks, streams, graphs, CuPy, failures", 120, 1,
          tests="tests/gpu/test_ranks.py"),
    Check("training tests", "equal to one rank, compression, scaling, beside DDP's NCCL", 110, 1,
          tests="tests/gpu/test_training.py"),
    Check("pack", "pack, unpack and casts against a device copy, GB/s", 45, 2),
    Check("host", "host microseconds: a call, a launch, a bucket, a gradient", 45, 2),
    Check("training", "one rank: plain, wrapped, wrapped and sharing with itself, DDP; ms a step", 115, 2),
    Check("small steps", "the same, where the host limits; ms a step on the host, CPU time", 40, 2),
    Check("waits", "calls that wait for the GPU within training steps; where a step's time goes", 35, 2),
    Check("launch", "from 'bucket full' to 'NCCL enqueued', idle and beside a thread that holds the GIL", 60, 2),
    Check("overlap", "how much of a communication the backward pass hides, ours and DDP's", 40, 2),
    Check("situations", "reentrant checkpoints, another stream, peak memory, a nearly full GPU", 45, 2),
    Check("nccl", "NCCL through CuPy against torch.distributed, on the same buffers", 55, 3, ranks=2),
    Check("several ranks", "the host's time of a step beside DDP's, and launches, where others take part", 90, 3, ranks=2),
    Check("random trainings", "random scripts equal one process, with torch and with Keras on it", 120, 3,
          tests="tests/gpu/test_random.py"),
    Check("kernels", "the kernels under compute-sanitizer's memory checker", 120, 3, under=SANITIZER),
)
PARTS = (1, 2, 3)
PATIENCE = 20.0
"""Seconds that ranks get after one has failed."""
LEAST = 5.0
"""Seconds without which no check begins."""
TOTAL = 530.0
"""Seconds of a part, after which no further check begins, and the one under way is cut short."""


def main(arguments: Sequence[str] | None = None, checks: Sequence[Check] = CHECKS) -> int:
    parser = argparse.ArgumentParser(description="Check and measure hvdlite on this machine's GPUs.")
    parser.add_argument("--part", type=int, choices=PARTS, help="default: all")
    parser.add_argument("--only", help="names of checks, with commas between")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--show", type=Path, nargs="+", metavar="RECORD", help="print the table of records")
    parser.add_argument("--record", type=Path, help="the JSON file (default: benchmarks/results/gpu-<GPU>-<count>.json); "
                        "checks that it has from the same machine, versions and commit stay in it")
    parser.add_argument("--seconds", type=float, default=TOTAL, help="of all checks of a part together")
    parser.add_argument("--wheels", type=Path, help="a directory with wheels of what is missing here")
    parser.add_argument("--artifacts", type=Path, help="a directory for traces of the profiler")
    parser.add_argument("--commit", help="what is being checked, where git does not tell")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{check.name:<16} part {check.part}, {check.limit:>3.0f} s  {check.what}" for check in checks))
        return 0
    if options.show:
        print(table(merged([read(path) or {} for path in options.show])))
        return 0
    wanted = [name.strip() for name in options.only.split(",")] if options.only else \
        [check.name for check in checks if options.part in (None, check.part)]
    unknown = set(wanted) - {check.name for check in checks}
    if unknown:
        print(f"There is no check {', '.join(sorted(unknown))}; --list says what there is")
        return 2
    if options.artifacts:
        options.artifacts.mkdir(parents=True, exist_ok=True)
        os.environ[ARTIFACTS] = str(options.artifacts.resolve())
    with tempfile.TemporaryDirectory(prefix="hvdlite-wheels-") as unpacked:
        if options.wheels:
            try:
                unpack_wheels(options.wheels, Path(unpacked))
            except ValueError as error:
                print(error)
                return 2
            sys.path.insert(0, unpacked)
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [unpacked, os.environ.get("PYTHONPATH", "")]))
        missing = [package for module, package in NEEDED.items() if util.find_spec(module) is None]
        if missing:
            print(missing_text(missing))
            return 2
        chosen = sorted((check for check in checks if check.name in wanted), key=lambda check: wanted.index(check.name))
        return run_all(chosen, options)


def run_all(checks: Sequence[Check], options: argparse.Namespace) -> int:
    """Run checks, and record each; return the exit code."""
    record = begin(options.commit)
    path = options.record or ROOT / "benchmarks/results" / f"gpu-{record['gpu'] or 'none'}-{record['gpus']}.json"
    earlier = read(path)
    if earlier is not None:
        record["checks"] = merged([record, earlier])["checks"]
    ends: dict[int, float] = {}  # by part
    for check in checks:
        limit = min(check.limit, ends.setdefault(check.part, time.monotonic() + options.seconds) - time.monotonic())
        if limit < LEAST:
            record["checks"][check.name] = {"state": "not begun: no time left"}
            continue
        print(f"--- {check.name}: {check.what} (at most {limit:.0f} s)", flush=True)
        record["checks"][check.name] = {"state": "under way"}  # what a run that is ended here leaves
        write(path, record)
        began = time.monotonic()
        try:
            result = run_tests(check, limit) if check.tests else run_check(check, limit, record["gpus"])
        except Exception as error:  # a defect of this script must not cost the other checks
            result = {"state": "broken", "error": f"{type(error).__name__}: {error}"}
        result["seconds"] = round(time.monotonic() - began, 1)
        record["checks"][check.name] = result
        write(path, record)
        print(summary(check.name, result), flush=True)
    write(path, record)
    print(table(record))
    print(f"\nwritten to {path}")
    return 0 if all(record["checks"][check.name]["state"] in ("ok", "skipped") for check in checks) else 1


def begin(commit: str | None) -> Record:
    """Return the record's head: what this machine is."""
    gpus = output(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]).splitlines()
    name = gpus[0].split(",")[0].strip().replace(" ", "-") if gpus else ""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    return {"gpu": name, "gpus": len(gpus), "nvidia_smi": gpus, "date": time.strftime("%Y-%m-%d %H:%M:%S"),
            "commit": commit or output(["git", "-C", str(ROOT), "rev-parse", "HEAD"]).strip(),
            "python": platform.python_version(), "machine": platform.platform(), "cores": os.cpu_count(),
            "versions": versions, "checks": {}}


def output(command: Sequence[str]) -> str:
    """Return what a command prints; "" when it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def missing_text(packages: Sequence[str]) -> str:
    """Return what is missing, and how to bring it."""
    version = platform.python_version_tuple()
    return (f"These Python packages are missing: {', '.join(packages)}. Install them; or, if this machine has no network, "
            f"fetch their wheels where there is one and bring the directory along:\n"
            f"    python -m pip download --no-deps --only-binary=:all: --python-version {version[0]}.{version[1]} "
            f"--platform manylinux_2_28_{platform.machine()} --platform manylinux2014_{platform.machine()} -d wheels "
            f"{' '.join(packages)}\n    python -m benchmarks.gpu_check --wheels wheels")


def unpack_wheels(directory: Path, into: Path) -> None:
    """Unpack wheels, which need no installation to be imported.

    Raises:
        ValueError: when there are none, or too many bytes, or one is for another Python.
    """
    wheels = sorted(directory.glob("*.whl"))
    if not wheels:
        raise ValueError(f"there are no wheels in {directory}")
    nbytes = sum(wheel.stat().st_size for wheel in wheels)
    if nbytes > WHEELS_LIMIT:
        raise ValueError(f"the wheels in {directory} have {nbytes >> 20} MiB, and at most {WHEELS_LIMIT >> 20} are meant to "
                         "travel: bring only what the machine lacks, with --no-deps")
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for wheel in wheels:
        python, abi, _ = wheel.stem.split("-")[-3:]
        if not (own in python.split(".") or "py3" in python.split(".") or (abi == "abi3" and python.startswith("cp3"))):
            raise ValueError(f"{wheel.name} is for {python}, and this is {own}: fetch it with --python-version "
                             f"{sys.version_info.major}.{sys.version_info.minor}")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)


# --- checks --------------------------------------------------------------------------------------------------------


def ranks_of(check: Check, gpus: int) -> int:
    """Return the number of ranks of a check on a machine with some GPUs."""
    return max(check.ranks, gpus) if check.ranks > 1 else 1


def run_check(check: Check, limit: float, gpus: int = 1) -> Record:
    """Run a check's function on its ranks, each a process."""
    ranks = ranks_of(check, gpus)
    prefix: list[str] = []
    if check.under:
        program = find_program(check.under[0])
        if program is None:
            return {"state": "skipped", "reason": f"{check.under[0]} is not installed"}
        prefix = [program, *check.under[1:]]
    with tempfile.TemporaryDirectory(prefix="hvdlite-gpu-") as directory:
        where = Path(directory)
        job = where / "job"
        job.mkdir(mode=0o700)
        processes = []
        for rank in range(ranks):
            command = [*prefix, sys.executable, "-m", check.module, check.name, str(where / f"{rank}.json")]
            processes.append(Running(command, where / f"{rank}.log", rank_environment(rank, ranks, job)))
        codes = wait(processes, limit)
        figures = [read(where / f"{rank}.json") for rank in range(ranks)]
        logs = [process.log() for process in processes]
    result: Record = {"state": "ok", **(figures[0] or {})}
    if check.under:
        result["said"] = logs[0][-TAIL:]
        if UNSUPPORTED in logs[0]:
            return {"state": "skipped", "reason": f"{check.under[0]}: {UNSUPPORTED}"}
    errors = {f"rank {rank}: {part}": text for rank, each in enumerate(figures) for part, text in
              (each or {}).get("errors", {}).items()}
    if errors:
        result.update(state="failed", errors=errors)
    if any(code != 0 for code in codes):
        result["state"] = "too long" if None in codes else "failed"
        result["codes"] = codes
        result["output"] = [log[-TAIL:] for log in logs]
    return result


def run_tests(check: Check, limit: float) -> Record:
    """Run pytest on some files; return each test's outcome."""
    with tempfile.TemporaryDirectory(prefix="hvdlite-gpu-") as directory:
        where = Path(directory)
        report = where / "report.xml"
        command = [sys.executable, "-m", "pytest", check.tests, "-v", "-rs", f"--junitxml={report}",
                   "-p", "no:cacheprovider", *(["-n", "4"] if util.find_spec("xdist") else []),
                   *(["--timeout", "100"] if util.find_spec("pytest_timeout") else ["-o", "addopts="])]  # "timeout" is its
        process = Running(command, where / "log", environment())
        (code,) = wait([process], limit)
        log = process.log()
        tests = outcomes(report) if report.exists() else outcomes_so_far(log)
    passed = sum(text == "passed" for text in tests.values())
    skipped = sum(text.startswith("skipped") for text in tests.values())
    state = state_of(code, passed, skipped, len(tests))
    result: Record = {"state": state, "tests": {name: text[-TAIL:] for name, text in tests.items()}, "passed": passed,
                      "failed": len(tests) - passed - skipped, "skipped": skipped}
    if state != "ok":
        result["output"] = log[-2 * TAIL:]
    return result


def state_of(code: int | None, passed: int, skipped: int, tests: int) -> str:
    """Return the state of a check by pytest's exit code (None: it took too long) and its tests' outcomes."""
    if code is None:
        return "too long"
    if code or passed + skipped < tests:
        return "failed"
    return "ok" if passed else "skipped"


def outcomes(report: Path) -> dict[str, str]:
    """Return what became of each test, from pytest's XML; the text of those that failed."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        text = "passed"
        for kind in ("failure", "error", "skipped"):
            part = case.find(kind)
            if part is not None:
                text = f"{kind}: {part.get('message') or ''}" + (f"\n{part.text or ''}" if kind != "skipped" else "")
        found[str(case.get("name"))] = text
    return found


def outcomes_so_far(log: str) -> dict[str, str]:
    """Return what became of the tests that ended before pytest was ended, from its output."""
    found = {}
    for line in log.splitlines():
        words = re.search(r"(PASSED|FAILED|ERROR|SKIPPED)", line)
        test = re.search(r"\.py::(\S+)", line)
        if words and test:
            found[test[1]] = {"PASSED": "passed", "SKIPPED": "skipped"}.get(words[1], words[1].lower())
    return found


class Running:
    """A process with its output in a file, and a group of its own."""

    def __init__(self, command: Sequence[str], log: Path, variables: dict[str, str]) -> None:
        self._path = log
        with open(log, "wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                            env=variables, cwd=ROOT, start_new_session=True)

    def end(self) -> None:
        """End the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def log(self) -> str:
        """Return what it has printed."""
        return self._path.read_text(encoding="utf-8", errors="replace")


def wait(processes: Sequence[Running], limit: float) -> list[int | None]:
    """Wait for processes and return their exit codes: None for those that took too long, which print their stacks."""
    deadline = time.monotonic() + limit
    while any(process.process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.process.poll() for process in processes):  # one failed: the others hardly get on
            deadline = min(deadline, time.monotonic() + PATIENCE)
        time.sleep(0.05)
    codes = [process.process.poll() for process in processes]
    for process, code in zip(processes, codes, strict=True):
        if code is None:
            process.process.send_signal(signal.SIGUSR2)  # faulthandler, in `gpu_checks`
    time.sleep(1.0 if None in codes else 0.0)
    for process in processes:
        process.end()
    return codes


def environment() -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("HVDLITE_", "HOROVOD_"))}
    variables.update(PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
                     PYTHONUNBUFFERED="1", NCCL_DEBUG=os.environ.get("NCCL_DEBUG", "WARN"), HVDLITE_LOG_LEVEL="INFO")
    return variables


def find_program(name: str) -> str | None:
    """Return the path of a program of the CUDA toolkit."""
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")


def rank_environment(rank: int, size: int, job: Path) -> dict[str, str]:
    """Return a rank's environment; `gpu_checks` does what several ranks on one GPU need."""
    variables = environment()
    if size > 1:
        variables.update(HVDLITE_RANK=str(rank), HVDLITE_SIZE=str(size), HVDLITE_LOCAL_RANK=str(rank),
                         HVDLITE_LOCAL_SIZE=str(size), HVDLITE_CROSS_RANK="0", HVDLITE_CROSS_SIZE="1",
                         HVDLITE_JOB_DIRECTORY=str(job), HVDLITE_START_TIMEOUT="60")
    return variables


if __name__ == "__main__":
    sys.exit(main())

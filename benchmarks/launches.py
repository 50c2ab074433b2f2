"""Time from a full bucket to NCCL's call, without a GPU: `python -m benchmarks.launches` starts two ranks for each setting.

The processes, messages and threads are the real ones. Only the GPU is a double that does nothing, and notes when the
communicator is called. Figures are in microseconds:

    own         on each rank: from its own full bucket to its call
    collective  from the moment when the last rank's bucket is full to the last rank's call: until then NCCL cannot begin
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite import api
from hvdlite.core.device import DeviceArray
from hvdlite.core.types import ReduceOp
from hvdlite.negotiation.messages import BucketReady
from hvdlite.planes.nccl.plane import NcclPlane
from hvdlite.runtime import assemble
from hvdlite.runtime.gradient_sets import Moment

BUCKETS, LABEL = 6, "set"
ROUNDS = {False: 150, True: 40}
"""By whether a thread holds the GIL."""
WARM_UP = 30
COMPUTE_SECONDS = 0.0005


class Communicator:
    """Notes when it is called."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def allReduce(self, *_: Any) -> None:
        self.calls.append(time.perf_counter_ns())

    def check_async_error(self) -> None: ...
    def abort(self) -> None: ...


class Gpu:
    """A GPU that has done everything at once, and changes nothing."""

    index, stream, version, failure = 0, 1, 22809, (KeyError, MemoryError)

    def __init__(self) -> None:
        self.made = Communicator()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def bus_id(self) -> str:
        return f"gpu-{os.getpid()}"

    def uuid(self) -> str:
        return self.bus_id()

    def make_event(self) -> int:
        return 1

    def is_event_done(self, event: int) -> bool:
        return True

    def is_capturing(self, stream: int) -> bool:
        return False

    def allocate(self, nbytes: int) -> DeviceArray:
        memory = np.empty(nbytes + 256, np.uint8)
        return DeviceArray(memory.ctypes.data, (nbytes,), np.dtype(np.uint8), 0, memory)

    def batched_copy(self, *_: Any) -> bool:
        return True

    def has_kernels(self) -> bool:
        return True

    def unique_id(self) -> bytes:
        return b"0" * 128

    def communicator(self, *_: Any) -> Communicator:
        return self.made

    def group(self) -> Any:
        return contextlib.nullcontext()


def rounds(gpu: Gpu, count: int) -> list[int]:
    """Reduce a gradient set so many times; return when each bucket of the last rounds was full."""
    runtime = api.runtime()
    members = [gpu.allocate(64 << 10) for _ in range(BUCKETS)]
    full: list[int] = []
    for number in range(1, WARM_UP + count + 1):
        learned = runtime.gradients.layout(LABEL, number)
        if learned is None:
            moment = Moment(LABEL, number)
            handles: list[Any] = [runtime.gradients.enqueue_gradient(f"x.{index}", array, array, ReduceOp.AVERAGE, moment)
                                  for index, array in enumerate(members)]
            runtime.gradients.close_round(LABEL, number)
        else:
            handles = []
            for index, bucket in enumerate(learned.buckets):
                time.sleep(COMPUTE_SECONDS)
                ready = BucketReady(bucket_id=bucket.definition.bucket_id, round_id=number, step=number,
                                    ends_round=index == len(learned.buckets) - 1)
                event = runtime.devices.record_event(0)  # type: ignore[union-attr]
                if number > WARM_UP:
                    full.append(time.perf_counter_ns())
                handles.append(runtime.gradients.enqueue_bucket(bucket, ready, event))
        for handle in handles:
            handle.wait()
    return full


def rank(hogs: bool) -> None:
    """Be one rank."""
    gpu = Gpu()
    assemble.gpus = lambda info, config, environment: lambda rank, oob, wake: NcclPlane(  # type: ignore[assignment]
        rank, "host", oob, wake, lambda index: gpu, lambda: "", exit_timeout=0.0)  # type: ignore[arg-type,return-value]
    api.init()
    full: list[int] = []
    ended = threading.Event()
    if hogs:
        threading.Thread(target=lambda: [None for _ in iter(ended.is_set, True)], daemon=True).start()
    # As in torch, another thread than the main one fills buckets.
    trains = threading.Thread(target=lambda: full.extend(rounds(gpu, ROUNDS[hogs])))
    trains.start()
    trains.join()
    ended.set()
    runtime = api.runtime()
    mine = np.array([full, gpu.made.calls[-len(full):]], np.int64).T
    both = runtime.allgather("times", np.ascontiguousarray(mine)).wait().reshape(api.size(), -1, 2)
    if api.rank() == 0:
        own = (both[:, :, 1] - both[:, :, 0]).ravel() / 1e3
        collective = (both[:, :, 1].max(axis=0) - both[:, :, 0].max(axis=0)) / 1e3
        print(json.dumps({"own": _figures(own), "collective": _figures(collective)}))
    api.shutdown()


def _figures(values: Any) -> Sequence[float]:
    return [round(float(each), 1) for each in np.percentile(values, [50, 99])]


def measure(hogs: str) -> None:
    """Start the ranks for one setting, and print what they found."""
    environment = {**os.environ, "HVDLITE_BUCKET_SIZE": "65536", "HVDLITE_BUCKET_EDGE": "65536"}
    command = [sys.executable, "-m", "hvdlite_runner", "-np", "2",
               sys.executable, "-m", "benchmarks.launches", "--rank", hogs]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    lines = [line[line.index("{"):] for line in ended.stdout.splitlines() if "{" in line]
    if ended.returncode or not lines:
        sys.exit(ended.stdout + ended.stderr)
    figures = json.loads(lines[0])
    setting = "beside a GIL hog" if hogs == "hogs" else "idle"
    print(f"{setting:20}" + "".join(f"{each:10}" for kind in ("own", "collective") for each in figures[kind]), flush=True)


def main() -> None:
    """Start the ranks for each setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rank", choices=["idle", "hogs"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank == "hogs")
        return
    print(f"{'':20}" + "".join(f"{each:>10}" for each in ("own p50", "p99", "coll. p50", "p99")))
    for _ in range(options.repeats):
        for hogs in ("idle", "hogs"):
            measure(hogs)


if __name__ == "__main__":
    main()

"""Worlds of threads whose ranks have doubles of GPUs. See `tests/gpu_double/__init__.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hvdlite.core.device import DeviceArray
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from tests import worlds
from tests.gpu_double.gpu import GpuDouble, plane
from tests.gpu_double.nccl import Meetings


class Gpus:
    """The doubles of all ranks of the worlds that a test makes.

    Attributes:
        made: every one, in order.
        planes: theirs.
        options: of planes.
    """

    def __init__(self) -> None:
        self.made: list[GpuDouble] = []
        self.planes: list[Any] = []
        self.options: dict[str, Any] = {}
        self.meetings = Meetings()

    def plane(self, rank: int, oob: Any, wake: Any) -> Any:
        gpu = GpuDouble(0, self.meetings)
        self.made.append(gpu)
        self.planes.append(plane(rank, oob, wake, gpu, **self.options))
        return self.planes[-1]

    def end(self) -> None:
        for gpu in self.made:
            gpu.end()
            assert gpu.error is None, gpu.error

    def wrap(self, runtime: Any, array: Any, stream: int = 0) -> DeviceArray:
        """Let a NumPy array pass for a rank's GPU memory."""
        def empty(shape: tuple[int, ...]) -> DeviceArray:
            return self.wrap(runtime, np.empty(shape, array.dtype), stream)
        return runtime.devices.wrap(array.ctypes.data, array.shape, array.dtype, 0, stream=stream, owner=array, empty=empty)


def install_gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Give the ranks of `worlds.threads` a double of a GPU each, for one test."""
    made, real = Gpus(), worlds.assemble_threads
    monkeypatch.setattr(worlds, "assemble_threads",
                        lambda *arguments, **options: real(*arguments, **{"devices": made.plane, **options}))
    return made


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    made = install_gpus(monkeypatch)
    yield made
    made.end()


def spin(predicate: Callable[[], bool]) -> None:
    """The simplest `WaitUntil`."""
    deadline = time.monotonic() + 20
    while not predicate():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def allreduce(gpus: Gpus, runtime: Runtime, name: str, values: Any, op: ReduceOp = ReduceOp.SUM, stream: int = 0,
              **options: Any) -> Any:
    array = gpus.wrap(runtime, values, stream)
    return runtime.allreduce(name, array, array, op, **options)


def begun(gpus: Gpus, runtime: Runtime, process_set: int = 0) -> GpuDouble:
    """Return this rank's GPU, after a first collective has made the communicator and is done."""
    first = allreduce(gpus, runtime, "first", np.ones(2), process_set=process_set)
    first.wait()
    first.completion.wait()
    return gpus.made[runtime.world.rank]

"""Worlds of threads whose ranks have doubles of GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hvdlite.core.types import ReduceOp
from hvdlite.runtime import assemble
from hvdlite.runtime.runtime import Runtime
from tests import worlds
from tests.device_double import GpuDouble, Gpus


def install_gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Give the ranks of `worlds.threads` a double of a GPU each, for one test."""
    made, real = Gpus(), assemble.assemble_threads
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

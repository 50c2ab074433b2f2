"""Contexts of GPUs: a rank makes one on its own GPU, and on no other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdlite.planes.nccl.cupy_device import CupyDevice
from hvdlite.planes.nccl.device import EventPool
from hvdlite.runtime.runtime import Runtime
from tests import worlds
from tests.device_double import Gpus
from tests.gpu_worlds import allreduce, begun, spin
from tests.gpu_worlds import gpus as gpus
from tests.planes.cuda_double import CudaDouble


def in_a_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results.pop()


def use(device: CupyDevice) -> None:
    """Use a GPU in the ways that need a current device, and free memory in a thread that has used none."""
    pool = EventPool(device)
    event = pool.record(0)
    device.wait(0, event.handle)
    memory = [device.allocate(100)]
    device.zero(memory[0])
    in_a_thread(memory.clear)


def test_no_thread_makes_a_context_on_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = CudaDouble()
    device = in_a_thread(lambda: cuda.device(monkeypatch, 2))
    in_a_thread(lambda: use(device))

    def own() -> None:
        device.make_current()
        use(device)
        assert cuda.getDevice() == 2
    in_a_thread(own)
    assert cuda.contexts == {2} and not cuda.allocated


def test_a_thread_of_the_users_gets_its_device_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = CudaDouble()
    device = cuda.device(monkeypatch, 2)

    def users() -> int:
        cuda.setDevice(1)
        use(device)
        return cuda.getDevice()
    assert in_a_thread(users) == 1

    def own() -> int:
        device.make_current()
        cuda.setDevice(1)  # by a framework
        use(device)
        return cuda.getDevice()
    assert in_a_thread(own) == 2


def test_all_threads_of_the_plane_enter_its_gpu(gpus: Gpus) -> None:
    entered: list[set[str]] = [set(), set()]

    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        runtime.devices.record_event(0)
        gpu = gpus.made[rank]
        gpu.make_current = lambda: entered[rank].add(threading.current_thread().name)  # type: ignore[method-assign]
        begun(gpus, runtime)
        made = gpus.wrap(runtime, np.ones(2))
        real = made.empty
        assert real is not None

        def empty(shape: tuple[int, ...]) -> Any:
            assert threading.current_thread().name in entered[rank], "torch allocates for the current device"
            return real(shape)
        made.empty = empty
        runtime.allgather("rows", made).wait()
        allreduce(gpus, runtime, "x", np.ones(3)).wait()
    worlds.threads(2, step)
    for names in entered:
        spin(lambda names=names: len({name.rstrip("0123456789-") for name in list(names)}) == 4)  # one may not have begun

"""Contexts of GPUs: a rank makes one on its own GPU, and on no other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdlite.planes.nccl.cupy_device import CupyDevice, EventPool
from hvdlite.runtime.runtime import Runtime
from tests import worlds
from tests.gpu_double.gpu import GpuDouble
from tests.gpu_double.worlds import Gpus, allreduce, begun, spin
from tests.gpu_double.worlds import gpus as gpus


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
    assert device.batched_copy([(memory[0].pointer, memory[0].pointer, 25)], "float32", "float32", device.stream)
    in_a_thread(memory.clear)


def test_no_thread_makes_a_context_on_another_gpu() -> None:
    gpu = in_a_thread(lambda: GpuDouble(2))
    device = gpu.device
    in_a_thread(lambda: use(device))

    def own() -> None:
        device.make_current()
        use(device)
        assert gpu.getDevice() == 2
    in_a_thread(own)
    assert gpu.contexts == {2} and not gpu.allocated
    gpu.end()


def test_a_thread_of_the_users_gets_its_device_back() -> None:
    gpu = GpuDouble(2)
    device = gpu.device

    def users() -> int:
        gpu.setDevice(1)
        use(device)
        return gpu.getDevice()
    assert in_a_thread(users) == 1

    def own() -> int:
        device.make_current()
        gpu.setDevice(1)  # by a framework
        use(device)
        return gpu.getDevice()
    assert in_a_thread(own) == 2
    gpu.end()


def test_the_planes_stream_comes_first() -> None:
    gpu = GpuDouble()
    assert gpu.streamGetPriority(gpu.stream) == -5
    gpu.end()


def test_all_threads_of_the_plane_enter_its_gpu(gpus: Gpus) -> None:
    entered: list[set[str]] = [set(), set()]

    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        runtime.devices.record_event(0)
        gpu = gpus.made[rank]
        gpu.device.make_current = lambda: entered[rank].add(threading.current_thread().name)  # type: ignore[method-assign]
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

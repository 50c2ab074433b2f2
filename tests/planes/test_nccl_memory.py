"""Memory of GPUs: what happens when there is none, which errors are told, and when a framework may reuse its own."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import numpy as np
import pytest

from hvdlite.core.device import DeviceArray
from hvdlite.core.errors import HorovodInternalError, UnsupportedError
from hvdlite.core.types import ReduceOp
from hvdlite.planes.nccl.cupy_device import StagingBuffer
from hvdlite.runtime.gradient_sets import Moment
from hvdlite.runtime.runtime import Runtime
from tests import worlds
from tests.gpu_double.cuda import CudaError, view
from tests.gpu_double.gpu import GpuDouble, plane
from tests.gpu_double.worlds import Gpus, allreduce, begun, spin
from tests.gpu_double.worlds import gpus as gpus

SUM = ReduceOp.SUM


def fused(gpus: Gpus, runtime: Runtime, count: int = 1 << 14) -> Any:
    """Reduce two tensors that go through staging memory."""
    arrays = [gpus.wrap(runtime, np.ones(count)) for _ in range(2)]
    return runtime.grouped_allreduce("g", arrays, arrays, SUM).wait()


def test_no_memory_says_where(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        begun(gpus, runtime).memory = 1 << 16
        with pytest.raises(HorovodInternalError, match=r"rank \d: out of memory in allreduce of 'g'.* on GPU 0"):
            fused(gpus, runtime)
    worlds.threads(2, step)


@pytest.mark.parametrize("captures", [False, True])
def test_memory_is_the_frameworks_and_is_used_when_its_stream_has_left_it(gpus: Gpus, captures: bool) -> None:
    """What the stream still does with it comes first. While the stream is captured, the device's memory is used."""
    def step(runtime: Runtime) -> None:
        gpu, devices, asked = begun(gpus, runtime), runtime.devices, list[int]()
        owner = np.full(1 << 20, 7.0)
        stream = gpu.make_stream()

        def allocate(nbytes: int) -> DeviceArray:
            asked.append(nbytes)
            if captures:
                raise UnsupportedError("the stream is captured")
            gpu.launch(stream, "use", lambda: owner.fill(9.0))
            return DeviceArray(owner.ctypes.data, (nbytes,), np.dtype(np.uint8), 0, owner, devices.record_event(stream))
        values = [np.ones(1 << 14) for _ in range(2)]
        arrays = [devices.wrap(each.ctypes.data, each.shape, each.dtype, 0, stream=0, owner=each, allocate=allocate)
                  for each in values]
        before = len(gpu.allocations)
        handle = runtime.grouped_allreduce("g", arrays, arrays, SUM)
        handle.wait()
        for completion in handle.completions():
            completion.wait()
        assert asked and all((each == 2).all() for each in values)
        assert (len(gpu.allocations) > before) == captures
    worlds.threads(2, step)


def test_other_errors_are_told_as_what_they_are(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        begun(gpus, runtime).fault = CudaError(700, "cudaErrorIllegalAddress: an illegal memory access was encountered")
        with pytest.raises(HorovodInternalError, match=r"rank \d: CUDA failed in allreduce of 'g'.* on GPU 0: "
                                                       r"cudaErrorIllegalAddress") as caught:
            fused(gpus, runtime)
        assert "out of memory" not in str(caught.value) and "NCCL_DEBUG" not in str(caught.value)
    worlds.threads(2, step)


def test_a_rank_without_gpu_memory_asks_the_hosts_plane_for_what_the_others_ask(
        gpus: Gpus, caplog: pytest.LogCaptureFixture) -> None:
    """All ranks must make the same calls of a host's plane: it places buffers by them."""
    asked: dict[int, list[int]] = {0: [], 1: []}

    class Asked:
        def __init__(self, rank: int, plane: Any) -> None:
            self.rank, self.plane = rank, plane

        def __getattr__(self, name: str) -> Any:
            return getattr(self.plane, name)

        def fusion_buffer(self, nbytes: int, ranks: tuple[int, ...]) -> Any:
            asked[self.rank].append(nbytes)
            return self.plane.fusion_buffer(nbytes, ranks)

    def step(runtime: Runtime) -> None:
        gpu = begun(gpus, runtime)
        for number in (1, 2, 3):
            if runtime.world.rank == 1:
                gpu.memory = 0
            there, here = np.ones(4, np.float32), np.ones(4, np.float32)
            members = {"there": gpus.wrap(runtime, there), "here": here}
            handles = [runtime.gradients.enqueue_gradient(name, member, member, SUM, Moment("set", number))
                       for name, member in members.items()]
            runtime.gradients.close_round("set", number)
            for handle in handles:
                handle.wait()
            handles[0].completion.wait()
            assert (here == 2).all() and (there == 2).all()
            assert runtime.gradients.layout("set", number) is None
    worlds.threads(2, step, wrap=Asked)
    assert asked[0] and asked[0] == asked[1]
    assert "rank 1: 'set' goes on without learned buckets" in caplog.text


def test_a_buckets_memory_is_zero() -> None:
    """The gaps between its tensors are reduced, too."""
    gpu = GpuDouble()
    used = plane(0, None, lambda: None, gpu)
    own: Any = used.fusion_buffer(1 << 13, (0,), spin).own  # type: ignore[union-attr]
    assert not view(own.pointer, own.nbytes, np.dtype(np.uint8)).any()
    used.close()
    gpu.end()


def test_staging_memory_is_allocated_seldom() -> None:
    gpu = GpuDouble()
    staging = StagingBuffer(gpu.device, gpu.device.allocate)
    for nbytes in range(1024, 100_000, 1024):
        staging.get(nbytes)
    assert len(gpu.allocations) < 10
    assert all(later >= 2 * earlier for earlier, later in itertools.pairwise(gpu.allocations))
    staging.get(1 << 20)
    assert gpu.allocations[-1] == 1 << 20
    gpu.memory = (1 << 20) + 4096
    staging.get((1 << 20) + 1)
    assert gpu.allocations[-1] == (1 << 20) + 256, "there is no memory for more than what is needed"
    gpu.end()


@pytest.mark.parametrize(("status", "expected"), [(2, MemoryError), (700, RuntimeError)])
def test_only_cudas_own_status_is_out_of_memory(status: int, expected: type[Exception]) -> None:
    gpu = GpuDouble()
    gpu.fault = CudaError(status)
    with pytest.raises(expected, match=f"status {status}") as caught:
        gpu.device.allocate(100)
    assert isinstance(caught.value, MemoryError) == (status == 2)
    gpu.end()


# --- memory of the framework's, which it reuses in the order of a stream ---------------------------------------------------


class _Watched(np.ndarray):
    """An array that can be referred to weakly."""


@pytest.mark.parametrize(("waits", "is_free"), [([], False), (["lender"], True), (["other"], False),
                                                (["other", "lender"], True)])
def test_memory_is_held_until_its_own_stream_follows_or_work_is_done(gpus: Gpus, waits: list[str], is_free: bool) -> None:
    def step(runtime: Runtime) -> None:
        gpu = begun(gpus, runtime)
        streams = {"lender": gpu.make_stream(), "other": gpu.make_stream()}
        gpu.hold(gpu.stream)
        watched = np.ndarray.__new__(_Watched, (10,))
        handle, alive = allreduce(gpus, runtime, "x", watched, stream=streams["lender"]), weakref.ref(watched)
        del watched
        handle.wait()
        assert alive() is not None
        for name in waits:
            handle.completion.block_stream(streams[name])
        del handle
        gc.collect()
        assert (alive() is None) == is_free, "a framework reuses freed memory on the stream for which it was allocated"
        gpu.release(gpu.stream)
        spin(lambda: gc.collect() >= 0 and alive() is None)
    worlds.threads(1, step)


def test_memory_of_two_streams_is_held_until_the_work_is_done(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        gpu = begun(gpus, runtime)
        streams = [gpu.make_stream(), gpu.make_stream()]
        gpu.hold(gpu.stream)
        watched = [np.ndarray.__new__(_Watched, (10,)) for _ in streams]
        arrays = [gpus.wrap(runtime, each, stream) for each, stream in zip(watched, streams, strict=True)]
        alive = [weakref.ref(each) for each in watched]
        handle = runtime.grouped_allreduce("x", arrays, arrays, SUM)
        del watched, arrays
        handle.wait()
        completions = handle.completions()
        del handle
        for stream in streams:
            for completion in completions:
                completion.block_stream(stream)
        gc.collect()
        assert all(each() is not None for each in alive)
        gpu.release(gpu.stream)
        spin(lambda: gc.collect() >= 0 and not any(each() is not None for each in alive))
    worlds.threads(1, step)

"""The GPU behind the plane: memory, streams, events, and the kernel against NumPy. One process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hvdlite.core.array import SUPPORTED_DTYPES
from hvdlite.core.device import DeviceArray
from hvdlite.planes.nccl import library
from hvdlite.planes.nccl.kernels import ENTRIES, bits
from tests.gpu_double.kernels import calculated

NAMES = [name for name in SUPPORTED_DTYPES if name != "bool" and "complex" not in name]


@pytest.fixture(scope="module")
def device() -> Iterator[Any]:
    import torch  # first, so that there is one libnccl
    torch.zeros(1, device="cuda")
    from hvdlite.planes.nccl.cupy_device import CupyDevice
    made = CupyDevice(0, 0, {})
    made.make_current()
    yield made


def on_gpu(device: Any, array: Any, shift: int = 0) -> DeviceArray:
    import cupy
    room = device.allocate(array.nbytes + 512)
    memory = room.part(shift, array.size, array.dtype)
    cupy.cuda.runtime.memcpy(memory.pointer, array.ctypes.data, array.nbytes, cupy.cuda.runtime.memcpyHostToDevice)
    memory.owner = room
    return memory


def back(device: Any, array: DeviceArray) -> Any:
    import cupy
    cupy.cuda.runtime.streamSynchronize(device.stream)
    out = np.empty(array.size, array.dtype)
    cupy.cuda.runtime.memcpy(out.ctypes.data, array.pointer, out.nbytes, cupy.cuda.runtime.memcpyDeviceToHost)
    return out


def test_one_nccl_new_enough_and_the_gpu_has_a_name(device: Any) -> None:
    assert len(library.copies()) == 1
    assert device.version >= library.OLDEST
    assert device.bus_id().count(":") == 2, "a PCI bus id"
    assert library.cuda_of_torch() in (12, 13)


def test_memory_is_aligned_and_can_be_cleared(device: Any) -> None:
    memory = device.allocate(1000)
    device.zero(memory)
    assert memory.pointer % 256 == 0 and not back(device, memory).any()
    with pytest.raises(MemoryError):
        device.allocate(1 << 50)


def test_an_event_passes_when_its_stream_has_come_to_it(device: Any) -> None:
    import torch
    stream = torch.cuda.Stream()
    event = device.make_event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
    device.record(event, stream.cuda_stream)
    assert not device.is_event_done(event)
    device.wait(device.stream, event)
    done = device.make_event()
    device.record(done, device.stream)
    assert not device.is_event_done(done), "our stream waits for the other one"
    stream.synchronize()
    torch.cuda.synchronize()
    assert device.is_event_done(event) and device.is_event_done(done)


def test_the_stream_is_non_blocking_and_of_the_highest_priority(device: Any) -> None:
    from cupy.cuda import runtime
    assert runtime.streamGetFlags(device.stream) == runtime.streamNonBlocking
    beyond = runtime.streamCreateWithPriority(runtime.streamNonBlocking, -1000)  # CUDA makes that its highest
    assert runtime.streamGetPriority(device.stream) == runtime.streamGetPriority(beyond) < 0
    runtime.streamDestroy(beyond)


@pytest.mark.parametrize(("source", "target"), [(name, name) for name in NAMES] + [
    pair for pair in itertools.product(("float16", "bfloat16", "float32", "float64"), repeat=2) if pair[0] != pair[1]])
def test_the_kernel_copies_casts_and_calculates_like_numpy(device: Any, source: str, target: str) -> None:
    generator = np.random.default_rng(1)
    for count, shift, factor in itertools.product((1, 4097, 300_001), (0, 1),
                                                   (1.0, 0.5, 1 / 3)):
        values = (generator.normal(size=count) * 40).astype(np.float32 if "float" in source else np.float64)
        values = np.abs(values).astype(SUPPORTED_DTYPES[source])
        given = on_gpu(device, values, shift)
        out = on_gpu(device, np.zeros(count, SUPPORTED_DTYPES[target]), shift)
        assert device.batched_copy([(given.pointer, out.pointer, count)], source, target, device.stream, factor)
        expected, result = calculated(values, factor, SUPPORTED_DTYPES[target]), back(device, out)
        if source == target and factor == 1.0:
            assert result.tobytes() == expected.tobytes()
        elif "int" in target:
            assert np.array_equal(result, expected), (count, shift, factor)
        else:
            step = {"float16": 2e-3, "bfloat16": 1e-2}.get(target, 1e-6)
            np.testing.assert_allclose(result.astype(np.float64), expected.astype(np.float64), rtol=step)


def test_many_arrays_and_fillers(device: Any) -> None:
    sources = [on_gpu(device, np.full(1 + index, index, np.float32)) for index in range(2 * ENTRIES + 3)]
    targets = [on_gpu(device, np.zeros(1 + index, np.float32)) for index in range(2 * ENTRIES + 3)]
    copies = [(source.pointer, target.pointer, source.size) for source, target in zip(sources, targets, strict=True)]
    assert device.batched_copy(copies, "float32", "float32", device.stream)
    assert all((back(device, target) == index).all() for index, target in enumerate(targets))
    for name in NAMES:
        out = on_gpu(device, np.zeros(1001, SUPPORTED_DTYPES[name]))
        device.batched_copy([(0, out.pointer, 1001)], name, name, device.stream, fill_value=bits(7, SUPPORTED_DTYPES[name]))
        assert (back(device, out).astype(np.float64) == 7).all(), name


def test_layouts_are_rearranged(device: Any) -> None:
    shape, strides = (2, 3, 4), (12, 1, 3)
    for name in ("uint8", "float32", "bfloat16", "complex128"):
        values = np.arange(24).astype(SUPPORTED_DTYPES[name])
        source = on_gpu(device, values)
        source.shape, source.strides = shape, strides
        target = on_gpu(device, np.zeros(24, SUPPORTED_DTYPES[name]))
        target.shape = shape
        device.copy_row_major(source, target, device.stream)
        expected = np.lib.stride_tricks.as_strided(values, shape, tuple(step * values.itemsize for step in strides))
        assert back(device, target).tobytes() == np.ascontiguousarray(expected).tobytes(), name


def test_a_capture_is_seen(device: Any) -> None:
    import torch
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    assert not device.is_capturing(stream.cuda_stream)
    with torch.cuda.graph(graph, stream=stream):
        assert device.is_capturing(torch.cuda.current_stream().cuda_stream)


def test_torch_takes_the_planes_memory(device: Any) -> None:
    import torch

    from hvdlite_torch.arrays import cuda
    memory = device.allocate(4096)
    part = memory.part(64, 24, np.dtype(np.float32))
    part.shape, part.strides = (2, 3, 4), (12, 1, 3)
    tensor = cuda.as_tensor(part)
    assert tensor.data_ptr() == part.pointer and tensor.stride() == (12, 1, 3) and tensor.dtype is torch.float32
    tensor.fill_(3.0)
    torch.cuda.synchronize()
    assert (back(device, part.flat()) == 3).all()
    half = memory.part(0, 8, SUPPORTED_DTYPES["bfloat16"])
    assert cuda.as_tensor(half).dtype is torch.bfloat16

"""Situations for `gpu_check` that only a GPU has: its memory, streams and torch's thread; and kernels under a checker."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np

from benchmarks.gpu_sheet import Setup, Sheet, has_learned, launch_times, sharing_alone
from benchmarks.gpu_training import images, kinds, stepper

FREE = 32 << 20
"""Bytes that the nearly full GPU has for others than torch; less than ResNet-50's gradients."""
KERNELS = (("uint8", "uint8", 1.0), ("float16", "float16", 1.0), ("float32", "float32", 1.0),
           ("float64", "float64", 1.0), ("float32", "bfloat16", 1.0), ("bfloat16", "float32", 1.0),
           ("float32", "float16", 1.0), ("float16", "float32", 1.0), ("float32", "float32", 0.5),
           ("float32", "bfloat16", 0.5), ("int32", "int32", 0.5))
"""Dtypes before and after, and the factor; each takes seconds under the checker."""


def situations(sheet: Sheet, setup: Setup) -> None:
    """Try them, each by itself."""
    gpu = setup.gpu()
    import hvdlite_torch as hvd
    hvd.init()
    setup.join_torch(gpu)
    for name, work in (("reentrant checkpoints", reentrant_checkpoints), ("another stream", another_stream),
                       ("peak memory", peak_memory), ("nearly full GPU", nearly_full)):
        with sheet.part(name):
            work(sheet, setup, gpu)
    setup.leave_torch()
    hvd.shutdown()


def reentrant_checkpoints(sheet: Sheet, setup: Setup, gpu: Any) -> None:
    """Backward passes within a backward pass, on torch's thread for the GPU: one round a step, and the same gradients."""
    import torch
    from torch.utils.checkpoint import checkpoint

    import hvdlite_torch as hvd

    def blocks() -> Any:
        torch.manual_seed(5)
        return torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(6)).to(gpu)

    def backward(model: Any) -> None:
        x = torch.linspace(-1, 1, 8 * 64, device=gpu).view(8, 64).requires_grad_()
        for block in model:
            x = checkpoint(block, x, use_reentrant=True)
        x.square().mean().backward()

    ours, plain = blocks(), blocks()
    with sharing_alone():
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours.named_parameters())
    for _ in range(4):
        optimizer.zero_grad()
        backward(ours)
    assert has_learned(optimizer), "buckets were never learned"
    steps = setup.work.times(5)
    with launch_times() as launches:
        for _ in range(steps):
            optimizer.zero_grad()
            backward(ours)
    torch.cuda.synchronize()
    backward(plain)
    buckets = len(optimizer._hooks.reducer.layout.plans)
    sheet.add("reentrant checkpoints: launches a step", len(launches) / steps, f"for {buckets} buckets")
    assert len(launches) == buckets * steps, "checkpoint segments were taken for backward passes"
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def another_stream(sheet: Sheet, setup: Setup, gpu: Any) -> None:
    """A tensor that one stream makes is awaited on another one, and its memory freed at once."""
    import torch

    import hvdlite_torch as hvd
    made, used = torch.cuda.Stream(), torch.cuda.Stream()
    length, turns = setup.work.elements(1 << 22), setup.work.times(30)
    for turn in range(turns):
        with torch.cuda.stream(made):
            torch.cuda._sleep(2_000_000)
            handle = hvd.allreduce_async(torch.full((length,), float(turn), device=gpu), op=hvd.Sum, name=f"turn {turn}")
        with torch.cuda.stream(used):
            result = hvd.synchronize(handle)
            doubled = result * 2
        with torch.cuda.stream(made):  # takes the memory of what is free
            noise = [torch.full((length,), -1.0, device=gpu) for _ in range(3)]
        torch.cuda.synchronize()
        assert (doubled == 2 * turn).all(), f"turn {turn}"
        del result, doubled, noise, handle
    sheet.add("another stream: awaited there, right each time", turns)


def peak_memory(sheet: Sheet, setup: Setup, gpu: Any) -> None:
    """Memory of a training, by torch's account and by the GPU's."""
    import torch
    data = images(setup, gpu, setup.work.batch, setup.work.pixels)
    for kind in kinds():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, _ = torch.cuda.mem_get_info()
        step = stepper(setup, kind, setup.work.model, data)
        after, _ = torch.cuda.mem_get_info()
        sheet.add(f"peak memory: {kind}, of torch's allocator", torch.cuda.max_memory_allocated() / 1e6, "MB")
        sheet.add(f"peak memory: {kind}, taken from the GPU", (before - after) / 1e6, "MB")
        del step


def nearly_full(sheet: Sheet, setup: Setup, gpu: Any) -> None:
    """Buckets are learned although torch's cache holds nearly all memory: it gives back what it does not use."""
    import torch

    import hvdlite_torch as hvd
    gc.collect()
    torch.cuda.empty_cache()
    model = setup.work.model().to(gpu)
    with sharing_alone():
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    x, y = images(setup, gpu, setup.work.small_batch, setup.work.small_pixels)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    step()
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    hogs = [torch.empty((free - FREE) // 32, dtype=torch.uint8, device=gpu) for _ in range(32)]
    del hogs  # into torch's cache, which gives back blocks of which nothing is used
    sheet.add("nearly full GPU: free before buckets are learned", torch.cuda.mem_get_info()[0] / 1e6, "MB")
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    sheet.add("nearly full GPU: free after that", torch.cuda.mem_get_info()[0] / 1e6, "MB")
    assert has_learned(optimizer), "buckets were never learned"
    torch.cuda.empty_cache()


def kernels(sheet: Sheet, setup: Setup) -> None:
    """Run kernels of every kind on sizes and addresses at their edges, without torch; meant to run under a checker."""
    from hvdlite.core.array import SUPPORTED_DTYPES
    from hvdlite.core.device import DeviceArray
    from hvdlite.planes.nccl.kernels import ENTRIES
    device = setup.device(0)
    stream, launches = device.stream, 0
    for source, target, factor in KERNELS:
        of, to = SUPPORTED_DTYPES[source].itemsize, SUPPORTED_DTYPES[target].itemsize
        for count in (1, 257, setup.work.elements(1 << 20) + 1):
            given, out = setup.malloc((count + 1) * of), setup.malloc((count + 1) * to)  # no byte more than is used
            for shift in (0, 1):
                device.batched_copy([(given + shift * of, out + shift * to, count)], source, target, stream,
                                    factor)
            setup.read(out, to)
            launches += 2
    length = 2 * ENTRIES + 3
    ones, copied = setup.malloc(4 * length), setup.malloc(4 * length)
    device.batched_copy([(0, copied, length)], "float32", "float32", stream, fill_value=0)
    device.batched_copy([(ones + 4 * index, copied + 4 * index, 1) for index in range(length)], "float32", "float32", stream)
    assert setup.read(copied, 4 * length) == b"\1" * 4 * length, "many tiny arrays"
    rows, columns, dtype, shape = setup.malloc(96), setup.malloc(96), np.dtype(np.float32), (2, 3, 4)
    device.copy_row_major(DeviceArray(rows, shape, dtype, device.index, strides=(12, 1, 3)),
                          DeviceArray(columns, shape, dtype, device.index), stream)
    assert setup.read(columns, 96) == b"\1" * 96, "rearranged"
    sheet.add("kernel launches", launches + 5)

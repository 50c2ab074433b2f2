"""Programs of test_ranks.py."""

from __future__ import annotations

import math
import time
import warnings
from typing import Any

import numpy as np
import torch

import hvdlite
import hvdlite_torch as hvd
from benchmarks.gpu_sheet import sharing_alone
from tests.gpu.programs import support
from tests.gpu.programs.support import begin
from tests.raising import raises

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)


def full(shape: tuple[int, ...], value: float, dtype: torch.dtype = torch.float32) -> Any:
    return torch.full(shape, value, device=support.GPU).to(dtype)


def check(result: Any, expected: Any, what: object) -> None:
    assert result.device.type == support.GPU, what
    assert (result.cpu().double() == expected).all(), (what, result, expected)


def every_reduction_and_dtype() -> None:
    rank, size, gpu = begin()
    total = sum(range(1, size + 1))
    handles = []
    for dtype in FLOATS + INTEGERS:
        one = full((5, 7), rank + 1, dtype)
        for op, expected in ((hvd.Sum, total), (hvd.Min, 1), (hvd.Max, size), (hvd.Product, math.factorial(size)),
                             (hvd.Average, total / size if dtype in FLOATS else total // size)):
            handles.append((hvd.allreduce_async(one, op=op, name=f"{dtype}.{op}"), expected, (dtype, op), dtype))
    for handle, expected, what, dtype in handles:
        result = hvd.synchronize(handle)
        assert result.dtype is dtype
        assert (result.cpu().double() - expected).abs().max() < 0.02, (what, result, expected)
    for dtype in (torch.complex64, torch.complex128):
        check(hvd.allreduce(full((4,), rank + 1, dtype), op=hvd.Sum).real, total, dtype)
    check(hvd.allreduce(torch.tensor([rank == 0, True], device=gpu), op=hvd.Min), torch.tensor([size == 1, True]), "all")
    check(hvd.allreduce(full((3,), 4.0), prescale_factor=0.5, postscale_factor=3.0, op=hvd.Sum), 6.0 * size, "factors")
    check(hvd.allreduce(full((3,), 7, torch.int32), prescale_factor=0.5, op=hvd.Sum), 3 * size, "factors of integers")
    group = hvd.grouped_allreduce([full((n,), rank + 1.0) for n in (1, 3, 1000, 100_000)], op=hvd.Sum)
    for member in group:
        check(member, total, "group")
    mixed = hvd.grouped_allreduce([full((4,), rank + 1, torch.float16), full((4,), rank + 1, torch.int64),
                                   torch.full((4,), rank + 1.0)], op=hvd.Sum)
    assert [member.device.type for member in mixed] == [support.GPU, support.GPU, "cpu"]
    assert all((member.cpu() == total).all() for member in mixed)
    hvd.shutdown()


def every_other_collective() -> None:
    rank, size, gpu = begin()
    total = sum(range(1, size + 1))
    for dtype in FLOATS + INTEGERS + (torch.bool, torch.int16, torch.complex64):
        check(hvd.broadcast(full((4, 2), 1 if rank == size - 1 else 0, dtype), size - 1).real, 1, dtype)
    rows = hvd.allgather(full((rank + 1, 3), rank))
    assert rows[:, 0].tolist() == [of for of in range(size) for _ in range(of + 1)]
    assert hvd.allgather(full((2, 3), rank))[:, 0].tolist() == [of for of in range(size) for _ in range(2)]
    for length in (2 * size, 2 * size + 1):
        part = hvd.reducescatter(torch.arange(length, device=gpu).float()[:, None] + rank, op=hvd.Sum)
        own = [length // size + (of < length % size) for of in range(size)]
        first = sum(own[:rank])
        check(part[:, 0], torch.arange(first, first + own[rank]).double() * size + sum(range(size)), "reducescatter")
    received, counts = hvd.alltoall(full((sum(range(1, size + 1)), 2), rank), splits=list(range(1, size + 1)))
    assert counts.tolist() == [rank + 1] * size
    assert received[:, 0].tolist() == [of for of in range(size) for _ in range(rank + 1)]
    gathered = hvd.gather(full((rank + 1,), rank), 0)
    assert rank or gathered.tolist() == [of for of in range(size) for _ in range(of + 1)]
    scattered = hvd.scatter(torch.arange(size + 1, device=gpu) + 100 * rank, 1)
    assert scattered.tolist() == ([100, 101] if rank == 0 else [100 + rank + 1])
    reduced = hvd.reduce(full((4,), rank + 1), 1, op=hvd.Sum)
    assert reduced is None if rank != 1 else (reduced == total).all()
    if rank == 0:
        hvd.send(full((5,), 42), size - 1)
    elif rank == size - 1:
        assert (hvd.recv(full((5,), 0), 0) == 42).all()
    # What NCCL does not do goes over the host's memory.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(hvd.allreduce(full((3,), rank + 1, torch.int16), op=hvd.Sum), total, "int16")
        assert hvd.allreduce(full((8,), rank + 1.0), op=hvd.Adasum).device.type == support.GPU
    check(hvd.allreduce(torch.full((3,), rank + 1.0), op=hvd.Sum).to(gpu), total, "a tensor on the host beside them")
    leaf = full((3,), rank + 1.0).requires_grad_()
    hvd.allreduce(leaf, op=hvd.Sum).sum().backward()
    check(leaf.grad, size, "gradient")
    assert (hvd.allreduce(full((4, 6), rank + 1.0).t(), op=hvd.Sum) == total).all(), "strides"
    hvd.shutdown()


def process_sets_and_join() -> None:
    rank, _, _ = begin()
    some = hvd.add_process_set([0, 2])
    if rank != 1:
        check(hvd.allreduce(full((9,), rank + 1.0), op=hvd.Sum, process_set=some), 4, "set")
    check(hvd.allreduce(full((9,), rank + 1.0), op=hvd.Sum), 6, "all")
    hvd.remove_process_set(some)
    if rank < 2:
        tensors = [full((n,), rank + 1.0) for n in (3, 500)]
        for tensor in hvd.grouped_allreduce(tensors, op=hvd.Sum):
            check(tensor, 3, "joined")
        check(hvd.allreduce(full((4,), rank + 5, torch.int32), op=hvd.Min), 5, "identity")
        check(hvd.broadcast(full((4,), rank + 1.0), 1), 2, "broadcast")
    hvd.join()
    hvd.shutdown()


def arrays_of_cupy() -> None:
    import cupy

    rank, _, gpu = begin()
    cupy.cuda.Device(gpu.index).use()
    mine = cupy.full((3, 4), rank + 1, cupy.float32)
    result = hvdlite.allreduce(mine, op=hvdlite.Sum)
    assert isinstance(result, cupy.ndarray) and (result == 3).all()
    assert hvdlite.allreduce_(mine, op=hvdlite.Sum) is mine and (mine == 3).all()
    rows = hvdlite.allgather(cupy.full((rank + 1, 2), rank, cupy.int64))
    assert isinstance(rows, cupy.ndarray) and rows[:, 0].tolist() == [0, 1, 1]
    assert (hvdlite.broadcast(cupy.full(3, rank), 1) == 1).all()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        later = cupy.ones(1 << 20) * (rank + 1)
        assert (hvdlite.allreduce(later, op=hvdlite.Sum) == 3).all()
    assert (hvdlite.allreduce(np.full(3, rank + 1.0), op=hvdlite.Sum) == 3).all()
    hvd.shutdown()


def streams_order_the_work_and_the_host_goes_on() -> None:
    _, _, gpu = begin()
    hvd.allreduce(torch.ones(8, device=gpu), op=hvd.Sum)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        late = torch.zeros(1 << 20, device=gpu)
        torch.cuda._sleep(4_000_000_000)  # about two seconds
        late.fill_(3.0)
        began = time.perf_counter()
        handle = hvd.allreduce_async_(late, op=hvd.Sum, name="late")
        result = hvd.synchronize(handle)
        seconds = time.perf_counter() - began
        doubled = result * 2
    done = side.query()
    side.synchronize()
    assert not done, "the host waited for the GPU"
    assert (doubled == 6).all() and (late == 3).all()
    print("host seconds", seconds)
    hvd.shutdown()


def memory_of_dropped_tensors_is_not_reused_too_early() -> None:
    rank, _, gpu = begin()
    for turn in range(20):
        handle = hvd.allreduce_async(torch.full((1 << 20,), float(rank + turn), device=gpu), op=hvd.Sum, name=f"t{turn}")
        noise = torch.full((1 << 20,), -1.0, device=gpu)  # would take the tensor's memory if it were free
        result = hvd.synchronize(handle)
        assert (result == 2 * turn + 1).all(), turn
        del noise, result
    hvd.shutdown()


def a_collective_in_a_graph_is_refused_and_graphs_of_the_model_work() -> None:
    _, _, gpu = begin()
    tensor = torch.ones(8, device=gpu)
    hvd.allreduce_(tensor, op=hvd.Sum)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    error = None
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            hvd.allreduce_async_(tensor, op=hvd.Sum)
        except ValueError as caught:
            error = caught
        tensor + 1
        graph.capture_end()
    assert "CUDA graph" in str(error), error
    model = torch.nn.Linear(16, 4).to(gpu)
    graphed: Any = torch.cuda.make_graphed_callables(model, (torch.randn(8, 16, device=gpu),))
    with sharing_alone():
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(6):
        optimizer.zero_grad()
        graphed(torch.randn(8, 16, device=gpu)).square().mean().backward()
        optimizer.step()
    # The runtime's threads go on while somebody captures.
    with torch.cuda.stream(stream):
        other = torch.cuda.CUDAGraph()
        handle = hvd.allreduce_async_(torch.ones(1 << 22, device=gpu), op=hvd.Sum)
        with torch.cuda.graph(other):
            tensor * 2
        hvd.synchronize(handle)
    torch.cuda.synchronize()
    hvd.shutdown()


def a_gpu_that_two_share() -> None:
    begin(shared_gpu=False)
    raises(hvd.HorovodInternalError, "ranks 0 and 1 use the same GPU", lambda: hvd.allreduce(torch.ones(3, device="cuda")))


def train_without_end() -> None:
    _, _, gpu = begin()
    model = torch.nn.Linear(512, 512).to(gpu)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for turn in range(100_000):
        optimizer.zero_grad()
        model(torch.randn(8, 512, device=gpu)).square().mean().backward()
        optimizer.step()
        if turn == 5:
            print("trains", flush=True)

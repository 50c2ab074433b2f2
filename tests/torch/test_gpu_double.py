"""The optimizer's own tests once more, with gradients that pass for a GPU's; and what only happens there."""

from __future__ import annotations

import dataclasses
import threading
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch as hvd  # noqa: E402
from hvdlite import api  # noqa: E402
from hvdlite.core.errors import HorovodInternalError, UnsupportedError  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch import Compression  # noqa: E402
from hvdlite_torch.arrays import cuda  # noqa: E402
from tests.gpu_double.torch_cuda import install  # noqa: E402
from tests.gpu_double.worlds import Gpus  # noqa: E402
from tests.torch import test_buckets, test_optimizer, test_weights  # noqa: E402
from tests.torch.models import by_bucket, net, settle, train, wrapped  # noqa: E402
from tests.worlds import threads  # noqa: E402

SIZE = pytest.mark.parametrize("size", [3]).mark
"""One number of ranks is enough: what these tests show at others is what the runtime does, and it is the same here."""


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    made = install(monkeypatch)
    yield made
    made.end()


ON_THE_HOST = ("test_bad_arguments", "test_no_memory_on_one_rank_means_no_buckets_on_all")
"""Tests that are about the host's plane, or need no ranks."""


def _again() -> None:
    """Collect the tests of other files that run on threads."""
    for module in (test_optimizer, test_buckets, test_weights):
        for name, test in vars(module).items():
            if name.startswith("test_") and name not in ON_THE_HOST and "processes" not in test.__code__.co_names:
                again = types.FunctionType(test.__code__, test.__globals__, f"{name}_on_a_gpu", closure=test.__closure__)
                again.pytestmark = [SIZE if mark.args[:1] == ("size",) else mark for mark in getattr(test, "pytestmark", [])]
                again.__annotations__ = test.__annotations__
                globals()[again.__name__] = again


_again()


def launches(gpu: Any) -> Counter[str]:
    """Return what was launched since the last call, but waits and records."""
    counted = Counter(what for what in gpu.launches if what not in ("wait", "record"))
    gpu.launches.clear()
    return counted


@pytest.mark.parametrize(("to_none", "compression", "moves"), [
    (True, Compression.none, 1), (False, Compression.none, 1), (True, Compression.fp16, 2), (False, Compression.bf16, 2)],
                         ids=["copied in", "in place", "cast in and out", "cast although it is kept"])
def test_a_bucket_costs_one_call_and_as_few_kernels_as_possible(gpus: Gpus, to_none: bool, compression: Any,
                                                                moves: int) -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrapped(runtime, model, compression=compression)
        settle(runtime, model, optimizer)
        gpu = gpus.made[runtime.world.rank]
        launches(gpu)
        optimizer.zero_grad(set_to_none=to_none)
        torch.nn.functional.mse_loss(model(torch.ones(4, 6)), torch.ones(4, 3)).backward()
        expected = Counter({"allReduce": 1, "move": moves})
        assert launches(gpu) == +expected
        optimizer.step()
    threads(2, step)


@pytest.mark.parametrize("broken", [False, True])
def test_averages_are_right_whether_or_not_ranks_divide_when_they_pack(gpus: Gpus, broken: bool) -> None:
    """One rank has no kernels. Another one has no gradient for a parameter, and if it has kept an old one, breaks its bucket
    when that is filled."""
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        runtime.devices.record_event(0)
        gpus.made[rank].kernels = rank != 1
        model = net()
        optimizer = wrapped(runtime, model)
        settle(runtime, model, optimizer)
        first, *others = model.parameters()
        kept = first.grad if broken and rank == 2 else None
        for scale in (1.0, 2.0):
            optimizer.zero_grad()
            used = others if rank == 2 else [first, *others]
            sum((parameter * (rank + 1.0) * scale).sum() for parameter in used).backward()
            optimizer.synchronize()
            torch.testing.assert_close(first.grad, torch.full_like(first, scale))
            for parameter in others:
                torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 2.0 * scale))
        del kept
    threads(3, step)


def test_gradients_are_aligned_views_of_the_gpus_memory(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrapped(runtime, model)
        settle(runtime, model, optimizer)
        addresses = [parameter.grad.data_ptr() for parameter in model.parameters()]
        assert all(address % 256 == 0 for address in addresses)
        for _ in range(3):
            train(optimizer, model, torch.ones(4, 6), torch.ones(4, 3))
            assert [parameter.grad.data_ptr() for parameter in model.parameters()] == addresses
    threads(2, step)


def several_streams(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.local, list[int]]:
    """Return what holds each thread's current stream as `now`, and how many tensors outlived their stream, by call."""
    streams, outlived = threading.local(), list[int]()
    monkeypatch.setattr(cuda, "current_stream", lambda index: getattr(streams, "now", 0))
    monkeypatch.setattr(cuda, "record_stream", lambda tensors: outlived.append(len(tensors)))
    return streams, outlived


@pytest.mark.parametrize("to_none", [True, False], ids=["copied in", "in place"])
def test_gradients_from_several_streams_are_waited_for(gpus: Gpus, to_none: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    streams, outlived = several_streams(monkeypatch)

    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrapped(runtime, model)
        settle(runtime, model, optimizer)
        gpu = gpus.made[runtime.world.rank]
        other, parameters = gpu.make_stream(), list(model.parameters())
        noted: list[int] = []
        for parameter in parameters:  # the last one's gradient is made elsewhere
            parameter.register_hook(lambda _, own=parameter: setattr(streams, "now", other if own is parameters[-1] else 0))
        real = gpu.device.wait
        monkeypatch.setattr(gpu.device, "wait", lambda stream, event: (noted.append(stream), real(stream, event))[1])
        optimizer.zero_grad(set_to_none=to_none)
        torch.nn.functional.mse_loss(model(torch.ones(4, 6)), torch.ones(4, 3)).backward()
        streams.now = 0
        assert noted[0] == 0, "the stream that packs waits for the other one first"
        optimizer.step()
    threads(2, step)
    assert outlived == ([4, 4] if to_none else [])


def test_every_bucket_waits_for_all_streams_that_made_gradients(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    streams, outlived = several_streams(monkeypatch)

    def step(runtime: Runtime) -> None:
        model = net()
        parameters = list(model.parameters())
        optimizer = wrapped(runtime, model, groups=[[parameters[0], parameters[2]], [parameters[1], parameters[3]]])
        settle(runtime, model, optimizer)
        gpu = gpus.made[runtime.world.rank]
        other = gpu.make_stream()
        for index, parameter in enumerate(parameters):  # one gradient of each bucket is made elsewhere
            parameter.register_hook(lambda _, own=index: setattr(streams, "now", other if own > 1 else 0))
        noted: list[int] = []
        real = gpu.device.wait
        monkeypatch.setattr(gpu.device, "wait", lambda stream, event: (noted.append(stream), real(stream, event))[1])
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.ones(4, 6)), torch.ones(4, 3)).backward()
        streams.now = 0
        assert [stream for stream in noted if stream != gpu.stream][:2] == [0, 0], "both buckets' packing"
        optimizer.step()
    threads(2, step)
    assert outlived == [2, 2, 2, 2], "memory of another stream is kept until it is packed"


def test_without_kernels_torch_copies(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        runtime.devices.record_event(0)
        gpus.made[runtime.world.rank].kernels = False
        model = net()
        optimizer = wrapped(runtime, model)
        settle(runtime, model, optimizer)
        launches(gpus.made[runtime.world.rank])
        train(optimizer, model, torch.ones(4, 6), torch.ones(4, 3))
        assert launches(gpus.made[runtime.world.rank]) == Counter({"allReduce": 1})
    threads(2, step)


@pytest.mark.parametrize(("raised", "expected"), [
    (torch.cuda.OutOfMemoryError("CUDA out of memory"), "100 bytes: CUDA out of memory"),
    (RuntimeError("CUDA error: an illegal access"), "CUDA failed in allocating 100 bytes on GPU 3: .*illegal access")])
def test_what_torch_raises_when_it_allocates(raised: Exception, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def fail(*_: Any, **__: Any) -> Any:
        raise raised
    monkeypatch.setattr(cuda, "_empty", fail)
    with pytest.raises((MemoryError, HorovodInternalError), match=expected):
        cuda.allocate(None, 3, 0, 100)  # type: ignore[arg-type]


@pytest.mark.parametrize("to_none", [True, False])
def test_an_average_of_the_only_gradient_of_a_bucket(gpus: Gpus, to_none: bool) -> None:
    def step(runtime: Runtime) -> None:
        model = torch.nn.Linear(8, 4, bias=False)
        optimizer = wrapped(runtime, model)
        for _ in range(5):
            optimizer.zero_grad(set_to_none=to_none)
            (model.weight * (runtime.world.rank + 1.0)).sum().backward()
            optimizer.synchronize()
            torch.testing.assert_close(model.weight.grad, torch.full((4, 8), 1.5))
        assert by_bucket(optimizer)
    threads(2, step)


def test_a_buckets_memory_outlives_every_stream_that_uses_it(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reuses it in the order of one stream, for which it was allocated."""
    streams, seen = threading.local(), list[tuple[int, int]]()
    allocate = cuda.allocate

    def allocated(*arguments: Any) -> Any:
        array = allocate(*arguments)
        return dataclasses.replace(array, owner=cuda.bytes_tensor(array))
    monkeypatch.setattr(cuda, "allocate", allocated)
    monkeypatch.setattr(cuda, "current_stream", lambda index: getattr(streams, "now", 0))
    monkeypatch.setattr(cuda, "record_stream", lambda tensors: seen.append((streams.now, tensors[0].data_ptr())))

    def step(runtime: Runtime) -> None:
        streams.now = 0
        model = net()
        optimizer = wrapped(runtime, model)
        settle(runtime, model, optimizer)
        streams.now = gpus.made[runtime.world.rank].make_stream()
        for _ in range(2):
            train(optimizer, model, torch.ones(4, 6), torch.ones(4, 3))
        memory = next(iter(model.parameters())).grad.data_ptr()
        used = sorted(stream for stream, address in seen if 0 <= memory - address < 4096)
        assert used == [0, streams.now]
    threads(2, step)


def test_without_one_of_several_kernels_nothing_is_multiplied_twice(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(runtime: Runtime) -> None:
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(8, dtype=dtype))
                                        for dtype in (torch.float16, torch.float32)])
        optimizer = wrapped(runtime, model, compression=Compression.fp16)
        for turn in range(6):
            optimizer.zero_grad(set_to_none=False)
            sum((parameter * (runtime.world.rank + 1.0)).sum().float() for parameter in model).backward()
            optimizer.synchronize()
            for parameter in model:
                torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 1.5))
            with optimizer.skip_synchronize():
                optimizer.step()
            if turn == 3:
                assert by_bucket(optimizer)
                plane = runtime.devices
                real = plane.batched_copy

                def batched_copy(copies: Any, source: str, target: str, *rest: Any, real: Any = real) -> bool:
                    return (source, target) != ("float32", "float16") and bool(real(copies, source, target, *rest))
                monkeypatch.setattr(plane, "batched_copy", batched_copy)
    threads(2, step)


def test_no_memory_on_one_ranks_gpu_means_no_buckets_on_all(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        if runtime.world.rank == 1:
            gpus.made[1].memory = 1 << 14  # enough to make a communicator
        model = torch.nn.Linear(100, 100)
        optimizer = wrapped(runtime, model)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, 100)).sum().backward()
            optimizer.step()
            assert not by_bucket(optimizer)
    threads(2, step, fusion_threshold=0)  # fused, they would need as much memory as a bucket


def test_a_capture_is_refused_where_it_is_made(gpus: Gpus) -> None:
    settled = threading.Barrier(2)

    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrapped(runtime, model)
        settle(runtime, model, optimizer)
        settled.wait(60)
        gpus.made[0].graph = gpus.made[1].graph = True
        with pytest.raises(UnsupportedError, match="CUDA graph"):
            torch.nn.functional.mse_loss(model(torch.ones(4, 6)), torch.ones(4, 3)).backward()
        runtime.fail("Done", "the test ends here", "")
    threads(2, step)


def test_operations_on_tensors(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    current = threading.local()
    monkeypatch.setattr(api.worlds(), "current", lambda: current.runtime)

    def step(runtime: Runtime) -> None:
        current.runtime = runtime
        rank, size = runtime.world.rank, 2
        ones = torch.full((4, 3), rank + 1.0)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int64):
            assert (hvd.allreduce(ones.to(dtype), op=hvd.Sum) == 3).all()
        assert (hvd.allreduce(ones, prescale_factor=2.0, postscale_factor=0.5, op=hvd.Average) == 1.5).all()
        assert (hvd.allreduce(ones.t(), op=hvd.Max) == 2).all(), "any strides"
        assert (hvd.allreduce_(ones.clone(), op=hvd.Product) == 2).all()
        assert all((each == 3).all() for each in hvd.grouped_allreduce([ones, ones[:1].double()], op=hvd.Sum))
        assert hvd.allgather(ones[:rank + 1]).shape == (3, 3)
        assert (hvd.broadcast(ones, 1) == 2).all()
        assert (hvd.broadcast_(ones.t().clone().t(), 1) == 2).all()
        assert hvd.reducescatter(ones, op=hvd.Sum).tolist() == [[3.0] * 3] * 2
        received, rows = hvd.alltoall(torch.arange(4), [1, 3])
        assert received.tolist() == ([0, 0] if rank == 0 else [1, 2, 3, 1, 2, 3])
        assert rows.tolist() == [1 + 2 * rank] * size
        assert hvd.gather(ones, 0) is None if rank else hvd.gather(ones, 0).shape == (8, 3)
        assert (hvd.scatter(torch.full((2,), rank), 1) == 1).all()
        reduced = hvd.reduce(ones, 1, op=hvd.Sum)
        assert reduced is None if rank == 0 else (reduced == 3).all()
        place = torch.zeros(2)
        hvd.send(torch.ones(2), 1, "p") if rank == 0 else hvd.recv(place, 0, "p")
        assert rank == 0 or (place == 1).all()
        # What NCCL cannot do goes over the host's memory.
        assert (hvd.allreduce(torch.full((3,), rank + 1, dtype=torch.int16), op=hvd.Sum) == 3).all()
        assert (hvd.allreduce(torch.full((3,), 126 + rank, dtype=torch.int8)) == 126).all(), "an average"
        assert hvd.allreduce(ones, op=hvd.Adasum).shape == (4, 3)
        leaf = ones.clone().requires_grad_()
        hvd.allreduce(leaf, op=hvd.Sum).sum().backward()
        assert (leaf.grad == 2).all()
        tensors = {"a": ones.clone(), "b": torch.full((3,), rank)}
        hvd.broadcast_parameters(tensors, 0)
        assert (tensors["a"] == 1).all() and (tensors["b"] == 0).all()
        hvd.check_replicas(tensors)
    threads(2, step)
    assert all({"allReduce", "broadcast", "allGather", "reduceScatter", "send"} & set(gpu.launches) for gpu in gpus.made)


def test_norms_and_hooks_on_a_gpu(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    current = threading.local()
    monkeypatch.setattr(api.worlds(), "current", lambda: current.runtime)

    def step(runtime: Runtime) -> None:
        current.runtime = runtime
        norm = hvd.SyncBatchNorm(3)
        norm(torch.randn(4, 3) + runtime.world.rank).sum().backward()
        means = hvd.allgather(norm.running_mean[None])
        assert torch.equal(means[0], means[1])
        model = net()
        optimizer = wrapped(runtime, model, comm_hook=hvd.comm_hooks.PowerSGD(start_iter=1))
        for _ in range(3):
            train(optimizer, model, torch.ones(4, 6), torch.ones(4, 3))
        hvd.check_replicas(model.state_dict())
        for compression in (hvd.Compression.none, hvd.Compression.fp16):
            model = net()
            optimizer = wrapped(runtime, model, op=hvd.Adasum, compression=compression)
            with optimizer.join(model, norm):
                for number in range(2 + runtime.world.rank):
                    train(optimizer, model, torch.ones(4, 6) + number, torch.ones(4, 3) * runtime.world.rank)
            hvd.check_replicas(model.state_dict())
    threads(2, step)


@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16], ids=["plain", "fp16"])
def test_a_model_that_is_moved_to_a_gpu_and_back_after_its_optimizer_was_made(gpus: Gpus, compression: Any,
                                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are reduced where they are, as soon as the layout is learned again there."""
    where = threading.local()
    on_gpu = cuda.is_on_gpu
    monkeypatch.setattr(cuda, "is_on_gpu", lambda tensor: getattr(where, "is_gpu", False) and on_gpu(tensor))

    def step(runtime: Runtime) -> list[Any]:
        model = net()
        optimizer = wrapped(runtime, model, compression=compression)
        gpu, used = gpus.made[runtime.world.rank], []
        for turn in range(24):
            if turn % 8 == 0:
                where.is_gpu = turn == 8
                for parameter in model.parameters():  # .grad is moved with them
                    parameter.grad = None if parameter.grad is None else parameter.grad.clone()
            launches(gpu)
            optimizer.zero_grad()
            if turn not in (8, 16) or runtime.world.rank == 0:  # the move is seen in the step, too
                (model(torch.ones(4, 6)).sum() * (runtime.world.rank + 1)).backward()
            optimizer.step()
            used.append(bool(launches(gpu)["allReduce"]))
        assert not any(used[:8]) and used[8] and used[15] and not any(used[17:]), used
        assert by_bucket(optimizer)
        return [parameter.detach().clone() for parameter in model.parameters()]
    one, other = threads(2, step)
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for turn in range(24):
        plain.zero_grad()
        (model(torch.ones(4, 6)).sum() * (0.5 if turn in (8, 16) else 1.5)).backward()
        plain.step()
    for mine, theirs, alone in zip(one, other, model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, alone.detach(), rtol=1e-2, atol=1e-2)

"""Programs of test_ops.py: the public functions of `hvdlite_torch`."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

import hvdlite_torch as hvd
from hvdlite import api
from tests.raising import raises
from tests.torch.models import has_learned


def ops_under_one_name(rank: int) -> None:
    runtime, array = api.runtime(), torch.ones(8).numpy()
    call = runtime.barrier if rank else lambda name: runtime.broadcast(name, array, 0)
    call("x").wait()


def begin() -> tuple[int, int]:
    """Return this rank and how many there are."""
    hvd.init()
    return hvd.rank(), hvd.size()


def every_dtype_and_layout() -> None:
    rank, size = begin()
    total = sum(range(size))
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
                  torch.float32, torch.float64):
        for shape in ((), (0,), (3, 4)):
            tensor = torch.full(shape, rank + 1).to(dtype)
            assert torch.equal(hvd.allreduce(tensor, op=hvd.Sum), torch.full(shape, total + size).to(dtype))
            assert torch.equal(hvd.broadcast(tensor, size - 1), torch.full(shape, size).to(dtype))
            assert torch.equal(tensor, torch.full(shape, rank + 1).to(dtype)), "the input was changed"
            assert hvd.broadcast_(tensor, 0) is tensor and (tensor == 1).all()
        assert hvd.allgather(torch.full((rank, 2), rank).to(dtype)).sum() == 2 * sum(r * r for r in range(size))
    base = torch.zeros(4, 6)
    column = base[:, 1]
    column += rank
    hvd.allreduce_(column, op=hvd.Sum)
    assert (column == total).all() and base.sum() == 4 * total
    assert hvd.allreduce(torch.arange(6.0).reshape(2, 3).t(), op=hvd.Sum).tolist() == [
        [0, 3 * size], [size, 4 * size], [2 * size, 5 * size]]
    assert hvd.allreduce(torch.tensor([rank == 0]), op=hvd.Max).item() is True


def handles_groups_and_names() -> None:
    rank, _ = begin()
    tensors = [torch.full((3,), float(rank + index)) for index in range(4)]
    group = hvd.grouped_allreduce_async_(tensors, name="g", op=hvd.Average)
    assert hvd.synchronize(group)[2] is tensors[2] and hvd.poll(group)
    assert [tensor[0].item() for tensor in tensors] == [0.5, 1.5, 2.5, 3.5]
    handle = hvd.allreduce_async(tensors[0], name="x")
    assert torch.equal(hvd.synchronize(handle), hvd.synchronize(handle))
    pending = hvd.allreduce_async_(torch.ones(1), name=f"only.{rank}")
    if rank == 0:
        raises(ValueError, "still being processed", lambda: hvd.allreduce_async_(torch.ones(1), name="only.0"))
    hvd.barrier()
    hvd.synchronize(hvd.allreduce_async(torch.ones(1), name=f"only.{1 - rank}"))
    hvd.synchronize(pending)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert hvd.allreduce(torch.ones(1), average=False).item() == 2
    assert caught[0].category is DeprecationWarning
    raises(ValueError, "not both", lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum))
    told = "pass an operation as op=hvd.Sum"
    raises(TypeError, told, lambda: hvd.allreduce(torch.ones(1), "sum"))  # type: ignore[arg-type]
    raises(TypeError, told, lambda: hvd.allreduce_(torch.ones(1), hvd.Sum))  # type: ignore[arg-type]
    raises(hvd.MismatchError, "[2]", lambda: hvd.allreduce(torch.ones(2 + rank), name="shapes"))
    assert hvd.allreduce(torch.ones(2), name="shapes").tolist() == [1, 1]
    raises(ValueError, "scalar", lambda: hvd.allgather(torch.tensor(1.0)))
    raises(ValueError, "sparse", lambda: hvd.allreduce(torch.eye(2).to_sparse()))


def every_error_condition_of_horovod_reaches_every_rank_and_the_job_goes_on() -> None:
    rank, _ = begin()
    ones: Any = torch.ones(4, 2)
    differ = {  # what the ranks disagree about: told to both, by name
        "shape": lambda: hvd.allreduce(torch.ones(2 + rank), name="x"),
        "shape ": lambda: hvd.broadcast(torch.ones(2 + rank), 0, name="x"),
        "shape  ": lambda: hvd.reducescatter(torch.ones(2 + rank), name="x"),
        "number of dimensions": lambda: hvd.allgather(torch.ones([2] * (1 + rank)), name="x"),
        "shape after the first dimension": lambda: hvd.allgather(torch.ones(2, 2 + rank), name="x"),
        "shape after the first dimension ": lambda: hvd.alltoall(torch.ones(2, 2 + rank), name="x"),
        "dtype": lambda: hvd.allreduce(ones.to([torch.float32, torch.float64][rank]), name="x"),
        "operation": lambda: ops_under_one_name(rank),
        "reduce op": lambda: hvd.allreduce(ones, op=[hvd.Sum, hvd.Average][rank], name="x"),
        "reduce op ": lambda: hvd.reducescatter(ones, op=[hvd.Sum, hvd.Average][rank], name="x"),
        "prescale_factor": lambda: hvd.allreduce(ones, prescale_factor=1.0 + rank, name="x"),
        "postscale_factor": lambda: hvd.allreduce(ones, postscale_factor=1.0 + rank, name="x"),
        "root rank": lambda: hvd.broadcast(ones, rank, name="x"),
    }
    for what, call in differ.items():
        raises(hvd.HorovodInternalError, f"disagree about the {what.strip()} of", call)
        assert hvd.allreduce(ones, op=hvd.Sum, name="x").sum() == 16, "the job cannot be used any more"
    here = {  # found at the call, on this rank alone
        "scalar": lambda: hvd.reducescatter(torch.tensor(1.0)),
        "not registered": lambda: hvd.allreduce(ones, process_set=hvd.ProcessSet([0])),
        "root_rank 7": lambda: hvd.broadcast(ones, 7),
        "must be 2 whole numbers": lambda: hvd.alltoall(ones, splits=[1, 1, 1]),
        "at most 4": lambda: hvd.alltoall(ones, splits=[3, 3]),
        "cannot be shared equally": lambda: hvd.alltoall(torch.ones(3)),
        "bool has no Sum": lambda: hvd.allreduce(torch.ones(2, dtype=torch.bool), op=hvd.Sum),
        "must be a torch.Tensor, not ndarray": lambda: hvd.broadcast_(ones.numpy(), 0),
        "must be a torch.Tensor, not ndarray ": lambda: hvd.allreduce(ones.numpy()),
        "must be a torch.Tensor, not ndarray  ": lambda: hvd.grouped_allgather([ones, ones.numpy()]),
        "not 'sum'": lambda: hvd.allreduce(ones, op="sum"),  # type: ignore[arg-type]
        "not Tensor": lambda: hvd.synchronize(ones),
        "not NoneType": lambda: hvd.poll(None),
        "no Linear in it (entry 0)": lambda: hvd.broadcast_parameters(torch.nn.Linear(1, 1), 0),  # type: ignore[arg-type]
    }
    for told, call in here.items():
        raises(ValueError, told.rstrip(), call)
    own = hvd.add_process_set([0])
    if rank == 1:
        raises(ValueError, "not a member", lambda: hvd.allreduce(ones, process_set=own))
    else:
        raises(ValueError, "root_rank 1 is not a rank of", lambda: hvd.broadcast(ones, 1, process_set=own))
    hvd.shutdown()
    raises(hvd.HorovodInternalError, "hvd.init()", lambda: hvd.allreduce(ones))
    raises(ValueError, "hvd.init()", hvd.rank)


def gradients_of_collectives_are_those_that_can_be_written_down() -> None:
    rank, size = begin()
    total = sum(range(size))
    torch.manual_seed(0)
    weight = torch.randn(4, dtype=torch.float64)
    x = torch.randn(4, dtype=torch.float64) + rank
    x.requires_grad_()
    (hvd.allreduce(x, op=hvd.Average) * weight * (rank + 1)).sum().backward()
    torch.testing.assert_close(x.grad, weight * (total + size) / size)  # allreduce(Average) of the upstream gradient
    x.grad = None
    scale = torch.arange(1, 4 * size + 1, dtype=torch.float64)
    (hvd.allgather(x) ** 2 * scale * (rank + 1)).sum().backward()
    mine = scale[4 * rank:4 * rank + 4]
    torch.testing.assert_close(x.grad, 2 * x.detach() * mine * (total + size) / size)
    x.grad = None
    (hvd.broadcast(x, 1) * (rank + 1)).sum().backward()
    expected = (total + size) / size if rank == 1 else 0.0
    torch.testing.assert_close(x.grad, torch.full((4,), expected, dtype=torch.float64))
    a, b = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    one, two = hvd.grouped_allreduce([a, b], op=hvd.Sum)
    (one.sum() + 2 * two.sum()).backward()
    assert a.grad.tolist() == [size] * 2 and b.grad.tolist() == [2 * size] * 3
    compressed = hvd.allreduce(x, compression=hvd.Compression.bf16)
    assert compressed.dtype is torch.float64


def loss_of(model: Any, optimizer: Any) -> Any:
    optimizer.zero_grad()
    loss = model(torch.ones(1, 1, 4, 4)).square().sum()
    loss.backward()
    return loss


def state_travels() -> None:
    rank, _ = begin()
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    everywhere = hvd.allgather_object({name: value.sum().item() for name, value in model.state_dict().items()})
    assert everywhere[0] == everywhere[1]
    hvd.broadcast_parameters(model.named_parameters(), root_rank=1)
    hvd.broadcast_parameters(list(model.parameters()), root_rank=1)
    raises(ValueError, "no str in it", lambda: hvd.broadcast_parameters(["a"], root_rank=0))
    for make in (lambda p: torch.optim.SGD(p, lr=0.1 + rank, momentum=0.9), lambda p: torch.optim.Adam(p, lr=0.1 + rank),
                 lambda p: torch.optim.LBFGS(p, lr=0.1 + rank)):
        optimizer = make(model.parameters())
        if rank == 0:
            optimizer.step(functools.partial(loss_of, model, optimizer))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "no step may be taken"
        assert optimizer.param_groups[0]["lr"] == 0.1
        texts = hvd.allgather_object(str(optimizer.state_dict()["state"]))
        assert texts[0] == texts[1] and len(texts[0]) > 50
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert hvd.broadcast_object({"rank": rank}, root_rank=1) == {"rank": 1}
    assert hvd.allgather_object("x" * rank) == ["", "x"]


def reducescatter_alltoall_and_roots() -> None:
    rank, _ = begin()
    x = torch.arange(14.0).reshape(7, 2) * (rank + 1)
    mine = hvd.reducescatter(x, op=hvd.Sum)
    assert torch.equal(mine, (torch.arange(14.0).reshape(7, 2) * 6)[[0, 3, 5, 7][rank]:[0, 3, 5, 7][rank + 1]])
    assert torch.equal(hvd.reducescatter(x, compression=hvd.Compression.fp16, op=hvd.Sum), mine)
    group = hvd.grouped_reducescatter([x, x.int()], op=hvd.Sum)
    assert torch.equal(group[0], mine) and torch.equal(group[1], mine.int())
    out, rows = hvd.alltoall(torch.full((6,), rank), splits=torch.tensor([1, 2, 3]))
    assert rows.tolist() == [rank + 1] * 3 and rows.dtype is torch.int32
    assert out.tolist() == sorted([0, 1, 2] * (rank + 1))
    assert hvd.alltoall(torch.full((3,), rank)).tolist() == [0, 1, 2]
    both = hvd.synchronize(hvd.alltoall_async(torch.full((3,), rank)))
    assert both[0].tolist() == [0, 1, 2] and both[1].tolist() == [1, 1, 1]
    gathered = hvd.grouped_allgather([torch.full((rank, 1), rank), torch.tensor([rank])])
    assert gathered[0].ravel().tolist() == [1, 2, 2] and gathered[1].tolist() == [0, 1, 2]
    at_root = hvd.reduce(torch.tensor([1.0, rank]), 1, op=hvd.Sum)
    assert at_root is None if rank != 1 else at_root.tolist() == [3, 3]
    at_root = hvd.gather(torch.tensor([[rank]]), 2)
    assert at_root is None if rank != 2 else at_root.tolist() == [[0], [1], [2]]
    assert hvd.scatter(torch.arange(3) * (rank == 0), 0).tolist() == [rank]
    assert hvd.allreduce(torch.tensor([2.0]), op=hvd.Product).item() == 8


def gradients_are_the_derivatives_or_horovods() -> None:
    rank, _ = begin()

    def gradient(call: Any, rows: int) -> Any:
        x = torch.arange(rows * 2.0).reshape(rows, 2).requires_grad_()
        result = call(x)
        weights = (rank + 1) * torch.arange(1.0, result.numel() + 1).reshape(result.shape)
        (result * weights).sum().backward()
        return x.grad

    one = torch.arange(1.0, 9.0).reshape(4, 2)
    for exact, factor in ((True, 3.0), (False, 1.5)):
        got = gradient(functools.partial(hvd.allgather, horovod_gradient=not exact), 2)
        assert torch.equal(got, factor * one[2 * rank:2 * rank + 2]), got
        got = gradient(functools.partial(hvd.broadcast, root_rank=1, horovod_gradient=not exact), 2)
        assert torch.equal(got, factor * one[:2] * (rank == 1)), got
    own = torch.cat([one[:2], 2 * one[:2]])
    for op, exact, factor in ((hvd.Sum, True, 1), (hvd.Sum, False, 2), (hvd.Average, True, .5), (hvd.Average, False, 1)):
        got = gradient(functools.partial(hvd.reducescatter, op=op, horovod_gradient=not exact), 4)
        assert torch.equal(got, factor * own), (op, exact, got)
    got = gradient(lambda x: hvd.alltoall(x, splits=[1, 2])[0], 4)  # one row stays here
    wanted = torch.zeros(4, 2)
    wanted[:1] = 1 * one[rank:rank + 1]  # our row in rank 0's result, whose weights are 1 x
    wanted[1:3] = 2 * torch.arange(1.0, 9.0).reshape(4, 2)[2 * rank:2 * rank + 2]
    assert torch.equal(got, wanted), (got, wanted)
    got = gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), 2)
    assert torch.equal(got, 3 * one[:2])
    own, both = torch.tensor([[1.0, 2.0], [3.0, 5.0]])[rank], torch.tensor([4.0, 7.0])  # forward mode
    def squares(x):
        return hvd.allreduce(x * x, op=hvd.Sum)
    assert torch.equal(torch.func.jvp(squares, (own,), (torch.ones(2),))[1], 2 * both)
    assert torch.equal(torch.func.jacfwd(squares)(own), 2 * both.diag())
    assert torch.equal(torch.func.hessian(lambda x: squares(x).sum())(own), 4 * torch.eye(2))
    gathered = torch.func.jvp(hvd.allgather, (own[:1 + rank],), (own[:1 + rank],))[1]
    assert gathered.tolist() == [1, 3, 5]


def process_sets_with_torch() -> None:
    rank, _ = begin()
    pair = hvd.add_process_set(hvd.ProcessSet([0, 2]))
    model = torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_set=pair)
    if pair.included():
        assert hvd.allreduce(torch.tensor([float(rank)]), process_set=pair).item() == 1
        assert hvd.broadcast_object({"from": rank}, 2, process_set=pair) == {"from": 2}
        assert hvd.allgather_object(rank, process_set=pair) == [0, 2]
        hvd.broadcast_parameters(model.state_dict(), 0, process_set=pair)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.full((1, 3), float(rank))).sum().backward()
            assert torch.equal(model.weight.grad, torch.ones(2, 3))
            optimizer.step()
        assert has_learned(optimizer)
    else:
        model(torch.full((1, 3), 5.0)).sum().backward()
        optimizer.step()
        assert torch.equal(model.weight.grad, torch.full((2, 3), 5.0))
        raises(ValueError, "not a member", lambda: hvd.allreduce(torch.ones(1), process_set=pair))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3
    assert hvd.remove_process_set(pair)

"""Collectives of process groups against torch's arithmetic on all ranks' tensors; ranks are threads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from hvdlite.core.errors import MismatchError
from hvdlite_torch.distributed.errors import UnsupportedArgumentError
from hvdlite_torch.distributed.tensors import NAMES
from tests.torch.distributed.threads import run

INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
ONLY_MOVED = [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32]
SIZES = [1, 2, 3]


def own(rank: int, dtype: torch.dtype, count: int = 6) -> torch.Tensor:
    """Return a rank's values: small, so that sums of any dtype are exact."""
    return (torch.arange(count) % 3 + 1 + rank).to(torch.float32 if dtype in ONLY_MOVED else dtype).to(dtype)


def bits(tensor: torch.Tensor) -> list[Any]:
    """Return what can be compared of a tensor of any dtype."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return flat.contiguous().view(torch.uint8).tolist()


def options(kind: Any, **fields: Any) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def reducing(op: Any) -> Any:
    return options(dist.AllreduceOptions, reduceOp=op)


def reference(op: Any, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the reduction of the ranks' tensors in a dtype with all operations."""
    wide = torch.stack([value if value.dtype == torch.bool else value.to(
        torch.complex128 if value.is_complex() else torch.float64) for value in values])
    if op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        combine = {dist.ReduceOp.BAND: torch.bitwise_and, dist.ReduceOp.BOR: torch.bitwise_or,
                   dist.ReduceOp.BXOR: torch.bitwise_xor}[op]
        return functools.reduce(combine, list(wide if wide.dtype == torch.bool else wide.to(torch.int64)))
    if wide.dtype == torch.bool:
        return wide.any(0) if op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX) else wide.all(0)
    return {dist.ReduceOp.SUM: lambda: wide.sum(0), dist.ReduceOp.AVG: lambda: wide.mean(0),
            dist.ReduceOp.PRODUCT: lambda: wide.prod(0), dist.ReduceOp.MIN: lambda: wide.min(0).values,
            dist.ReduceOp.MAX: lambda: wide.max(0).values}[op]()


ARITHMETIC = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT]
ORDER = [dist.ReduceOp.MIN, dist.ReduceOp.MAX]
BITS = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
SUPPORTED = [*[(dtype, op) for dtype in INTEGERS for op in ARITHMETIC + ORDER + BITS],
             *[(dtype, op) for dtype in FLOATS for op in ARITHMETIC + ORDER],
             *[(dtype, op) for dtype in COMPLEX for op in ARITHMETIC],
             *[(torch.bool, op) for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, *ORDER, *BITS)]]


@pytest.mark.parametrize("size", SIZES)
def test_reductions_of_all_dtypes(size: int) -> None:
    def step(group: Any) -> None:
        for dtype, op in SUPPORTED:
            values = [own(rank, dtype) if dtype != torch.bool else own(rank, torch.int32) % 2 == 0 for rank in range(size)]
            expected = reference(op, values).to(dtype)
            mine, name = values[group.rank()].clone(), f"{op} of {dtype}"
            group.allreduce([mine], reducing(op)).wait()
            assert bits(mine) == bits(expected), name
            mine = values[group.rank()].clone()
            group.reduce([mine], options(dist.ReduceOptions, reduceOp=op, rootRank=size - 1)).wait()
            assert bits(mine) == bits(expected if group.rank() == size - 1 else values[group.rank()]), name
            whole = torch.cat([values[group.rank()]] * size)
            part = torch.empty_like(values[0])
            group._reduce_scatter_base(part, whole, options(dist.ReduceScatterOptions, reduceOp=op)).wait()
            assert bits(part) == bits(expected), name

    run(size, step)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("one_host", [True, False])
def test_moves_of_all_dtypes(size: int, one_host: bool) -> None:
    def step(group: Any) -> None:
        rank = group.rank()
        for dtype in [*INTEGERS, *FLOATS, *COMPLEX, *ONLY_MOVED, torch.bool]:
            values = [own(each, dtype) for each in range(size)]
            mine = values[rank].clone()
            group.broadcast([mine], options(dist.BroadcastOptions, rootRank=size - 1)).wait()
            assert bits(mine) == bits(values[-1]), dtype
            outputs = [torch.empty_like(mine) for _ in range(size)]
            group.allgather([outputs], [values[rank]]).wait()
            assert list(map(bits, outputs)) == list(map(bits, values)), dtype
            whole = torch.empty(size, 6, dtype=dtype)
            group._allgather_base(whole, values[rank]).wait()
            assert list(map(bits, whole)) == list(map(bits, values)), dtype
            outputs = [torch.empty_like(mine) for _ in range(size)]
            group.gather([outputs] if rank == 0 else [], [values[rank]], options(dist.GatherOptions, rootRank=0)).wait()
            assert rank != 0 or list(map(bits, outputs)) == list(map(bits, values)), dtype
            group.scatter([mine], [values] if rank == 0 else [], options(dist.ScatterOptions, rootRank=0)).wait()
            assert bits(mine) == bits(values[rank]), dtype
            group.alltoall(outputs, [own(rank + each, dtype) for each in range(size)]).wait()
            assert list(map(bits, outputs)) == [bits(own(each + rank, dtype)) for each in range(size)], dtype

    run(size, step, one_host=one_host)


def test_parts_of_different_sizes() -> None:
    def step(group: Any) -> None:
        rank, sizes = group.rank(), [3, 0, 5]
        values = [torch.full((count,), float(each)) for each, count in enumerate(sizes)]
        outputs = [torch.empty(count) for count in sizes]
        group.allgather([outputs], [values[rank]]).wait()
        assert [output.tolist() for output in outputs] == [value.tolist() for value in values]
        part = torch.empty(sizes[rank])
        group.reduce_scatter([part], [[value + rank for value in values]]).wait()
        assert part.tolist() == [3.0 * rank + 3] * sizes[rank]
        sent = torch.cat([torch.full((rank + each, 2), 10.0 * rank + each) for each in range(3)])
        received = torch.empty(sum(rank + each for each in range(3)), 2)
        splits = [rank + each for each in range(3)]
        group.all_to_all_single(received, sent, splits, splits).wait()
        assert received[:, 1].tolist() == [10.0 * each + rank for each in range(3) for _ in range(rank + each)]
        group.all_to_all_single(outputs := torch.empty(6), torch.arange(6.0) + 10 * rank, [], []).wait()
        assert outputs.tolist() == [10.0 * each + 2 * rank + column for each in range(3) for column in (0, 1)]

    run(3, step)


@pytest.mark.parametrize("one_host", [True, False])
def test_splits_on_some_ranks_only(one_host: bool) -> None:
    """The others get as much from every rank, and know it; so they do not tell each other."""
    def step(group: Any) -> None:
        rank = group.rank()
        splits = [2, 2, 2] if rank == 1 else []
        for _ in range(3):
            outputs = torch.empty(6)
            group.all_to_all_single(outputs, torch.arange(6.0) + 10 * rank, splits, splits).wait()
            assert outputs.tolist() == [10.0 * each + 2 * rank + column for each in range(3) for column in (0, 1)]
            group.all_to_all_single(outputs, torch.arange(6.0), [], []).wait()
        nothing, splits = torch.empty(0), [0, 0, 0] if rank else []
        group.all_to_all_single(nothing, nothing.clone(), splits, splits).wait()
        splits = [3, 3, 3] if rank else []
        with pytest.raises(MismatchError, match="rank 0 sends 4 bytes to rank 1, which expects 12"):
            group.all_to_all_single(torch.empty(9 if rank else 3), torch.empty(9 if rank else 3), splits, splits).wait()
        with pytest.raises(MismatchError, match=r"all_to_all\(float32; splits given\) on ranks 1, 2"):
            given = torch.empty(3, dtype=torch.float32 if rank else torch.int32)
            group.all_to_all_single(given, given.clone(), splits and [1, 1, 1], splits and [1, 1, 1]).wait()
        mine = torch.ones(1)
        group.allreduce([mine]).wait()
        assert mine.item() == 3

    run(3, step, one_host=one_host)


def test_tensors_that_are_not_contiguous() -> None:
    def strided(value: float) -> torch.Tensor:
        return torch.full((4, 6), value)[:, ::2]

    def step(group: Any) -> None:
        rank = group.rank()
        surroundings = torch.full((4, 6), -1.0)
        mine = surroundings[:, ::2]
        mine[...] = rank + 1
        group.allreduce([mine]).wait()
        assert (mine == 3).all() and (surroundings[:, 1::2] == -1).all()
        group.reduce([mine], options(dist.ReduceOptions, rootRank=0)).wait()
        assert (mine == (6 if rank == 0 else 3)).all()
        group.broadcast([mine], options(dist.BroadcastOptions, rootRank=1)).wait()
        assert (mine == 3).all()
        outputs = [strided(-1.0) for _ in range(2)]
        group.allgather([outputs], [strided(float(rank))]).wait()
        assert (outputs[0] == 0).all() and (outputs[1] == 1).all()
        group.scatter([mine], [[strided(5.0), strided(6.0)]] if rank == 1 else [],
                      options(dist.ScatterOptions, rootRank=1)).wait()
        assert (mine == 5 + rank).all()
        group.reduce_scatter([mine], [[strided(1.0), strided(2.0)]]).wait()
        assert (mine == 2 * (rank + 1)).all()
        group.alltoall(outputs, [strided(10.0 * rank), strided(10.0 * rank + 1)]).wait()
        assert (outputs[0] == rank).all() and (outputs[1] == 10 + rank).all()
        turned = torch.full((2, 3), 1 + 2j, dtype=torch.complex64).conj()
        group.broadcast([turned], options(dist.BroadcastOptions, rootRank=0)).wait()
        assert (turned == 1 - 2j).all()

    run(2, step)


def test_outputs_that_adjoin_are_written_without_a_copy() -> None:
    def step(group: Any) -> None:
        whole = torch.empty(3, 4)
        work = group.allgather([list(whole)], [whole[group.rank()].fill_(group.rank())])
        (call,) = work._calls
        assert call.finish is None and call.operations[0].prepare is None
        work.wait()
        assert whole[:, 3].tolist() == [0, 1, 2]

    run(3, step)


def begin(name: str, group: Any, mine: torch.Tensor) -> tuple[Any, list[torch.Tensor], list[Any]]:
    """Begin an operation of 2 ranks; return its work, and what it writes: each is so many times the ranks' input [2, 2]."""
    rank, room = group.rank(), [torch.full((2, 2), -1.0) for _ in range(2)]
    at_root = options(getattr(dist, f"{name.title()}Options", dist.ReduceOptions), rootRank=0)
    if name == "all_gather":
        return group.allgather([room], [mine]), room, [1, 1]
    if name == "gather":
        room = room if rank == 0 else []
        return group.gather([room] if room else [], [mine], at_root), room, [1, 1]
    if name == "broadcast":
        room = [mine if rank == 0 else room[0]]
        return group.broadcast(room, at_root), room, [1]
    if name == "scatter":
        return group.scatter(room[:1], [[mine, mine]] if rank == 0 else [], at_root), room, [1]
    if name == "reduce_scatter":
        return group.reduce_scatter(room[:1], [[mine, mine]]), room, [2]
    if name == "all_to_all":
        return group.alltoall(room, [mine, mine]), room, [1, 1]
    if name == "reduce":
        return group.reduce([mine], at_root), [mine], [2 if rank == 0 else 1]
    return group.allreduce([mine]), [mine], [2]


@pytest.mark.parametrize("name", ["all_gather", "gather", "broadcast", "scatter", "reduce_scatter", "all_to_all", "reduce",
                                  "all_reduce"])
def test_what_is_queued_reads_what_operations_before_it_have_written(name: str) -> None:
    """As with torch's own backends: also where the input is not contiguous, or a list, and has to be copied."""
    queued = threading.Event()

    def step(group: Any) -> None:
        total = torch.arange(4.0).view(2, 2) * (group.rank() + 1)
        if group.rank() == 1:
            queued.wait()
        group.allreduce([total])
        work, written, factors = begin(name, group, total.t())
        assert group.rank() == 1 or not work.is_completed()
        queued.set()
        work.wait()
        for tensor, factor in zip(written, factors, strict=False):
            assert tensor.tolist() == [[0.0, factor * 6.0], [factor * 3.0, factor * 9.0]]

    run(2, step)


def test_inference_tensors() -> None:
    """Only threads in inference mode may change them, and the worker thread copies to those that are not contiguous."""
    def step(group: Any) -> None:
        with torch.inference_mode():
            strided, turned = torch.ones(2, 4)[:, ::2], torch.full((2, 2), float(group.rank())).t()
            outputs = [torch.empty(2, 2).t() for _ in range(2)]
            mine = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,), check_invariants=False)
            for work in (group.allreduce([strided]), group.allgather([outputs], [turned]), group.allreduce([mine])):
                work.wait()
            assert (strided == 2).all() and [output.unique().tolist() for output in outputs] == [[0.0], [1.0]]
            assert mine.to_dense().tolist() == [2.0, 4.0, 0.0]

    run(2, step)


def test_several_tensors_at_once() -> None:
    def step(group: Any) -> None:
        rank = group.rank()
        tensors = [torch.full((3,), float(rank)), torch.full((2, 2), rank, dtype=torch.int64), torch.full((1,), rank + 0.5)]
        group.allreduce_coalesced(tensors, options(c10d.AllreduceCoalescedOptions, reduceOp=dist.ReduceOp.MAX)).wait()
        assert [tensor.unique().tolist() for tensor in tensors] == [[1.0], [1], [1.5]]
        outputs, inputs = [torch.empty(4), torch.empty(2, dtype=torch.int8)], [torch.full((2,), float(rank)),
                                                                              torch.full((1,), rank, dtype=torch.int8)]
        group.allgather_into_tensor_coalesced(outputs, inputs).wait()
        assert [output.tolist() for output in outputs] == [[0, 0, 1, 1], [0, 1]]
        parts = [torch.empty(1), torch.empty(2)]
        group.reduce_scatter_tensor_coalesced(parts, [torch.arange(2.0), torch.arange(4.0)]).wait()
        assert [part.tolist() for part in parts] == [[2.0 * rank], [4.0 * rank, 4.0 * rank + 2]]
        lists = [[torch.empty(2), torch.empty(1)] for _ in range(2)]
        group.allgather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((1,), rank + 0.5)]).wait()
        assert [[each.tolist() for each in one] for one in lists] == [[[0, 0], [0.5]], [[1, 1], [1.5]]]
        group._start_coalescing(torch.device("cpu"))
        one, other = torch.ones(1), torch.ones(2)
        group.allreduce([one])
        group.allreduce([other])
        group._end_coalescing(torch.device("cpu")).wait()
        assert one.tolist() == [2.0] and other.tolist() == [2.0, 2.0]

    run(2, step)


def test_a_sum_with_factors_of_the_ranks() -> None:
    def step(group: Any) -> None:
        for factor in (0.5, torch.tensor(0.5)):
            mine = torch.full((3,), 2.0 * (group.rank() + 1))
            group.allreduce([mine], reducing(c10d._make_nccl_premul_sum(factor))).wait()
            assert mine.tolist() == [3.0] * 3

    run(2, step)


def test_sparse_tensors() -> None:
    def step(group: Any) -> None:
        rank = group.rank()
        mine = torch.sparse_coo_tensor([[rank, 2, 2]], torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.5, 0.5]]), (4, 2),
                                       check_invariants=False)
        group.allreduce([mine]).wait()
        expected = torch.zeros(4, 2)
        expected[2] = torch.tensor([10.5, 13.5])
        expected[:3] += torch.tensor([1.0, 2.0]) * torch.tensor([[1.0], [1.0], [1.0]])
        assert torch.equal(mine.to_dense(), expected)
        works = [group.allreduce([mine]) for _ in range(2)]
        assert all(work.wait() for work in works) and torch.equal(mine.to_dense(), expected * 9)
        with pytest.raises(UnsupportedArgumentError, match="sparse tensors can be reduced with SUM only, not MAX"):
            group.allreduce([mine], reducing(dist.ReduceOp.MAX))

    run(3, step)


def test_nothing_and_scalars() -> None:
    def step(group: Any) -> None:
        nothing, scalar = torch.empty(0, 3), torch.tensor(float(group.rank()))
        group.allreduce([nothing]).wait()
        group.allreduce([scalar]).wait()
        assert scalar.item() == 1.0
        outputs = [torch.tensor(-1.0) for _ in range(2)]
        group.allgather([outputs], [torch.tensor(float(group.rank()))]).wait()
        assert outputs == [0, 1]
        group.all_to_all_single(nothing, nothing.clone(), [0, 0], [0, 0]).wait()
        group.broadcast([torch.empty(0, dtype=torch.float8_e5m2)], options(dist.BroadcastOptions, rootRank=0)).wait()
        group.barrier().wait()

    run(2, step)


def test_gradients_and_leaves_are_reduced_in_place() -> None:
    def step(group: Any) -> None:
        leaf = torch.ones(3, requires_grad=True)
        memory = leaf.untyped_storage()
        group.allreduce([leaf]).wait()
        assert leaf.tolist() == [2.0] * 3
        memory.resize_(0)  # as FSDP frees its tensors

    run(2, step)


BAD: list[tuple[str, Callable[[Any], Any], type[Exception], str]] = [
    ("float8", lambda group: group.allreduce([torch.ones(2).to(torch.float8_e5m2)]), ValueError,
     "all_reduce: float8_e5m2 can be moved, but not reduced"),
    ("bits of floats", lambda group: group.allreduce([torch.ones(2)], reducing(dist.ReduceOp.BAND)), ValueError,
     "cannot use ReduceOp.BAND with float32"),
    ("order of complex", lambda group: group.allreduce([torch.ones(2) * 1j], reducing(dist.ReduceOp.MAX)), ValueError,
     "complex numbers have no order"),
    ("mean of bool", lambda group: group.allreduce([torch.ones(2).bool()], reducing(dist.ReduceOp.AVG)), ValueError,
     "AVG is not defined for bool"),
    ("another device", lambda group: group.allreduce([torch.empty(2, device="meta")]), ValueError,
     'a tensor is on meta, and this process group moves host memory; .*"cpu:hvdlite,meta:'),
    ("a layout", lambda group: group.broadcast([torch.eye(2).to_sparse()], options(dist.BroadcastOptions)), ValueError,
     "needs a dense tensor"),
    ("a short list", lambda group: group.allgather([[torch.empty(2)]], [torch.ones(2)]), ValueError,
     "the list has 1 tensors; it needs one for each of 2 ranks"),
    ("a place of another size", lambda group: group.allgather([list(torch.empty(2, 2))], [torch.ones(3)]), ValueError,
     "has 3 elements, and its place in the output 2"),
    ("another dtype", lambda group: group.allgather([[torch.empty(2), torch.empty(2)]], [torch.ones(2).half()]), ValueError,
     "tensors with different dtypes: float32 and float16"),
    ("a small output", lambda group: group._allgather_base(torch.empty(3), torch.ones(2)), ValueError,
     "output has 3 elements, the input 2, for 2 ranks"),
    ("a small input", lambda group: group._reduce_scatter_base(torch.empty(3), torch.ones(3)), ValueError,
     "input has 3 elements, the output 3, for 2 ranks"),
    ("an odd number of rows", lambda group: group.all_to_all_single(torch.empty(3), torch.empty(3), [], []), ValueError,
     "does not divide equally across group size: the output has 3 rows"),
    ("splits", lambda group: group.all_to_all_single(torch.empty(3), torch.empty(3), [1, 1], [1, 2]), ValueError,
     r"the output has 3 rows for 2 ranks, the splits are \[1, 1\]"),
    ("a root", lambda group: group.broadcast([torch.empty(3)], options(dist.BroadcastOptions, rootRank=2)), ValueError,
     r"invalid root rank: 2 is not in 0\.\.1"),
    ("a destination", lambda group: group.send([torch.empty(3)], 5, 0), ValueError, "invalid destination rank: 5"),
    ("several tensors", lambda group: group.allreduce([torch.empty(3), torch.empty(3)]), ValueError,
     "all_reduce: takes one tensor of each rank, not 2"),
    ("no tensor", lambda group: group.broadcast([]), ValueError, "broadcast: takes one tensor of each rank, not 0"),
    ("a tag", lambda group: group.send([torch.empty(3)], 1 - group.rank(), -3), ValueError, "Tag must be nonnegative"),
    ("strides", lambda group: group.recv([torch.empty(3, 2).t()], 0, 0), ValueError, "recv: Tensors must be contiguous"),
]


def test_bad_arguments_are_refused_by_the_call_and_change_nothing() -> None:
    def step(group: Any) -> None:
        for name, call, kind, said in BAD:
            with pytest.raises(kind, match=said) as caught:
                call(group)
                raise AssertionError(name)
            assert isinstance(caught.value, RuntimeError), f"{name}: as Gloo's errors"
        mine = torch.ones(2)
        group.allreduce([mine]).wait()
        assert mine.tolist() == [2.0, 2.0]
        group.broadcast([mine]).wait()  # rank 0 is the root by default
        group.reduce([mine]).wait()
        assert mine.tolist() == [2.0 if group.rank() else 4.0] * 2

    run(2, step)


def test_every_dtype_of_torch_has_a_name() -> None:
    assert NAMES[torch.float8_e4m3fn] == "float8_e4m3fn" and NAMES[torch.float16] in ("float16", "half")
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int16, torch.int32, torch.int64, torch.complex64):
        assert NAMES[dtype] == str(dtype).removeprefix("torch.")

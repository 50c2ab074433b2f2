"""One suite for all planes: ranks as threads, inputs whose result is a closed form or a NumPy model.

Over MPI the ranks are processes: tests/planes/test_mpi.py starts this file under mpiexec, one process a rank.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from hvdlite.core.array import SUPPORTED_DTYPES, Array, identity
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.negotiation.fusion import even_rows, receive_splits
from hvdlite.negotiation.messages import Request, Response
from hvdlite.planes.base import AlltoallSplits, BufferSlice, Plan, Plane
from tests.planes import under_mpi
from tests.planes.makers import gloo, hierarchical, hierarchical_mpi, loopback, mpi, shm, shm_fenced
from tests.planes.models import drawn, mean_near_limits, modelled, near_limits, values
from tests.planes.nccl_double import nccl
from tests.planes.steps import run

SIZES = (2, 4) if under_mpi.ACTIVE else (1, 2, 3, 4)  # a world under mpiexec takes as much time as all others


@pytest.fixture(params=[mpi, hierarchical_mpi] if under_mpi.ACTIVE else [
                    loopback, shm, shm_fenced, gloo, hierarchical, nccl],
                ids=lambda plane: plane.__name__)
def make_planes(request: pytest.FixtureRequest) -> Callable[..., list[Plane]]:
    return request.param


@contextlib.contextmanager
def case(*what: object) -> Iterator[None]:
    """Name one of several cases on the same planes: to make planes takes longer than most cases."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"in the case of {', '.join(map(str, what))}: {error}") from error


def in_any_order(make_planes: Any, size: int) -> bool:
    """Say whether a plane may add up the terms of a sum in another order than that of the ranks."""
    return make_planes in (gloo, mpi, hierarchical, hierarchical_mpi, nccl) and size > 2


def check_equal(result: Array, expected: Array, reordered: bool) -> None:
    """Fail unless two results are equal: to the bit, or but for rounding where a sum was `reordered`."""
    if reordered and result.dtype.kind in "fc":
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-6 if result.dtype.itemsize > 4 else 1e-5)
    else:
        assert result.tobytes() == expected.tobytes()


def ops_for(dtype: np.dtype[Any]) -> list[ReduceOp]:
    if dtype.kind == "b":
        return [ReduceOp.MIN, ReduceOp.MAX]
    if dtype.kind == "c":
        return [ReduceOp.SUM, ReduceOp.AVERAGE]
    return [ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX]


FAMILIES = {
    "bool": ["bool"], "complex": ["complex64", "complex128"], "floats": ["float16", "bfloat16", "float32", "float64"],
    "integers": ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]}
assert {dtype for family in FAMILIES.values() for dtype in family} == set(SUPPORTED_DTYPES)


def reductions(execute: Any, family: str, size: int) -> Iterator[tuple[str, ReduceOp]]:
    """Yield the dtypes of a family with what can be made of them, as far as the plane supports it."""
    for dtype in FAMILIES[family]:
        for op in ops_for(SUPPORTED_DTYPES[dtype]):
            if execute.supports(allreduce(dtype, op, size)):
                yield dtype, op


def run_cases(make_planes: Any, size: int, step: Callable[[int, Any], int]) -> None:
    """Run a step that returns how many cases there were; without any there was nothing to test."""
    if 0 in run(make_planes, size, step):
        pytest.skip(f"{make_planes.__name__} supports none of them")


def allreduce(dtype: str, op: ReduceOp, size: int, **fields: Any) -> Response:
    return Response(names=fields.pop("names", ("x",)), collective=Collective.ALLREDUCE, dtype=dtype, op=op,
                    contributors=fields.pop("contributors", tuple(range(size))), **fields)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_allreduce_matches_the_model_bit_for_bit(make_planes: Any, size: int, family: str) -> None:
    def step(rank: int, execute: Any) -> int:
        found = list(reductions(execute, family, size))
        for dtype, op in found:
            for count in (0, 1, 17, 1000, 50_000):
                with case(dtype, op.name, count):
                    given = drawn(rank, count, SUPPORTED_DTYPES[dtype])
                    mine, out = given.copy(), np.empty_like(given)
                    execute(allreduce(dtype, op, size), [mine], [out])
                    expected = modelled(op, count, given.dtype, size) if count else out
                    check_equal(out, expected, in_any_order(make_planes, size))
                    assert mine.tobytes() == given.tobytes(), "the source was changed"
                    execute(allreduce(dtype, op, size), [mine], [mine])
                    assert mine.tobytes() == out.tobytes(), "in place differs"
        return len(found)
    run_cases(make_planes, size, step)


@pytest.mark.parametrize("size", [3, 4])
# docs/protocol.md#same-bits
def test_fusion_does_not_change_a_bit(make_planes: Any, size: int) -> None:
    counts = [1, 300, 7, 40_000, 0, 5000]

    def step(rank: int, execute: Any) -> None:
        sources = [values(rank, count, np.dtype(np.float32)) for count in counts]
        together, alone = ([np.empty_like(source) for source in sources] for _ in range(2))
        execute(allreduce("float32", ReduceOp.AVERAGE, size, names=tuple("abcdef")), sources, together)
        for source, out in zip(sources, alone, strict=True):
            execute(allreduce("float32", ReduceOp.AVERAGE, size), [source], [out])
        for one, other in zip(together, alone, strict=True):
            check_equal(one, other, in_any_order(make_planes, size))
    run(make_planes, size, step)


@pytest.mark.parametrize("count", [10, 50_000])
def test_only_contributors_count_but_average_divides_by_all(make_planes: Any, count: int) -> None:
    def step(rank: int, execute: Any) -> None:
        out = np.zeros(count, np.float32)
        mine = np.full(count, 4.0 ** rank, np.float32) if rank in (0, 2) else None
        execute(allreduce("float32", ReduceOp.AVERAGE, 4, contributors=(0, 2)), [mine], [out])
        assert (out == 17 / 4).all()
        execute(allreduce("float32", ReduceOp.AVERAGE, 4, contributors=()), [None], [out])
        assert (out == 17 / 4).all(), "nobody contributed, so nothing may be written"
    run(make_planes, 4, step)


@pytest.mark.parametrize(("dtype", "expected"), [("float32", 7.5), ("int32", 6), ("bfloat16", 7.5), ("float16", 7.5)])
def test_scale_factors(make_planes: Any, dtype: str, expected: float) -> None:
    def step(rank: int, execute: Any) -> None:
        for count in (3, 50_000):
            with case(count):
                mine = np.full(count, 2 + rank).astype(SUPPORTED_DTYPES[dtype])  # 2 + 3, halves of ints truncated: 1 + 1
                execute(allreduce(dtype, ReduceOp.SUM, 2, prescale=0.5, postscale=3.0), [mine], [mine])
                assert (mine.astype(np.float64) == expected).all()
    run(make_planes, 2, step)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_bucket_gives_the_same_bits_as_a_private_tensor(make_planes: Any, size: int, family: str) -> None:
    def step(rank: int, execute: Any) -> int:
        buffer = execute.fusion_buffer(3 * 65_536, tuple(range(size)))
        found = list(reductions(execute, family, size))
        for dtype, op in found:
            kind = SUPPORTED_DTYPES[dtype]
            for count, factors in ((8, {}), (4000, {}), (4000, {"prescale": 0.3, "postscale": 1.7})):
                if factors and kind.kind not in "f":
                    continue
                with case(dtype, op.name, count, factors):
                    response = allreduce(dtype, op, size, **factors)
                    mine = values(rank, count, kind)
                    alone = np.empty_like(mine)
                    execute(response, [mine], [alone])
                    nbytes = -(-mine.nbytes // 64) * 64
                    buffer_slice = BufferSlice(buffer, 65_536, 65_536 + nbytes)
                    memory = buffer.own[buffer_slice.begin:buffer_slice.end].view(kind)
                    memory[...] = 0
                    memory[:count] = mine
                    execute.barrier()  # as the decision that releases a bucket says
                    execute(response, [memory], [memory], buffer_slice)
                    check_equal(memory[:count], alone, in_any_order(make_planes, size))
        return len(found)
    run_cases(make_planes, size, step)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_identity_changes_no_bit(make_planes: Any, family: str) -> None:
    """A missing member's place holds it (docs/protocol.md#rounds): rank 1 contributes it, rank 0 anything, -0.0 too."""
    def step(rank: int, execute: Any) -> int:
        found = list(reductions(execute, family, 2))
        for dtype, op in found:
            kind = SUPPORTED_DTYPES[dtype]
            special = [0.0, -0.0, np.inf, -np.inf, np.nan] if kind.kind in "fV" else [0, 1]
            everything = np.concatenate([np.array(special, np.float32).astype(kind), values(0, 100, kind)])
            neutral = np.empty_like(everything)
            neutral[...] = identity(op, kind)
            results = []
            for contributors in ((0,), (0, 1)):
                out = np.empty_like(everything)
                response = msgspec.structs.replace(allreduce(dtype, op, 2), contributors=contributors)
                source = everything if rank == 0 else neutral if 1 in contributors else None
                execute(response, [source], [out])
                results.append(out.view(np.uint8))
            with case(dtype, op.name):
                assert np.array_equal(*results)
        return len(found)
    run_cases(make_planes, 2, step)


@pytest.mark.parametrize("size", SIZES)
def test_averages_of_integers_are_exact_where_their_sum_overflows(make_planes: Any, size: int) -> None:
    """The means of a dtype's limits and of values beside them, by every way a reduction takes."""
    def step(rank: int, execute: Any) -> int:
        found = [dtype for dtype, op in reductions(execute, "integers", size) if op is ReduceOp.AVERAGE]
        for dtype in found:
            kind = SUPPORTED_DTYPES[dtype]
            buffer = execute.fusion_buffer(3 * 65_536, tuple(range(size)))
            for count in (8, 20_000):
                mine = near_limits(rank, size, count, dtype)
                expected = mean_near_limits(size, count, dtype)
                total = len(mine)
                with case(dtype, count):
                    out = np.empty_like(mine)
                    execute(allreduce(dtype, ReduceOp.AVERAGE, size), [mine], [out])
                    assert np.array_equal(out, expected)
                    parts = [out[:count], out[count:]]
                    out[...] = 1
                    execute(allreduce(dtype, ReduceOp.AVERAGE, size, names=("a", "b")), [mine[:count], mine[count:]], parts)
                    assert np.array_equal(out, expected), "fused"
                    root = size - 1
                    execute(response(Collective.REDUCE, size, [], dtype=dtype, op=ReduceOp.AVERAGE, root_rank=root),
                            [mine], [out if rank == root else None])
                    assert rank != root or np.array_equal(out, expected), "reduce"
                    rows = even_rows(total, size)
                    own, begin = np.empty(rows[rank], kind), sum(rows[:rank])
                    scattered = response(Collective.REDUCESCATTER, size, list(rows), dtype=dtype, op=ReduceOp.AVERAGE)
                    execute(msgspec.structs.replace(scattered, row_elements=1), [mine], [own])
                    assert np.array_equal(own, expected[begin:begin + len(own)]), "reducescatter"
                    if mine.nbytes <= 65_536:
                        memory = buffer.own[65_536:131_072].view(kind)
                        memory[:total], memory[total:] = mine, 0
                        execute.barrier()
                        piece = BufferSlice(buffer, 65_536, 131_072)
                        execute(allreduce(dtype, ReduceOp.AVERAGE, size), [memory], [memory], piece)
                        assert np.array_equal(memory[:total], expected), "a bucket"
        return len(found)
    run_cases(make_planes, size, step)


def test_factors_of_averaged_integers_truncate_each_value_and_the_mean(make_planes: Any) -> None:
    def step(rank: int, execute: Any) -> int:
        found = [dtype for dtype, op in reductions(execute, "integers", 2) if op is ReduceOp.AVERAGE]
        for dtype in found:
            mine = np.array([5, 100] if rank else [2, 27], dtype)  # halved: 2 + 1 and 50 + 13, whose means are 1 and 31
            execute(allreduce(dtype, ReduceOp.AVERAGE, 2, prescale=0.5, postscale=2.5), [mine], [mine])
            with case(dtype):
                assert mine.tolist() == [2, 77]
        return len(found)
    run_cases(make_planes, 2, step)


def test_sixteen_bit_floats_are_summed_in_float32(make_planes: Any) -> None:
    def step(rank: int, execute: Any) -> None:
        for dtype in (ml_dtypes.bfloat16, np.float16):
            mine = np.array([[4096.0], [1.0], [1.0], [1.0]][rank], dtype)  # in 16 bits each + 1 would be lost
            out = np.empty_like(mine)
            execute(allreduce(np.dtype(dtype).name, ReduceOp.SUM, 4), [mine], [out])
            assert out == np.array([4099.0], np.float32).astype(dtype)
    run(make_planes, 4, step)


def test_nan_and_infinity_travel(make_planes: Any) -> None:
    def step(rank: int, execute: Any) -> None:
        for dtype in ("bfloat16", "float16", "float32"):
            mine = np.array([np.nan if rank == 1 else 1.0, np.inf, -np.inf, 1.0], np.float32)
            mine = mine.astype(SUPPORTED_DTYPES[dtype])
            execute(allreduce(dtype, ReduceOp.SUM, 2), [mine], [mine])
            assert str(mine.astype(np.float32).tolist()) == "[nan, inf, -inf, 2.0]"
    run(make_planes, 2, step)


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_from_every_root(make_planes: Any, size: int) -> None:
    def step(rank: int, execute: Any) -> None:
        for root in range(size):
            arrays = [np.full(count, rank, np.int16) for count in (0, 5, 70_000)]
            execute(Response(names=("a", "b", "c"), collective=Collective.BROADCAST, dtype="int16", root_rank=root,
                             contributors=tuple(range(size))), arrays, arrays)
            assert all((array == root).all() for array in arrays)
    run(make_planes, size, step)


@pytest.mark.parametrize("size", SIZES)
def test_ragged_allgather(make_planes: Any, size: int) -> None:
    def step(rank: int, execute: Any) -> None:
        for scale in (1, 9000):
            rows = [(3 * rank + 2) % 5 * scale for rank in range(size)]  # rank 1 has none
            mine = np.full(rows[rank] * 3, rank, np.float64)
            out = np.empty(sum(rows) * 3)
            execute(Response(names=("g",), collective=Collective.ALLGATHER, dtype="float64", rows=tuple(rows),
                             row_elements=3, contributors=tuple(range(size))), [mine], [out])
            with case(rows):
                assert out.tolist() == np.repeat(np.arange(size), np.array(rows) * 3).tolist()
    run(make_planes, size, step)


ROWS = {1: [5], 2: [0, 70_000], 3: [4, 0, 9000], 4: [1, 2, 0, 5]}


def response(collective: Collective, size: int, rows: list[int], **rest: Any) -> Response:
    return Response(names=("x",), collective=collective, rows=tuple(rows), row_elements=3,
                    contributors=tuple(range(size)), **rest)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "int64", "bfloat16"])
def test_reducescatter_gives_each_rank_its_rows(make_planes: Any, size: int, dtype: str) -> None:
    kind = SUPPORTED_DTYPES[dtype]

    def step(rank: int, execute: Any) -> None:
        for rows in (7, 2, 30_000):
            mine = values(rank, rows * 3, kind)
            split = even_rows(rows, size)
            for op in (ReduceOp.SUM, ReduceOp.AVERAGE):
                out = np.empty(split[rank] * 3, kind)
                one = response(Collective.REDUCESCATTER, size, list(split), dtype=dtype, op=op)
                if not execute.supports(one):
                    continue
                execute(one, [mine], [out])
                begin = sum(split[:rank]) * 3
                expected = modelled(op, rows * 3, kind, size)[begin:begin + out.size]
                with case(rows, op.name):
                    check_equal(out, expected, in_any_order(make_planes, size))
    run(make_planes, size, step)


@pytest.mark.parametrize("size", SIZES)
def test_reduce_to_every_root(make_planes: Any, size: int) -> None:
    def step(rank: int, execute: Any) -> None:
        for count in (10, 50_000):
            mine = values(rank, count, np.dtype(np.float64))
            for root in range(size):
                out = np.empty(count) if rank == root else None
                execute(response(Collective.REDUCE, size, [], dtype="float64", op=ReduceOp.MAX, root_rank=root),
                        [mine], [out])
                with case(count, f"root {root}"):
                    assert out is None or np.array_equal(out, modelled(ReduceOp.MAX, count, mine.dtype, size))
    run(make_planes, size, step)


@pytest.mark.parametrize("size", SIZES)
def test_gather_and_scatter_at_every_root(make_planes: Any, size: int) -> None:
    rows = ROWS[size]

    def step(rank: int, execute: Any) -> None:
        for root in range(size):
            mine = np.full(rows[rank] * 3, rank, np.int32)
            out = np.empty(sum(rows) * 3, np.int32) if rank == root else None
            execute(response(Collective.GATHER, size, rows, dtype="int32", root_rank=root), [mine], [out])
            assert out is None or out.tolist() == np.repeat(np.arange(size), np.array(rows) * 3).tolist()
            whole = np.arange(sum(rows) * 3, dtype=np.int32) * (rank == root)
            part = np.empty(rows[rank] * 3, np.int32)
            execute(response(Collective.SCATTER, size, rows, dtype="int32", root_rank=root), [whole], [part])
            assert part.tolist() == list(range(sum(rows[:rank]) * 3, sum(rows[:rank + 1]) * 3))
    run(make_planes, size, step)


def alltoall_splits(splits: list[list[int]], rank: int) -> AlltoallSplits:
    """Return what a rank knows of an alltoall, of everybody's splits."""
    requests = {sender: Request("x", Collective.ALLTOALL, "uint8", (sum(row), 3), splits=tuple(row))
                for sender, row in enumerate(splits) if row}
    received = receive_splits(requests, range(len(splits)))[rank]
    return AlltoallSplits(tuple(splits[rank]) or (0,) * len(splits), received.rows, received.offsets)


@pytest.mark.parametrize("size", [2, 3])
def test_alltoall_with_a_rank_that_has_joined(make_planes: Any, size: int) -> None:
    """It gets rows that nobody keeps."""
    def step(rank: int, execute: Any) -> None:
        splits = [[sender + receiver + 1 for receiver in range(size)] if sender != 1 else [] for sender in range(size)]
        active = [sender for sender in range(size) if sender != 1]
        most = max(map(sum, splits)), max(sum(splits[sender][receiver] for sender in active) for receiver in range(size))
        told = msgspec.structs.replace(response(Collective.ALLTOALL, size, most, dtype="uint8"), contributors=tuple(active))
        if rank == 1:
            execute(told, [], [], splits=alltoall_splits(splits, rank))
            return
        mine = np.concatenate([np.full(count * 3, 10 * rank + receiver, np.uint8)
                               for receiver, count in enumerate(splits[rank])])
        out = np.empty(sum(splits[sender][rank] for sender in active) * 3, np.uint8)
        execute(told, [mine], [out], splits=alltoall_splits(splits, rank))
        assert out.tolist() == [10 * sender + rank for sender in active for _ in range(splits[sender][rank] * 3)]
    run(make_planes, size, step)


@pytest.mark.parametrize("size", SIZES)
def test_alltoall_with_splits(make_planes: Any, size: int) -> None:
    def step(rank: int, execute: Any) -> None:
        for scale in (0, 1, 4000):
            splits = [[(2 * sender + 3 * receiver) % 4 * scale for receiver in range(size)] for sender in range(size)]
            mine = np.concatenate([np.full(count * 3, 10 * rank + receiver, np.uint8)  # one row stays where it is
                                   for receiver, count in enumerate([*splits[rank], 1])])
            out = np.empty(sum(row[rank] for row in splits) * 3, np.uint8)
            wants = alltoall_splits(splits, rank)
            most = max(map(sum, splits)), max(map(sum, zip(*splits, strict=True)))
            execute(response(Collective.ALLTOALL, size, most, dtype="uint8"), [mine], [out], splits=wants)
            wanted = [10 * sender + rank for sender in range(size) for _ in range(splits[sender][rank] * 3)]
            with case(splits):
                assert out.tolist() == wanted
    run(make_planes, size, step)


def test_product(make_planes: Any) -> None:
    def step(rank: int, execute: Any) -> None:
        for dtype in ("int16", "float16", "complex64"):
            mine = np.array([rank + 1, 2, 0.5 if dtype != "int16" else 3], SUPPORTED_DTYPES[dtype])
            out = np.empty_like(mine)
            execute(allreduce(dtype, ReduceOp.PRODUCT, 3), [mine], [out])
            assert out.tolist() == [6, 8, 27 if dtype == "int16" else 0.125]
    run(make_planes, 3, step)


def test_process_sets_that_overlap_do_not_disturb_each_other(make_planes: Any) -> None:
    """Sets {0, 1}, {1, 2} and all, large and small plans in turn; each rank executes those of its own sets."""
    sets = {0: (0, 1, 2), 1: (0, 1), 2: (1, 2)}

    def step(rank: int, execute: Any) -> None:
        generator = np.random.default_rng(3)  # the same story on all ranks
        for process_set_id in (1, 2):
            execute.plane.add_process_set(process_set_id, sets[process_set_id])
        for turn in range(200):
            process_set_id, count = int(generator.integers(0, 3)), int(generator.choice([3, 60, 9000, 40_000]))
            members = sets[process_set_id]
            if rank not in members:
                continue
            mine = np.full(count, turn + rank, np.int64)
            request = allreduce("int64", ReduceOp.SUM, 3)
            one = msgspec.structs.replace(request, process_set_id=process_set_id, contributors=members)
            execute(one, [mine], [mine], ranks=members)
            assert (mine == len(members) * turn + sum(members)).all(), turn
        for process_set_id in (1, 2):
            execute.plane.remove_process_set(process_set_id, execute.wait_until)
    run(make_planes, 3, step)


def test_a_root_that_ends_at_once_takes_nothing_from_slower_ranks() -> None:
    """The root leaves a broadcast at its barrier; it may close its plane before the others have copied."""
    closed, bells = threading.Event(), [threading.Event(), threading.Event()]
    root, other = shm(2, lambda rank: bells[rank].set())
    response = Response(names=("a",), collective=Collective.BROADCAST, dtype="int64", root_rank=0, contributors=(0, 1))

    def waiter(rank: int, then: Callable[[], object]) -> Callable[[Callable[[], bool]], None]:
        def wait_until(predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
            while not predicate():
                bells[rank].wait(0.1)
            then()
        return wait_until

    def lead() -> None:
        mine = np.full(1000, 7)
        root.execute(Plan(1, (0, 1), response, [mine], [mine]), waiter(0, lambda: None))
        root.close()
        closed.set()

    leader = threading.Thread(target=lead)
    leader.start()
    copy = np.zeros(1000, np.int64)
    other.execute(Plan(1, (0, 1), response, [copy], [copy]), waiter(1, lambda: closed.wait(30)))
    leader.join()
    assert closed.is_set() and (copy == 7).all()
    other.close()


def test_many_pieces_in_a_row_never_overtake_each_other(make_planes: Any) -> None:
    """Small and large plans in turn, so regions alternate between algorithms (docs/protocol.md#staging-regions)."""
    def step(rank: int, execute: Any) -> None:
        generator = np.random.default_rng(7)  # the same sizes on all ranks
        for turn in range(300):
            mine = np.full(int(generator.choice([3, 60, 3000, 40_000])), turn + rank, np.int64)
            execute(allreduce("int64", ReduceOp.SUM, 3), [mine], [mine])
            assert (mine == 3 * turn + 3).all(), turn
    run(make_planes, 3, step)


def adaptive(one: Array, other: Array) -> Array:
    """Adasum of two tensors, as the paper has it."""
    agreement = float(one @ other)
    squares = [float(one @ one), float(other @ other)]
    weights = [1 - agreement / (2 * square) if square else 1 for square in squares]
    return weights[0] * one + weights[1] * other


def adaptive_model(inputs: list[Array]) -> Array:
    level = [array.astype(np.float64) for array in inputs]
    while len(level) > 1:
        level = [adaptive(*level[at:at + 2]) if at + 1 < len(level) else level[at] for at in range(0, len(level), 2)]
    return level[0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_adasum_weighs_each_tensor_by_itself(make_planes: Any, size: int, dtype: str) -> None:
    kind = SUPPORTED_DTYPES[dtype]
    counts = (1, 0, 70, 30_000)  # from less than a cache line a rank to more than a slot

    def step(rank: int, execute: Any) -> list[bytes]:
        inputs = [[values(other, count, kind) for other in range(size)] for count in counts]
        inputs[2][0][:] = 0  # a zero vector has no direction
        outputs = [np.empty_like(each[rank]) for each in inputs]
        execute(allreduce(dtype, ReduceOp.ADASUM, size, rows=counts, prescale=2.0, postscale=0.25, elements=sum(counts)),
                [each[rank] for each in inputs], outputs)
        for each, output in zip(inputs, outputs, strict=True):
            expected = 0.5 * adaptive_model(each)
            np.testing.assert_allclose(output.astype(np.float64), expected, rtol=0.01 if kind.itemsize == 2 else 1e-5,
                                       atol=0.02 if kind.itemsize == 2 else 1e-6)
        return [output.tobytes() for output in outputs]
    results = run(make_planes, size, step)
    assert all(result == results[0] for result in results), "ranks differ"


def test_adasum_without_a_rank_that_joined(make_planes: Any) -> None:
    def step(rank: int, execute: Any) -> None:
        inputs = [values(other, 20_000, np.dtype(np.float32)) for other in range(3)]
        out = np.empty(20_000, np.float32)
        given = ([], []) if rank == 1 else ([inputs[rank]], [out])
        execute(allreduce("float32", ReduceOp.ADASUM, 3, rows=(20_000,), elements=20_000, contributors=(0, 2)), *given)
        if rank != 1:
            expected = adaptive_model([inputs[0], inputs[2]])
            np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    run(make_planes, 3, step)


def test_send(make_planes: Any) -> None:
    def step(rank: int, execute: Any) -> None:
        execute.plane.add_process_set(-1, (0, 2))
        if rank == 1:
            return
        for count in (0, 3, 100_000):
            for number, (sender, receiver) in enumerate([(0, 2), (2, 0), (0, 2)]):
                mine = np.arange(count, dtype=np.int32) + number
                out = np.empty_like(mine) if rank == receiver else None
                sent = Response(names=("x",), collective=Collective.SEND, dtype="int32", process_set_id=-1, root_rank=sender,
                                elements=count, contributors=(0, 2))
                execute(sent, [mine if rank == sender else np.zeros_like(mine)], [out], ranks=(0, 2))
                with case(count, f"from {sender}"):
                    assert out is None or np.array_equal(out, mine)
    run(make_planes, 3, step)

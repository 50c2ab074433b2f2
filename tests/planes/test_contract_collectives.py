"""The contract of planes: collectives that move tensors, reductions to some ranks, process sets, and the order of plans."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from hvdlite.core.array import SUPPORTED_DTYPES
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.negotiation.fusion import even_rows, receive_splits
from hvdlite.negotiation.messages import Request, Response
from hvdlite.planes.base import AlltoallSplits, Plan
from tests.planes.contract import SIZES, allreduce, case, check_equal, in_any_order, response
from tests.planes.makers import shm
from tests.planes.models import modelled, values
from tests.planes.steps import run


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

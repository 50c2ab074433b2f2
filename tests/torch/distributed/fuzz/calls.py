"""The calls of a program: the plain collectives, and what is made of several calls, of objects, and of messages."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed import _functional_collectives as functional

from hvdlite.core.errors import MismatchError
from tests.fuzzing import WrongError
from tests.torch.distributed.fuzz.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
)
from tests.torch.distributed.fuzz.turn import Begun, Turn, comparing
from tests.torch.distributed.fuzz.values import (
    REDUCED,
    Wanted,
    compare,
    reduced,
)


def objects(turn: Turn) -> Begun:
    kind, root = turn.common.choice(["broadcast", "all_gather", "gather", "scatter"]), turn.root()
    everybodys: list[Any] = [{"rank": rank, "of": "ä" * turn.common.randrange(3000), "none": None}
                             for rank in range(turn.size)]
    found, wanted = [None] * turn.size, everybodys
    mine, is_root = everybodys[turn.rank], turn.rank == root
    turn.told.append(kind)
    if kind == "broadcast":
        found = list(everybodys) if is_root else found
        dist.broadcast_object_list(found, group=turn.group, group_src=root)
    elif kind == "all_gather":
        dist.all_gather_object(found, mine, turn.group)
    elif kind == "gather":
        dist.gather_object(mine, found if is_root else None, group=turn.group, group_dst=root)
        wanted = everybodys if is_root else [None] * turn.size
    else:
        found, wanted = [None], [mine]
        dist.scatter_object_list(found, everybodys if is_root else None, group=turn.group, group_src=root)
    if found != wanted:
        raise WrongError(f"{kind} of objects: {str(found)[:300]}, wanted {str(wanted)[:300]}")
    return None, lambda: None


def coalescing(turn: Turn) -> Begun:
    """Several calls in a coalescing manager, which torch passes on as one or one by one."""
    kind, dtype = turn.common.choice(["all_reduce", "all_gather", "reduce_scatter"]), turn.dtype(REDUCED)
    shapes, pairs = [turn.shape() or (1,) for _ in range(turn.common.randint(1, 4))], []
    device, turn.is_async = turn.common.choice([None, torch.device("cpu")]), bool(turn.common.getrandbits(1))
    turn.told.append(f"{kind} {device} {turn.is_async}")
    with dist._coalescing_manager(turn.group, device, turn.is_async) as manager:
        for part, shape in enumerate(shapes):
            whole = (turn.size * shape[0], *shape[1:])
            everybodys = [turn.drawn(whole if kind == "reduce_scatter" else shape, dtype, rank, part)
                          for rank in range(turn.size)]
            mine = everybodys[turn.rank]
            if kind == "all_reduce":
                tensor = turn.changed(mine)
                dist.all_reduce(tensor, group=turn.group)
                pairs.append((tensor, reduced("SUM", everybodys)))
                turn.shared.append(tensor)
            elif kind == "all_gather":
                output = turn.room(whole, dtype)
                dist.all_gather_into_tensor(output, turn.given(mine), turn.group)
                pairs.append((output, Wanted(torch.cat(everybodys))))
            else:
                output = turn.room(shape, dtype)
                dist.reduce_scatter_tensor(output, turn.given(mine), group=turn.group)
                pairs.append((output, reduced("SUM", [each.chunk(turn.size)[turn.rank] if shape[0] else each
                                                      for each in everybodys])))
    return manager if turn.is_async else None, comparing(f"coalesced {kind}", pairs)


def functional_collective(turn: Turn) -> Begun:
    kind = turn.common.choice(["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"])
    dtype, shape = turn.dtype(REDUCED), turn.shape() or (1,)
    whole = (turn.size * shape[0], *shape[1:])
    everybodys = [turn.drawn(whole if kind in ("reduce_scatter", "all_to_all") else shape, dtype, rank)
                  for rank in range(turn.size)]
    turn.told.append(kind)
    mine = turn.given(everybodys[turn.rank])
    if kind == "all_reduce":
        found, wanted = functional.all_reduce(mine, "sum", turn.group), reduced("SUM", everybodys)
    elif kind == "all_gather":
        found, wanted = functional.all_gather_tensor(mine, 0, turn.group), Wanted(torch.cat(everybodys))
    elif kind == "reduce_scatter":
        found = functional.reduce_scatter_tensor(mine, "sum", 0, turn.group)
        wanted = reduced("SUM", [each.view(turn.size, *shape)[turn.rank].clone() for each in everybodys])
    elif kind == "broadcast":
        root = turn.root()
        found, wanted = functional.broadcast(mine, root, turn.group), Wanted(everybodys[root])
    else:
        found = functional.all_to_all_single(mine, None, None, turn.group)
        wanted = Wanted(torch.cat([each.view(turn.size, *shape)[turn.rank] for each in everybodys]))
    return None, lambda: compare(f"functional {kind}", found.clone(), wanted)


def sparse(turn: Turn) -> Begun:
    counts = [turn.common.randrange(6) for _ in turn.ranks]
    def tensor(rank: int) -> torch.Tensor:
        draws = random.Random(f"{turn.key} {rank} sparse")
        indices = torch.tensor([[draws.randrange(9) for _ in range(counts[rank])]], dtype=torch.int64).view(1, -1)
        rows = turn.drawn((counts[rank], 3), torch.float64, rank)
        return torch.sparse_coo_tensor(indices, rows, (9, 3), check_invariants=True)
    mine = tensor(turn.rank)
    wanted = reduced("SUM", [tensor(rank).to_dense() for rank in range(turn.size)])
    work = dist.all_reduce(mine, group=turn.group, async_op=turn.is_async)
    return work, lambda: compare("sparse all_reduce", mine.to_dense(), wanted)


def disagreement(turn: Turn) -> Begun:
    """A rank calls something else: all ranks get an error that shows both calls, and the group goes on."""
    if turn.size == 1:
        return None, lambda: None
    culprit, kind = turn.common.randrange(turn.size), turn.common.choice(["size", "dtype", "op", "root", "collective"])
    differs = turn.rank == culprit
    turn.told.append(f"rank {culprit} differs in {kind}")
    tensor, calls = torch.ones(4 + (differs and kind == "size")), "all_reduce"
    if kind == "dtype" and differs:
        tensor = tensor.double()
    try:
        if kind == "root":
            calls = "broadcast"
            dist.broadcast(tensor, group=turn.group, group_src=(culprit if differs else (culprit + 1) % turn.size))
        elif kind == "collective" and differs:
            dist.all_gather([torch.empty(4) for _ in turn.ranks], tensor, turn.group)
        else:
            op = ReduceOp.MAX if kind == "op" and differs else ReduceOp.SUM
            work = dist.all_reduce(tensor, op, turn.group, turn.is_async)
            if work is not None:
                work.wait()
    except MismatchError as error:
        text = str(error)
        if calls not in text or f"rank {turn.ranks[culprit]}" not in text:
            raise WrongError(f"the mismatch of {kind} on rank {turn.ranks[culprit]} is told as {text}") from error
        return None, lambda: None
    raise WrongError(f"rank {turn.ranks[culprit]} differs in {kind}, and this rank gets no error")


def nested(turn: Turn) -> Begun:
    """A callback of a future makes calls of the group, and waits for them, as hooks of DDP do.

    The future may be asked for after another call.
    """
    shape, dtype = turn.shape(), turn.dtype(REDUCED)
    first, second, third, between = tensors = [turn.changed(turn.drawn(shape, dtype, part=part)) for part in range(4)]
    wanted = [reduced("SUM", [turn.drawn(shape, dtype, rank, part) for rank in range(turn.size)]) for part in range(4)]

    def continues(done: Any) -> Any:
        done.value()
        dist.all_reduce(second, group=turn.group, async_op=True).get_future().wait()
        dist.all_reduce(third, group=turn.group)
        return tensors

    work: Any = dist.all_reduce(first, group=turn.group, async_op=True)
    if turn.common.random() < 0.5:
        turn.told.append("another call before get_future")
        dist.all_reduce(between, group=turn.group, async_op=True)
    else:
        dist.all_reduce(between, group=turn.group)
    future = work.get_future().then(continues)
    turn.shared += tensors
    return future, comparing("nested", list(zip(tensors, wanted, strict=True)))


def messages(turn: Turn) -> Begun:
    """Sends and receives: in one order and blocking, or in any order; with sources or from any."""
    if turn.size == 1:
        return None, lambda: None
    shuffles, dtype = turn.common.random() < 0.6, turn.dtype()
    sent = [(*turn.common.sample(range(turn.size), 2), turn.common.randrange(3), turn.shape(), number)
            for number in range(turn.common.randint(1, 10))]  # source, to, tag, shape, number
    mine = [each for each in sent if turn.rank in each[:2]]
    if shuffles:
        mine = _shuffled(turn.own, mine)
    works, pairs, turn.is_async = [], [], True
    turn.told.append(f"{'shuffled ' * shuffles}{[each[:4] for each in mine]}")
    if not shuffles or turn.own.random() < 0.5:
        for source, to, tag, shape, number in mine:
            if source == turn.rank:
                tensor = turn.given(turn.drawn(shape, dtype, source, number))
                if turn.own.random() < 0.5 and not shuffles:
                    dist.send(tensor, group=turn.group, tag=tag, group_dst=to)
                else:
                    works.append(dist.isend(tensor, group=turn.group, tag=tag, group_dst=to))
                continue
            output = turn.changed(turn.drawn(shape, dtype, to, 50 + number), is_contiguous=True)
            pairs.append((output, Wanted(turn.drawn(shape, dtype, source, number))))
            if turn.own.random() < 0.5 and not shuffles and not works:
                dist.recv(output, group=turn.group, tag=tag, group_src=source)
            else:
                works.append(dist.irecv(output, group=turn.group, tag=tag, group_src=source))
    else:
        batch = []
        for source, to, tag, shape, number in mine:
            output = turn.changed(turn.drawn(shape, dtype, turn.rank, number), is_contiguous=True)
            if source != turn.rank:
                pairs.append((output, Wanted(turn.drawn(shape, dtype, source, number))))
            batch.append(dist.P2POp(dist.isend if source == turn.rank else dist.irecv, output, group=turn.group, tag=tag,
                                    group_peer=to if source == turn.rank else source))
        works += dist.batch_isend_irecv(batch) if batch else []
    turn.own.shuffle(works)
    return _Several(works), comparing("messages", pairs)


def any_source(turn: Turn) -> Begun:
    """One rank receives from whoever sends; the messages of a rank come in order."""
    if turn.size == 1:
        return None, lambda: None
    to, dtype, shape, tag = turn.root(), turn.dtype(), turn.shape(), 100 * turn.key[1] + turn.key[2]
    counts = [0 if rank == to else turn.common.randrange(4) for rank in range(turn.size)]
    if turn.rank != to:
        return _Several([dist.isend(turn.given(turn.drawn(shape, dtype, part=part)), group=turn.group, tag=tag, group_dst=to)
                         for part in range(counts[turn.rank])]), lambda: None
    next_part = [0] * turn.size
    for _ in range(sum(counts)):
        output = turn.changed(turn.drawn(shape, dtype, part=99), is_contiguous=True)
        if turn.own.random() < 0.5:
            source = dist.get_group_rank(turn.group, dist.recv(output, group=turn.group, tag=tag))
        else:
            work: Any = dist.irecv(output, group=turn.group, tag=tag)
            work.wait()
            source = work._source_rank()
        compare(f"any_source from {source}", output, Wanted(turn.drawn(shape, dtype, source, next_part[source])))
        next_part[source] += 1
    if next_part != counts:
        raise WrongError(f"any_source: {next_part} messages, not {counts}")
    return None, lambda: None


class _Several:
    """Works as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _shuffled(draws: random.Random, mine: list[Any]) -> list[Any]:
    """Return messages in another order, but those of a pair and a tag in theirs."""
    order = list(range(len(mine)))
    draws.shuffle(order)
    by_stream: dict[Any, list[Any]] = {}
    for each in mine:
        by_stream.setdefault(each[:3], []).append(each)
    return [by_stream[mine[index][:3]].pop(0) for index in order]


CALLS: Final[dict[str, Callable[[Turn], Begun]]] = {call.__name__: call for call in (
    all_reduce, all_reduce_coalesced, broadcast, reduce, all_gather, all_gather_into_tensor, gather, scatter, reduce_scatter,
    reduce_scatter_tensor, all_to_all_single, all_to_all, barrier, objects, coalescing, functional_collective, sparse,
    disagreement, nested, messages, any_source)}

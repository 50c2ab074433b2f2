"""The calls of a program: each draws its arguments, calls `torch.distributed`, and says how to check the result."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed import _functional_collectives as functional

import hvdlite_torch.distributed
from hvdlite.core.errors import MismatchError
from tests.fuzzing import WrongError
from tests.torch.distributed.fuzz.values import (
    ANY,
    OPS,
    REDUCED,
    Laid,
    Wanted,
    compare,
    ops_of,
    reduced,
    values,
)

SHAPES: Final = ((), (0,), (1,), (2, 0), (3,), (7,), (4, 5), (2, 3, 4), (64,), (33, 31), (1000,), (4099,))
LONG: Final = ((1 << 17,), (300, 1111))


class Turn:
    """One rank's part of one step.

    Attributes:
        ranks: the members of the group, as ranks of the job.
        rank: this rank's index in them.
        size: their number.
        common: draws what all members draw.
        own: draws what each rank draws for itself.
        shared: gets results that are to be equal on all members, bit by bit.
        told: gets what is called, for messages.
    """

    def __init__(self, seed: int, step: int, part: int, ranks: Sequence[int], me: int, group: Any) -> None:
        self.key = (seed, step, part)
        self.ranks, self.rank, self.size, self.group = tuple(ranks), list(ranks).index(me), len(ranks), group
        self.common, self.own = random.Random(f"{seed} {step} {part}"), random.Random(f"{seed} {step} {part} {me}")
        self.shared: list[torch.Tensor] = []
        self.told: list[str] = []
        self.is_async = self.own.random() < 0.5
        self._laid: list[Laid] = []
        self._inputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def shape(self) -> tuple[int, ...]:
        return self.common.choice(LONG if self.common.random() < 0.04 else SHAPES)

    def dtype(self, among: Sequence[torch.dtype] = ANY) -> torch.dtype:
        dtype = self.common.choice(among)
        self.told.append(str(dtype).removeprefix("torch."))
        return dtype

    def root(self) -> int:
        root = self.common.randrange(self.size)
        self.told.append(f"root {root}")
        return root

    def op(self, dtype: torch.dtype) -> tuple[str, Any, list[float]]:
        """Return the name of an operation, the operation, and the ranks' factors."""
        name, factors = self.common.choice(ops_of(dtype)), [self.common.choice([0.5, 1.0, 2.0, -3.0]) for _ in self.ranks]
        self.told.append(name)
        op = dist._make_nccl_premul_sum(factors[self.rank]) if name == "PREMUL_SUM" else getattr(ReduceOp, name)
        return name, op, factors

    def drawn(self, shape: Sequence[int], dtype: torch.dtype, rank: int | None = None, part: int = 0) -> torch.Tensor:
        """Return the values of a rank's tensor, by default this one's."""
        return values((*self.key, self.ranks[self.rank if rank is None else rank], part), shape, dtype)

    def given(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an input with these values, which no call may change."""
        laid = self.changed(tensor)
        self._inputs.append((laid, tensor))
        return laid

    def changed(self, tensor: torch.Tensor, *, is_contiguous: bool = False) -> torch.Tensor:
        """Return a tensor with these values, which the call changes."""
        laid = Laid(self.own, tensor, is_contiguous=is_contiguous)
        self.told.append(f"{laid.kind}{list(tensor.shape)}")
        self._laid.append(laid)
        return laid.tensor

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor for a result."""
        return self.changed(values((99, *self.key), shape, dtype))

    def check(self, name: str) -> None:
        for laid in self._laid:
            laid.check_gaps(name)
        for laid, tensor in self._inputs:
            compare(f"{name}: the input", laid, Wanted(tensor))


Begun = tuple[Any, Callable[[], None]]
"""A work, or None for what is done, and what checks the result."""


def comparing(name: str, pairs: Sequence[tuple[torch.Tensor, Wanted]]) -> Callable[[], None]:
    def check() -> None:
        for index, (found, wanted) in enumerate(pairs):
            compare(f"{name}: result {index}", found, wanted)
    return check


def all_reduce(turn: Turn) -> Begun:
    dtype, shape = turn.dtype(REDUCED), turn.shape()
    name, op, factors = turn.op(dtype)
    tensor = turn.changed(turn.drawn(shape, dtype))
    wanted = reduced(name, [turn.drawn(shape, dtype, rank) for rank in range(turn.size)], factors)
    turn.shared.append(tensor)
    return dist.all_reduce(tensor, op, turn.group, turn.is_async), comparing("all_reduce", [(tensor, wanted)])


def all_reduce_coalesced(turn: Turn) -> Begun:
    dtypes = [turn.dtype(REDUCED) for _ in range(turn.common.randint(1, 4))]
    shapes = [turn.shape() for _ in dtypes]
    names = [name for name in OPS if name != "PREMUL_SUM" and all(name in ops_of(dtype) for dtype in dtypes)]
    name = turn.common.choice(names or ["SUM"])
    tensors = [turn.changed(turn.drawn(shape, dtype, part=part))
               for part, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]
    wanted = [reduced(name, [turn.drawn(shape, dtype, rank, part) for rank in range(turn.size)])
              for part, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]
    turn.shared += tensors
    with warnings.catch_warnings(action="ignore"):
        options: Any = dist.AllreduceCoalescedOptions()
        options.reduceOp = getattr(ReduceOp, name)
        work = turn.group.allreduce_coalesced(tensors, options)
    return work, comparing("all_reduce_coalesced", list(zip(tensors, wanted, strict=True)))


def broadcast(turn: Turn) -> Begun:
    dtype, shape, root = turn.dtype(), turn.shape(), turn.root()
    tensor = turn.changed(turn.drawn(shape, dtype))
    work = dist.broadcast(tensor, group=turn.group, async_op=turn.is_async, group_src=root)
    return work, comparing("broadcast", [(tensor, Wanted(turn.drawn(shape, dtype, root)))])


def reduce(turn: Turn) -> Begun:
    dtype, shape, root = turn.dtype(REDUCED), turn.shape(), turn.root()
    name, op, factors = turn.op(dtype)
    tensor = turn.changed(turn.drawn(shape, dtype))
    wanted = reduced(name, [turn.drawn(shape, dtype, rank) for rank in range(turn.size)], factors)
    if turn.rank != root:
        wanted = Wanted(turn.drawn(shape, dtype))
    work = dist.reduce(tensor, op=op, group=turn.group, async_op=turn.is_async, group_dst=root)
    return work, comparing("reduce", [(tensor, wanted)])


def all_gather(turn: Turn) -> Begun:
    dtype = turn.dtype()
    shapes = [turn.shape()] * turn.size
    if turn.common.random() < 0.4:
        shapes = [turn.shape() for _ in shapes]
    wanted = [turn.drawn(shape, dtype, rank) for rank, shape in enumerate(shapes)]
    if turn.own.random() < 0.3:
        flat = torch.zeros(sum(each.numel() for each in wanted), dtype=torch.float64).to(dtype)
        parts = flat.split([each.numel() for each in wanted])
        outputs = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    else:
        outputs = [turn.room(shape, dtype) for shape in shapes]
    work = dist.all_gather(outputs, turn.given(wanted[turn.rank]), turn.group, turn.is_async)
    return work, comparing("all_gather", [
        (output, Wanted(each)) for output, each in zip(outputs, wanted, strict=True)])


def all_gather_into_tensor(turn: Turn) -> Begun:
    dtype, shape = turn.dtype(), turn.shape() or (1,)
    wanted = torch.stack([turn.drawn(shape, dtype, rank) for rank in range(turn.size)])
    if turn.common.random() < 0.5:
        wanted = wanted.reshape(turn.size * shape[0], *shape[1:])
    output = turn.room(wanted.shape, dtype)
    work = dist.all_gather_into_tensor(output, turn.given(turn.drawn(shape, dtype)), turn.group, turn.is_async)
    return work, comparing("all_gather_into_tensor", [(output, Wanted(wanted))])


def gather(turn: Turn) -> Begun:
    dtype, shape, root = turn.dtype(), turn.shape(), turn.root()
    outputs = [turn.room(shape, dtype) for _ in turn.ranks] if turn.rank == root else None
    own = turn.given(turn.drawn(shape, dtype))
    work = dist.gather(own, outputs, group=turn.group, async_op=turn.is_async, group_dst=root)
    return work, comparing("gather", [(output, Wanted(turn.drawn(shape, dtype, rank)))
                                      for rank, output in enumerate(outputs or [])])


def scatter(turn: Turn) -> Begun:
    dtype, shape, root = turn.dtype(), turn.shape(), turn.root()
    inputs = [turn.given(turn.drawn(shape, dtype, root, rank)) for rank in range(turn.size)] if turn.rank == root else None
    output = turn.room(shape, dtype)
    work = dist.scatter(output, inputs, group=turn.group, async_op=turn.is_async, group_src=root)
    return work, comparing("scatter", [(output, Wanted(turn.drawn(shape, dtype, root, turn.rank)))])


def reduce_scatter(turn: Turn) -> Begun:
    dtype = turn.dtype(REDUCED)
    name, op, factors = turn.op(dtype)
    shapes = [turn.shape()] * turn.size
    if turn.common.random() < 0.4:
        shapes = [turn.shape() for _ in shapes]
    output = turn.room(shapes[turn.rank], dtype)
    inputs = [turn.given(turn.drawn(shape, dtype, part=part)) for part, shape in enumerate(shapes)]
    wanted = reduced(name, [turn.drawn(shapes[turn.rank], dtype, rank, turn.rank) for rank in range(turn.size)], factors)
    work = dist.reduce_scatter(output, inputs, op, turn.group, turn.is_async)
    return work, comparing("reduce_scatter", [(output, wanted)])


def reduce_scatter_tensor(turn: Turn) -> Begun:
    dtype, shape = turn.dtype(REDUCED), turn.shape() or (1,)
    name, op, factors = turn.op(dtype)
    whole = (turn.size * shape[0], *shape[1:])
    output = turn.room(shape, dtype)
    wanted = reduced(name, [turn.drawn(whole, dtype, rank).view(turn.size, *shape)[turn.rank].clone()
                            for rank in range(turn.size)], factors)
    work = dist.reduce_scatter_tensor(output, turn.given(turn.drawn(whole, dtype)), op, turn.group, turn.is_async)
    return work, comparing("reduce_scatter_tensor", [(output, wanted)])


def all_to_all_single(turn: Turn) -> Begun:
    dtype, row = turn.dtype(), turn.shape()[:2]
    is_even = turn.common.random() < 0.4
    count = turn.common.randrange(4)
    sizes = [[count if is_even else turn.common.randrange(4) for _ in turn.ranks] for _ in turn.ranks]
    def sent(rank: int) -> torch.Tensor:
        return turn.drawn((sum(sizes[rank]), *row), dtype, rank)
    wanted = torch.cat([sent(rank).split(sizes[rank])[turn.rank] for rank in range(turn.size)])
    received = [each[turn.rank] for each in sizes]
    output = turn.room(wanted.shape, dtype)
    splits = (None, None) if is_even else (received, sizes[turn.rank])
    turn.told.append("even" if is_even else str(sizes))
    work = dist.all_to_all_single(output, turn.given(sent(turn.rank)), *splits, turn.group, turn.is_async)
    return work, comparing("all_to_all_single", [(output, Wanted(wanted))])


def all_to_all(turn: Turn) -> Begun:
    dtype = turn.dtype()
    shapes = [[turn.shape() for _ in turn.ranks] for _ in turn.ranks]
    inputs = [turn.given(turn.drawn(shape, dtype, part=to)) for to, shape in enumerate(shapes[turn.rank])]
    outputs = [turn.room(shapes[source][turn.rank], dtype) for source in range(turn.size)]
    work = dist.all_to_all(outputs, inputs, turn.group, turn.is_async)
    return work, comparing("all_to_all", [
        (output, Wanted(turn.drawn(shapes[source][turn.rank], dtype, source, turn.rank)))
        for source, output in enumerate(outputs)])


def barrier(turn: Turn) -> Begun:
    if turn.common.random() < 0.5:
        hvdlite_torch.distributed.monitored_barrier(turn.group)
        return None, lambda: None
    return dist.barrier(turn.group, turn.is_async), lambda: None


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
    """A callback of a future makes calls of the group, and waits for them, as hooks of DDP do."""
    shape, dtype = turn.shape(), turn.dtype(REDUCED)
    first, second, third = (turn.changed(turn.drawn(shape, dtype, part=part)) for part in range(3))
    wanted = [reduced("SUM", [turn.drawn(shape, dtype, rank, part) for rank in range(turn.size)]) for part in range(3)]

    def continues(done: Any) -> Any:
        done.value()
        dist.all_reduce(second, group=turn.group, async_op=True).get_future().wait()
        dist.all_reduce(third, group=turn.group)
        return [first, second, third]

    future = dist.all_reduce(first, group=turn.group, async_op=True).get_future().then(continues)
    turn.shared += [first, second, third]
    return future, comparing("nested", list(zip((first, second, third), wanted, strict=True)))


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

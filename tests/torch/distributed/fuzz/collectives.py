"""The plain collectives: each draws its arguments, calls `torch.distributed`, and says how to check the result."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import hvdlite_torch.distributed
from tests.torch.distributed.fuzz.turn import Begun, Turn, comparing
from tests.torch.distributed.fuzz.values import (
    OPS,
    REDUCED,
    Wanted,
    ops_of,
    reduced,
)


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

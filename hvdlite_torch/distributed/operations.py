"""The collectives of `torch.distributed` as operations of a group; no rank is needed to make them.

What travels without arithmetic travels as bytes, so that every dtype of torch can. Ranks may call a collective with
different shapes of the same number of elements, as with torch's own backends: errors and checks therefore show numbers of
elements. What does not lie in memory one after the other is copied: inputs when the operation's turn comes, so that it reads
what operations before it have written, and outputs when the call is done.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.distributed import ReduceOp as TorchOp

from hvdlite.core.types import BITWISE, Collective, ReduceOp
from hvdlite.groups.operation import Operation
from hvdlite_torch.distributed import tensors as memory
from hvdlite_torch.distributed.errors import ArgumentError, UnsupportedArgumentError
from hvdlite_torch.distributed.tensors import Copies, PreparedCall, joined

_OPS: Final[dict[Any, ReduceOp]] = {
    TorchOp.SUM: ReduceOp.SUM, TorchOp.AVG: ReduceOp.AVERAGE, TorchOp.MIN: ReduceOp.MIN, TorchOp.MAX: ReduceOp.MAX,
    TorchOp.PRODUCT: ReduceOp.PRODUCT, TorchOp.BAND: ReduceOp.BAND, TorchOp.BOR: ReduceOp.BOR, TorchOp.BXOR: ReduceOp.BXOR,
    TorchOp.PREMUL_SUM: ReduceOp.SUM,
}
_OF_BOOL: Final = {
    ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN, ReduceOp.MIN: ReduceOp.MIN, ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.BAND: ReduceOp.MIN, ReduceOp.BOR: ReduceOp.MAX, ReduceOp.BXOR: ReduceOp.BXOR,
}
"""Booleans are reduced as NCCL reduces them: a sum is true if any rank has true."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reduce:
    """How values are reduced: torch's operation, and the factor of PREMUL_SUM, which may differ between ranks."""

    name: str
    op: ReduceOp
    prescale: float = 1.0

    @classmethod
    def of(cls, given: Any) -> Reduce:
        """Return the reduction that a `torch.distributed.ReduceOp` stands for."""
        kind = getattr(given, "op", given)
        known = _PLAIN.get(int(kind))
        if known is not None:
            return known
        if kind == TorchOp.PREMUL_SUM:
            return cls("PREMUL_SUM", ReduceOp.SUM, float(given.factor))
        raise UnsupportedArgumentError(f"ReduceOp.{_name(kind)} is not supported; supported: {', '.join(map(_name, _OPS))}")

    def on(self, dtype: torch.dtype, what: str) -> ReduceOp:
        """Return the operation for values of a dtype.

        Raises:
            UnsupportedArgumentError: if there is none.
        """
        if dtype not in memory.REDUCED:
            raise UnsupportedArgumentError(f"{what}: {memory.NAMES[dtype]} can be moved, but not reduced; convert it first")
        if dtype is torch.bool:
            if self.op not in _OF_BOOL or self.prescale != 1.0:
                raise UnsupportedArgumentError(f"{what}: {self.name} is not defined for bool; convert it first")
            return _OF_BOOL[self.op]
        if self.op in BITWISE and (dtype.is_floating_point or dtype.is_complex):
            raise UnsupportedArgumentError(f"{what}: cannot use ReduceOp.{self.name} with {memory.NAMES[dtype]}, "
                                           "only with integers and bool")
        if dtype.is_complex and self.op in (ReduceOp.MIN, ReduceOp.MAX):
            raise UnsupportedArgumentError(f"{what}: complex numbers have no order, so no ReduceOp.{self.name}")
        return self.op


def _name(kind: Any) -> str:
    return str(kind).rpartition(".")[2]


_PLAIN: Final = {int(kind): Reduce(_name(kind), op) for kind, op in _OPS.items() if kind != TorchOp.PREMUL_SUM}
"""By the number of torch's operation."""


@functools.lru_cache(4096)
def _call_text(name: str, how: str, dtype: torch.dtype, count: object) -> str:
    """Return a call in an error's words, which are equal on all ranks if the ranks agree."""
    return f"{name}({how}{', ' if how else ''}{memory.NAMES[dtype]}[{count}])"


@functools.lru_cache(4096)
def _exchange_text(dtype: torch.dtype, each: int | None = None) -> str:
    """Like `_call_text`, of an alltoall: every rank gets `each` elements from every rank, or as many as the splits have."""
    return f"all_to_all({memory.NAMES[dtype]}; splits {'given' if each is None else f'of {each} elements'})"


def coalesced(tensor: torch.Tensor, reduce: Reduce) -> torch.Tensor:
    """Return this rank's contribution to a sum of sparse tensors (COO), in which each index occurs once.

    Raises:
        UnsupportedArgumentError: for another layout, device or operation.
    """
    if tensor.layout is not torch.sparse_coo or tensor.device.type != "cpu":
        raise UnsupportedArgumentError("all_reduce: only COO is supported of the sparse layouts, in host memory; this "
                                       f"tensor has {tensor.layout} on {tensor.device}")
    if reduce.op is not ReduceOp.SUM or reduce.prescale != 1.0:
        raise UnsupportedArgumentError(f"all_reduce: sparse tensors can be reduced with SUM only, not {reduce.name}")
    return tensor.detach().coalesce()


def sparse_text(tensor: torch.Tensor) -> str:
    """Like `_call_text`, of a sum of sparse tensors, such as the gradients of `nn.Embedding(sparse=True)`."""
    return f"all_reduce of a sparse tensor of shape {tuple(tensor.shape)}, {tensor.sparse_dim()} sparse dimensions"


class Operations:
    """Makes the operations of one rank of a group.

    Every method raises `UnsupportedArgumentError` for tensors that cannot be served, and `ValueError` for numbers of tensors
    or elements that do not fit.

    Args:
        rank: this rank's index in the group.
        size: number of ranks of the group.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def allreduce(self, tensors: Sequence[torch.Tensor], reduce: Reduce, name: str = "all_reduce") -> PreparedCall:
        """Reduce every tensor in place; tensors of one dtype together."""
        if len(tensors) == 1:  # the ordinary case
            memory.check(tensors[0], name)
            return _reduction(list(tensors), reduce, name)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            memory.check(tensor, name)
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        return joined([_reduction(members, reduce, name) for members in by_dtype.values()], list(tensors))

    def sparse_sum(self, tensor: torch.Tensor, own: torch.Tensor, counts: Sequence[int]) -> PreparedCall:
        """Replace a sparse tensor by the sum of all ranks' contributions.

        Args:
            own: this rank's contribution; see `coalesced`.
            counts: the ranks' numbers of values.
        """
        name, shape, total = sparse_text(own), own.shape, sum(counts)
        indices = torch.empty((total, own.sparse_dim()), dtype=torch.int64)
        values = torch.empty((total, *own.values().shape[1:]), dtype=own.dtype)
        gathered = [self.allgather(whole.split(list(counts)), part, name)
                    for whole, part in ((indices, own.indices().t()), (values, own.values()))]

        def finish() -> None:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=False).coalesce())

        return PreparedCall([operation for each in gathered for operation in each.operations], [tensor], finish)

    def reduce(self, tensor: torch.Tensor, root: int, reduce: Reduce) -> PreparedCall:
        """Reduce in place on the root; other ranks keep their values."""
        memory.check(tensor, "reduce")
        op, copies = reduce.on(tensor.dtype, "reduce"), Copies()
        array = memory.values(copies.room_with_values(tensor) if self._rank == root else copies.source(tensor))
        operation = Operation(
            collective=Collective.REDUCE,
            agreed=_call_text("reduce", f"{reduce.name}, to rank {root}", tensor.dtype, array.size),
            dtype=memory.NAMES[tensor.dtype], sources=[array], outputs=[array if self._rank == root else None], op=op,
            root=root, prescale=reduce.prescale)
        return copies.prepared(operation, [tensor])

    def broadcast(self, tensor: torch.Tensor, root: int) -> PreparedCall:
        """Copy the root's values to all ranks."""
        memory.check(tensor, "broadcast")
        copies = Copies()
        array = memory.memory(copies.source(tensor) if self._rank == root else copies.room(tensor))
        operation = Operation(
            collective=Collective.BROADCAST,
            agreed=_call_text("broadcast", f"from rank {root}", tensor.dtype, tensor.numel()),
            dtype="uint8", sources=[array], outputs=[array], root=root)
        return copies.prepared(operation, [tensor])

    def allgather(self, outputs: Sequence[torch.Tensor], own: torch.Tensor, name: str = "all_gather") -> PreparedCall:
        """Gather every rank's tensor in `outputs`; their numbers of elements may differ between ranks."""
        self._check_parts(outputs, name, own)
        rows = tuple(output.numel() for output in outputs)
        if own.numel() != rows[self._rank]:
            raise ArgumentError(f"{name}: this rank's tensor has {own.numel()} elements, and its place in the output "
                                f"{rows[self._rank]}; they must be equal")
        copies = Copies()
        return _gathering(copies, copies.room_for_all(outputs), own, rows, name, list(outputs))

    def allgather_single(self, output: torch.Tensor, own: torch.Tensor) -> PreparedCall:
        """Gather every rank's tensor, of equal size, in one."""
        name = "all_gather"
        self._check_like([output], own, name)
        if output.numel() != own.numel() * self._size:
            raise ArgumentError(f"{name}: output tensor size must be equal to world_size times input tensor size; the "
                                f"output has {output.numel()} elements, the input {own.numel()}, for {self._size} ranks")
        copies = Copies()
        return _gathering(copies, copies.room(output), own, (own.numel(),) * self._size, name, [output])

    def gather(self, outputs: Sequence[torch.Tensor] | None, own: torch.Tensor, root: int) -> PreparedCall:
        """Gather every rank's tensor on the root, which alone has `outputs`; all have the same number of elements."""
        memory.check(own, "gather")
        copies, target, count = Copies(), None, own.numel()
        if self._rank == root:
            outputs = outputs or []
            self._check_parts(outputs, "gather", own)
            _check_even(outputs, own, "gather")
            target = memory.memory(copies.room_for_all(outputs))
        operation = Operation(
            collective=Collective.GATHER, agreed=_call_text("gather", f"to rank {root}", own.dtype, count), dtype="uint8",
            sources=[memory.memory(copies.source(own))], outputs=[target], root=root,
            rows=(count * own.element_size(),) * self._size)
        return copies.prepared(operation, list(outputs or []))

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> PreparedCall:
        """Give every rank one of the tensors of the root, which alone has `inputs`; all have the same number of elements."""
        memory.check(output, "scatter")
        copies, sources = Copies(), []
        if self._rank == root:
            inputs = inputs or []
            self._check_parts(inputs, "scatter", output)
            _check_even(inputs, output, "scatter")
            sources = [memory.memory(copies.sources(inputs))]
        operation = Operation(
            collective=Collective.SCATTER, agreed=_call_text("scatter", f"from rank {root}", output.dtype, output.numel()),
            dtype="uint8", sources=sources, outputs=[memory.memory(copies.room(output))], root=root,
            rows=(output.numel() * output.element_size(),) * self._size)
        return copies.prepared(operation, [output])

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduce: Reduce) -> PreparedCall:
        """Reduce the ranks' lists of tensors; each rank gets one of the results. The tensors' sizes may differ."""
        name = "reduce_scatter"
        self._check_parts(inputs, name, output)
        rows = tuple(part.numel() for part in inputs)
        if output.numel() != rows[self._rank]:
            raise ArgumentError(f"{name}: the output has {output.numel()} elements, and this rank's tensor of the inputs "
                                f"{rows[self._rank]}; they must be equal")
        copies = Copies()
        return _scattering(copies, output, copies.sources(inputs), rows, reduce)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, reduce: Reduce) -> PreparedCall:
        """Reduce the ranks' tensors; each rank gets an equal part of the result."""
        self._check_like([source], output, "reduce_scatter")
        if source.numel() != output.numel() * self._size:
            raise ArgumentError("reduce_scatter: input tensor must be the same size as output size times world size; the "
                                f"input has {source.numel()} elements, the output {output.numel()}, for {self._size} ranks")
        copies = Copies()
        return _scattering(copies, output, copies.source(source), (output.numel(),) * self._size, reduce)

    def alltoall_single(self, output: torch.Tensor, source: torch.Tensor, output_splits: Sequence[int],
                        input_splits: Sequence[int]) -> PreparedCall:
        """Exchange rows of tensors; without splits every rank gets as many."""
        self._check_like([output], source, "all_to_all")
        received, sent = self._elements(output, output_splits, "output"), self._elements(source, input_splits, "input")
        is_even = not output_splits and not input_splits  # on this rank, and on all if the calls agree
        if is_even and received != sent:
            raise ArgumentError(f"all_to_all: the output has {output.numel()} elements, the input {source.numel()}; without "
                                "splits they must be equal")
        copies = Copies()
        exchange = _exchange(copies.room(output), copies.source(source), received, sent, is_even)
        return copies.prepared(exchange, [output])

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> PreparedCall:
        """Exchange lists of tensors of any sizes."""
        self._check_parts(inputs, "all_to_all")
        self._check_parts(outputs, "all_to_all", inputs[0])
        received, sent = ([part.numel() for part in parts] for parts in (outputs, inputs))
        copies = Copies()
        exchange = _exchange(copies.room_for_all(outputs), copies.sources(inputs), received, sent)
        return copies.prepared(exchange, list(outputs))

    def barrier(self) -> PreparedCall:
        """Wait until all ranks have come."""
        return PreparedCall([_BARRIER], [])

    def _elements(self, tensor: torch.Tensor, splits: Sequence[int], what: str) -> list[int]:
        """Return the elements for each rank of a tensor that is split along its first dimension."""
        length = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if length % self._size:
                raise ArgumentError(f"all_to_all: Tensor's dim 0 does not divide equally across group size: the {what} has "
                                    f"{length} rows for {self._size} ranks; pass {what}_split_sizes")
            return [tensor.numel() // self._size] * self._size
        if len(splits) != self._size or sum(splits) != length or min(splits) < 0:
            raise ArgumentError(f"all_to_all: Split sizes doesn't match total dim 0 size: the {what} has {length} rows for "
                                f"{self._size} ranks, the splits are {list(splits)}")
        per_row = tensor.numel() // length if length else 0
        return [split * per_row for split in splits]

    def _check_parts(self, parts: Sequence[torch.Tensor], name: str, like: torch.Tensor | None = None) -> None:
        """Check that there is a tensor for each rank, and that all are like another one, or like the first of them."""
        if len(parts) != self._size:
            raise ArgumentError(f"{name}: the list has {len(parts)} tensors; it needs one for each of {self._size} ranks")
        self._check_like(parts, parts[0] if like is None else like, name)

    def _check_like(self, tensors: Sequence[torch.Tensor], like: torch.Tensor, name: str) -> None:
        memory.check(like, name)
        for tensor in tensors:
            memory.check(tensor, name)
            if tensor.dtype is not like.dtype:
                raise ArgumentError(f"{name}: Invalid usage of tensors with different dtypes: {memory.NAMES[tensor.dtype]} "
                                    f"and {memory.NAMES[like.dtype]}")


def _reduction(tensors: list[torch.Tensor], reduce: Reduce, name: str) -> PreparedCall:
    """Return an allreduce of tensors of one dtype, in place."""
    dtype = tensors[0].dtype
    op, copies = reduce.on(dtype, name), Copies()
    arrays = [memory.values(copies.room_with_values(tensor)) for tensor in tensors]
    count = arrays[0].size if len(arrays) == 1 else f"{len(arrays)} tensors, {sum(array.size for array in arrays)}"
    operation = Operation(
        collective=Collective.ALLREDUCE, agreed=_call_text(name, reduce.name, dtype, count), dtype=memory.NAMES[dtype],
        sources=arrays, outputs=arrays, op=op, prescale=reduce.prescale)
    return copies.prepared(operation, tensors)


def _gathering(copies: Copies, whole: torch.Tensor, own: torch.Tensor, rows: tuple[int, ...], name: str,
               outputs: list[torch.Tensor]) -> PreparedCall:
    """Return an allgather, which writes to `whole`."""
    unit = own.element_size()
    operation = Operation(
        collective=Collective.ALLGATHER, agreed=_call_text(name, "", own.dtype, _counted(rows)), dtype="uint8",
        sources=[memory.memory(copies.source(own))], outputs=[memory.memory(whole)],
        rows=tuple(row * unit for row in rows))
    return copies.prepared(operation, outputs)


def _scattering(copies: Copies, output: torch.Tensor, source: torch.Tensor, rows: tuple[int, ...],
                reduce: Reduce) -> PreparedCall:
    """Return a reducescatter of what `source` has when its turn comes."""
    op = reduce.on(output.dtype, "reduce_scatter")
    operation = Operation(
        collective=Collective.REDUCESCATTER, agreed=_call_text("reduce_scatter", reduce.name, output.dtype, _counted(rows)),
        dtype=memory.NAMES[output.dtype], sources=[memory.values(source)], outputs=[memory.values(copies.room(output))],
        op=op, rows=rows, prescale=reduce.prescale)
    return copies.prepared(operation, [output])


def _counted(rows: Sequence[int]) -> object:
    """Return the ranks' numbers of elements as a call shows them."""
    return rows[0] if len(set(rows)) == 1 else ", ".join(map(str, rows))


_BARRIER: Final = Operation(collective=Collective.BARRIER, agreed="barrier()", dtype="uint8")
MONITORED_BARRIER: Final = Operation(collective=Collective.BARRIER, agreed="monitored_barrier()", dtype="uint8")


def _exchange(output: torch.Tensor, source: torch.Tensor, received: Sequence[int], sent: Sequence[int],
              is_even: bool = False) -> Operation:
    """Return an alltoall; without `is_even` the ranks exchange how much they send."""
    unit, arrays = source.element_size(), (memory.memory(source), memory.memory(output))
    if is_even:
        return Operation(
            collective=Collective.ALLTOALL, agreed=_exchange_text(source.dtype, sent[0]),
            dtype="uint8", sources=arrays[:1], outputs=arrays[1:], rows=(sent[0] * unit,) * len(sent))
    return Operation(
        collective=Collective.ALLTOALL, agreed=_exchange_text(source.dtype), dtype="uint8",
        sources=arrays[:1], outputs=arrays[1:], sent=tuple(count * unit for count in sent),
        received=tuple(count * unit for count in received))


def _check_even(parts: Sequence[torch.Tensor], like: torch.Tensor, name: str) -> None:
    for index, part in enumerate(parts):
        if part.numel() != like.numel():
            raise ArgumentError(f"{name}: tensor {index} of the list has {part.numel()} elements, this rank's tensor "
                                f"{like.numel()}; all must be equal")

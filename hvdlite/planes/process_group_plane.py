"""Collectives over a message-passing library: the plane that MPI and Gloo share.

Each process set has a `ProcessGroup` of the library. Reductions that the library supports are done in place: in the bucket,
in a single tensor's output, or in a buffer into which several tensors are packed. The others are reduced by slices: 16-bit
floats (summed in float32), averages of integers (sums may exceed the dtype), minima and maxima of floats (libraries lose
NaNs), and Adasum.

    alltoall   every rank sends each other rank the slice that it owns, in the tensor's own dtype
    combine    every rank reduces its slice over all contributors in rank order, like every plane
    allgather  the results

This transfers as many bytes as a ring. All ranks get the same bits; the order of the library's own sums is the library's.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES, Array, aligned_zeros, identity
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.planes.adasum import AdasumReduction
from hvdlite.planes.arithmetic import Casts, Reduction
from hvdlite.planes.base import CHUNK_KNOB, FusionBuffer, Plan, WaitUntil
from hvdlite.planes.process_group import Connect, ProcessGroup
from hvdlite.planes.slices import Concatenation, row_bounds, slice_bounds

PIECE = 64 << 20
"""Bytes of a tensor that is reduced by slices at a time."""


class ProcessGroupPlane:
    """Implements `Plane` over the process groups of a library.

    Args:
        connect: creates the process group of a process set.
        chunk: bytes reduced per NumPy call.
    """

    def __init__(self, name: str, rank: int, connect: Connect, *, chunk: int, casts: Casts | None = None) -> None:
        self.name = name
        self._rank, self._connect, self._chunk = rank, connect, chunk
        self._casts = casts or Casts.of_numpy()
        self._groups: dict[int, ProcessGroup] = {}  # made when they are first needed
        self._scratch_memory = np.empty(0, np.uint8)

    def execute(self, plan: Plan, wait_until: WaitUntil) -> None:
        process_set_id, collective = plan.response.process_set_id, plan.response.collective
        if collective in (Collective.ALLREDUCE, Collective.REDUCE) and not plan.response.contributors:
            return
        if process_set_id not in self._groups:
            self._groups[process_set_id] = self._connect(process_set_id, plan.ranks, wait_until)
        operation = _Operation(plan, plan.ranks.index(self._rank), self._groups[process_set_id], self._scratch, self._chunk,
                               self._casts, wait_until)
        match collective:
            case (Collective.ALLREDUCE | Collective.REDUCE) if plan.response.op is ReduceOp.ADASUM:
                operation.adasum()
            case Collective.ALLREDUCE | Collective.REDUCE:
                operation.reduce()
            case Collective.REDUCESCATTER:
                operation.reducescatter()
            case Collective.BROADCAST:
                operation.broadcast()
            case Collective.ALLGATHER | Collective.GATHER:
                operation.gather()
            case Collective.SCATTER:
                operation.scatter()
            case Collective.ALLTOALL:
                operation.alltoall()
            case Collective.SEND:
                operation.send()

    def add_process_set(self, process_set_id: int, ranks: tuple[int, ...]) -> None:
        pass

    def remove_process_set(self, process_set_id: int, wait_until: WaitUntil) -> None:
        group = self._groups.pop(process_set_id, None)
        if group is not None:
            group.close()

    def fusion_buffer(self, nbytes: int, ranks: tuple[int, ...]) -> FusionBuffer | None:
        return FusionBuffer(aligned_zeros(nbytes)) if self._rank in ranks else None

    def staging_bytes(self) -> int:
        return self._scratch_memory.nbytes

    def tune(self, settings: Mapping[str, int]) -> None:
        self._chunk = settings.get(CHUNK_KNOB, self._chunk)

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # release everything, even when a group raises
            for group in self._groups.values():
                closing.callback(group.close)
            self._groups.clear()

    def _scratch(self, count: int, dtype: np.dtype[np.generic]) -> Array:
        """Return scratch memory for the current plan; every call returns the same memory."""
        if self._scratch_memory.size < count * dtype.itemsize:
            self._scratch_memory = aligned_zeros(count * dtype.itemsize)
        return self._scratch_memory[:count * dtype.itemsize].view(dtype)


class _Operation:
    """The execution of one plan over a process group."""

    def __init__(self, plan: Plan, index: int, group: ProcessGroup, scratch: Callable[[int, np.dtype[np.generic]], Array],
                 chunk: int, casts: Casts, wait_until: WaitUntil) -> None:
        self._plan, self._response, self._group, self._wait_until = plan, plan.response, group, wait_until
        self._index, self._size = index, len(plan.ranks)
        self._dtype = SUPPORTED_DTYPES[plan.response.dtype]
        self._scratch, self._casts, self._chunk = scratch, casts, chunk
        self._contributes = bool(plan.sources) and plan.ranks[index] in plan.response.contributors

    @property
    def _root(self) -> int:
        return self._plan.ranks.index(self._response.root_rank)

    @property
    def _contributors(self) -> list[int]:
        return [self._plan.ranks.index(rank) for rank in self._response.contributors]

    # --- reductions ------------------------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Allreduce or reduce; for reduce, only the root has outputs."""
        everywhere = self._response.collective is Collective.ALLREDUCE
        receives = bool(self._plan.outputs) and (everywhere or self._index == self._root)
        outputs = self._plan.outputs if receives else ()
        reduction = self._reduction()
        if not self._native():
            self._reduce_slices(reduction, Concatenation(outputs) if receives else None)
            return
        values = self._packed(reduction, outputs)
        if everywhere:
            self._group.allreduce(values, self._library_op(), self._wait_until)
        else:
            self._group.reduce(values, self._library_op(), self._root, self._wait_until)
        if receives:
            reduction.finish(values, values)
            _unpack(values, outputs)

    def reducescatter(self) -> None:
        reduction, bounds = self._reduction(), row_bounds(self._response)
        out = self._plan.outputs[0] if self._plan.outputs else np.empty(bounds[self._index + 1] - bounds[self._index],
                                                                        self._dtype)
        assert out is not None
        if not self._native():
            source = Concatenation(self._plan.sources) if self._contributes else None
            reduction.combine(self._slices(reduction, source, 0, bounds), out)
            return
        values = self._packed(reduction, ())
        self._group.reduce_scatter(values, bounds, out, self._library_op(), self._wait_until)
        reduction.finish(out, out)

    def adasum(self) -> None:
        """Compute and sum the inner products of all slices, then reduce by weighted sums; many tensors at a time."""
        receives = self._response.collective is Collective.ALLREDUCE or self._index == self._root
        for first, last in _batches(self._response.rows, PIECE // self._dtype.itemsize):
            rows = self._response.rows[first:last]
            adasum = AdasumReduction(self._response, self._dtype, self._chunk // self._dtype.itemsize, self._casts, rows)
            sources = Concatenation(self._plan.sources[first:last]) if self._contributes else None
            outputs = Concatenation(self._plan.outputs[first:last]) if self._plan.outputs and receives else None
            bounds = slice_bounds(0, sum(rows), self._size, self._dtype)
            begin = bounds[self._index]
            slices = self._slices(adasum, sources, 0, bounds)
            products = adasum.products(slices, begin)
            self._group.allreduce(products.reshape(-1), ReduceOp.SUM, self._wait_until)
            adasum.set_weights(products)
            self._combine(functools.partial(adasum.combine, begin=begin), slices, outputs, 0, bounds)

    def _reduction(self) -> Reduction:
        return Reduction(self._response, self._dtype, self._size, self._chunk // self._dtype.itemsize, self._casts)

    def _native(self) -> bool:
        if self._response.op is ReduceOp.AVERAGE and self._dtype.kind in "iu":
            return False  # a library's sum wraps
        nbytes = self._total() * self._dtype.itemsize
        return self._group.reduces(self._response.collective, self._library_op(), self._dtype, nbytes)

    def _total(self) -> int:
        """Return the number of elements of all tensors; equal on all ranks."""
        given = self._plan.sources if self._contributes else self._plan.outputs
        sizes = [tensor.size for tensor in given if tensor is not None]
        return sum(sizes) if sizes else self._response.elements

    def _library_op(self) -> ReduceOp:
        return ReduceOp.SUM if self._response.op is ReduceOp.AVERAGE else self._response.op

    def _packed(self, reduction: Reduction, outputs: Sequence[Array | None]) -> Array:
        """Return this rank's tensors concatenated and prescaled; a single tensor is packed into its own output."""
        sources = self._plan.sources
        single = outputs[0] if len(outputs) == 1 else None
        values = self._scratch(self._total(), self._dtype) if single is None else single
        if not self._contributes:
            values[...] = identity(self._library_op(), self._dtype)
            return values
        begin = 0
        for source in sources:
            assert source is not None, "a contributor has every tensor of the response"
            reduction.copy_prescaled(source, values[begin:begin + source.size] if len(sources) > 1 else values)
            begin += source.size
        return values

    def _reduce_slices(self, reduction: Reduction, outputs: Concatenation | None) -> None:
        sources = Concatenation(self._plan.sources) if self._contributes else None
        total, per_piece = self._total(), PIECE // self._dtype.itemsize
        for low in range(0, total, per_piece):
            bounds = slice_bounds(low, min(low + per_piece, total), self._size, self._dtype)
            self._combine(reduction.combine, self._slices(reduction, sources, low, bounds), outputs, low, bounds)

    def _slices(self, reduction: Reduction | AdasumReduction, sources: Concatenation | None, low: int,
                bounds: Sequence[int]) -> list[Array]:
        """Return every contributor's values of this rank's slice of elements bounds[0]..bounds[-1], prescaled."""
        relative = [bound - low for bound in bounds]
        values = np.empty(0, self._dtype)
        if sources is not None:
            values = reduction.prescaled(sources.contiguous(low, bounds[-1]))
        mine = bounds[self._index + 1] - bounds[self._index]
        contributors = self._contributors
        received = self._scratch(mine * len(contributors), self._dtype)
        out_bounds = [0, *itertools.accumulate(mine if rank in contributors else 0 for rank in range(self._size))]
        largest = max(end - begin for begin, end in itertools.pairwise(bounds))
        max_count = max(relative[-1], largest * len(contributors))
        self._group.alltoall(values, relative if sources is not None else [0] * (self._size + 1), received, out_bounds,
                             max_count, self._wait_until)
        return [received[at * mine:(at + 1) * mine] for at in range(len(contributors))]

    def _combine(self, combine: Callable[[list[Array], Array], None], slices: list[Array], outputs: Concatenation | None,
                 low: int, bounds: Sequence[int]) -> None:
        """Reduce this rank's slice, and send the result to the ranks that have outputs."""
        relative = [bound - low for bound in bounds]
        single = outputs.single(low, bounds[-1]) if outputs is not None else None
        whole = single
        if whole is None and (outputs is not None or self._response.collective is Collective.ALLREDUCE):
            whole = np.empty(relative[-1], self._dtype)
        result = np.empty(slices[0].size, self._dtype) if whole is None else whole[relative[self._index]:
                                                                                   relative[self._index + 1]]
        combine(slices, result)
        if self._response.collective is Collective.ALLREDUCE:
            assert whole is not None
            self._group.allgather(result, whole, relative, self._wait_until)
        else:
            self._group.gather(result, whole, relative, self._root, self._wait_until)
        if outputs is not None and single is None:
            assert whole is not None
            for start, stop, part in outputs.parts(low, bounds[-1], max(1, relative[-1])):
                np.copyto(part, whole[start - low:stop - low])

    # --- moves -----------------------------------------------------------------------------------------------------

    def broadcast(self) -> None:
        outputs, sources = self._plan.outputs, self._plan.sources
        is_root = self._index == self._root
        if len(outputs) == 1 and outputs[0] is not None:
            values = outputs[0]
            if is_root and sources[0] is not values:
                np.copyto(values, sources[0])
            self._group.broadcast(_bytes(values), self._root, self._wait_until)
            return
        total = sum(output.size for output in outputs if output is not None) if outputs else self._response.elements
        values = self._scratch(total, self._dtype)
        if is_root:
            Concatenation(sources).copy_to(0, total, values)
        self._group.broadcast(_bytes(values), self._root, self._wait_until)
        if not is_root or sources is not outputs:
            _unpack(values, outputs)

    def gather(self) -> None:
        """Allgather or gather; for gather, only the root has an output."""
        bounds = self._row_bytes()
        own = self._source()
        output = self._plan.outputs[0] if self._plan.outputs else None
        if self._response.collective is Collective.GATHER:
            out = None if output is None else _bytes(output)
            self._group.gather(own, out, bounds, self._root, self._wait_until)
        else:
            out = np.empty(bounds[-1], np.uint8) if output is None else _bytes(output)
            self._group.allgather(own, out, bounds, self._wait_until)

    def scatter(self) -> None:
        bounds = self._row_bytes()
        values = self._source() if self._index == self._root else None
        output = self._plan.outputs[0] if self._plan.outputs else None
        out = np.empty(bounds[self._index + 1] - bounds[self._index], np.uint8) if output is None else _bytes(output)
        self._group.scatter(values, out, bounds, self._root, self._wait_until)

    def alltoall(self) -> None:
        unit, splits = self._response.row_elements * self._dtype.itemsize, self._plan.splits
        assert splits is not None
        sent, received = (np.array(rows, np.int64) * unit for rows in (splits.send_rows, splits.recv_rows))
        # A rank that has joined discards the data that it receives.
        out = self._plan.outputs[0] if self._plan.outputs else np.empty(int(received.sum()), np.uint8)
        assert out is not None
        self._group.alltoall(self._source()[:int(sent.sum())], _bounds(sent), _bytes(out), _bounds(received),
                             max(self._response.rows) * unit, self._wait_until)

    def send(self) -> None:
        """Send from the root to the other rank of the pair."""
        output = self._plan.outputs[0] if self._plan.outputs else None
        values = self._source() if self._index == self._root else None if output is None else _bytes(output)
        if values is not None:
            self._group.broadcast(values, self._root, self._wait_until)

    def _source(self) -> Array:
        source = self._plan.sources[0] if self._plan.sources else None
        return np.empty(0, np.uint8) if source is None else _bytes(source)

    def _row_bytes(self) -> list[int]:
        return [bound * self._dtype.itemsize for bound in row_bounds(self._response)]


def _bounds(counts: Array) -> list[int]:
    return [0, *np.cumsum(counts).tolist()]


def _bytes(values: Array) -> Array:
    return values.view(np.uint8)


def _batches(rows: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of tensors with at most `limit` elements in total, or of a single larger tensor."""
    first = total = 0
    for index, count in enumerate(rows):
        if total and total + count > limit:
            yield first, index
            first, total = index, 0
        total += count
    if total:
        yield first, len(rows)


def _unpack(values: Array, outputs: Sequence[Array | None]) -> None:
    """Copy the packed tensors to their outputs, unless the packed memory is the output."""
    begin = 0
    for output in outputs:
        assert output is not None
        if output is not values:
            np.copyto(output, values[begin:begin + output.size])
        begin += output.size

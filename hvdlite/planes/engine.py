"""Collectives over a library that moves messages between processes: what MPI and Gloo have in common.

A `Link` is such a library's group of processes for one process set. What it can reduce itself is given to it in place: in
the bucket, in a single tensor's output, or in a buffer into which several tensors are packed. The rest (16-bit floats, whose
sums are kept in float32, averages of integers, whose sums may not fit into their dtype, minima of floats, whose NaNs
libraries lose, and Adasum) is reduced by slices:

    exchange   every rank sends each other rank the slice that it owns, in the tensor's own dtype
    combine    every rank reduces its slice over all contributors in rank order, as all planes do it
    allgather  the results

which moves as many bytes as a ring does. Every rank gets the same bits; what the library sums itself depends on its order.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES, Array, aligned_zeros, identity
from hvdlite.core.errors import HorovodInternalError
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.planes.adasum import AdaptiveSum
from hvdlite.planes.arithmetic import Casts, Reduction
from hvdlite.planes.base import FusionBuffer, Plan, WaitUntil
from hvdlite.planes.slices import Concatenation, row_bounds, slice_bounds

ACCOUNT_SECONDS: Final = 3.0
"""How long the control plane gets to say who died, once a library has noticed that something is wrong."""
PIECE = 64 << 20
"""Bytes of a tensor that is reduced by slices at a time."""


class Link(Protocol):
    """One process set's way through a library. Ranks are indices in the set; all make the same calls in the same order.

    Arrays are flat and contiguous. Bounds say where each rank's part begins, in elements, and where the last one ends.
    """

    def reduces(self, collective: Collective, op: ReduceOp, dtype: np.dtype[np.generic], nbytes: int) -> bool:
        """Return whether the library should do a reduction: then with the same result on all ranks, NaNs included."""

    def allreduce(self, values: Array, op: ReduceOp, wait_until: WaitUntil) -> None:
        """Reduce in place; `op` is never Average."""

    def reduce(self, values: Array, op: ReduceOp, root: int, wait_until: WaitUntil) -> None:
        """Like `allreduce`; `values` has the result on the root, and nothing of use elsewhere."""

    def reduce_scatter(self, values: Array, bounds: Sequence[int], out: Array, op: ReduceOp, wait_until: WaitUntil) -> None:
        """Reduce each rank's part of `values` into its `out`."""

    def broadcast(self, values: Array, root: int, wait_until: WaitUntil) -> None:
        """Copy the root's values to everybody."""

    def allgather(self, own: Array, out: Array, bounds: Sequence[int], wait_until: WaitUntil) -> None:
        """Put every rank's `own` into its part of `out`; `own` may lie there already."""

    def gather(self, own: Array, out: Array | None, bounds: Sequence[int], root: int, wait_until: WaitUntil) -> None:
        """Like `allgather`, on the root only."""

    def scatter(self, values: Array | None, out: Array, bounds: Sequence[int], root: int, wait_until: WaitUntil) -> None:
        """Put a rank's part of the root's values into its `out`."""

    def exchange(self, values: Array, bounds: Sequence[int], out: Array, out_bounds: Sequence[int], most: int,
                 wait_until: WaitUntil) -> None:
        """Send every rank its part of `values`; put what each sends into its part of `out`.

        No rank sends or receives more than `most` elements, which is the same number on all ranks.
        """

    def close(self) -> None:
        """Give it up."""


Connect = Callable[[int, tuple[int, ...], WaitUntil], Link]
"""Make the link of a process set, by its id and ranks; its members call this at the same place of their plans."""


def explained(engine: str, ranks: Sequence[int], error: Exception, wait_until: WaitUntil) -> HorovodInternalError:
    """Wait for the control plane to say who died, which raises; else return what the library says as an error of ours."""
    deadline = time.monotonic() + ACCOUNT_SECONDS
    wait_until(lambda: time.monotonic() >= deadline)
    return HorovodInternalError(f"{engine} failed between ranks {list(ranks)}, though all of them are alive: {error}. Is "
                                "there a firewall between the hosts, or the wrong network chosen?")


class EnginePlane:
    """Like `LoopbackPlane`, over links.

    Args:
        chunk: bytes reduced per NumPy call.
        disconnect: ends the library's part when the plane is closed.
    """

    def __init__(self, name: str, rank: int, connect: Connect, *, chunk: int, casts: Casts | None = None,
                 disconnect: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self._rank, self._connect, self._disconnect = rank, connect, disconnect
        self._chunk = chunk
        self._casts = casts or Casts.of_numpy()
        self._links: dict[int, Link] = {}  # made when they are first needed
        self._room = np.empty(0, np.uint8)

    def execute(self, plan: Plan, wait_until: WaitUntil) -> None:
        number, collective = plan.response.process_set, plan.response.collective
        if collective in (Collective.ALLREDUCE, Collective.REDUCE) and not plan.response.contributors:
            return
        if number not in self._links:
            self._links[number] = self._connect(number, plan.ranks, wait_until)
        work = _Work(plan, plan.ranks.index(self._rank), self._links[number], self._scratch, self._chunk, self._casts,
                     wait_until)
        match collective:
            case (Collective.ALLREDUCE | Collective.REDUCE) if plan.response.op is ReduceOp.ADASUM:
                work.adasum()
            case Collective.ALLREDUCE | Collective.REDUCE:
                work.reduce()
            case Collective.REDUCESCATTER:
                work.reducescatter()
            case Collective.BROADCAST:
                work.broadcast()
            case Collective.ALLGATHER | Collective.GATHER:
                work.gather()
            case Collective.SCATTER:
                work.scatter()
            case Collective.ALLTOALL:
                work.alltoall()
            case Collective.SEND:
                work.send()

    def open_set(self, number: int, ranks: tuple[int, ...]) -> None:
        pass

    def close_set(self, number: int, wait_until: WaitUntil) -> None:
        link = self._links.pop(number, None)
        if link is not None:
            link.close()

    def fusion_buffer(self, nbytes: int, ranks: tuple[int, ...]) -> FusionBuffer | None:
        return FusionBuffer(aligned_zeros(nbytes)) if self._rank in ranks else None

    def tune(self, settings: Mapping[str, int]) -> None:
        self._chunk = settings.get("shm_chunk", self._chunk)

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # all of it, even when a link raises
            closing.callback(self._disconnect)
            for link in self._links.values():
                closing.callback(link.close)
            self._links.clear()

    def _scratch(self, count: int, dtype: np.dtype[np.generic]) -> Array:
        """Return memory for this plan, the same every time it is asked for."""
        if self._room.size < count * dtype.itemsize:
            self._room = aligned_zeros(count * dtype.itemsize)
        return self._room[:count * dtype.itemsize].view(dtype)


class _Work:
    """One plan on its way through a link."""

    def __init__(self, plan: Plan, index: int, link: Link, scratch: Callable[[int, np.dtype[np.generic]], Array], chunk: int,
                 casts: Casts, wait_until: WaitUntil) -> None:
        self._plan, self._response, self._link, self._wait_until = plan, plan.response, link, wait_until
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
        """Allreduce, or reduce: then only the root has outputs."""
        everywhere = self._response.collective is Collective.ALLREDUCE
        receives = bool(self._plan.outputs) and (everywhere or self._index == self._root)
        outputs = self._plan.outputs if receives else ()
        reduction = self._reduction()
        if not self._native():
            self._reduce_slices(reduction, Concatenation(outputs) if receives else None)
            return
        values = self._packed(reduction, outputs)
        if everywhere:
            self._link.allreduce(values, self._engine_op(), self._wait_until)
        else:
            self._link.reduce(values, self._engine_op(), self._root, self._wait_until)
        if receives:
            reduction.conclude(values, values)
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
        self._link.reduce_scatter(values, bounds, out, self._engine_op(), self._wait_until)
        reduction.conclude(out, out)

    def adasum(self) -> None:
        """Measure the inner products slice by slice, add them up, then weighted sums by slices; many tensors at a time."""
        receives = self._response.collective is Collective.ALLREDUCE or self._index == self._root
        for first, last in _batches(self._response.rows, PIECE // self._dtype.itemsize):
            rows = self._response.rows[first:last]
            adaptive = AdaptiveSum(self._response, self._dtype, self._chunk // self._dtype.itemsize, self._casts, rows)
            sources = Concatenation(self._plan.sources[first:last]) if self._contributes else None
            outputs = Concatenation(self._plan.outputs[first:last]) if self._plan.outputs and receives else None
            bounds = slice_bounds(0, sum(rows), self._size, self._dtype)
            begin = bounds[self._index]
            slices = self._slices(adaptive, sources, 0, bounds)
            products = adaptive.products(slices, begin)
            self._link.allreduce(products.reshape(-1), ReduceOp.SUM, self._wait_until)
            adaptive.weigh(products)
            self._combine(functools.partial(adaptive.combine, begin=begin), slices, outputs, 0, bounds)

    def _reduction(self) -> Reduction:
        return Reduction(self._response, self._dtype, self._size, self._chunk // self._dtype.itemsize, self._casts)

    def _native(self) -> bool:
        if self._response.op is ReduceOp.AVERAGE and self._dtype.kind in "iu":
            return False  # a library's sum wraps
        nbytes = self._total() * self._dtype.itemsize
        return self._link.reduces(self._response.collective, self._engine_op(), self._dtype, nbytes)

    def _total(self) -> int:
        """Return the elements of all tensors, which is the same on all ranks."""
        given = self._plan.sources if self._contributes else self._plan.outputs
        sizes = [tensor.size for tensor in given if tensor is not None]
        return sum(sizes) if sizes else self._response.elements

    def _engine_op(self) -> ReduceOp:
        return ReduceOp.SUM if self._response.op is ReduceOp.AVERAGE else self._response.op

    def _packed(self, reduction: Reduction, outputs: Sequence[Array | None]) -> Array:
        """Return this rank's tensors one after the other, scaled: in the output itself when there is just one."""
        sources = self._plan.sources
        single = outputs[0] if len(outputs) == 1 else None
        values = self._scratch(self._total(), self._dtype) if single is None else single
        if not self._contributes:
            values[...] = identity(self._engine_op(), self._dtype)
            return values
        begin = 0
        for source in sources:
            assert source is not None, "a contributor has every tensor of the response"
            reduction.place(source, values[begin:begin + source.size] if len(sources) > 1 else values)
            begin += source.size
        return values

    def _reduce_slices(self, reduction: Reduction, outputs: Concatenation | None) -> None:
        sources = Concatenation(self._plan.sources) if self._contributes else None
        total, per_piece = self._total(), PIECE // self._dtype.itemsize
        for low in range(0, total, per_piece):
            bounds = slice_bounds(low, min(low + per_piece, total), self._size, self._dtype)
            self._combine(reduction.combine, self._slices(reduction, sources, low, bounds), outputs, low, bounds)

    def _slices(self, reduction: Reduction | AdaptiveSum, sources: Concatenation | None, low: int,
                bounds: Sequence[int]) -> list[Array]:
        """Return what each contributor has of this rank's slice of elements bounds[0]..bounds[-1], scaled."""
        relative = [bound - low for bound in bounds]
        values = np.empty(0, self._dtype)
        if sources is not None:
            values = reduction.placed(sources.contiguous(low, bounds[-1]))
        mine = bounds[self._index + 1] - bounds[self._index]
        contributors = self._contributors
        received = self._scratch(mine * len(contributors), self._dtype)
        out_bounds = [0, *itertools.accumulate(mine if rank in contributors else 0 for rank in range(self._size))]
        largest = max(end - begin for begin, end in itertools.pairwise(bounds))
        most = max(relative[-1], largest * len(contributors))
        self._link.exchange(values, relative if sources is not None else [0] * (self._size + 1), received, out_bounds, most,
                            self._wait_until)
        return [received[at * mine:(at + 1) * mine] for at in range(len(contributors))]

    def _combine(self, combine: Callable[[list[Array], Array], None], slices: list[Array], outputs: Concatenation | None,
                 low: int, bounds: Sequence[int]) -> None:
        """Reduce this rank's slice, and hand the results to those who want them."""
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
            self._link.allgather(result, whole, relative, self._wait_until)
        else:
            self._link.gather(result, whole, relative, self._root, self._wait_until)
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
            self._link.broadcast(_bytes(values), self._root, self._wait_until)
            return
        total = sum(output.size for output in outputs if output is not None) if outputs else self._response.elements
        values = self._scratch(total, self._dtype)
        if is_root:
            Concatenation(sources).copy_to(0, total, values)
        self._link.broadcast(_bytes(values), self._root, self._wait_until)
        if not is_root or sources is not outputs:
            _unpack(values, outputs)

    def gather(self) -> None:
        """Allgather, or gather: then only the root has an output."""
        bounds = self._in_bytes(row_bounds(self._response))
        own = self._source()
        output = self._plan.outputs[0] if self._plan.outputs else None
        if self._response.collective is Collective.GATHER:
            out = None if output is None else _bytes(output)
            self._link.gather(own, out, bounds, self._root, self._wait_until)
        else:
            out = np.empty(bounds[-1], np.uint8) if output is None else _bytes(output)
            self._link.allgather(own, out, bounds, self._wait_until)

    def scatter(self) -> None:
        bounds = self._in_bytes(row_bounds(self._response))
        values = self._source() if self._index == self._root else None
        output = self._plan.outputs[0] if self._plan.outputs else None
        out = np.empty(bounds[self._index + 1] - bounds[self._index], np.uint8) if output is None else _bytes(output)
        self._link.scatter(values, out, bounds, self._root, self._wait_until)

    def alltoall(self) -> None:
        unit, exchange = self._response.row_elements * self._dtype.itemsize, self._plan.exchange
        assert exchange is not None
        sent, received = (np.array(rows, np.int64) * unit for rows in (exchange.sent, exchange.received))
        # What the others send to a rank that has joined is not kept.
        out = self._plan.outputs[0] if self._plan.outputs else np.empty(int(received.sum()), np.uint8)
        assert out is not None
        self._link.exchange(self._source()[:int(sent.sum())], _bounds(sent), _bytes(out), _bounds(received),
                            max(self._response.rows) * unit, self._wait_until)

    def send(self) -> None:
        """From the root to the other one."""
        output = self._plan.outputs[0] if self._plan.outputs else None
        values = self._source() if self._index == self._root else None if output is None else _bytes(output)
        if values is not None:
            self._link.broadcast(values, self._root, self._wait_until)

    def _source(self) -> Array:
        source = self._plan.sources[0] if self._plan.sources else None
        return np.empty(0, np.uint8) if source is None else _bytes(source)

    def _in_bytes(self, bounds: Sequence[int]) -> list[int]:
        return [bound * self._dtype.itemsize for bound in bounds]


def _bounds(counts: Array) -> list[int]:
    return [0, *np.cumsum(counts).tolist()]


def _bytes(values: Array) -> Array:
    return values.view(np.uint8)


def _batches(rows: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Yield first..last of tensors with at most `limit` elements together, or of one that has more."""
    first = total = 0
    for index, count in enumerate(rows):
        if total and total + count > limit:
            yield first, index
            first, total = index, 0
        total += count
    if total:
        yield first, len(rows)


def _unpack(values: Array, outputs: Sequence[Array | None]) -> None:
    """Copy what was packed to where it belongs, unless it lies there."""
    begin = 0
    for output in outputs:
        assert output is not None
        if output is not values:
            np.copyto(output, values[begin:begin + output.size])
        begin += output.size

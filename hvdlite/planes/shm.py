"""Shared memory on one host: every rank reduces a slice of each piece, straight from the others' staging slots.

One piece (at most a slot) of an allreduce, on every rank:

    publish   copy the slices that others own into the own slot           (the own slice stays private)
    barrier
    reduce    the own slice, over all contributors in rank order, into the own slot; copy it to the output
    barrier
    collect   copy the other slices' results from their owners' slots

A bucket of a fusion buffer lies in shared memory already, on every rank: the decision that releases it was the first
barrier, every rank reduces its slice and writes the result into all ranks' slots, and one barrier ends it.

A small piece is published whole and reduced by everybody: no second barrier, and no result in shared memory. The other
collectives are cut from the same cloth: publish what others need, barrier, take what is yours.

Rules (docs/protocol.md#staging-regions, #same-bits)
- A process set has its own counters and slots, so sets that overlap do not touch each other's memory.
- Pieces alternate between two regions. A slot of a region is written again two pieces later; every rank has by then
  passed a barrier that all ranks of the set entered after their last read of it.
- Which bytes are whose depends only on the response, so all ranks agree without a word.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from hvdlite.core.array import ALIGNMENT, SUPPORTED_DTYPES, Array
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.negotiation.messages import Response
from hvdlite.planes.adasum import AdaptiveSum
from hvdlite.planes.arithmetic import Casts, Reduction
from hvdlite.planes.base import FusionBuffer, Part, Plan, WaitUntil
from hvdlite.planes.shm_barrier import Barrier


class StagingSegment(Protocol):
    """What a process set needs of `memory.Segment`."""

    slot: int
    arrivals: Array

    @property
    def fence(self) -> Callable[[], None] | None: ...

    @property
    def flush(self) -> Callable[[], None]: ...

    def staging(self, index: int, region: int) -> Array: ...

    def reserve(self, region: int, nbytes: int) -> None: ...

    def release(self) -> None: ...

    def close(self) -> None: ...


class Memory(Protocol):
    """What the plane needs of `memory.SharedMemory`."""

    def segment(self, ranks: Sequence[int], slot: int) -> StagingSegment | None: ...

    def window(self, nbytes: int, ranks: Sequence[int]) -> list[Array]: ...

    def close(self) -> None: ...


class ShmPlane:
    """Collectives of the ranks of one host through shared staging slots.

    Args:
        ring: wakes another rank that may be waiting at a barrier.
        slot: bytes of one staging slot.
        chunk: bytes reduced per NumPy call.
        direct: up to this many bytes every rank reduces everything.
    """

    name = "shm"

    def __init__(self, rank: int, memory: Memory, ring: Callable[[int], None], *, slot: int, chunk: int, direct: int,
                 casts: Casts | None = None) -> None:
        self._rank = rank
        self._memory, self._ring = memory, ring
        self._slot, self._chunk, self._direct = slot, chunk, direct
        self._casts = casts or Casts.of_numpy()
        self._groups: dict[int, Group] = {}  # the process sets this rank is in

    def execute(self, plan: Plan, wait_until: WaitUntil) -> None:
        group = self._groups[plan.response.process_set]
        match plan.response.collective:
            case Collective.ALLREDUCE if plan.part is not None:
                self._allreduce_in_place(group, plan.part, plan.response, wait_until)
            case Collective.ALLREDUCE | Collective.REDUCE if plan.response.op is ReduceOp.ADASUM:
                self._adasum(group, plan, wait_until)
            case Collective.ALLREDUCE | Collective.REDUCE:
                self._reduce(group, plan, wait_until)
            case Collective.REDUCESCATTER:
                self._reducescatter(group, plan, wait_until)
            case Collective.BROADCAST:
                self._broadcast(group, plan, wait_until)
            case _:
                self._exchange(group, plan, wait_until)

    def open_set(self, number: int, ranks: tuple[int, ...]) -> None:
        segment = self._memory.segment(ranks, self._slot)
        if segment is not None:
            self._groups[number] = Group(self._rank, ranks, segment, self._ring)

    def close_set(self, number: int, wait_until: WaitUntil) -> None:
        group = self._groups.pop(number, None)
        if group is not None:
            group.barrier(wait_until)  # nobody reads this rank's slots any more
            group.segment.release()
            group.segment.close()

    def fusion_buffer(self, nbytes: int, ranks: tuple[int, ...]) -> FusionBuffer | None:
        slots = self._memory.window(nbytes, ranks)
        return FusionBuffer(slots[ranks.index(self._rank)], tuple(slots)) if slots else None

    def tune(self, settings: Mapping[str, int]) -> None:
        self._chunk = settings.get("shm_chunk", self._chunk)
        self._direct = settings.get("shm_direct", self._direct)

    def close(self) -> None:
        for group in self._groups.values():
            group.segment.close()
        self._groups.clear()
        self._memory.close()

    def _reduction(self, group: Group, response: Response) -> Reduction:
        dtype = SUPPORTED_DTYPES[response.dtype]
        return Reduction(response, dtype, group.size, self._chunk // dtype.itemsize, self._casts)

    def _allreduce_in_place(self, group: Group, part: Part, response: Response, wait_until: WaitUntil) -> None:
        reduction = self._reduction(group, response)
        slots = [slot[part.begin:part.end].view(reduction.dtype) for slot in part.buffer.slots]
        begin, end = slice_bounds(0, slots[0].size, group.size, reduction.dtype)[group.index:group.index + 2]
        for start in range(begin, end, reduction.chunk):
            pieces = [slot[start:min(start + reduction.chunk, end)] for slot in slots]
            for piece in pieces:
                reduction.place(piece, piece)
            reduction.combine(pieces, pieces[0])
            for piece in pieces[1:]:
                np.copyto(piece, pieces[0])
        group.barrier(wait_until)

    def _reduce(self, group: Group, plan: Plan, wait_until: WaitUntil) -> None:
        """Allreduce, or reduce: then only the root has outputs."""
        if not plan.response.contributors:
            return
        reduction = self._reduction(group, plan.response)
        sources = Concatenation(plan.sources) if self._rank in plan.response.contributors else None
        receives = plan.outputs and (plan.response.collective is Collective.ALLREDUCE
                                     or self._rank == plan.response.root_rank)
        outputs = Concatenation(plan.outputs) if receives else None
        total = sources.size if sources else outputs.size if outputs else plan.response.elements
        per_piece = group.segment.slot // reduction.dtype.itemsize
        for low in range(0, total, per_piece):
            piece = _Piece(group, plan.response, reduction, low, min(low + per_piece, total))
            if (piece.high - piece.low) * reduction.dtype.itemsize <= self._direct:
                piece.reduce_whole(sources, outputs, wait_until)
            else:
                piece.reduce_slices(sources, outputs, wait_until)

    def _adasum(self, group: Group, plan: Plan, wait_until: WaitUntil) -> None:
        """Measure the inner products slice by slice, add them up, then weighted sums by slices; all tensors together."""
        response, dtype = plan.response, SUPPORTED_DTYPES[plan.response.dtype]
        if not response.contributors:
            return
        receives = plan.outputs and (response.collective is Collective.ALLREDUCE or self._rank == response.root_rank)
        adaptive = AdaptiveSum(response, dtype, self._chunk // dtype.itemsize, self._casts, response.rows)
        sources = Concatenation(plan.sources) if self._rank in response.contributors else None
        outputs = Concatenation(plan.outputs) if receives else None
        total, per_piece = sum(response.rows), group.segment.slot // dtype.itemsize

        def pieces() -> Iterator[_AdaptivePiece]:
            for low in range(0, total, per_piece):
                yield _AdaptivePiece(group, response, adaptive, low, min(low + per_piece, total))

        if total * dtype.itemsize <= self._direct:
            for piece in pieces():
                piece.reduce_whole(sources, outputs, wait_until)
            return
        products = np.zeros((len(response.rows), len(response.contributors), len(response.contributors)))
        for piece in pieces():
            products += piece.measure_slice(sources, wait_until)
        fitting = max(1, group.segment.slot // products[0].nbytes)
        for first in range(0, len(products), fitting):
            products[first:first + fitting] = group.total(products[first:first + fitting], wait_until)
        adaptive.weigh(products)
        for piece in pieces():
            piece.reduce_slices(sources, outputs, wait_until)

    def _reducescatter(self, group: Group, plan: Plan, wait_until: WaitUntil) -> None:
        reduction = self._reduction(group, plan.response)
        source = Concatenation(plan.sources) if plan.sources else None
        output = plan.outputs[0] if plan.outputs else None
        bounds = row_bounds(plan.response)
        begin, end = bounds[group.index], bounds[group.index + 1]
        per_piece = group.segment.slot // reduction.dtype.itemsize
        total = source.size if source else plan.response.elements
        for low in range(0, total, per_piece):
            piece = _Piece(group, plan.response, reduction, low, min(low + per_piece, total))
            piece.reduce_own(source, output, begin, end, wait_until)

    def _broadcast(self, group: Group, plan: Plan, wait_until: WaitUntil) -> None:
        root = plan.response.root_rank
        dtype = SUPPORTED_DTYPES[plan.response.dtype]
        outputs = Concatenation(plan.outputs)
        per_piece = group.segment.slot // dtype.itemsize
        total = outputs.size if plan.outputs else plan.response.elements
        for low in range(0, total, per_piece):
            high = min(low + per_piece, total)
            region = group.next_region((high - low) * dtype.itemsize if self._rank == root else 0)
            if self._rank == root:
                Concatenation(plan.sources).copy_to(low, high, group.slot(group.index, region, dtype))
            group.barrier(wait_until)
            staged = group.slot(group.ranks.index(root), region, dtype)
            for start, stop, part in outputs.parts(low, high, high - low) if plan.outputs else ():
                if self._rank != root or plan.sources is not plan.outputs:
                    np.copyto(part, staged[start - low:stop - low])

    def _exchange(self, group: Group, plan: Plan, wait_until: WaitUntil) -> None:
        """Allgather, gather, scatter, alltoall: everybody stages what it sends, and takes what is for it."""
        dtype = SUPPORTED_DTYPES[plan.response.dtype]
        source = plan.sources[0] if plan.sources else np.empty(0, dtype)
        output = plan.outputs[0] if plan.outputs else None
        assert source is not None
        if plan.exchange is not None:
            source = source[:sum(plan.exchange.sent) * plan.response.row_elements]  # rows beyond stay here
        moves = _MOVES[plan.response.collective](plan)
        longest = _longest(plan.response, moves)
        per_piece = group.segment.slot // dtype.itemsize
        sends = plan.exchange is not None or any(sender == group.index for sender, _, _, _ in moves)
        taken = 0  # where the next rows go in the output
        places = []
        for sender, receiver, begin, end in moves:
            if receiver in (group.index, None) and output is not None:
                places.append((sender, begin, end, taken))
                taken += end - begin
        for low in range(0, longest, per_piece):
            mine = source[low:low + per_piece] if sends else source[:0]
            region = group.next_region(mine.nbytes)
            np.copyto(group.slot(group.index, region, dtype)[:mine.size], mine)
            group.barrier(wait_until)
            for sender, begin, end, place in places:
                start, stop = max(begin, low), min(end, low + per_piece)
                if start < stop:
                    staged = group.slot(sender, region, dtype)[start - low:stop - low]
                    np.copyto(output[place + start - begin:place + stop - begin], staged)  # type: ignore[index]


class Group:
    """One process set's memory, and this rank's place in it; indices count the set's ranks.

    Attributes:
        barrier: of the set's ranks.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...], segment: StagingSegment, ring: Callable[[int], None]) -> None:
        self.ranks, self.segment = ranks, segment
        self.index, self.size = ranks.index(rank), len(ranks)
        self.barrier = Barrier(rank, ranks, segment, ring)
        self._pieces = 0

    def next_region(self, nbytes: int) -> int:
        """Return the region for the next piece, with room for `nbytes` in this rank's slot."""
        region = self._pieces % 2
        self._pieces += 1
        self.segment.reserve(region, nbytes)
        return region

    def slot(self, index: int, region: int, dtype: np.dtype[np.generic]) -> Array:
        """Return a rank's slot as elements of `dtype`."""
        staging = self.segment.staging(index, region)
        return staging[:staging.size // dtype.itemsize * dtype.itemsize].view(dtype)

    def total(self, values: Array, wait_until: WaitUntil) -> Array:
        """Return the sum of every rank's float64 array, added up in rank order; it must fit into a slot."""
        region = self.next_region(values.nbytes)
        self.slot(self.index, region, values.dtype)[:values.size] = values.reshape(-1)
        self.barrier(wait_until)
        result = np.zeros(values.size)
        for index in range(self.size):
            result += self.slot(index, region, values.dtype)[:values.size]
        return result.reshape(values.shape)


class _Piece:
    """Elements low..high of a reduction's concatenated tensors, in one region."""

    def __init__(self, group: Group, response: Response, reduction: Reduction | AdaptiveSum, low: int, high: int) -> None:
        self.low, self.high = low, high
        self._group, self._reduction = group, reduction
        self._contributors = [group.ranks.index(rank) for rank in response.contributors]
        self._region = group.next_region((high - low) * reduction.dtype.itemsize)
        self._slots = [group.slot(index, self._region, reduction.dtype) for index in range(group.size)]

    def reduce_whole(self, sources: Concatenation | None, outputs: Concatenation | None, wait_until: WaitUntil) -> None:
        """Publish everything, then let every rank reduce everything into its output."""
        if sources is not None:
            self._publish(sources, self.low, self.high)
        self._group.barrier(wait_until)
        for start, stop, part in outputs.parts(self.low, self.high, self._reduction.chunk) if outputs else ():
            self._reduction.combine([self._staged(index, start, stop) for index in self._contributors], part)

    def reduce_slices(self, sources: Concatenation | None, outputs: Concatenation | None, wait_until: WaitUntil) -> None:
        """Let every rank reduce the slice it owns, and collect the other slices' results."""
        group = self._group
        bounds = slice_bounds(self.low, self.high, group.size, self._reduction.dtype)
        begin, end = bounds[group.index], bounds[group.index + 1]
        if sources is not None:
            self._publish(sources, self.low, begin)
            self._publish(sources, end, self.high)
        group.barrier(wait_until)
        self._reduce_slice(sources, outputs, begin, end)
        group.barrier(wait_until)
        if outputs is None:
            return
        for owner in range(group.size):
            if owner != group.index:
                self._collect(outputs, owner, bounds[owner], bounds[owner + 1])

    def reduce_own(self, sources: Concatenation | None, output: Array | None, begin: int, end: int,
                   wait_until: WaitUntil) -> None:
        """Publish what others own, and reduce elements begin..end, as far as they lie in this piece, into `output`."""
        mine, rest = max(begin, self.low), min(end, self.high)
        if mine >= rest:
            mine = rest = self.high
        if sources is not None:
            self._publish(sources, self.low, mine)
            self._publish(sources, rest, self.high)
        self._group.barrier(wait_until)
        if sources is None or output is None:
            return  # a rank that has joined
        for start, stop, _ in sources.parts(mine, rest, self._reduction.chunk):
            terms = [self._term(index, sources, start, stop) for index in self._contributors]
            self._reduction.combine(terms, output[start - begin:stop - begin])

    def _publish(self, sources: Concatenation, low: int, high: int) -> None:
        for start, stop, part in sources.parts(low, high, self._reduction.chunk):
            self._reduction.place(part, self._staged(self._group.index, start, stop))

    def _term(self, index: int, sources: Concatenation | None, start: int, stop: int) -> Array:
        if index != self._group.index:
            return self._staged(index, start, stop)
        assert sources is not None
        (_, _, part), = sources.parts(start, stop, stop - start)
        return self._reduction.placed(part)

    def _reduce_slice(self, sources: Concatenation | None, outputs: Concatenation | None, begin: int, end: int) -> None:
        """Reduce elements begin..end into the own slot and the output."""
        own = self._group.index
        guide = outputs or sources or Concatenation([self._slots[own][:self.high - self.low]], self.low)
        for start, stop, part in guide.parts(begin, end, self._reduction.chunk):
            result = self._staged(own, start, stop)
            self._reduction.combine([self._term(index, sources, start, stop) for index in self._contributors], result)
            if outputs is not None:
                np.copyto(part, result)

    def _collect(self, outputs: Concatenation, owner: int, begin: int, end: int) -> None:
        """Copy elements begin..end from their owner's slot to the output."""
        for start, stop, part in outputs.parts(begin, end, self.high - self.low):
            np.copyto(part, self._staged(owner, start, stop))

    def _staged(self, index: int, start: int, stop: int) -> Array:
        return self._slots[index][start - self.low:stop - self.low]


class _AdaptivePiece(_Piece):
    """Like `_Piece`, of an adaptive sum, which depends on the tensor that an element belongs to."""

    def __init__(self, group: Group, response: Response, adaptive: AdaptiveSum, low: int, high: int) -> None:
        super().__init__(group, response, adaptive, low, high)
        self._adaptive = adaptive

    def reduce_whole(self, sources: Concatenation | None, outputs: Concatenation | None, wait_until: WaitUntil) -> None:
        """Publish everything, then let every rank measure and reduce everything; the piece is all there is."""
        if sources is not None:
            self._publish(sources, self.low, self.high)
        self._group.barrier(wait_until)
        if outputs is None:
            return
        terms = [self._staged(index, self.low, self.high) for index in self._contributors]
        self._adaptive.weigh(self._adaptive.products(terms, self.low))
        result = np.empty_like(terms[0])
        self._adaptive.combine(terms, result, self.low)
        for start, stop, part in outputs.parts(self.low, self.high, self.high - self.low):
            np.copyto(part, result[start - self.low:stop - self.low])

    def measure_slice(self, sources: Concatenation | None, wait_until: WaitUntil) -> Array:
        """Publish what others own, and return the inner products, by tensor, of the values in the slice owned here."""
        group = self._group
        bounds = slice_bounds(self.low, self.high, group.size, self._adaptive.dtype)
        begin, end = bounds[group.index], bounds[group.index + 1]
        if sources is not None:
            self._publish(sources, self.low, begin)
            self._publish(sources, end, self.high)
        group.barrier(wait_until)
        return self._adaptive.products(self._terms(sources, begin, end), begin)

    def _reduce_slice(self, sources: Concatenation | None, outputs: Concatenation | None, begin: int, end: int) -> None:
        own = self._group.index
        self._adaptive.combine(self._terms(sources, begin, end), self._staged(own, begin, end), begin)
        if outputs is not None:
            self._collect(outputs, own, begin, end)

    def _terms(self, sources: Concatenation | None, begin: int, end: int) -> list[Array]:
        """Return every contributor's elements begin..end; the own ones are in no slot."""
        return [self._staged(index, begin, end) if index != self._group.index or sources is None
                else sources.contiguous(begin, end) for index in self._contributors]


def slice_bounds(low: int, high: int, size: int, dtype: np.dtype[np.generic]) -> list[int]:
    """Return where the ranks' slices of elements low..high begin, in whole cache lines, and where the last one ends."""
    step = ALIGNMENT // dtype.itemsize
    share = -(-(high - low) // (size * step)) * step
    return [min(low + rank * share, high) for rank in range(size + 1)]


def row_bounds(response: Response) -> list[int]:
    """Return where each rank's rows of a scattered tensor begin, in elements, and where the last one ends."""
    return [0, *itertools.accumulate(count * response.row_elements for count in response.rows)]


Move = tuple[int, int | None, int, int]
"""Sender, receiver (None: everybody), and the elements begin..end of what the sender stages; in the receiver's order."""


def _gather_moves(plan: Plan) -> list[Move]:
    response = plan.response
    receiver = None if response.collective is Collective.ALLGATHER else plan.ranks.index(response.root_rank)
    return [(sender, receiver, 0, count * response.row_elements) for sender, count in enumerate(response.rows)]


def _scatter_moves(plan: Plan) -> list[Move]:
    bounds = row_bounds(plan.response)
    root = plan.ranks.index(plan.response.root_rank)
    return [(root, receiver, bounds[receiver], bounds[receiver + 1]) for receiver in range(len(plan.ranks))]


def _send_moves(plan: Plan) -> list[Move]:
    sender = plan.ranks.index(plan.response.root_rank)
    return [(sender, 1 - sender, 0, plan.response.elements)]


def _alltoall_moves(plan: Plan) -> list[Move]:
    """Only what this rank gets: who gets the rest is not its business."""
    assert plan.exchange is not None
    per_row = plan.response.row_elements
    return [(sender, None, start * per_row, (start + rows) * per_row) for sender, (rows, start)
            in enumerate(zip(plan.exchange.received, plan.exchange.starts, strict=True))]


def _longest(response: Response, moves: Sequence[Move]) -> int:
    """Return how many elements the rank that stages most has to stage; the same on all ranks."""
    if response.collective is Collective.ALLTOALL:
        return response.rows[0] * response.row_elements
    return max((end for _, _, _, end in moves), default=0)


_MOVES: dict[Collective, Callable[[Plan], list[Move]]] = {
    Collective.ALLGATHER: _gather_moves, Collective.GATHER: _gather_moves, Collective.SCATTER: _scatter_moves,
    Collective.ALLTOALL: _alltoall_moves, Collective.SEND: _send_moves,
}


class Concatenation:
    """Flat arrays seen as one, without copying; the first one begins at element `begin`."""

    def __init__(self, arrays: Sequence[Array | None], begin: int = 0) -> None:
        self._arrays = [array for array in arrays if array is not None]
        assert len(self._arrays) == len(arrays), "a contributor has every tensor of the response"
        self._begins = np.cumsum([begin, *(array.size for array in self._arrays)]).tolist()
        self.size: int = self._begins[-1] - begin

    def parts(self, low: int, high: int, limit: int) -> Iterator[tuple[int, int, Array]]:
        """Yield (start, stop, view) covering low..high, each at most `limit` elements and within one array."""
        if low >= high:
            return
        first = int(np.searchsorted(self._begins, low, side="right")) - 1
        for begin, array in zip(self._begins[first:], self._arrays[first:]):  # noqa: B905 (begins has one more)
            if begin >= high:
                return
            start, last = max(low, begin), min(high, begin + array.size)
            while start < last:
                stop = min(start + limit, last)
                yield start, stop, array[start - begin:stop - begin]
                start = stop

    def single(self, low: int, high: int) -> Array | None:
        """Return elements low..high when they lie in one array, else None."""
        parts = list(self.parts(low, high, high - low))
        return parts[0][2] if len(parts) == 1 else None

    def contiguous(self, low: int, high: int) -> Array:
        """Return elements low..high, copied only when they lie in several arrays."""
        single = self.single(low, high)
        if single is not None:
            return single
        out = np.empty(high - low, self._arrays[0].dtype)
        self.copy_to(low, high, out)
        return out

    def copy_to(self, low: int, high: int, out: Array) -> None:
        """Copy elements low..high to the beginning of `out`."""
        for start, stop, part in self.parts(low, high, max(1, high - low)):
            np.copyto(out[start - low:stop - low], part)

"""Shared memory on one host: every rank reduces a slice of each piece, directly from the other ranks' staging slots.

One piece (at most a slot) of an allreduce, on every rank:

    publish   copy the slices that other ranks own into this rank's slot   (this rank's slice stays private)
    barrier
    reduce    this rank's slice, over all contributors in rank order, into its slot; copy it to the output
    barrier
    collect   copy the results of the other slices from their owners' slots

The next piece is published before the second barrier, which is its first one, too.

A bucket of a fusion buffer is already in shared memory on every rank. The decision that releases the bucket replaces the
first barrier; every rank reduces its slice and writes the result into all ranks' slots; one barrier follows.

Small tensors are written whole, and every rank makes its result of all of them (`exchange.py`), without a second barrier.
The other collectives follow the same pattern: publish the data that other ranks need, barrier, copy the own part.

Rules (docs/protocol.md#staging-regions, #same-bits)
- Each process set has its own counters and slots, so that overlapping sets do not touch each other's memory.
- Pieces take turns with three staging regions; see `planes/staging.py`.
- The assignment of bytes to ranks depends only on the response, so all ranks agree without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.negotiation.messages import Response
from hvdlite.planes.adasum import AdasumReduction
from hvdlite.planes.arithmetic import Casts, Reduction
from hvdlite.planes.base import CHUNK_KNOB, BufferSlice, FusionBuffer, Plan, WaitUntil
from hvdlite.planes.exchange import WHOLE, Broadcast, Exchange, Reduce, ReduceInPlace
from hvdlite.planes.shm_barrier import WakeRanks
from hvdlite.planes.shm_pieces import AdasumPiece, Piece, reduce_by_slices
from hvdlite.planes.slices import Concatenation, row_bounds
from hvdlite.planes.staging import HostMemory, StagingArea


class ShmPlane:
    """Collectives of the ranks of one host through shared staging slots.

    Args:
        wake_ranks: wakes other ranks that may be waiting at a barrier.
        slot: bytes of one staging slot.
        chunk: bytes reduced per NumPy call.
        direct: up to this many bytes, every rank reduces a tensor in full.
    """

    name = "shm"

    def __init__(self, rank: int, memory: HostMemory, wake_ranks: WakeRanks, *, slot: int, chunk: int,
                 direct: int, casts: Casts | None = None) -> None:
        self._rank = rank
        self._memory, self._wake_ranks = memory, wake_ranks
        self._slot, self._chunk, self._direct = slot, chunk, direct
        self._casts = casts or Casts.of_numpy()
        self._areas: dict[int, StagingArea] = {}  # the process sets this rank is in

    def execute(self, plan: Plan, wait_until: WaitUntil) -> None:
        area = self._areas[plan.response.process_set_id]
        exchange = self._exchange(area, plan)
        if exchange is not None:
            region = area.next_region(exchange.written)
            exchange.write(region, plan.sources[0])
            area.barrier(wait_until)
            if plan.outputs[0] is not None:
                exchange.collect(region, plan.sources[0], plan.outputs[0])
            return
        match plan.response.collective:
            case Collective.ALLREDUCE if plan.buffer_slice is not None:
                self._allreduce_in_place(area, plan.buffer_slice, plan.response, wait_until)
            case Collective.ALLREDUCE | Collective.REDUCE if plan.response.op is ReduceOp.ADASUM:
                self._adasum(area, plan, wait_until)
            case Collective.ALLREDUCE | Collective.REDUCE:
                self._reduce(area, plan, wait_until)
            case Collective.REDUCESCATTER:
                self._reducescatter(area, plan, wait_until)
            case Collective.BROADCAST:
                self._broadcast(area, plan, wait_until)
            case Collective.BARRIER:
                area.next_region(0)  # like every collective
                area.barrier(wait_until)
            case _:
                self._gather_scatter(area, plan, wait_until)

    def add_process_set(self, process_set_id: int, ranks: tuple[int, ...]) -> None:
        segment = self._memory.segment(ranks, self._slot)
        if segment is not None:
            self._areas[process_set_id] = StagingArea(self._rank, ranks, segment, self._wake_ranks)

    def remove_process_set(self, process_set_id: int, wait_until: WaitUntil) -> None:
        area = self._areas.pop(process_set_id, None)
        if area is not None:
            area.barrier(wait_until)  # nobody reads this rank's slots any more
            area.segment.release()
            area.close()

    def fusion_buffer(self, nbytes: int, ranks: tuple[int, ...]) -> FusionBuffer | None:
        slots = self._memory.window(nbytes, ranks)
        return FusionBuffer(slots[ranks.index(self._rank)], tuple(slots)) if slots else None

    def staging_bytes(self) -> int:
        return sum(area.segment.allocated for area in list(self._areas.values()))

    def tune(self, settings: Mapping[str, int]) -> None:
        self._chunk = settings.get(CHUNK_KNOB, self._chunk)
        self._direct = settings.get("shm_direct", self._direct)
        for area in self._areas.values():
            area.exchanges.clear()

    def close(self) -> None:
        for area in self._areas.values():
            area.close()
        self._areas.clear()
        self._memory.close()

    def _exchange(self, area: StagingArea, plan: Plan) -> Exchange | None:
        """Return what carries out a plan for one tensor that every rank has and that fits; None for others."""
        response, sources = plan.response, plan.sources
        kind = WHOLE.get(response.collective)
        if kind is None or len(sources) != 1 or len(response.contributors) != area.size or plan.buffer_slice is not None:
            return None
        elements = sources[0].size
        found = area.exchanges.get(id(response))  # which groups keep
        if found is not None and found.response is response and found.elements == elements:
            return found
        root = area.ranks.index(response.root_rank) if kind is Broadcast else -1
        made = kind(response, elements, area.places, area.index, root=root, chunk=self._chunk, casts=self._casts)
        limit = min(area.segment.slot, self._direct) if kind is Reduce else area.segment.slot
        if not 0 < max(made.counts) * made.dtype.itemsize <= limit or response.op is ReduceOp.ADASUM:
            return None
        return area.keep(made)

    def _reduction(self, area: StagingArea, response: Response) -> Reduction:
        dtype = SUPPORTED_DTYPES[response.dtype]
        return Reduction(response, dtype, area.size, self._chunk // dtype.itemsize, self._casts)

    def _allreduce_in_place(self, area: StagingArea, buffer_slice: BufferSlice, response: Response,
                            wait_until: WaitUntil) -> None:
        reduction = self._reduction(area, response)
        ReduceInPlace(reduction, buffer_slice.slots(reduction.dtype), area.index).run()
        area.barrier(wait_until)

    def _reduce(self, area: StagingArea, plan: Plan, wait_until: WaitUntil) -> None:
        """Allreduce or reduce; for reduce, only the root has outputs."""
        if not plan.response.contributors:
            return
        reduction = self._reduction(area, plan.response)
        sources, outputs = self._ends(plan)
        total = sources.size if sources else outputs.size if outputs else plan.response.elements
        per_piece = area.segment.slot // reduction.dtype.itemsize
        pieces = (Piece(area, plan.response, reduction, low, min(low + per_piece, total))
                  for low in range(0, total, per_piece))
        if total * reduction.dtype.itemsize <= self._direct:
            for piece in pieces:
                piece.reduce_whole(sources, outputs, wait_until)
        else:
            reduce_by_slices(pieces, sources, outputs, area.barrier, wait_until)

    def _ends(self, plan: Plan) -> tuple[Concatenation | None, Concatenation | None]:
        """Return what this rank contributes to a reduction, and where it receives the result."""
        response = plan.response
        receives = plan.outputs and (response.collective is Collective.ALLREDUCE or self._rank == response.root_rank)
        return (Concatenation(plan.sources) if self._rank in response.contributors else None,
                Concatenation(plan.outputs) if receives else None)

    def _adasum(self, area: StagingArea, plan: Plan, wait_until: WaitUntil) -> None:
        """Compute and sum the inner products of all slices, then reduce by weighted sums; all tensors together."""
        response, dtype = plan.response, SUPPORTED_DTYPES[plan.response.dtype]
        if not response.contributors:
            return
        adasum = AdasumReduction(response, dtype, self._chunk // dtype.itemsize, self._casts, response.rows)
        sources, outputs = self._ends(plan)
        total, per_piece = sum(response.rows), area.segment.slot // dtype.itemsize

        def pieces() -> Iterator[AdasumPiece]:
            for low in range(0, total, per_piece):
                yield AdasumPiece(area, response, adasum, low, min(low + per_piece, total))

        if total * dtype.itemsize <= self._direct:
            for piece in pieces():
                piece.reduce_whole(sources, outputs, wait_until)
            return
        products = np.zeros((len(response.rows), len(response.contributors), len(response.contributors)))
        for piece in pieces():
            products += piece.measure_slice(sources, wait_until)
        fitting = max(1, area.segment.slot // products[0].nbytes)
        for first in range(0, len(products), fitting):
            products[first:first + fitting] = area.total(products[first:first + fitting], wait_until)
        adasum.set_weights(products)
        reduce_by_slices(pieces(), sources, outputs, area.barrier, wait_until)

    def _reducescatter(self, area: StagingArea, plan: Plan, wait_until: WaitUntil) -> None:
        reduction = self._reduction(area, plan.response)
        source = Concatenation(plan.sources) if plan.sources else None
        output = plan.outputs[0] if plan.outputs else None
        bounds = row_bounds(plan.response)
        begin, end = bounds[area.index], bounds[area.index + 1]
        per_piece = area.segment.slot // reduction.dtype.itemsize
        total = source.size if source else plan.response.elements
        for low in range(0, total, per_piece):
            piece = Piece(area, plan.response, reduction, low, min(low + per_piece, total))
            piece.reduce_own(source, output, begin, end, wait_until)

    def _broadcast(self, area: StagingArea, plan: Plan, wait_until: WaitUntil) -> None:
        root = plan.response.root_rank
        dtype = SUPPORTED_DTYPES[plan.response.dtype]
        outputs = Concatenation(plan.outputs)
        per_piece = area.segment.slot // dtype.itemsize
        total = outputs.size if plan.outputs else plan.response.elements
        for low in range(0, total, per_piece):
            high = min(low + per_piece, total)
            region = area.next_region((high - low) * dtype.itemsize if self._rank == root else 0)
            if self._rank == root:
                Concatenation(plan.sources).copy_to(low, high, area.slot(area.index, region, dtype))
            area.barrier(wait_until)
            staged = area.slot(area.ranks.index(root), region, dtype)
            for start, stop, part in outputs.parts(low, high, high - low) if plan.outputs else ():
                if self._rank != root or plan.sources is not plan.outputs:
                    np.copyto(part, staged[start - low:stop - low])

    def _gather_scatter(self, area: StagingArea, plan: Plan, wait_until: WaitUntil) -> None:
        """Allgather, gather, scatter and alltoall: every rank stages the data that it sends, and copies its own part."""
        dtype = SUPPORTED_DTYPES[plan.response.dtype]
        source = plan.sources[0] if plan.sources else np.empty(0, dtype)
        output = plan.outputs[0] if plan.outputs else None
        assert source is not None
        if plan.splits is not None:
            source = source[:sum(plan.splits.send_rows) * plan.response.row_elements]  # rows beyond stay here
        moves = _MOVES[plan.response.collective](plan)
        longest = _longest(plan.response, moves)
        per_piece = area.segment.slot // dtype.itemsize
        sends = plan.splits is not None or any(sender == area.index for sender, _, _, _ in moves)
        taken = 0  # where the next rows go in the output
        places = []
        for sender, receiver, begin, end in moves:
            if receiver in (area.index, None) and output is not None:
                places.append((sender, begin, end, taken))
                taken += end - begin
        for low in range(0, longest, per_piece):
            mine = source[low:low + per_piece] if sends else source[:0]
            region = area.next_region(mine.nbytes)
            np.copyto(area.slot(area.index, region, dtype)[:mine.size], mine)
            area.barrier(wait_until)
            for sender, begin, end, place in places:
                start, stop = max(begin, low), min(end, low + per_piece)
                if start < stop:
                    staged = area.slot(sender, region, dtype)[start - low:stop - low]
                    np.copyto(output[place + start - begin:place + stop - begin], staged)  # type: ignore[index]


Move = tuple[int, int | None, int, int]
"""Sender, receiver (None: all ranks), and elements begin..end of the sender's staged data; in the receiver's order."""


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
    """Return only the moves to this rank."""
    assert plan.splits is not None
    per_row = plan.response.row_elements
    return [(sender, None, start * per_row, (start + rows) * per_row) for sender, (rows, start)
            in enumerate(zip(plan.splits.recv_rows, plan.splits.source_starts, strict=True))]


def _longest(response: Response, moves: Sequence[Move]) -> int:
    """Return the largest number of elements that any rank stages; equal on all ranks."""
    if response.collective is Collective.ALLTOALL:
        return response.rows[0] * response.row_elements
    return max((end for _, _, _, end in moves), default=0)


_MOVES: dict[Collective, Callable[[Plan], list[Move]]] = {
    Collective.ALLGATHER: _gather_moves, Collective.GATHER: _gather_moves, Collective.SCATTER: _scatter_moves,
    Collective.ALLTOALL: _alltoall_moves, Collective.SEND: _send_moves,
}

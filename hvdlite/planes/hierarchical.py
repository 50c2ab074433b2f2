"""Two levels: shared memory within a host, MPI or Gloo between hosts, so each byte crosses the network once per host.

An allreduce is cut into as many slices as the smallest host has ranks in the process set. On every host, rank i

    reduce     sums slice i over the ranks of its host, from shared memory
    cross      sums it with the rank i of every other host, over the cross plane
    gather     puts the result where the host's others copy it from

so hosts may have different numbers of ranks: where there are more, the rest only helps inside. Broadcast and allgather take
the same ways; a small allgather crosses once a host, between the first ranks of the hosts. What else there is, and Adasum,
goes through the cross plane between all ranks; a process set within one host, through shared memory alone.

Rules (docs/protocol.md#same-bits, #hierarchy)
- Average divides once, after the sum across hosts; averages of integers cross as `Reduction` accumulates them.
- 16-bit floats cross as float32 until they are summed, and the sums as 16-bit floats. With one rank a host they need no
  float32, for the cross plane accumulates in it.
- Staging slots are used as in `planes/shm.py`: regions are used in turn, and barriers of the host lie between two uses.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES, Array, accumulator_dtype, dtype_name, identity
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.core.world import Hosts
from hvdlite.negotiation.messages import Response
from hvdlite.planes.arithmetic import Casts, Reduction
from hvdlite.planes.base import CHUNK_KNOB, BufferSlice, FusionBuffer, Plan, Plane, WaitUntil
from hvdlite.planes.shm import ShmPlane
from hvdlite.planes.shm_barrier import WakeRanks
from hvdlite.planes.slices import Concatenation, row_bounds, slice_bounds
from hvdlite.planes.staging import HostMemory, StagingArea

SMALL_BYTES = 256 << 10
"""Allgathers of up to so many bytes in all go through the first rank of each host."""
_CROSS_SETS = 1 << 20
"""Ids of the cross plane's process sets for slices begin here; see `_TwoLevelSet.cross_set_id`."""


class HierarchicalPlane:
    """Like `LoopbackPlane`, on several hosts.

    Args:
        memory: this host's.
        cross_plane: reduces between hosts; accepts process sets of any ranks.
        slot: bytes of one staging slot.
        chunk: bytes reduced per NumPy call.
    """

    def __init__(self, rank: int, hosts: Hosts, memory: HostMemory, wake_ranks: WakeRanks, cross_plane: Plane, *,
                 slot: int, chunk: int, direct: int, casts: Casts | None = None) -> None:
        self.name = f"hierarchical ({cross_plane.name})"
        self._rank, self._hosts, self._memory = rank, hosts, memory
        self._wake_ranks, self._cross_plane = wake_ranks, cross_plane
        self._slot, self._chunk = slot, chunk
        self._casts = casts or Casts.of_numpy()
        self._local_plane = ShmPlane(rank, memory, wake_ranks, slot=slot, chunk=chunk, direct=direct, casts=self._casts)
        self._local_sets: set[int] = set()  # process sets of one host
        self._two_level_sets: dict[int, _TwoLevelSet] = {}  # those of several hosts that this rank is in

    def execute(self, plan: Plan, wait_until: WaitUntil) -> None:
        process_set_id = plan.response.process_set_id
        if process_set_id in self._local_sets:
            self._local_plane.execute(plan, wait_until)
            return
        levels = self._two_level_sets.get(process_set_id)
        match plan.response.collective:
            case Collective.ALLREDUCE if levels is not None and plan.response.op is not ReduceOp.ADASUM:
                if plan.buffer_slice is not None:
                    self._allreduce_in_place(levels, plan.buffer_slice, plan.response, wait_until)
                else:
                    self._allreduce(levels, plan, wait_until)
            case Collective.BROADCAST if levels is not None:
                outputs = Concatenation(plan.outputs) if plan.outputs else None
                root = plan.ranks.index(plan.response.root_rank)
                source = Concatenation(plan.sources) if self._rank == plan.response.root_rank else None
                total = outputs.size if outputs else plan.response.elements
                in_place = plan.sources is plan.outputs
                self._broadcast(levels, root, source, outputs, 0, total, plan.response, in_place, wait_until)
            case Collective.ALLGATHER if levels is not None and _gathered_bytes(plan.response) <= self._small(levels):
                self._allgather_by_hosts(levels, plan, wait_until)
            case Collective.ALLGATHER if levels is not None:
                self._allgather(levels, plan, wait_until)
            case _:
                self._cross_plane.execute(plan, wait_until)

    def add_process_set(self, process_set_id: int, ranks: tuple[int, ...]) -> None:
        hosts = self._hosts.restrict_to(ranks)
        here = set(self._hosts.local_ranks(self._rank))
        if len(hosts.ranks_by_host) == 1:
            self._local_sets.add(process_set_id)
            if here.issuperset(ranks):
                self._local_plane.add_process_set(process_set_id, ranks)
            return
        self._cross_plane.add_process_set(process_set_id, ranks)
        local = tuple(rank for rank in ranks if rank in here)
        if process_set_id < 0 or not local:
            return  # a pair only sends
        segment = self._memory.segment(local, self._slot)
        if segment is not None:
            area = StagingArea(self._rank, local, segment, self._wake_ranks)
            self._two_level_sets[process_set_id] = _TwoLevelSet(process_set_id, self._rank, ranks, hosts, area)

    def remove_process_set(self, process_set_id: int, wait_until: WaitUntil) -> None:
        if process_set_id in self._local_sets:
            self._local_sets.discard(process_set_id)
            self._local_plane.remove_process_set(process_set_id, wait_until)
            return
        levels = self._two_level_sets.pop(process_set_id, None)
        if levels is not None:
            levels.area.barrier(wait_until)  # nobody reads this rank's slots any more
            levels.area.segment.release()
            levels.area.close()
            self._cross_plane.remove_process_set(levels.cross_set_id, wait_until)
        self._cross_plane.remove_process_set(process_set_id, wait_until)

    def fusion_buffer(self, nbytes: int, ranks: tuple[int, ...]) -> FusionBuffer | None:
        here = self._hosts.local_ranks(self._rank)
        local = tuple(rank for rank in ranks if rank in here)
        slots = self._memory.window(nbytes, local) if local else []
        return FusionBuffer(slots[local.index(self._rank)], tuple(slots)) if slots else None

    def staging_bytes(self) -> int:
        own = sum(levels.area.segment.allocated for levels in list(self._two_level_sets.values()))
        return own + self._local_plane.staging_bytes() + self._cross_plane.staging_bytes()

    def tune(self, settings: Mapping[str, int]) -> None:
        self._chunk = settings.get(CHUNK_KNOB, self._chunk)
        self._local_plane.tune(settings)
        self._cross_plane.tune(settings)

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # the cross plane first, and the rest even when it raises
            closing.callback(self._local_plane.close)
            for levels in self._two_level_sets.values():
                closing.callback(levels.area.close)
            closing.callback(self._cross_plane.close)
            self._two_level_sets.clear()

    def _reduction(self, levels: _TwoLevelSet, response: Response) -> Reduction:
        dtype = SUPPORTED_DTYPES[response.dtype]
        return Reduction(response, dtype, len(levels.ranks), self._chunk // dtype.itemsize, self._casts)

    def _allreduce_in_place(self, levels: _TwoLevelSet, buffer_slice: BufferSlice, response: Response,
                            wait_until: WaitUntil) -> None:
        """The bucket's slices are summed in the slot of the host's first rank, and copied from there."""
        reduction = self._reduction(levels, response)
        slots = [slot[buffer_slice.begin:buffer_slice.end].view(reduction.dtype) for slot in buffer_slice.buffer.slots]
        begin, end = levels.own_slice(0, slots[0].size, reduction.dtype)
        if begin < end:
            terms = [slot[begin:end] for slot in slots]
            for start in range(0, end - begin, reduction.chunk):
                for term in terms:
                    piece = term[start:start + reduction.chunk]
                    reduction.copy_prescaled(piece, piece)
            self._sum(levels, reduction, response, terms, terms[0], True, wait_until)
            for term in terms[1:]:
                np.copyto(term, terms[0])
        levels.area.barrier(wait_until)

    def _allreduce(self, levels: _TwoLevelSet, plan: Plan, wait_until: WaitUntil) -> None:
        response, area = plan.response, levels.area
        if not response.contributors:
            return
        reduction = self._reduction(levels, response)
        sources = Concatenation(plan.sources) if plan.sources and self._rank in response.contributors else None
        outputs = Concatenation(plan.outputs) if plan.outputs else None
        total = sources.size if sources else outputs.size if outputs else response.elements
        contributors = [area.ranks.index(rank) for rank in response.contributors if rank in area.ranks]
        per_piece = area.segment.slot // reduction.dtype.itemsize
        for low in range(0, total, per_piece):
            high = min(low + per_piece, total)
            region = area.next_region((high - low) * reduction.dtype.itemsize)
            slots = [area.slot(index, region, reduction.dtype)[:high - low] for index in range(area.size)]
            begin, end = levels.own_slice(low, high, reduction.dtype)
            own = None if sources is None else sources.single(begin, end) if begin < end else None
            if sources is not None:  # the own slice stays private where it lies in one piece
                for first, last in ((low, begin), (end, high)) if own is not None else ((low, high),):
                    for start, stop, part in sources.parts(first, last, reduction.chunk):
                        reduction.copy_prescaled(part, slots[area.index][start - low:stop - low])
            area.barrier(wait_until)
            if begin < end:
                terms = [reduction.prescaled(own) if own is not None and index == area.index
                         else slots[index][begin - low:end - low] for index in contributors]
                self._sum(levels, reduction, response, terms, slots[area.index][begin - low:end - low],
                          own is not None or area.index not in contributors[2:], wait_until)
            area.barrier(wait_until)
            if outputs is not None:
                self._collect(levels, slots, outputs, low, high, reduction.dtype)

    def _sum(self, levels: _TwoLevelSet, reduction: Reduction, response: Response, terms: Sequence[Array], out: Array,
             in_place: bool, wait_until: WaitUntil) -> None:
        """Reduce a slice over this host's terms, then over the hosts: in `out` itself, if its memory is no later term."""
        is_16_bit_float = accumulator_dtype(reduction.dtype) != reduction.dtype
        if is_16_bit_float and max(map(len, levels.members)) == 1:
            if not terms:
                out[...] = identity(response.op, out.dtype)
            elif terms[0] is not out:
                np.copyto(out, terms[0])
            divisor = response.divisor or len(levels.ranks)
            plan = levels.plan(Collective.ALLREDUCE, out, op=response.op, divisor=divisor, postscale=response.postscale)
            self._cross_plane.execute(plan, wait_until)
            return
        total = reduction.accumulator(out, in_place=in_place)
        reduction.accumulate(terms, total)
        op = ReduceOp.SUM if response.op is ReduceOp.AVERAGE else response.op
        if is_16_bit_float:
            scatter, part, gather = levels.scattering(total, out, op)
            self._cross_plane.execute(scatter, wait_until)
            reduction.finish(scatter.outputs[0], part)
            self._cross_plane.execute(gather, wait_until)
            return
        self._cross_plane.execute(levels.plan(Collective.ALLREDUCE, total, op=op), wait_until)
        reduction.finish(total, out)

    def _broadcast(self, levels: _TwoLevelSet, root: int, source: Concatenation | None, outputs: Concatenation | None,
                   low: int, end: int, response: Response, in_place: bool, wait_until: WaitUntil) -> None:
        """Bring elements low..end, which the root has in `source`, into everybody's `outputs`."""
        area, dtype = levels.area, SUPPORTED_DTYPES[response.dtype]
        root_rank = levels.ranks[root]
        root_is_local = root_rank in area.ranks
        per_piece = area.segment.slot // dtype.itemsize
        for start in range(low, end, per_piece):
            stop = min(start + per_piece, end)
            first, last = levels.own_slice(start, stop, dtype)
            writes = source is not None or (first < last and not root_is_local)
            region = area.next_region((stop - start) * dtype.itemsize if writes else 0)
            slots = [area.slot(index, region, dtype)[:stop - start] for index in range(area.size)]
            if source is not None:
                source.copy_to(start - low, stop - low, slots[area.index])
            if root_is_local:
                area.barrier(wait_until)
                slots = [slots[area.ranks.index(root_rank)]] * area.size
            if first < last:
                plan = levels.plan(Collective.BROADCAST, slots[area.index][first - start:last - start],
                                   root_rank=levels.peer_at(root_rank))
                self._cross_plane.execute(plan, wait_until)
            if not root_is_local:
                area.barrier(wait_until)
            if outputs is not None and not (in_place and source is not None):
                self._collect(levels, slots, outputs, start, stop, dtype)

    def _allgather(self, levels: _TwoLevelSet, plan: Plan, wait_until: WaitUntil) -> None:
        """Broadcast each rank's rows to where they belong."""
        output = plan.outputs[0] if plan.outputs else None
        whole = None if output is None else Concatenation([output])
        bounds = row_bounds(plan.response)
        for index, rank in enumerate(plan.ranks):
            source = Concatenation([plan.sources[0]]) if rank == self._rank and plan.sources else None
            self._broadcast(levels, index, source, whole, bounds[index], bounds[index + 1], plan.response, False, wait_until)

    @staticmethod
    def _small(levels: _TwoLevelSet) -> int:
        return min(SMALL_BYTES, levels.area.segment.slot)

    def _allgather_by_hosts(self, levels: _TwoLevelSet, plan: Plan, wait_until: WaitUntil) -> None:
        """Put a host's rows together, exchange them between the hosts' first ranks, and share what came."""
        area, dtype, bounds = levels.area, SUPPORTED_DTYPES[plan.response.dtype], row_bounds(plan.response)
        sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
        by_host = [[plan.ranks.index(rank) for rank in members] for members in levels.members]
        source = plan.sources[0] if plan.sources else None
        region = area.next_region(sizes[plan.ranks.index(self._rank)] * dtype.itemsize)
        if source is not None:
            np.copyto(area.slot(area.index, region, dtype)[:source.size], source)
        area.barrier(wait_until)
        region, first = area.next_region(bounds[-1] * dtype.itemsize if area.index == 0 else 0), region
        whole = area.slot(0, region, dtype)[:bounds[-1]]
        if area.index == 0:
            here = [area.slot(at, first, dtype)[:sizes[plan.ranks.index(rank)]] for at, rank in enumerate(area.ranks)]
            rows = [sum(sizes[index] for index in members) for members in by_host]
            self._cross_plane.execute(levels.gathering(np.concatenate(here), whole, rows), wait_until)
        area.barrier(wait_until)
        if plan.outputs:
            begin = 0
            for index in itertools.chain.from_iterable(by_host):
                np.copyto(plan.outputs[0][bounds[index]:bounds[index + 1]], whole[begin:begin + sizes[index]])
                begin += sizes[index]

    def _collect(self, levels: _TwoLevelSet, slots: Sequence[Array], outputs: Concatenation, low: int, high: int,
                 dtype: np.dtype[np.generic]) -> None:
        """Copy what each owner has of its slice of elements low..high."""
        bounds = slice_bounds(low, high, levels.slices, dtype)
        for owner in range(levels.slices):
            for start, stop, part in outputs.parts(bounds[owner], bounds[owner + 1], max(1, high - low)):
                np.copyto(part, slots[owner][start - low:stop - low])


class _TwoLevelSet:
    """A process set on several hosts, from this rank's place in it.

    Attributes:
        area: the set's ranks on this host.
        slices: how many ranks of each host speak to other hosts.
        members: the set's ranks of each host, in the order of the hosts' first ranks.
        cross_set_id: the id of the cross plane's process set that reduces this rank's slice.
    """

    def __init__(self, process_set_id: int, rank: int, ranks: tuple[int, ...], hosts: Hosts, area: StagingArea) -> None:
        self._rank, self.ranks, self.area = rank, ranks, area
        self.members = sorted(hosts.ranks_by_host)
        self.slices = min(map(len, hosts.ranks_by_host))
        self._hosts = hosts
        has_slice = area.index < self.slices
        self._peers = tuple(sorted(members[area.index] for members in hosts.ranks_by_host)) if has_slice else ()
        self.cross_set_id = _CROSS_SETS + process_set_id

    def own_slice(self, low: int, high: int, dtype: np.dtype[np.generic]) -> tuple[int, int]:
        """Return which of elements low..high this rank sums and carries across; none where it has no slice."""
        if not self._peers:
            return high, high
        begin, end = slice_bounds(low, high, self.slices, dtype)[self.area.index:self.area.index + 2]
        return begin, end

    def peer_at(self, rank: int) -> int:
        """Return which of this rank's peers is on a rank's host."""
        home = self._hosts.local_ranks(rank)
        return next(peer for peer in self._peers if peer in home)

    def gathering(self, own: Array, whole: Array, rows: Sequence[int]) -> Plan:
        """Return the cross plane's plan to gather the given numbers of elements of each host, in the order of `members`."""
        response = Response(names=("rows",), collective=Collective.ALLGATHER, dtype=dtype_name(own.dtype),
                            process_set_id=self.cross_set_id, rows=tuple(rows), row_elements=1, contributors=self._peers)
        return Plan(0, self._peers, response, [own], [whole])

    def scattering(self, total: Array, out: Array, op: ReduceOp) -> tuple[Plan, Array, Plan]:
        """Return an allreduce as two plans of the cross plane, between which this rank finishes its part of the sum.

        Returns:
            The plan that reduces this rank's part of `total`; memory for the finished part; the plan that gathers all
            finished parts in `out`.
        """
        bounds = slice_bounds(0, total.size, len(self._peers), out.dtype)
        rows = [end - begin for begin, end in itertools.pairwise(bounds)]
        mine = rows[self._peers.index(self._rank)]
        response = Response(names=("slice",), collective=Collective.REDUCESCATTER, dtype=dtype_name(total.dtype), op=op,
                            process_set_id=self.cross_set_id, rows=tuple(rows), row_elements=1, elements=total.size,
                            contributors=self._peers)
        part = np.empty(mine, out.dtype)
        return (Plan(0, self._peers, response, [total], [np.empty(mine, total.dtype)]), part,
                self.gathering(part, out, rows))

    def plan(self, collective: Collective, values: Array, *, op: ReduceOp = ReduceOp.SUM, root_rank: int = -1,
             divisor: int = 0, postscale: float = 1.0) -> Plan:
        """Return the cross plane's plan for a slice, in place."""
        response = Response(names=("slice",), collective=collective, dtype=dtype_name(values.dtype), op=op,
                            root_rank=root_rank, process_set_id=self.cross_set_id, elements=values.size,
                            contributors=self._peers, divisor=divisor, postscale=postscale)
        memory = [values]
        return Plan(0, self._peers, response, memory, memory)


def _gathered_bytes(response: Response) -> int:
    return row_bounds(response)[-1] * SUPPORTED_DTYPES[response.dtype].itemsize

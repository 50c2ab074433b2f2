"""Two storeys: shared memory inside a host, an engine (MPI or Gloo) between hosts, so a byte crosses once a host.

An allreduce is cut into as many slices as the smallest host has ranks in the process set. On every host, rank i

    reduce     sums slice i over the ranks of its host, from shared memory
    across     sums it with the rank i of every other host, through the engine
    gather     puts the result where the host's others copy it from

so hosts may have different numbers of ranks: where there are more, the rest only helps inside. Broadcast and allgather take
the same ways; a small allgather crosses once a host, between the first ranks of the hosts. What else there is, and Adasum,
goes through the engine between all ranks; a process set within one host, through shared memory alone.

Rules (docs/protocol.md#same-bits, #hierarchy)
- Average divides once, after the sum across hosts; 16-bit floats cross as float32, averages of integers as `Reduction`
  accumulates them.
- Staging slots are used as in `planes/shm.py`: regions alternate, and a barrier of the host lies between two uses.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES, Array, dtype_name
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.core.world import Hosts
from hvdlite.negotiation.messages import Response
from hvdlite.planes.arithmetic import Casts, Reduction
from hvdlite.planes.base import FusionBuffer, Part, Plan, Plane, WaitUntil
from hvdlite.planes.shm import Concatenation, Group, Memory, ShmPlane, row_bounds, slice_bounds

SMALL_BYTES = 256 << 10
"""Allgathers of up to so many bytes in all go through the first rank of each host."""
_ACROSS = 1 << 20
"""Process sets of the engine from this number on are those of slices; see `_Storeys.across`."""


class HierarchicalPlane:
    """Like `LoopbackPlane`, on several hosts.

    Args:
        memory: this host's.
        engine: carries process sets of any ranks.
        slot: bytes of one staging slot.
        chunk: bytes reduced per NumPy call.
    """

    def __init__(self, rank: int, hosts: Hosts, memory: Memory, ring: Callable[[int], None], engine: Plane, *, slot: int,
                 chunk: int, direct: int, casts: Casts | None = None) -> None:
        self.name = f"hierarchical ({engine.name})"
        self._rank, self._hosts, self._memory, self._ring, self._engine = rank, hosts, memory, ring, engine
        self._slot, self._chunk = slot, chunk
        self._casts = casts or Casts.of_numpy()
        self._inside = ShmPlane(rank, memory, ring, slot=slot, chunk=chunk, direct=direct, casts=self._casts)
        self._within: set[int] = set()  # process sets of one host
        self._sets: dict[int, _Storeys] = {}  # those of several hosts that this rank is in

    def execute(self, plan: Plan, wait_until: WaitUntil) -> None:
        number = plan.response.process_set
        if number in self._within:
            self._inside.execute(plan, wait_until)
            return
        storeys = self._sets.get(number)
        match plan.response.collective:
            case Collective.ALLREDUCE if storeys is not None and plan.response.op is not ReduceOp.ADASUM:
                if plan.part is not None:
                    self._allreduce_in_place(storeys, plan.part, plan.response, wait_until)
                else:
                    self._allreduce(storeys, plan, wait_until)
            case Collective.BROADCAST if storeys is not None:
                outputs = Concatenation(plan.outputs) if plan.outputs else None
                root = plan.ranks.index(plan.response.root_rank)
                source = Concatenation(plan.sources) if self._rank == plan.response.root_rank else None
                total = outputs.size if outputs else plan.response.elements
                in_place = plan.sources is plan.outputs
                self._broadcast(storeys, root, source, outputs, 0, total, plan.response, in_place, wait_until)
            case Collective.ALLGATHER if storeys is not None and _gathered_bytes(plan.response) <= self._small(storeys):
                self._allgather_by_hosts(storeys, plan, wait_until)
            case Collective.ALLGATHER if storeys is not None:
                self._allgather(storeys, plan, wait_until)
            case _:
                self._engine.execute(plan, wait_until)

    def open_set(self, number: int, ranks: tuple[int, ...]) -> None:
        hosts = self._hosts.within(ranks)
        here = set(self._hosts.around(self._rank))
        if len(hosts.groups) == 1:
            self._within.add(number)
            if here.issuperset(ranks):
                self._inside.open_set(number, ranks)
            return
        self._engine.open_set(number, ranks)
        local = tuple(rank for rank in ranks if rank in here)
        if number < 0 or not local:
            return  # a pair only sends
        segment = self._memory.segment(local, self._slot)
        if segment is not None:
            self._sets[number] = _Storeys(number, self._rank, ranks, hosts, Group(self._rank, local, segment, self._ring))

    def close_set(self, number: int, wait_until: WaitUntil) -> None:
        if number in self._within:
            self._within.discard(number)
            self._inside.close_set(number, wait_until)
            return
        storeys = self._sets.pop(number, None)
        if storeys is not None:
            storeys.group.barrier(wait_until)  # nobody reads this rank's slots any more
            storeys.group.segment.release()
            storeys.group.segment.close()
            self._engine.close_set(storeys.across, wait_until)
        self._engine.close_set(number, wait_until)

    def fusion_buffer(self, nbytes: int, ranks: tuple[int, ...]) -> FusionBuffer | None:
        here = self._hosts.around(self._rank)
        local = tuple(rank for rank in ranks if rank in here)
        slots = self._memory.window(nbytes, local) if local else []
        return FusionBuffer(slots[local.index(self._rank)], tuple(slots)) if slots else None

    def tune(self, settings: Mapping[str, int]) -> None:
        self._chunk = settings.get("shm_chunk", self._chunk)
        self._inside.tune(settings)
        self._engine.tune(settings)

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # the engine first, and the rest even when it raises
            closing.callback(self._inside.close)
            for storeys in self._sets.values():
                closing.callback(storeys.group.segment.close)
            closing.callback(self._engine.close)
            self._sets.clear()

    def _reduction(self, storeys: _Storeys, response: Response) -> Reduction:
        dtype = SUPPORTED_DTYPES[response.dtype]
        return Reduction(response, dtype, len(storeys.ranks), self._chunk // dtype.itemsize, self._casts)

    def _allreduce_in_place(self, storeys: _Storeys, part: Part, response: Response, wait_until: WaitUntil) -> None:
        """The bucket's slices are summed in the slot of the host's first rank, and copied from there."""
        reduction = self._reduction(storeys, response)
        slots = [slot[part.begin:part.end].view(reduction.dtype) for slot in part.buffer.slots]
        begin, end = storeys.own_slice(0, slots[0].size, reduction.dtype)
        if begin < end:
            terms = [slot[begin:end] for slot in slots]
            for start in range(0, end - begin, reduction.chunk):
                for term in terms:
                    piece = term[start:start + reduction.chunk]
                    reduction.place(piece, piece)
            self._sum(storeys, reduction, response, terms, terms[0], True, wait_until)
            for term in terms[1:]:
                np.copyto(term, terms[0])
        storeys.group.barrier(wait_until)

    def _allreduce(self, storeys: _Storeys, plan: Plan, wait_until: WaitUntil) -> None:
        response, group = plan.response, storeys.group
        if not response.contributors:
            return
        reduction = self._reduction(storeys, response)
        sources = Concatenation(plan.sources) if plan.sources and self._rank in response.contributors else None
        outputs = Concatenation(plan.outputs) if plan.outputs else None
        total = sources.size if sources else outputs.size if outputs else response.elements
        contributors = [group.ranks.index(rank) for rank in response.contributors if rank in group.ranks]
        per_piece = group.segment.slot // reduction.dtype.itemsize
        for low in range(0, total, per_piece):
            high = min(low + per_piece, total)
            region = group.next_region((high - low) * reduction.dtype.itemsize)
            slots = [group.slot(index, region, reduction.dtype)[:high - low] for index in range(group.size)]
            begin, end = storeys.own_slice(low, high, reduction.dtype)
            own = None if sources is None else sources.single(begin, end) if begin < end else None
            if sources is not None:  # the own slice stays private where it lies in one piece
                for first, last in ((low, begin), (end, high)) if own is not None else ((low, high),):
                    for start, stop, part in sources.parts(first, last, reduction.chunk):
                        reduction.place(part, slots[group.index][start - low:stop - low])
            group.barrier(wait_until)
            if begin < end:
                terms = [reduction.placed(own) if own is not None and index == group.index
                         else slots[index][begin - low:end - low] for index in contributors]
                self._sum(storeys, reduction, response, terms, slots[group.index][begin - low:end - low],
                          own is not None or group.index not in contributors[2:], wait_until)
            group.barrier(wait_until)
            if outputs is not None:
                self._collect(storeys, slots, outputs, low, high, reduction.dtype)

    def _sum(self, storeys: _Storeys, reduction: Reduction, response: Response, terms: Sequence[Array], out: Array,
             in_place: bool, wait_until: WaitUntil) -> None:
        """Reduce a slice over this host's terms, then over the hosts: in `out` itself, if its memory is no later term."""
        total = reduction.total(out, in_place=in_place)
        reduction.accumulate(terms, total)
        op = ReduceOp.SUM if response.op is ReduceOp.AVERAGE else response.op
        self._engine.execute(storeys.plan(Collective.ALLREDUCE, total, op=op), wait_until)
        reduction.conclude(total, out)

    def _broadcast(self, storeys: _Storeys, root: int, source: Concatenation | None, outputs: Concatenation | None, low: int,
                   end: int, response: Response, in_place: bool, wait_until: WaitUntil) -> None:
        """Bring elements low..end, which the root has in `source`, into everybody's `outputs`."""
        group, dtype = storeys.group, SUPPORTED_DTYPES[response.dtype]
        root_rank = storeys.ranks[root]
        at_home = root_rank in group.ranks
        per_piece = group.segment.slot // dtype.itemsize
        for start in range(low, end, per_piece):
            stop = min(start + per_piece, end)
            first, last = storeys.own_slice(start, stop, dtype)
            writes = source is not None or (first < last and not at_home)
            region = group.next_region((stop - start) * dtype.itemsize if writes else 0)
            slots = [group.slot(index, region, dtype)[:stop - start] for index in range(group.size)]
            if source is not None:
                source.copy_to(start - low, stop - low, slots[group.index])
            if at_home:
                group.barrier(wait_until)
                slots = [slots[group.ranks.index(root_rank)]] * group.size
            if first < last:
                plan = storeys.plan(Collective.BROADCAST, slots[group.index][first - start:last - start],
                                    root_rank=storeys.peer_at(root_rank))
                self._engine.execute(plan, wait_until)
            if not at_home:
                group.barrier(wait_until)
            if outputs is not None and not (in_place and source is not None):
                self._collect(storeys, slots, outputs, start, stop, dtype)

    def _allgather(self, storeys: _Storeys, plan: Plan, wait_until: WaitUntil) -> None:
        """Broadcast each rank's rows to where they belong."""
        output = plan.outputs[0] if plan.outputs else None
        whole = None if output is None else Concatenation([output])
        bounds = row_bounds(plan.response)
        for index, rank in enumerate(plan.ranks):
            source = Concatenation([plan.sources[0]]) if rank == self._rank and plan.sources else None
            self._broadcast(storeys, index, source, whole, bounds[index], bounds[index + 1], plan.response, False,
                            wait_until)

    @staticmethod
    def _small(storeys: _Storeys) -> int:
        return min(SMALL_BYTES, storeys.group.segment.slot)

    def _allgather_by_hosts(self, storeys: _Storeys, plan: Plan, wait_until: WaitUntil) -> None:
        """Put a host's rows together, exchange them between the hosts' first ranks, and share what came."""
        group, dtype, bounds = storeys.group, SUPPORTED_DTYPES[plan.response.dtype], row_bounds(plan.response)
        sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
        by_host = [[plan.ranks.index(rank) for rank in members] for members in storeys.members]
        source = plan.sources[0] if plan.sources else None
        region = group.next_region(sizes[plan.ranks.index(self._rank)] * dtype.itemsize)
        if source is not None:
            np.copyto(group.slot(group.index, region, dtype)[:source.size], source)
        group.barrier(wait_until)
        region, first = group.next_region(bounds[-1] * dtype.itemsize if group.index == 0 else 0), region
        whole = group.slot(0, region, dtype)[:bounds[-1]]
        if group.index == 0:
            here = [group.slot(at, first, dtype)[:sizes[plan.ranks.index(rank)]] for at, rank in enumerate(group.ranks)]
            rows = [sum(sizes[index] for index in members) for members in by_host]
            self._engine.execute(storeys.gathering(np.concatenate(here), whole, rows), wait_until)
        group.barrier(wait_until)
        if plan.outputs:
            begin = 0
            for index in itertools.chain.from_iterable(by_host):
                np.copyto(plan.outputs[0][bounds[index]:bounds[index + 1]], whole[begin:begin + sizes[index]])
                begin += sizes[index]

    def _collect(self, storeys: _Storeys, slots: Sequence[Array], outputs: Concatenation, low: int, high: int,
                 dtype: np.dtype[np.generic]) -> None:
        """Copy what each owner has of its slice of elements low..high."""
        bounds = slice_bounds(low, high, storeys.slices, dtype)
        for owner in range(storeys.slices):
            for start, stop, part in outputs.parts(bounds[owner], bounds[owner + 1], max(1, high - low)):
                np.copyto(part, slots[owner][start - low:stop - low])


class _Storeys:
    """A process set on several hosts, from this rank's place in it.

    Attributes:
        group: the set's ranks on this host.
        slices: how many ranks of each host speak to other hosts.
        members: the set's ranks of each host, in the order of the hosts' first ranks.
        across: the number of the engine's process set that this rank's slice uses.
    """

    def __init__(self, number: int, rank: int, ranks: tuple[int, ...], hosts: Hosts, group: Group) -> None:
        self.ranks, self.group = ranks, group
        self.members = sorted(hosts.groups)
        self.slices = min(map(len, hosts.groups))
        self._hosts = hosts
        self._peers = tuple(sorted(members[group.index] for members in hosts.groups)) if group.index < self.slices else ()
        self.across = _ACROSS + number

    def own_slice(self, low: int, high: int, dtype: np.dtype[np.generic]) -> tuple[int, int]:
        """Return which of elements low..high this rank sums and carries across; none where it has no slice."""
        if not self._peers:
            return high, high
        begin, end = slice_bounds(low, high, self.slices, dtype)[self.group.index:self.group.index + 2]
        return begin, end

    def peer_at(self, rank: int) -> int:
        """Return which of this rank's peers is on a rank's host."""
        home = self._hosts.around(rank)
        return next(peer for peer in self._peers if peer in home)

    def gathering(self, own: Array, whole: Array, rows: Sequence[int]) -> Plan:
        """Return what the engine is to do to gather so many elements of each host, in the order of `members`."""
        response = Response(names=("rows",), collective=Collective.ALLGATHER, dtype=dtype_name(own.dtype),
                            process_set=self.across, rows=tuple(rows), row_elements=1, contributors=self._peers)
        return Plan(0, self._peers, response, [own], [whole])

    def plan(self, collective: Collective, values: Array, *, op: ReduceOp = ReduceOp.SUM, root_rank: int = -1) -> Plan:
        """Return what the engine is to do with a slice, in place."""
        response = Response(names=("slice",), collective=collective, dtype=dtype_name(values.dtype), op=op,
                            root_rank=root_rank, process_set=self.across, elements=values.size, contributors=self._peers)
        memory = [values]
        return Plan(0, self._peers, response, memory, memory)


def _gathered_bytes(response: Response) -> int:
    return row_bounds(response)[-1] * SUPPORTED_DTYPES[response.dtype].itemsize

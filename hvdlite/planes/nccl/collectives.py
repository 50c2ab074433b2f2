"""Each collective as calls of a communicator and kernels, all on the plane's stream. The host never waits here.

NCCL computes sums in its own order, not in rank order like host planes; all ranks get the same result. Collectives that only
move data transfer bytes. Ranks without a contribution (absent or joined) contribute the op's identity element.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Final

from hvdlite.core.array import GPU_ALIGNMENT, SUPPORTED_DTYPES, check_reducible, identity
from hvdlite.core.device import CopySpec, DeviceArray
from hvdlite.core.errors import HorovodInternalError, UnsupportedError
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.negotiation.messages import Response
from hvdlite.planes.base import Plan
from hvdlite.planes.nccl.cupy_device import Communicator, CupyDevice, StagingBuffer
from hvdlite.planes.nccl.kernels import NEEDED, bits

BYTES: Final = 1
"""ncclUint8."""
SUM, PRODUCT, MAXIMUM, MINIMUM, MEAN = range(5)
"""ncclRedOp_t."""

DTYPES: Final = {"int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float16": 6, "float32": 7,
                 "float64": 8, "bfloat16": 9}
"""ncclDataType_t."""
_PARTS: Final = {"complex64": "float32", "complex128": "float64", "bool": "uint8"}
"""Dtypes that are reduced as another dtype, part by part."""
_OPS: Final = {ReduceOp.SUM: SUM, ReduceOp.PRODUCT: PRODUCT, ReduceOp.MAX: MAXIMUM, ReduceOp.MIN: MINIMUM}
_REDUCTIONS: Final = frozenset({Collective.ALLREDUCE, Collective.REDUCE, Collective.REDUCESCATTER})


def supports(collective: Collective, op: ReduceOp | None, dtype: str) -> bool:
    """Return whether NCCL supports an operation; others use the host plane."""
    if collective not in _REDUCTIONS or op is None:
        return True
    if op is ReduceOp.ADASUM or (_PARTS.get(dtype, dtype) not in DTYPES):
        return False
    if op is ReduceOp.AVERAGE and SUPPORTED_DTYPES[dtype].kind in "iu":
        return False  # ncclAvg divides a sum that may have wrapped
    try:
        check_reducible(dtype, op, "it")
    except UnsupportedError:
        return False
    return not (dtype.startswith("complex") and op is ReduceOp.PRODUCT)


@dataclasses.dataclass(frozen=True)
class Launch:
    """The launch of one plan.

    Attributes:
        rank: this rank's index in the process set, which is NCCL's rank.
        has_kernels: whether kernels work on all ranks of the communicator.
    """

    device: CupyDevice
    communicator: Communicator
    staging: StagingBuffer
    plan: Plan
    rank: int
    has_kernels: bool = True

    @property
    def response(self) -> Response:
        """The plan's response."""
        return self.plan.response

    @property
    def stream(self) -> int:
        """The plane's stream."""
        return self.device.stream

    def index(self, rank: int) -> int:
        """Return NCCL's rank of a rank of the job."""
        return self.plan.ranks.index(rank)

    def source(self, index: int = 0) -> DeviceArray | None:
        """Return a source; None if this rank does not contribute it or has joined."""
        found = self.plan.sources[index] if self.plan.sources else None
        assert found is None or isinstance(found, DeviceArray)
        return found

    def output(self, index: int = 0) -> DeviceArray | None:
        """Return an output; None if this rank does not receive it or has joined."""
        found = self.plan.outputs[index] if self.plan.outputs else None
        assert found is None or isinstance(found, DeviceArray)
        return found


class NcclReduction:
    """The arithmetic of one reduction: NCCL's op, and the kernels before and after it.

    An average is a sum of contributions that are multiplied by 1/N before. NVLS, NCCL's reduction in the switches of NVLink,
    computes sums, minima and maxima only; ncclAvg switches it off. That remains for communicators in which a rank has no
    kernels.
    """

    def __init__(self, launch: Launch) -> None:
        response = launch.response
        self._launch = launch
        self.dtype = _PARTS.get(response.dtype, response.dtype)
        self.parts = 2 if response.dtype.startswith("complex") else 1  # elements of `dtype` per element of the tensor
        self.width = SUPPORTED_DTYPES[self.dtype].itemsize
        self.code = DTYPES[self.dtype]
        size = len(launch.plan.ranks)
        is_average = response.op is ReduceOp.AVERAGE
        self.op, self._prescale = SUM if is_average else _OPS[response.op], response.prescale_over(size)
        if is_average and response.divisor in (0, size) and size > 1 and not launch.has_kernels:
            self.op, self._prescale = MEAN, response.prescale
        self.postscale = response.postscale
        self._fill_value = bits(identity(response.op, SUPPORTED_DTYPES[response.dtype]), SUPPORTED_DTYPES[self.dtype]) \
            if self.parts == 1 else bits(-0.0, SUPPORTED_DTYPES[self.dtype])

    def count(self, elements: int) -> int:
        """Return the number of elements of `dtype` for a number of the tensor's elements."""
        return elements * self.parts

    def prescale(self, source: DeviceArray) -> float:
        """Return by what a source is still to be multiplied."""
        return 1.0 if source.prescale == self._prescale else self._prescale / source.prescale

    def copy_scaled(self, copies: Sequence[CopySpec], factor: float = 1.0) -> None:
        """Copy and scale arrays; arrays without a source are filled with the op's identity element."""
        launch = self._launch
        copies = [pair for pair in copies if pair[2] and (pair[0] != pair[1] or factor != 1.0)]
        if not copies or launch.device.batched_copy(copies, self.dtype, self.dtype, launch.stream, factor,
                                                    self._fill_value):
            return
        if factor != 1.0 or not all(pair[0] for pair in copies):
            raise HorovodInternalError(f"factors, and ranks without a contribution, {NEEDED}")
        for source, target, count in copies:
            launch.device.copy(source, target, count * self.width, launch.stream)


def launch(work: Launch) -> None:
    """Launch a plan."""
    _COLLECTIVES[work.response.collective](work)


def _allreduce(work: Launch) -> None:
    if not work.response.contributors:
        return
    reduction = NcclReduction(work)
    if len(work.plan.sources) == 1:
        _reduce_one(work, reduction)
    else:  # also if this rank has joined; the tensors are then packed without gaps
        _reduce_fused(work, reduction)


def _reduce_one(work: Launch, reduction: NcclReduction) -> None:
    source, output = work.source(), work.output()
    assert output is not None
    count = reduction.count(output.size)
    if not count:
        return
    origin = target = output.pointer
    if source is None:
        reduction.copy_scaled([(0, target, count)])
    elif (factor := reduction.prescale(source)) != 1.0:
        reduction.copy_scaled([(source.pointer, target, count)], factor)
    else:
        origin = source.pointer
    work.communicator.allReduce(origin, target, count, reduction.code, reduction.op, work.stream)
    reduction.copy_scaled([(target, target, count)], reduction.postscale)


def _reduce_fused(work: Launch, reduction: NcclReduction) -> None:
    """Pack the tensors, reduce them as one, and unpack them."""
    sizes = [reduction.count(output.size) for output in work.plan.outputs if output is not None]
    total, places = _packing(work, sizes, reduction.width, reduction.count(work.response.elements))
    if not total:
        return
    staging = work.staging.get(total * reduction.width)
    addresses = [staging + place * reduction.width for place in places]
    copies: dict[float, list[CopySpec]] = {}  # by factor
    for index, (address, size) in enumerate(zip(addresses, sizes, strict=True)):
        source = work.source(index)
        origin, factor = (0, 1.0) if source is None else (source.pointer, reduction.prescale(source))
        copies.setdefault(factor, []).append((origin, address, size))
    if not sizes:  # joined
        copies[1.0] = [(0, staging, total)]
    for factor, alike in copies.items():
        reduction.copy_scaled(alike, factor)
    work.communicator.allReduce(staging, staging, total, reduction.code, reduction.op, work.stream)
    outputs = [output.pointer for output in work.plan.outputs if isinstance(output, DeviceArray)]
    reduction.copy_scaled(list(zip(addresses, outputs, sizes, strict=True)), reduction.postscale)


def _packing(work: Launch, sizes: Sequence[int], width: int, elements: int) -> tuple[int, list[int]]:
    """Return the length of the staging memory and each tensor's offset in it, in elements.

    There are no gaps if a rank has joined: it has only the total size.
    """
    step = GPU_ALIGNMENT // width if work.response.contributors == work.plan.ranks else 1
    ends = list(itertools.accumulate(-(-size // step) * step for size in sizes))
    return (ends[-1] if ends else elements), [0, *ends[:-1]] if ends else []


def _reduce(work: Launch) -> None:
    reduction = NcclReduction(work)
    source, output = work.source(), work.output()
    count = reduction.count(work.response.elements if source is None else source.size)
    if not count or not work.response.contributors:
        return
    origin = _contribution(work, reduction, source, count)
    target = origin if output is None else output.pointer
    work.communicator.reduce(origin, target, count, reduction.code, reduction.op, work.index(work.response.root_rank),
                             work.stream)
    if output is not None:
        reduction.copy_scaled([(target, target, count)], reduction.postscale)


def _contribution(work: Launch, reduction: NcclReduction, source: DeviceArray | None, count: int) -> int:
    """Return the address of this rank's contribution to a reduction: prescaled, or the identity element."""
    factor = 1.0 if source is None else reduction.prescale(source)
    if source is not None and factor == 1.0:
        return source.pointer
    staging = work.staging.get(count * reduction.width)
    if source is None:
        reduction.copy_scaled([(0, staging, count)])
    else:
        reduction.copy_scaled([(source.pointer, staging, count)], factor)
    return staging


def _reducescatter(work: Launch) -> None:
    reduction = NcclReduction(work)
    rows, per_row = work.response.rows, reduction.count(work.response.row_elements)
    total, output = sum(rows) * per_row, work.output()
    if not total:
        return
    mine = rows[work.rank] * per_row
    source = work.source()
    if source is None or reduction.prescale(source) != 1.0 or output is None:
        staging = work.staging.get((total + mine) * reduction.width)
        origin = _contribution(work, reduction, source, total)
        target = staging + total * reduction.width if output is None else output.pointer
    else:
        origin, target = source.pointer, output.pointer
    if len(set(rows)) == 1:
        work.communicator.reduceScatter(origin, target, mine, reduction.code, reduction.op, work.stream)
    else:
        with work.device.group():
            for root, begin in enumerate(_begins(rows)):
                part = origin + begin * per_row * reduction.width
                if rows[root] * per_row:
                    work.communicator.reduce(part, target if root == work.rank else part, rows[root] * per_row,
                                             reduction.code, reduction.op, root, work.stream)
    if output is not None:
        reduction.copy_scaled([(target, target, mine)], reduction.postscale)


def _broadcast(work: Launch) -> None:
    response, plan = work.response, work.plan
    root = work.index(response.root_rank)
    if response.contributors != plan.ranks:
        _broadcast_packed(work, root)
        return
    with work.device.group():
        for index in range(len(plan.outputs)):
            output, source = work.output(index), work.source(index)
            assert output is not None
            assert source is not None
            if output.nbytes:
                work.communicator.broadcast(source.pointer if root == work.rank else output.pointer, output.pointer,
                                            output.nbytes, BYTES, root, work.stream)


def _broadcast_packed(work: Launch, root: int) -> None:
    """Broadcast tensors as one: a rank that has joined has only the total size."""
    width = SUPPORTED_DTYPES[work.response.dtype].itemsize
    total = work.response.elements * width
    if not total:
        return
    staging = work.staging.get(total)
    sizes = [output.nbytes for output in work.plan.outputs if output is not None]
    places = list(itertools.accumulate(sizes, initial=staging))
    if work.rank == root:
        for index, place in enumerate(places[:-1]):
            source = work.source(index)
            assert source is not None
            work.device.copy(source.pointer, place, source.nbytes, work.stream)
    work.communicator.broadcast(staging, staging, total, BYTES, root, work.stream)
    for index, place in enumerate(places[:-1]):
        output = work.output(index)
        assert output is not None
        work.device.copy(place, output.pointer, output.nbytes, work.stream)


def _allgather(work: Launch) -> None:
    sizes = _row_bytes(work, work.response.rows)
    total, source, output = sum(sizes), work.source(), work.output()
    if not total:
        return
    target = work.staging.get(total) if output is None else output.pointer
    if len(set(sizes)) == 1:
        assert source is not None
        work.communicator.allGather(source.pointer, target, sizes[0], BYTES, work.stream)
        return
    with work.device.group():
        for root, begin in enumerate(_begins(sizes)):
            if sizes[root]:
                origin = source.pointer if root == work.rank and source is not None else target + begin
                work.communicator.broadcast(origin, target + begin, sizes[root], BYTES, root, work.stream)


def _gather(work: Launch) -> None:
    sizes, root = _row_bytes(work, work.response.rows), work.index(work.response.root_rank)
    source, output = work.source(), work.output()
    with work.device.group():
        if work.rank != root:
            if source is not None and source.nbytes:
                work.communicator.send(source.pointer, source.nbytes, BYTES, root, work.stream)
            return
        assert output is not None
        for peer, begin in enumerate(_begins(sizes)):
            if sizes[peer] and peer != root:
                work.communicator.recv(output.pointer + begin, sizes[peer], BYTES, peer, work.stream)
    if source is not None and source.nbytes:
        work.device.copy(source.pointer, output.pointer + sum(sizes[:root]), source.nbytes, work.stream)


def _scatter(work: Launch) -> None:
    sizes, root = _row_bytes(work, work.response.rows), work.index(work.response.root_rank)
    source, output, mine = work.source(), work.output(), sizes[work.rank]
    target = 0 if not mine else work.staging.get(mine) if output is None else output.pointer
    with work.device.group():
        if work.rank != root:
            if mine:
                work.communicator.recv(target, mine, BYTES, root, work.stream)
            return
        assert source is not None
        for peer, begin in enumerate(_begins(sizes)):
            if sizes[peer] and peer != root:
                work.communicator.send(source.pointer + begin, sizes[peer], BYTES, peer, work.stream)
    if mine:
        work.device.copy(source.pointer + sum(sizes[:root]), target, mine, work.stream)


def _alltoall(work: Launch) -> None:
    source, output, splits = work.source(), work.output(), work.plan.splits
    assert splits is not None
    sent, received = _row_bytes(work, splits.send_rows), _row_bytes(work, splits.recv_rows)
    # A rank that has joined sends nothing, and discards the received data.
    target = work.staging.get(max(1, sum(received))) if output is None else output.pointer
    with work.device.group():
        for peer, (out, back) in enumerate(zip(_begins(sent), _begins(received), strict=True)):
            if peer == work.rank:
                continue
            if source is not None and sent[peer]:
                work.communicator.send(source.pointer + out, sent[peer], BYTES, peer, work.stream)
            if received[peer]:
                work.communicator.recv(target + back, received[peer], BYTES, peer, work.stream)
    if source is not None and sent[work.rank]:
        work.device.copy(source.pointer + sum(sent[:work.rank]), target + sum(received[:work.rank]), sent[work.rank],
                         work.stream)


def _send(work: Launch) -> None:
    root = work.index(work.response.root_rank)
    source, output = work.source(), work.output()
    if work.rank == root:
        if source is not None and source.nbytes:
            work.communicator.send(source.pointer, source.nbytes, BYTES, 1 - root, work.stream)
    elif output is not None and output.nbytes:
        work.communicator.recv(output.pointer, output.nbytes, BYTES, root, work.stream)


def _row_bytes(work: Launch, rows: Sequence[int]) -> list[int]:
    per_row = work.response.row_elements * SUPPORTED_DTYPES[work.response.dtype].itemsize
    return [count * per_row for count in rows]


def _begins(sizes: Sequence[int]) -> list[int]:
    """Return the offsets of consecutive parts."""
    return [0, *itertools.accumulate(sizes)][:len(sizes)]


_COLLECTIVES: Final[dict[Collective, Callable[[Launch], None]]] = {
    Collective.ALLREDUCE: _allreduce, Collective.REDUCE: _reduce, Collective.REDUCESCATTER: _reducescatter,
    Collective.BROADCAST: _broadcast, Collective.ALLGATHER: _allgather, Collective.GATHER: _gather,
    Collective.SCATTER: _scatter, Collective.ALLTOALL: _alltoall, Collective.SEND: _send,
}

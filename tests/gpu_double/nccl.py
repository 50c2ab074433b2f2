"""Stands for the module `cupy.cuda.nccl`, over ranks that are threads. See `tests/gpu_double/__init__.py`."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES, accumulator_dtype
from hvdlite.planes.nccl.collectives import DTYPES, MAXIMUM, MEAN, MINIMUM, PRODUCT, SUM
from tests.gpu_double.cuda import PATIENCE, AbortedError, CudaDouble, view

_NAMES = {code: name for name, code in DTYPES.items()}


class NcclErrorDouble(RuntimeError):
    """Stands for `cupy.cuda.nccl.NcclError`; by default, that of an error of CUDA's."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


class NcclDouble:
    """The module, in one process.

    Attributes:
        communicators: those that somebody refers to.
        reductions: NCCL's ops of the reductions that were called, in order.
        cuda: where work is launched.
    """

    NcclError = NcclErrorDouble
    available = True

    def __init__(self, cuda: CudaDouble, meetings: Meetings) -> None:
        self.cuda, self._meetings = cuda, meetings
        self.communicators: weakref.WeakSet[CommunicatorDouble] = weakref.WeakSet()
        self.reductions: list[int] = []
        self._group = threading.local()

    def get_version(self) -> int:
        return 22809

    def get_unique_id(self) -> bytes:
        return self._meetings.new_id()

    def NcclCommunicator(self, size: int, unique_id: bytes, rank: int) -> CommunicatorDouble:
        self.communicators.add(made := CommunicatorDouble(self, self._meetings.meet(unique_id, size), rank))
        return made

    def groupStart(self) -> None:
        self._group.calls = []

    def groupEnd(self) -> None:
        calls, self._group.calls = self._group.calls, None
        for kind in ("send", "other", "recv"):  # a group is one launch: nobody waits for a send that comes later
            for stream, what, work in calls:
                if kind == (what if what in ("send", "recv") else "other"):
                    self.cuda.launch(stream, what, work)

    def call(self, stream: int, what: str, work: Callable[[], None]) -> None:
        """Launch a call of a communicator, at the end of its group if there is one."""
        grouped = getattr(self._group, "calls", None)
        if grouped is None:
            self.cuda.launch(stream, what, work)
        else:
            grouped.append((stream, what, work))


class Meetings:
    """Where the ranks' communicators find each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meetings: dict[bytes, Meeting] = {}
        self._ids = itertools.count(1)
        self.refuses = ""  # why no communicator can be made

    def new_id(self) -> bytes:
        with self._lock:
            return next(self._ids).to_bytes(128, "little")

    def meet(self, unique_id: bytes, size: int) -> Meeting:
        """Wait until all ranks of a communicator have called this; no abort ends it, as in NCCL."""
        if self.refuses:
            raise NcclErrorDouble(self.refuses)
        with self._lock:
            meeting = self._meetings.setdefault(unique_id, Meeting(size))
        with meeting.changed:
            meeting.present += 1
            meeting.changed.notify_all()
            meeting.until(lambda: meeting.present == size)
        return meeting


class Meeting:
    """What the ranks of one communicator lay on the table, by the number of the call."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.present = 0
        self.calls: dict[int, dict[int, tuple[Any, Any]]] = {}
        self.sent: dict[tuple[int, int, int], Any] = {}  # by sender, receiver and number

    def until(self, condition: Callable[[], bool], is_aborted: Callable[[], bool] = lambda: False) -> None:
        """Wait, holding the lock; like NCCL, for as long as it takes."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if is_aborted():  # only its own abort ends a rank's kernel
                raise AbortedError
            if not self.changed.wait(0.5) and time.monotonic() > deadline:
                raise NcclErrorDouble("another rank does not come")


class CommunicatorDouble:
    """Stands for `cupy.cuda.nccl.NcclCommunicator`."""

    comm = 0  # for NCCL's last error, of any communicator

    def __init__(self, nccl: NcclDouble, meeting: Meeting, rank: int) -> None:
        self._nccl, self._meeting, self._rank = nccl, meeting, rank
        self.size = meeting.size
        self._calls = itertools.count()
        self._sends: dict[int, Iterator[int]] = {}
        self._receives: dict[int, Iterator[int]] = {}
        self.ended = False

    def __del__(self) -> None:
        assert self.ended, "a communicator was collected before it was aborted"

    def _collective(self, what: str, stream: int, given: tuple[Any, ...], source: tuple[int, int, int] | None,
                    take: Callable[[list[Any]], None]) -> None:
        """Meet the others when the stream comes to it: bring `source` and `take` everybody's."""
        number, meeting = next(self._calls), self._meeting

        def work() -> None:
            if self.ended:
                raise AbortedError  # what begins after the abort brings nothing to the others
            values = None if source is None else view(source[0], source[1], _dtype(source[2])).copy()
            with meeting.changed:
                call = meeting.calls.setdefault(number, {})
                call[self._rank] = ((what, *given), values)
                meeting.changed.notify_all()
                meeting.until(lambda: len(call) == meeting.size, lambda: self.ended)
            told = {arguments for arguments, _ in call.values()}
            if len(told) > 1:
                raise NcclErrorDouble(f"the ranks' calls differ: {sorted(map(str, told))}")
            take([call[rank][1] for rank in range(meeting.size)])
        self._nccl.call(stream, what, work)

    def allReduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        def take(values: list[Any]) -> None:
            view(target, count, _dtype(dtype))[...] = _reduced(values, op)
        self._nccl.reductions.append(op)
        self._collective("allReduce", stream, (count, dtype, op), (source, count, dtype), take)

    def reduce(self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
        def take(values: list[Any]) -> None:
            if self._rank == root:
                view(target, count, _dtype(dtype))[...] = _reduced(values, op)
        self._nccl.reductions.append(op)
        self._collective("reduce", stream, (count, dtype, op, root), (source, count, dtype), take)

    def reduceScatter(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        def take(values: list[Any]) -> None:
            mine = slice(self._rank * count, (self._rank + 1) * count)
            view(target, count, _dtype(dtype))[...] = _reduced([each[mine] for each in values], op)
        self._nccl.reductions.append(op)
        self._collective("reduceScatter", stream, (count, dtype, op), (source, count * self._meeting.size, dtype), take)

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None:
        def take(values: list[Any]) -> None:
            view(target, count, _dtype(dtype))[...] = values[root]
        given = (source, count, dtype) if self._rank == root else None
        self._collective("broadcast", stream, (count, dtype, root), given, take)

    def allGather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None:
        def take(values: list[Any]) -> None:
            view(target, count * len(values), _dtype(dtype))[...] = np.concatenate(values)
        self._collective("allGather", stream, (count, dtype), (source, count, dtype), take)

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        number = next(self._sends.setdefault(peer, itertools.count()))

        def work() -> None:
            with self._meeting.changed:
                self._meeting.sent[self._rank, peer, number] = view(source, count, _dtype(dtype)).copy()
                self._meeting.changed.notify_all()
        assert peer != self._rank
        self._nccl.call(stream, "send", work)

    def recv(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None:
        number = next(self._receives.setdefault(peer, itertools.count()))

        def work() -> None:
            with self._meeting.changed:
                self._meeting.until(lambda: (peer, self._rank, number) in self._meeting.sent, lambda: self.ended)
                values = self._meeting.sent.pop((peer, self._rank, number))
            if len(values) != count:
                raise NcclErrorDouble(f"{count} elements are expected and {len(values)} were sent")
            view(target, count, _dtype(dtype))[...] = values
        self._nccl.call(stream, "recv", work)

    def check_async_error(self) -> None:
        if self._nccl.cuda.error is not None:
            raise NcclErrorDouble(str(self._nccl.cuda.error))

    def abort(self) -> None:
        self.ended = True
        with self._meeting.changed:
            for key in [key for key in self._meeting.sent if key[0] == self._rank]:
                del self._meeting.sent[key]
            self._meeting.changed.notify_all()


def _dtype(code: int) -> np.dtype[Any]:
    return SUPPORTED_DTYPES[_NAMES[code]]


def _reduced(values: list[Any], op: int) -> Any:
    dtype = values[0].dtype
    combine = {SUM: np.add, MEAN: np.add, PRODUCT: np.multiply, MINIMUM: np.minimum, MAXIMUM: np.maximum}[op]
    with np.errstate(all="ignore"):
        total = values[0].astype(accumulator_dtype(dtype))
        for each in values[1:]:
            total = combine(total, each.astype(total.dtype))
        if op == MEAN:
            total = np.trunc(total / len(values)) if dtype.kind in "iu" else total / total.dtype.type(len(values))
        return total.astype(dtype)

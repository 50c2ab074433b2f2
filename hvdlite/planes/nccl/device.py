"""The interface of a GPU for the plane: streams, events, memory, kernels, communicators; and its pool of events.

Streams, events and addresses are plain integers, as CuPy's low-level calls take them. Stream 0 is CUDA's default stream.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from hvdlite.core.device import CopySpec, DeviceArray
from hvdlite.core.errors import UnsupportedError


class Communicator(Protocol):
    """NCCL's communicator, with the names and arguments of `cupy.cuda.nccl.NcclCommunicator`: plain addresses."""

    comm: int

    def allReduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None: ...
    def reduce(self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int) -> None: ...
    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None: ...

    def reduceScatter(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None: ...

    def allGather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None: ...
    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None: ...
    def recv(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None: ...
    def check_async_error(self) -> None: ...
    def abort(self) -> None: ...


class Device(Protocol):
    """One GPU.

    Attributes:
        stream: the plane's stream: non-blocking, of the highest priority.
        version: the code of the NCCL version.
        failure: the exception types of NCCL (the first), CUDA and memory errors.
    """

    index: int
    stream: int
    version: int
    failure: tuple[type[Exception], ...]

    def make_current(self) -> None:
        """Make this GPU the current device of the calling thread, one of our own, for good.

        Another current device, 0 by default, would get a context, which takes some hundred MiB of its memory.
        """

    def uuid(self) -> str:
        """Return what is unique to the GPU, or to the slice of it (MIG) that this process uses."""

    def bus_id(self) -> str:
        """Return an identifier of this GPU on its host."""

    def make_event(self) -> int:
        """Return a new event."""

    def destroy_event(self, event: int) -> None:
        """Destroy an event; waits that are launched keep their meaning."""

    def close(self) -> None:
        """Destroy the plane's stream; work in progress on it goes on."""

    def record(self, event: int, stream: int) -> None:
        """Record an event: it covers all work launched on a stream so far."""

    def wait(self, stream: int, event: int) -> None:
        """Make future work on a stream wait for an event."""

    def is_event_done(self, event: int) -> bool:
        """Return whether all work before the event is done."""

    def is_capturing(self, stream: int) -> bool:
        """Return whether a stream is being captured into a CUDA graph."""

    def allocate(self, nbytes: int) -> DeviceArray:
        """Return uninitialised memory, aligned to 256 bytes.

        Raises:
            MemoryError: if there is not enough memory.
        """

    def synchronize(self) -> None:
        """Wait for the device's stream."""

    def zero(self, array: DeviceArray) -> None:
        """Fill a dense array with zeros; waits for all work on the plane's stream."""

    def copy(self, source: int, target: int, nbytes: int, stream: int) -> None:
        """Copy bytes."""

    def copy_row_major(self, source: DeviceArray, target: DeviceArray, stream: int) -> None:
        """Copy an array of any strides to a row-major array.

        Raises:
            HorovodInternalError: if kernels cannot be compiled.
        """

    def batched_copy(self, copies: Sequence[CopySpec], source: str, target: str, stream: int, factor: float = 1.0,
                     fill_value: int = 0) -> bool:
        """Copy, cast, scale and fill many arrays with as few kernels as possible; False if there are none."""

    def has_kernels(self) -> bool:
        """Return whether kernels can be compiled."""

    def unique_id(self) -> bytes:
        """Return the id of a new communicator; called by one of its ranks."""

    def communicator(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        """Create a communicator; blocks until all its ranks have called this."""

    def group(self) -> AbstractContextManager[None]:
        """Return a context whose communicator calls form one NCCL group."""

    def explain(self, communicator: Communicator | None, error: Exception) -> str:
        """Return an error's text with NCCL's last error message."""


def check_not_captured(device: Device, stream: int) -> None:
    """Check that a stream is not being captured into a CUDA graph.

    Raises:
        UnsupportedError: if it is, with the parts of a step that can be captured.
    """
    if device.is_capturing(stream):
        raise UnsupportedError("a collective cannot become part of a CUDA graph: ranks agree on it while it runs. "
                               "Capture the model only (torch.cuda.make_graphed_callables), and leave backward hooks, "
                               "collectives and optimizer.step() outside")


class EventPool:
    """A pool of events: creating an event costs more than recording it. Thread-safe.

    Attributes:
        free: the events that nobody refers to.
        closed: whether free events are destroyed.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.free: deque[int] = deque()
        self.closed = False
        self._pid = os.getpid()

    def record(self, stream: int) -> PooledEvent:
        """Return an event that covers all work launched on `stream` so far."""
        try:
            handle = self.free.pop()
        except IndexError:
            handle = self._device.make_event()
        event = PooledEvent(handle, stream, self)
        self._device.record(handle, stream)
        return event

    def close(self) -> None:
        """Destroy the free events now, and each other one when nobody refers to it any more."""
        self.closed = True
        self.destroy_free()

    def destroy_free(self) -> None:
        """Destroy the free events, but not in a forked child, which must not call CUDA."""
        while self._pid == os.getpid():
            try:
                event = self.free.pop()
            except IndexError:
                return
            try:
                self._device.destroy_event(event)
            except self._device.failure:
                return


class PooledEvent:
    """An event of the pool; returns to it when there are no more references. Launched waits keep their meaning."""

    __slots__ = ("_pool", "handle", "stream")

    def __init__(self, handle: int, stream: int, pool: EventPool) -> None:
        self.handle, self.stream, self._pool = handle, stream, pool

    def __del__(self) -> None:
        pool = self._pool
        pool.free.append(self.handle)
        if pool.closed:
            pool.destroy_free()

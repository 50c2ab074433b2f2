"""A GPU through CuPy, with what CuPy lacks: care for the current device, and for contexts on other GPUs; its pool of events.

Streams, events and addresses are plain integers, as CuPy's low-level calls take them. Stream 0 is CUDA's default stream.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.device import CopySpec, DeviceArray
from hvdlite.core.errors import HorovodInternalError, UnsupportedError
from hvdlite.planes.nccl import kernels, library
from hvdlite.planes.nccl.driver import Driver

_log = logging.getLogger("hvdlite")

Communicator: TypeAlias = Any
"""NCCL's communicator: a `cupy.cuda.nccl.NcclCommunicator`, whose methods take plain addresses."""
_HIGHEST_PRIORITY: Final = -5
"""CUDA clamps priorities to its range."""
_OUT_OF_MEMORY: Final = 2
"""cudaErrorMemoryAllocation."""
_NOT_READY: Final = 600
"""cudaErrorNotReady."""
_CAPTURE_FAULTS: Final = range(900, 909)
"""cudaErrorStreamCapture...: the query concerns a capture in progress, or the capture is invalid."""


class CupyDevice:
    """A GPU through CuPy. Raises `HorovodInternalError` when CuPy, NCCL or a GPU is missing.

    Args:
        index: the index of the GPU; None chooses it by the local rank.
        environment: the environment of the process, checked for unsupported settings.

    Attributes:
        stream: the plane's stream: non-blocking, of the highest priority.
        version: the code of the NCCL version.
        failure: the exception types of NCCL (the first), CUDA and memory errors.
    """

    def __init__(self, index: int | None, local_rank: int, environment: Mapping[str, str]) -> None:
        cupy = library.load(environment)
        self._open(cupy, Driver(), local_rank % cupy.cuda.runtime.getDeviceCount() if index is None else index)

    def _open(self, cupy: Any, driver: Driver, index: int) -> None:
        """Open a GPU.

        Args:
            cupy: the module, with `cupy.cuda.nccl`.
        """
        self._cupy, self._runtime, self._nccl = cupy, cupy.cuda.runtime, cupy.cuda.nccl
        self._driver, self.index = driver, index
        # Kernel errors come from the driver. KeyError: a status of NCCL that CuPy does not have.
        self.failure: tuple[type[Exception], ...] = (self._nccl.NcclError, self._runtime.CUDARuntimeError,
                                                     cupy.cuda.driver.CUDADriverError, MemoryError, KeyError)
        self.version: int = self._nccl.get_version()
        self._own_threads = threading.local()  # has an attribute in threads that called `make_current`
        with self._here():
            self.stream: int = self._runtime.streamCreateWithPriority(self._runtime.streamNonBlocking, _HIGHEST_PRIORITY)
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._kernels_work = True

    def make_current(self) -> None:
        """Make this GPU the current device of the calling thread, one of our own, for good.

        Another current device, 0 by default, would get a context, which takes some hundred MiB of its memory.
        """
        self._own_threads.entered = True
        self._runtime.setDevice(self.index)
        self._driver.relax_captures()

    def bus_id(self) -> str:
        """Return an identifier of this GPU on its host."""
        return str(self._runtime.deviceGetPCIBusId(self.index))

    def uuid(self) -> str:
        """Return what is unique to the GPU, or to the slice of it (MIG) that this process uses."""
        return self._driver.uuid(self.index)

    def make_event(self) -> int:
        """Return a new event."""
        with self._here():
            return int(self._runtime.eventCreateWithFlags(self._runtime.eventDisableTiming))

    def destroy_event(self, event: int) -> None:
        """Destroy an event; waits that are launched keep their meaning."""
        self._runtime.eventDestroy(event)

    def close(self) -> None:
        """Destroy the plane's stream; work in progress on it goes on."""
        self._runtime.streamDestroy(self.stream)

    def record(self, event: int, stream: int) -> None:
        """Record an event: it covers all work launched on a stream so far."""
        if self._runtime.getDevice() == self.index:
            self._runtime.eventRecord(event, stream)
            return
        with self._here():  # stream 0 belongs to the thread's current device
            self._runtime.eventRecord(event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Make future work on a stream wait for an event."""
        if self._runtime.getDevice() == self.index:
            self._runtime.streamWaitEvent(stream, event)
            return
        with self._here():
            self._runtime.streamWaitEvent(stream, event)

    def is_event_done(self, event: int) -> bool:
        """Return whether all work before the event is done."""
        status = self._driver.event_status(event)
        if status not in (0, _NOT_READY):  # without a driver, or an error: CuPy keeps the GIL, but has the errors' names
            status = self._runtime.eventQuery(event)
            if status not in (0, _NOT_READY):
                raise self._runtime.CUDARuntimeError(status)
        return status == 0

    def is_capturing(self, stream: int) -> bool:
        """Return whether a stream is being captured into a CUDA graph."""
        try:
            return bool(self._runtime.streamIsCapturing(stream))
        except self._runtime.CUDARuntimeError as error:
            if error.status in _CAPTURE_FAULTS:
                return True
            raise
        except RuntimeError:  # CuPy's error for an invalid capture
            return True

    def allocate(self, nbytes: int) -> DeviceArray:
        """Return uninitialised memory, aligned to 256 bytes.

        Raises:
            MemoryError: if there is not enough memory.
        """
        rounded = max(256, -(-nbytes // 256) * 256)
        with self._here():
            try:  # not from CuPy's pool, whose memory is reused in the order of one stream: this is used on several
                pointer = int(self._runtime.malloc(rounded))
            except self._runtime.CUDARuntimeError as error:
                if error.status != _OUT_OF_MEMORY:
                    raise  # an earlier error, of a kernel for example
                raise MemoryError(f"{nbytes} bytes on GPU {self.index}: {error}") from None
        return DeviceArray(pointer, (nbytes,), np.dtype(np.uint8), self.index, _Memory(pointer, self._free))

    def _free(self, pointer: int) -> None:
        try:
            with self._here():  # else a thread that has used no GPU gets a context on GPU 0
                mode = self._driver.relax_captures()  # it may be a thread of the user's, in the middle of a capture
                try:
                    self._runtime.free(pointer)
                finally:
                    self._driver.relax_captures(mode)
        except self._runtime.CUDARuntimeError as error:  # the GPU has failed, or the process ends
            _log.debug("memory of GPU %d is not freed: %s", self.index, error)

    def synchronize(self) -> None:
        """Wait for the device's stream."""
        self._runtime.streamSynchronize(self.stream)

    def zero(self, array: DeviceArray) -> None:
        """Fill a dense array with zeros; waits for all work on the plane's stream."""
        with self._here():
            self._runtime.memsetAsync(array.pointer, 0, array.nbytes, self.stream)
        self.synchronize()

    def copy(self, source: int, target: int, nbytes: int, stream: int) -> None:
        """Copy bytes."""
        self._runtime.memcpyAsync(target, source, nbytes, self._runtime.memcpyDeviceToDevice, stream)

    def copy_row_major(self, source: DeviceArray, target: DeviceArray, stream: int) -> None:
        """Copy an array of any strides to a row-major array.

        Raises:
            HorovodInternalError: if kernels cannot be compiled.
        """
        width = source.dtype.itemsize
        kernel = self._kernel(("layouts", width), lambda: kernels.row_major_code(width))
        if kernel is None:
            raise HorovodInternalError(f"gradients in another order than row-major {kernels.NEEDED}")
        table, blocks = kernels.layout(source, target)
        self._start(kernel, blocks, table, stream)

    def batched_copy(self, copies: Sequence[CopySpec], source: str, target: str, stream: int, factor: float = 1.0,
                     fill_value: int = 0) -> bool:
        """Copy, cast, scale and fill many arrays with as few kernels as possible; False if there are none."""
        scales = factor != 1.0
        kernel = self._kernel((source, target, scales), lambda: kernels.source_code(source, target, scales))
        if kernel is None:
            return False
        for table in kernels.tables(copies, kernels.chunk(source, target), factor, fill_value):
            entry = table[0]
            self._start(kernel, int(entry["first"][entry["entries"]]), table, stream)
        return True

    def has_kernels(self) -> bool:
        """Return whether kernels can be compiled."""
        kernel = self._kernel(("float32", "float32", True), lambda: kernels.source_code("float32", "float32", True))
        return kernel is not None

    def unique_id(self) -> bytes:
        """Return the id of a new communicator; called by one of its ranks."""
        return bytes(self._nccl.get_unique_id())

    def communicator(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        """Create a communicator; blocks until all its ranks have called this."""
        return self._nccl.NcclCommunicator(size, unique_id, rank)

    @contextmanager
    def group(self) -> Any:
        """Return a context whose communicator calls form one NCCL group."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def explain(self, communicator: Communicator | None, error: Exception) -> str:
        """Return an error's text with NCCL's last error message."""
        if isinstance(error, KeyError):
            return f"NCCL answered with status {error}, which CuPy does not know"
        detail = library.last_error(getattr(communicator, "comm", 0) or 0)
        return f"{error}" + (f" ({detail})" if detail else "")

    @contextmanager
    def _here(self) -> Any:
        """Return a context in which this GPU is the calling thread's current device.

        A thread of the user's gets back the device that it had, if that has a context: to set another one would make one.
        """
        before = self._runtime.getDevice()
        if before == self.index:
            yield
            return
        self._runtime.setDevice(self.index)
        try:
            yield
        finally:
            if not hasattr(self._own_threads, "entered") and self._driver.has_context(before):
                self._runtime.setDevice(before)

    def _start(self, kernel: Any, blocks: int, table: Array, stream: int) -> None:
        """Launch a kernel; its table is passed by value."""
        with self._here():  # passing the stream costs less than making it CuPy's current stream
            kernel.kernel((blocks,), (kernels.THREADS,), (table,), 0, _Handle(stream))

    def _kernel(self, key: tuple[Any, ...], code: Callable[[], str]) -> Any:
        """Return the compiled kernel; None if it cannot be compiled."""
        if key not in self._compiled and self._kernels_work:
            kernel = self._cupy.RawKernel(code(), kernels.NAME, options=("--std=c++17",))
            try:
                with self._here():
                    kernel.compile()
            except Exception as error:  # CuPy raises many kinds: no NVRTC, another CUDA version, no cache directory
                _log.warning("kernels cannot be compiled (%s: %s); packing takes more launches", type(error).__name__,
                             str(error).splitlines()[0] if str(error) else "")
                self._kernels_work = False
            else:
                self._compiled[key] = kernel
        return self._compiled.get(key)


class _Memory:
    """Allocated memory, freed when nobody refers to it any more; CUDA waits until the GPU does not use it.

    CuPy's own would be freed with whichever device is current. A forked child must not call CUDA.
    """

    __slots__ = ("_free", "_pid", "_pointer")

    def __init__(self, pointer: int, free: Callable[[int], None]) -> None:
        self._pointer, self._free, self._pid = pointer, free, os.getpid()

    def __del__(self) -> None:
        if self._pid == os.getpid():
            self._free(self._pointer)


class _Handle:
    """A stream in the form that CuPy's kernels expect."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


def check_not_captured(device: CupyDevice, stream: int) -> None:
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

    def __init__(self, device: CupyDevice) -> None:
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


class StagingBuffer:
    """Memory between tensors and NCCL; it grows on demand, and all launches on the stream share it.

    Args:
        allocate: returns memory for the device's stream; the framework may use it for another stream once it is dropped.
    """

    def __init__(self, device: CupyDevice, allocate: Callable[[int], DeviceArray]) -> None:
        self._device, self._allocate = device, allocate
        self._memory: DeviceArray | None = None

    def get(self, nbytes: int) -> int:
        """Return the address of at least `nbytes` bytes.

        Raises:
            MemoryError: if there is not enough memory.
        """
        size = 0 if self._memory is None else self._memory.nbytes
        if self._memory is None or size < nbytes:
            self.release()
            try:
                self._memory = self._allocate(max(2 * size, nbytes))  # to grow waits for the GPU: do it seldom
            except MemoryError:
                if 2 * size <= nbytes:
                    raise
                self._memory = self._allocate(nbytes)
        return self._memory.pointer

    def release(self) -> None:
        """Drop the memory, when the stream does not use it any more."""
        if self._memory is not None:
            self._device.synchronize()
            self._memory = None

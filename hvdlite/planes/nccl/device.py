"""What the plane needs of a GPU: streams, events, memory, kernels, communicators; and CuPy's.

Streams, events and addresses are plain integers, as CuPy's low-level calls take them. Stream 0 is CUDA's default stream.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol

import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES, Array
from hvdlite.core.device import CopySpec, DeviceArray
from hvdlite.core.errors import HorovodInternalError, UnsupportedError
from hvdlite.planes.nccl import kernels, library
from hvdlite.planes.nccl.kernels import NO_SCALING, Scaling

_log = logging.getLogger("hvdlite")

_RELAXED: Final = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED: this thread's calls do not spoil a capture that another thread is making."""

_HIGHEST_PRIORITY: Final = -5
"""CUDA takes a number beyond its range as the nearest one."""
_NOT_READY: Final = 600
"""cudaErrorNotReady."""
_CAPTURE_FAULTS: Final = range(900, 909)
"""cudaErrorStreamCapture...: a capture is under way that the question itself concerns, or it is spoilt."""


class Communicator(Protocol):
    """NCCL's communicator, with the names and arguments of `cupy.cuda.nccl.NcclCommunicator`: plain addresses."""

    def allReduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None: ...
    def reduce(self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int) -> None: ...
    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None: ...

    def reduceScatter(self, source: int, target: int, count: int, dtype: int, op: int,
                      stream: int) -> None: ...

    def allGather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None: ...
    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None: ...
    def recv(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None: ...
    def check_async_error(self) -> None: ...
    def abort(self) -> None: ...


class Device(Protocol):
    """One GPU.

    Attributes:
        stream: the plane's own: non-blocking, of the highest priority.
        version: NCCL's, as a code.
        failure: the exceptions that mean trouble with CUDA or NCCL, or that there is no memory.
    """

    index: int
    stream: int
    version: int
    failure: tuple[type[Exception], ...]

    def make_current(self) -> None:
        """Let the calling thread work with this GPU; once, at its start."""

    def bus_id(self) -> str:
        """Return what is different for every GPU of a host."""

    def make_event(self) -> int:
        """Return a new event."""

    def record(self, event: int, stream: int) -> None:
        """Let an event stand for all that was launched on a stream so far."""

    def wait(self, stream: int, event: int) -> None:
        """Let what is launched on a stream from now on come after an event."""

    def is_event_done(self, event: int) -> bool:
        """Return whether everything before the event is done."""

    def is_capturing(self, stream: int) -> bool:
        """Return whether what is launched on a stream goes into a CUDA graph instead."""

    def allocate(self, nbytes: int) -> DeviceArray:
        """Return bytes of new memory, aligned to 256, with anything in it.

        Raises:
            MemoryError: when there is not enough.
        """

    def zero(self, array: DeviceArray) -> None:
        """Fill a dense array with zeros; waits for what was launched on the plane's stream so far."""

    def copy(self, source: int, target: int, nbytes: int, stream: int) -> None:
        """Copy bytes."""

    def copy_row_major(self, source: DeviceArray, target: DeviceArray, stream: int) -> None:
        """Copy an array of any strides to a row-major one.

        Raises:
            HorovodInternalError: without kernels.
        """

    def batched_copy(self, copies: Sequence[CopySpec], source: str, target: str, stream: int, scaling: Scaling = NO_SCALING,
             fill_value: int = 0) -> bool:
        """Copy, cast, calculate and fill many arrays by as few kernels as possible; see `kernels`. False without kernels."""

    def unique_id(self) -> bytes:
        """Return a new communicator's id; its maker must be one of the ranks."""

    def communicator(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        """Make a communicator; blocks until all its ranks do."""

    def group(self) -> AbstractContextManager[None]:
        """Let the communicators' calls inside be one launch."""

    def explain(self, communicator: Communicator | None, error: Exception) -> str:
        """Return an error's text with what NCCL itself has to say."""


class CupyDevice:
    """A GPU through CuPy. Raises `HorovodInternalError` when CuPy, NCCL or a GPU is missing.

    Args:
        index: the GPU's number; None takes that of the calling process's local rank.
        environment: the process's, for settings that cannot work.
    """

    def __init__(self, index: int | None, local_rank: int, environment: Mapping[str, str]) -> None:
        cupy = library.load(environment)
        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        self._nccl = importlib.import_module("cupy.cuda.nccl")
        # Kernels are the driver's. KeyError: a status of NCCL that CuPy does not know.
        self.failure: tuple[type[Exception], ...] = (self._nccl.NcclError, self._runtime.CUDARuntimeError,
                                                     cupy.cuda.driver.CUDADriverError, MemoryError, KeyError)
        self.version: int = self._nccl.get_version()
        self.index: int = local_rank % self._runtime.getDeviceCount() if index is None else index
        before = self._runtime.getDevice()
        with cupy.cuda.Device(self.index):
            self.stream = self._runtime.streamCreateWithPriority(self._runtime.streamNonBlocking, _HIGHEST_PRIORITY)
        self._runtime.setDevice(before)
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._kernels_work = True

    def make_current(self) -> None:
        self._runtime.setDevice(self.index)
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
        except (OSError, AttributeError) as error:
            _log.warning("a CUDA graph that another thread captures may be spoilt by this one: %s", error)

    def bus_id(self) -> str:
        return str(self._runtime.deviceGetPCIBusId(self.index))

    def make_event(self) -> int:
        with self._here():
            return int(self._runtime.eventCreateWithFlags(self._runtime.eventDisableTiming))

    def record(self, event: int, stream: int) -> None:
        if self._runtime.getDevice() == self.index:
            self._runtime.eventRecord(event, stream)
            return
        with self._here():  # stream 0 is that of the thread's device
            self._runtime.eventRecord(event, stream)

    def wait(self, stream: int, event: int) -> None:
        if self._runtime.getDevice() == self.index:
            self._runtime.streamWaitEvent(stream, event)
            return
        with self._here():
            self._runtime.streamWaitEvent(stream, event)

    def is_event_done(self, event: int) -> bool:
        status = self._runtime.eventQuery(event)
        if status not in (0, _NOT_READY):
            raise self._runtime.CUDARuntimeError(status)
        return bool(status == 0)

    def is_capturing(self, stream: int) -> bool:
        try:
            return bool(self._runtime.streamIsCapturing(stream))
        except self._runtime.CUDARuntimeError as error:
            if error.status in _CAPTURE_FAULTS:
                return True
            raise
        except RuntimeError:  # CuPy's word for a capture that is spoilt
            return True

    def allocate(self, nbytes: int) -> DeviceArray:
        rounded = max(256, -(-nbytes // 256) * 256)
        with self._here():
            try:  # not from CuPy's pool, which gives memory back in the order of one stream: this is used on several
                memory = self._cupy.cuda.memory.Memory(rounded)
            except (self._cupy.cuda.memory.OutOfMemoryError, self._runtime.CUDARuntimeError) as error:
                raise MemoryError(f"{nbytes} bytes on GPU {self.index}: {error}") from None
        return DeviceArray(int(memory.ptr), (nbytes,), np.dtype(np.uint8), self.index, memory)

    def zero(self, array: DeviceArray) -> None:
        with self._here():
            self._runtime.memsetAsync(array.pointer, 0, array.nbytes, self.stream)
            self._runtime.streamSynchronize(self.stream)

    def copy(self, source: int, target: int, nbytes: int, stream: int) -> None:
        self._runtime.memcpyAsync(target, source, nbytes, self._runtime.memcpyDeviceToDevice, stream)

    def copy_row_major(self, source: DeviceArray, target: DeviceArray, stream: int) -> None:
        width = source.dtype.itemsize
        kernel = self._kernel(("layouts", width), lambda: kernels.row_major_code(width))
        if kernel is None:
            raise HorovodInternalError(f"gradients in another order than row-major {kernels.NEEDED}")
        table, blocks = kernels.layout(source, target)
        self._start(kernel, blocks, table, stream)

    def batched_copy(self, copies: Sequence[CopySpec], source: str, target: str, stream: int, scaling: Scaling = NO_SCALING,
             fill_value: int = 0) -> bool:
        calculates = not scaling.is_identity
        kernel = self._kernel((source, target, calculates), lambda: kernels.source_code(source, target, calculates))
        if kernel is None:
            return False
        for table in kernels.tables(copies, kernels.chunk(source, target), scaling, fill_value):
            entry = table[0]
            self._start(kernel, int(entry["first"][entry["entries"]]), table, stream)
        return True

    def unique_id(self) -> bytes:
        return bytes(self._nccl.get_unique_id())

    def communicator(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        return self._nccl.NcclCommunicator(size, unique_id, rank)  # type: ignore[no-any-return]

    @contextmanager
    def group(self) -> Any:
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def explain(self, communicator: Communicator | None, error: Exception) -> str:
        if isinstance(error, KeyError):
            return f"NCCL answered with status {error}, which CuPy does not know"
        said = library.last_error(getattr(communicator, "comm", 0) or 0)
        return f"{error}" + (f" ({said})" if said else "")

    @contextmanager
    def _here(self) -> Any:
        """Let the calling thread work with this GPU for a while."""
        before = self._runtime.getDevice()
        if before == self.index:
            yield
            return
        self._runtime.setDevice(self.index)
        try:
            yield
        finally:
            self._runtime.setDevice(before)

    def _start(self, kernel: Any, blocks: int, table: Array, stream: int) -> None:
        """Launch a kernel; its table goes with it by value."""
        with self._here():  # the stream is given along: to make it CuPy's current one for a while costs more
            kernel.kernel((blocks,), (kernels.THREADS,), (table,), 0, _Handle(stream))

    def _kernel(self, key: tuple[Any, ...], code: Callable[[], str]) -> Any:
        """Return the compiled kernel; None when there is no compiler for it."""
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


class _Handle:
    """A stream as CuPy's kernels want it."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


def check_not_captured(device: Device, stream: int) -> None:
    """Raise when what is launched on a stream goes into a CUDA graph.

    Raises:
        UnsupportedError: saying what can be captured.
    """
    if device.is_capturing(stream):
        raise UnsupportedError("a collective cannot become part of a CUDA graph: ranks agree on it while it runs. "
                               "Capture the model only (torch.cuda.make_graphed_callables), and leave backward hooks, "
                               "collectives and optimizer.step() outside")


class EventPool:
    """Events that are used again: making one costs more than recording it. Safe from any thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: deque[int] = deque()

    def record(self, stream: int) -> PooledEvent:
        """Return an event that stands for all that was launched on `stream` so far."""
        try:
            handle = self._free.pop()
        except IndexError:
            handle = self._device.make_event()
        event = PooledEvent(handle, self._free)
        self._device.record(handle, stream)
        return event


class PooledEvent:
    """An event on loan; goes back when nobody refers to it. Waits that were launched keep what it meant then."""

    __slots__ = ("_free", "handle")

    def __init__(self, handle: int, free: deque[int]) -> None:
        self.handle, self._free = handle, free

    def __del__(self) -> None:
        self._free.append(self.handle)


def width_of(dtype: str) -> int:
    """Return the bytes of an element."""
    return SUPPORTED_DTYPES[dtype].itemsize

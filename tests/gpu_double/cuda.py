"""Stands for CUDA's runtime, as `cupy.cuda.runtime` has it, and for `driver.Driver`. See `tests/gpu_double/__init__.py`."""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

import numpy as np

PATIENCE = 20.0
LATE = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0003, 0.001)
"""Seconds."""
OUT_OF_MEMORY, NOT_READY = 2, 600
_INVALID_HANDLE: Final = 400
_ALIGNMENT: Final = 256
_RELAXED: Final = 2
_HIGHEST_PRIORITY: Final = -5


class CudaError(RuntimeError):
    """Stands for `CUDARuntimeError` and `CUDADriverError`."""

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(text or f"status {status}")
        self.status = status


class AbortedError(Exception):
    """Ends what was launched, without an error."""


def view(pointer: int, count: int, dtype: np.dtype[Any]) -> Any:
    """Return the memory at an address."""
    nbytes = count * dtype.itemsize
    if not nbytes:
        return np.empty(0, dtype)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer)).view(dtype)


class _Stream:
    """A thread that does one thing after the other, late."""

    def __init__(self, seed: int, on_error: Callable[[Exception], None]) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._random = random.Random(seed)
        self._on_error = on_error
        self.held_up = threading.Event()
        self.held_up.set()
        threading.Thread(target=self._run, daemon=True, name="stream-double").start()

    def put(self, work: Callable[[], None] | None) -> None:
        self._work.put(work)

    def end(self) -> None:
        self.held_up.set()
        self.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self.held_up.wait()
            time.sleep(self._random.choice(LATE))
            try:
                work()
            except AbortedError:  # kernels of an aborted communicator just end
                pass
            except Exception as error:
                self._on_error(error)


class CudaDouble:
    """CUDA in one process.

    Attributes:
        identity: the PCI address of its GPUs.
        contexts: the GPUs with a context. To set a device makes one, and so does every call but `getDevice`.
        launches: the names of what was launched, in order.
        error: the first error in what was launched.
        graph: whether the framework's stream is being captured.
        memory: how many bytes can be allocated at once; None is any number.
        allocations: the sizes of the successful ones, in order.
        allocated: the sizes of those that are not freed, by address.
        fault: raised by allocations, like an error of CUDA that came before.
    """

    streamNonBlocking, eventDisableTiming, memcpyDeviceToDevice = 1, 2, 3
    CUDARuntimeError = CUDADriverError = CudaError

    def __init__(self, identity: str = "") -> None:
        self.identity = identity or f"gpu-{random.random()}"
        self.contexts: set[int] = set()
        self.launches: list[str] = []
        self.error: Exception | None = None
        self.graph = False
        self.memory: int | None = None
        self.allocations: list[int] = []
        self.allocated: dict[int, int] = {}
        self.fault: Exception | None = None
        self.events: set[int] = set()
        self._closed: set[int] = set()
        self._thread = threading.local()  # its current device, and its mode of captures
        self._marks: dict[int, threading.Event] = {}
        self._numbers = itertools.count(1)
        self._rooms: list[Any] = []
        self._streams: dict[int, _Stream] = {}
        self._priorities: dict[int, int] = {}  # by stream
        self._devices: dict[int, int] = {}  # by stream

    # --- for tests -----------------------------------------------------------------------------------------------------

    def make_stream(self) -> int:
        number = 1000 + len(self._streams)
        self._streams[number] = _Stream(number, self._fail)
        return number

    def hold(self, stream: int) -> None:
        """Let a stream do nothing until `release`."""
        self._streams[stream].held_up.clear()

    def release(self, stream: int) -> None:
        self._streams[stream].held_up.set()

    def end(self) -> None:
        """End the streams' threads."""
        for stream in self._streams.values():
            stream.end()

    def launch(self, stream: int, what: str, work: Callable[[], None]) -> None:
        self.launches.append(what)
        if stream == 0:
            work()
        else:
            self._streams[stream].put(work)

    def held(self) -> dict[str, int]:
        """Return how much of each kind of thing has been made and not given up."""
        return {"memory": sum(self.allocated.values()), "events": len(self.events),
                "streams": len(self._streams.keys() - self._closed)}

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error

    # --- the runtime: devices and streams ------------------------------------------------------------------------------

    def getDeviceCount(self) -> int:
        return 16

    def getDevice(self) -> int:
        return getattr(self._thread, "device", 0)

    def setDevice(self, index: int) -> None:
        self._thread.device = index
        self.contexts.add(index)

    def use(self, stream: int = 0) -> None:
        """Make a context on the calling thread's current device, to which a stream must belong."""
        self.contexts.add(self.getDevice())
        if self._devices.get(stream, self.getDevice()) != self.getDevice():
            raise CudaError(_INVALID_HANDLE)

    def deviceGetPCIBusId(self, index: int) -> str:
        return self.identity

    def uuid(self, index: int) -> str:
        return self.identity

    def deviceSynchronize(self) -> None:
        for stream in self._streams.keys() - self._closed:
            self.streamSynchronize(stream)

    def streamCreateWithPriority(self, flags: int, priority: int) -> int:
        self.use()
        assert flags == self.streamNonBlocking
        stream = self.make_stream()
        self._priorities[stream], self._devices[stream] = max(priority, _HIGHEST_PRIORITY), self.getDevice()
        return stream

    def streamGetPriority(self, stream: int) -> int:
        return self._priorities[stream]

    def streamDestroy(self, stream: int) -> None:
        self._closed.add(stream)
        self._streams[stream].put(None)

    def streamSynchronize(self, stream: int) -> None:
        self.use()
        done = threading.Event()
        self._streams[stream].put(done.set)
        assert done.wait(PATIENCE), "a stream does not come to its end"

    def streamIsCapturing(self, stream: int) -> bool:
        return self.graph

    # --- the runtime: events -------------------------------------------------------------------------------------------

    def eventCreateWithFlags(self, flags: int) -> int:
        self.use()
        self.events.add(event := next(self._numbers))
        return event

    def eventDestroy(self, event: int) -> None:
        self.events.remove(event)
        self._marks.pop(event, None)

    def eventRecord(self, event: int, stream: int) -> None:
        self.use()
        mark = self._marks[event] = threading.Event()
        self.launch(stream, "record", mark.set)

    def streamWaitEvent(self, stream: int, event: int) -> None:
        self.use()
        mark = self._marks[event]

        def work() -> None:
            if not mark.wait(PATIENCE):
                raise CudaError(NOT_READY, "a stream waits for an event that never comes")
        self.launch(stream, "wait", work)

    def eventQuery(self, event: int) -> int:
        return 0 if self._marks[event].is_set() else NOT_READY

    # --- the runtime: memory -------------------------------------------------------------------------------------------

    def malloc(self, nbytes: int) -> int:
        self.use()
        if self.fault is not None:
            raise self.fault
        if self.memory is not None and nbytes > self.memory:
            raise CudaError(OUT_OF_MEMORY)
        self.allocations.append(nbytes)
        room = np.full(nbytes + 2 * _ALIGNMENT, 0xA5, np.uint8)
        self._rooms.append(room)  # cudaFree waits until nobody uses the memory any more; here it is kept
        pointer: int = room.ctypes.data + -room.ctypes.data % _ALIGNMENT
        self.allocated[pointer] = nbytes
        return pointer

    def free(self, pointer: int) -> None:
        self.use()
        assert self._thread.mode == _RELAXED, "this would spoil a capture"
        del self.allocated[pointer]

    def memsetAsync(self, pointer: int, value: int, nbytes: int, stream: int) -> None:
        self.use()
        self.launch(stream, "set", lambda: view(pointer, nbytes, np.dtype(np.uint8)).fill(value))

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self.use()
        assert kind == self.memcpyDeviceToDevice
        self.launch(stream, "copy", lambda: ctypes.memmove(target, source, nbytes))  # type: ignore[arg-type,return-value]

    # --- the driver ----------------------------------------------------------------------------------------------------

    def relax_captures(self, mode: int = _RELAXED) -> int:
        before = getattr(self._thread, "mode", 0)
        self._thread.mode = mode
        return before  # type: ignore[no-any-return]

    def event_status(self, event: int) -> int | None:
        return self.eventQuery(event)

    def has_context(self, index: int) -> bool:
        return index in self.contexts

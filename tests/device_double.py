"""A test double of a GPU and of NCCL: ranks as threads, memory of the host. For tests only; no setting selects it.

What it keeps of the real thing is the order of things. Every stream is a thread that works late, after a random moment, so
whoever forgets to wait for an event reads old values. Events stand for what they stood for when they were waited for. A
communicator's collective meets the other ranks when its stream comes to it, not when it is called, and reads the memory
then; what it sent and nobody has taken yet is lost when it is aborted. Stream 0 is the framework's own: what is launched on
it (and what torch computes on the CPU) is done at once, and to wait on it is to block.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np

from hvdlite.core.array import BFLOAT16, SUPPORTED_DTYPES, accumulator_dtype
from hvdlite.core.device import CopySpec, DeviceArray
from hvdlite.planes.nccl.plane import NcclPlane
from tests.planes.communicator_double import PATIENCE, AbortedError, CommunicatorDouble, Meetings, view
from tests.planes.communicator_double import NcclErrorDouble as NcclErrorDouble

LATE = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0003, 0.001)
"""Seconds."""


class CudaErrorDouble(RuntimeError):
    """Stands for CuPy's `CUDARuntimeError`."""


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


class _Memory:
    """Stands for allocated memory: who holds it, holds this."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class GpuDouble:
    """Stands for `CupyDevice`.

    Attributes:
        launches: the names of what was launched, in order.
        reductions: NCCL's ops of the reductions that were called, in order.
        graph: whether the framework's stream is being captured.
        kernels: whether kernels work.
        memory: how many bytes can be allocated at once; None is any number.
        cached: how many more bytes could be allocated if the framework gave back what it does not use; see `reclaim`.
        reclaimed: how often it has.
        allocations: the sizes of the successful ones, in order.
        fault: raised by allocations, like an error of CUDA that came before.
    """

    def __init__(self, index: int = 0, meetings: Meetings | None = None, version: int = 22809, gpu: str = "") -> None:
        self.index, self.version = index, version
        self.failure = (NcclErrorDouble, CudaErrorDouble, MemoryError, KeyError)
        self.gpu = gpu or f"gpu-{random.random()}"
        self.launches: list[str] = []
        self.reductions: list[int] = []
        self.graph = False
        self.kernels = True
        self.memory: int | None = None
        self.cached = self.reclaimed = 0
        self.allocations: list[int] = []
        self.fault: Exception | None = None
        self.error: Exception | None = None
        self._meetings = meetings or Meetings()
        self.events: set[int] = set()
        self.memory_owners: weakref.WeakSet[_Memory] = weakref.WeakSet()
        self.communicators: weakref.WeakSet[CommunicatorDouble] = weakref.WeakSet()
        self.closed_streams = 0
        self._marks: dict[int, threading.Event] = {}
        self._events = itertools.count(1)
        self._rooms: list[Any] = []
        self._streams: dict[int, _Stream] = {}
        self.stream = self.make_stream()
        self._group = threading.local()

    def make_stream(self) -> int:
        number = 1000 + len(self._streams)
        self._streams[number] = _Stream(number, self._fail)
        return number

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error

    def hold(self, stream: int) -> None:
        """Let a stream do nothing until `release`."""
        self._streams[stream].held_up.clear()

    def release(self, stream: int) -> None:
        self._streams[stream].held_up.set()

    def end(self) -> None:
        """End the streams' threads."""
        for stream in self._streams.values():
            stream.end()

    def held(self) -> dict[str, int]:
        """Return how much of each kind of thing has been made and not given up."""
        return {"memory": sum(memory.nbytes for memory in self.memory_owners), "events": len(self.events),
                "streams": len(self._streams) - self.closed_streams,
                "communicators": sum(not each.ended for each in self.communicators)}

    def launch(self, stream: int, what: str, work: Callable[[], None]) -> None:
        self.launches.append(what)
        if stream == 0:
            work()
        else:
            self._streams[stream].put(work)

    def make_current(self) -> None:
        pass

    def bus_id(self) -> str:
        return self.gpu

    def uuid(self) -> str:
        return self.gpu

    def make_event(self) -> int:
        self.events.add(event := next(self._events))
        return event

    def destroy_event(self, event: int) -> None:
        self.events.remove(event)
        self._marks.pop(event, None)

    def close(self) -> None:
        self.closed_streams += 1
        self._streams[self.stream].put(None)

    def record(self, event: int, stream: int) -> None:
        mark = self._marks[event] = threading.Event()
        self.launch(stream, "record", mark.set)

    def wait(self, stream: int, event: int) -> None:
        mark = self._marks[event]

        def work() -> None:
            if not mark.wait(PATIENCE):
                raise NcclErrorDouble("a stream waits for an event that never comes")
        self.launch(stream, "wait", work)

    def is_event_done(self, event: int) -> bool:
        return self._marks[event].is_set()

    def is_capturing(self, stream: int) -> bool:
        return self.graph

    def allocate(self, nbytes: int) -> DeviceArray:
        if self.fault is not None:
            raise self.fault
        if self.memory is not None and nbytes > self.memory:
            raise MemoryError(f"{nbytes} bytes on GPU {self.index}: there are {self.memory}")
        self.allocations.append(nbytes)
        room = np.full(nbytes + 512, 0xA5, np.uint8)
        begin = -room.ctypes.data % 256
        self._rooms.append(room)  # cudaFree waits until nobody uses the memory any more; here it is kept
        self.memory_owners.add(owner := _Memory(nbytes))
        return DeviceArray(room.ctypes.data + begin, (nbytes,), np.dtype(np.uint8), self.index, owner)

    def reclaim(self) -> None:
        """What a framework does to give back memory."""
        self.reclaimed += 1
        if self.memory is not None:
            self.memory, self.cached = self.memory + self.cached, 0

    def zero(self, array: DeviceArray) -> None:
        view(array.pointer, array.nbytes, np.dtype(np.uint8))[...] = 0

    def copy(self, source: int, target: int, nbytes: int, stream: int) -> None:
        self.launch(stream, "copy", lambda: ctypes.memmove(target, source, nbytes))  # type: ignore[arg-type,return-value]

    def copy_row_major(self, source: DeviceArray, target: DeviceArray, stream: int) -> None:
        def strided(array: DeviceArray) -> Any:
            flat = view(array.pointer, array.size, array.dtype)
            if not array.strides:
                return flat.reshape(array.shape)
            steps = tuple(step * array.dtype.itemsize for step in array.strides)
            return np.lib.stride_tricks.as_strided(flat, array.shape, steps)
        self.launch(stream, "arrange", lambda: np.copyto(strided(target), strided(source)))

    def batched_copy(self, copies: Sequence[CopySpec], source: str, target: str, stream: int, factor: float = 1.0,
                     fill_value: int = 0) -> bool:
        if not self.kernels:
            return False
        copies = list(copies)

        def work() -> None:
            for origin, place, count in copies:
                out = view(place, count, SUPPORTED_DTYPES[target])
                if origin == 0:
                    value = np.array([fill_value], np.uint64).view(np.uint8)[:out.itemsize].view(out.dtype)
                    out[...] = value
                else:
                    out[...] = calculated(view(origin, count, SUPPORTED_DTYPES[source]).copy(), factor, out.dtype)
        self.launch(stream, "move", work)
        return True

    def has_kernels(self) -> bool:
        return self.kernels

    def unique_id(self) -> bytes:
        return self._meetings.new_id()

    def communicator(self, size: int, unique_id: bytes, rank: int) -> CommunicatorDouble:
        self.communicators.add(made := CommunicatorDouble(self, self._meetings.meet(unique_id, size), rank))
        return made

    @contextmanager
    def group(self) -> Iterator[None]:
        self._group.calls = []
        try:
            yield
        finally:
            calls, self._group.calls = self._group.calls, None
            for kind in ("send", "other", "recv"):  # a group is one launch: nobody waits for a send that comes later
                for stream, what, work in (call for call in calls if _kind(call[1]) == kind):
                    self.launch(stream, what, work)

    def call(self, stream: int, what: str, work: Callable[[], None]) -> None:
        """Launch a call of a communicator, at the end of its group if there is one."""
        grouped = getattr(self._group, "calls", None)
        if grouped is None:
            self.launch(stream, what, work)
        else:
            grouped.append((stream, what, work))

    def explain(self, communicator: Any, error: Exception) -> str:
        return str(error)


def _kind(what: str) -> str:
    return what if what in ("send", "recv") else "other"


def calculated(values: Any, factor: float, dtype: np.dtype[Any]) -> Any:
    """Do what the kernel does, with NumPy."""
    with np.errstate(all="ignore"):
        if values.dtype.kind in "iu":
            return (values if factor == 1.0 else np.trunc(values.astype(np.float64) * factor)).astype(dtype)
        wide = values.astype(accumulator_dtype(values.dtype))
        if factor != 1.0:
            wide = wide * wide.dtype.type(factor)
        return (wide.astype(np.float32) if dtype == BFLOAT16 else wide).astype(dtype)


def plane(rank: int, oob: Any, wake: Callable[[], None], gpu: GpuDouble, **options: Any) -> NcclPlane:
    """Return the real plane over a double of a GPU."""
    return NcclPlane(rank, "host", oob, wake, lambda index: gpu, lambda: "", **{"exit_timeout": 0.0, **options})


class Gpus:
    """The doubles of all ranks of the worlds that a test makes.

    Attributes:
        made: every one, in order.
    """

    def __init__(self) -> None:
        self.made: list[GpuDouble] = []
        self.planes: list[Any] = []
        self.options: dict[str, Any] = {}
        self.meetings = Meetings()

    def plane(self, rank: int, oob: Any, wake: Any) -> Any:
        gpu = GpuDouble(0, self.meetings)
        self.made.append(gpu)
        self.planes.append(plane(rank, oob, wake, gpu, **self.options))
        return self.planes[-1]

    def end(self) -> None:
        for gpu in self.made:
            gpu.end()
            assert gpu.error is None, gpu.error

    def wrap(self, runtime: Any, array: Any, stream: int = 0) -> DeviceArray:
        """Let a NumPy array pass for a rank's GPU memory."""
        def empty(shape: tuple[int, ...]) -> DeviceArray:
            return self.wrap(runtime, np.empty(shape, array.dtype), stream)
        return runtime.devices.wrap(array.ctypes.data, array.shape, array.dtype, 0, stream=stream, owner=array, empty=empty,
                                    reclaim=self.made[runtime.world.rank].reclaim)

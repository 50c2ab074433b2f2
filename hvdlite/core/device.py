"""GPU memory as addresses and events: the types that planes and adapters share. Only they access the values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from hvdlite.core.array import Array, flat

CPU = "cpu"
CUDA = "cuda"
"""The device kind of a request; all ranks must agree on it. Which GPU of a host it is does not matter to other ranks."""


class Event(Protocol):
    """A CUDA event; its handle is reused when there are no more references.

    Attributes:
        stream: the stream on which it was recorded.
    """

    handle: int
    stream: int


@dataclasses.dataclass(slots=True, eq=False)
class DeviceArray:
    """A dense array in a GPU's memory.

    Attributes:
        pointer: address of the first element.
        dtype: as `core.array` names it.
        owner: the object that owns the memory; a result is returned as its owner.
        ready: the event after which the values are available and the memory may be written; None: immediately.
        empty: creates an uninitialised array like this one, of another shape; None if no result is allocated like it.
        strides: in elements; () is row-major.
        prescale: a factor that has been applied to the values already; a reduction applies only what is missing of its own.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: int
    owner: object = None
    ready: Event | None = None
    empty: Callable[[tuple[int, ...]], DeviceArray] | None = None
    strides: tuple[int, ...] = ()
    prescale: float = 1.0

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        """Dimensions."""
        return len(self.shape)

    def flat(self) -> DeviceArray:
        """Return a 1-D array of all elements in memory order."""
        return dataclasses.replace(self, shape=(self.size,), strides=()) if self.ndim != 1 or self.strides else self

    def part(self, begin: int, count: int, dtype: np.dtype[Any] | None = None) -> DeviceArray:
        """Return a 1-D array of `count` elements from `begin`, counted in elements of `dtype` (default: its own)."""
        dtype = dtype or self.dtype
        return dataclasses.replace(self, pointer=self.pointer + begin * dtype.itemsize, shape=(count,), dtype=dtype,
                                   strides=())

    def after(self, ready: Event | None) -> DeviceArray:
        """Return the same memory with another ready event."""
        return dataclasses.replace(self, ready=ready)


AnyArray: TypeAlias = Array | DeviceArray


def device_of(array: AnyArray | None) -> str:
    """Return the device kind of `array` for a request."""
    return CUDA if type(array) is DeviceArray else CPU


def flattened(array: AnyArray) -> AnyArray:
    """Return a 1-D view of a dense array; never copies."""
    return array.flat() if type(array) is DeviceArray else flat(array)  # type: ignore[arg-type]


def empty(like: AnyArray, shape: tuple[int, ...]) -> AnyArray:
    """Return an uninitialised row-major array of `like`'s dtype, where `like` is."""
    if type(like) is DeviceArray:
        assert like.empty is not None, "this array cannot be the source of an operation that allocates its result"
        return like.empty(shape)
    assert isinstance(like, np.ndarray)
    return np.empty(shape, like.dtype)


class Completion(Protocol):
    """Work that was launched on a GPU for one entry; the host is notified before the GPU has done it.

    See docs/protocol.md#gpu-streams.

    Attributes:
        device: the GPU's number.
    """

    @property
    def device(self) -> int: ...

    def for_entry(self, keep_alive: object, streams: Collection[int] = ()) -> Completion:
        """Return the completion of another entry of the same launch; keeps a reference to `keep_alive` during the work.

        Args:
            streams: those for which the memory in `keep_alive` was allocated: the framework reuses it in their order.
        """

    def block_stream(self, stream: int) -> None:
        """Make future work on `stream` wait for this work, without blocking the host.

        Releases `keep_alive` if that belongs to no other stream.

        Raises:
            HorovodInternalError: when the work failed, or the job.
        """

    def is_done(self) -> bool:
        """Return whether the GPU has finished the work."""

    def wait(self) -> None:
        """Block the host until the work is finished; for frameworks without streams.

        Raises:
            HorovodInternalError: like `block_stream`.
        """


CopySpec: TypeAlias = tuple[int, int, int]
"""The addresses of a source (0: fill with the fill value) and a target, and the number of elements."""


class DeviceAccess(Protocol):
    """The interface of the GPU plane for adapters; callable from any thread."""

    def wrap(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, *, stream: int, owner: object,
             empty: Callable[[tuple[int, ...]], DeviceArray] | None = None,
             allocate: Callable[[int], DeviceArray] | None = None) -> DeviceArray:
        """Describe a dense array whose values were produced on `stream`; later work on the stream is not waited for.

        Args:
            empty: see `DeviceArray`.
            allocate: returns so many bytes of the framework's memory, which the framework uses again in the order of
                `stream`; called on any thread. Raises MemoryError.

        Raises:
            UnsupportedError: for a second GPU, and while `stream` is being captured into a CUDA graph.
        """

    def record_event(self, stream: int) -> Event:
        """Return a new event that covers all work launched on `stream` so far.

        Raises:
            UnsupportedError: while `stream` is being captured into a CUDA graph.
        """

    def wait_stream(self, stream: int, other: int) -> None:
        """Make future work on `stream` wait for all work launched on `other` so far."""

    def batched_copy(self, copies: Sequence[CopySpec], source: str, target: str, stream: int, factor: float = 1.0) -> bool:
        """Copy many arrays with as few kernels as possible, casting dtypes and multiplying values by a factor.

        Return False if kernels cannot be compiled.
        """

    def supports(self, collective: int, op: int | None, dtype: str) -> bool:
        """Return whether the plane supports this operation; equal on all ranks."""

    def unavailable_reason(self) -> str:
        """Return why there is no GPU plane here and how to get one; "" if there is one."""

"""Memory of a GPU as the runtime sees it: an address, never a value. Only a plane and an adapter know what is there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from hvdlite.core.array import Array, flat

CPU = "cpu"
CUDA = "cuda"
"""What a request says of where its tensor is; all ranks must agree. Which of a host's GPUs it is concerns nobody else."""


class Event(Protocol):
    """A point in the work of a stream; reused once nobody refers to it."""

    handle: int


@dataclasses.dataclass(slots=True, eq=False)
class DeviceArray:
    """A dense array in a GPU's memory.

    Attributes:
        pointer: address of the first element.
        dtype: as `core.array` names it.
        owner: what keeps the memory alive, and what a result is handed out as.
        ready: after it the values are there, and the memory may be written; None: now.
        empty: makes an uninitialised array like this one, of another shape; None where no result is ever made from it.
        strides: in elements; () is row-major.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: int
    owner: object = None
    ready: Event | None = None
    empty: Callable[[tuple[int, ...]], DeviceArray] | None = None
    strides: tuple[int, ...] = ()

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
        """Return all its elements as they lie in memory, as one dimension."""
        return dataclasses.replace(self, shape=(self.size,), strides=()) if self.ndim != 1 or self.strides else self

    def part(self, begin: int, count: int, dtype: np.dtype[Any] | None = None) -> DeviceArray:
        """Return `count` elements from `begin`, in elements of `dtype` (default: its own), as one dimension."""
        dtype = dtype or self.dtype
        return dataclasses.replace(self, pointer=self.pointer + begin * dtype.itemsize, shape=(count,), dtype=dtype,
                                   strides=())

    def after(self, ready: Event | None) -> DeviceArray:
        """Return the same memory, ready after `ready`."""
        return dataclasses.replace(self, ready=ready)


AnyArray: TypeAlias = Array | DeviceArray


def device_of(array: AnyArray | None) -> str:
    """Return what a request says of where `array` is."""
    return CUDA if type(array) is DeviceArray else CPU


def flattened(array: AnyArray) -> AnyArray:
    """Return a 1-D view of a dense array; never copies."""
    return array.flat() if type(array) is DeviceArray else flat(array)  # type: ignore[arg-type]


def empty(like: AnyArray, shape: tuple[int, ...]) -> AnyArray:
    """Return an uninitialised row-major array of `like`'s dtype, where `like` is."""
    if type(like) is DeviceArray:
        assert like.empty is not None, "this array cannot be the source of an operation that makes its own result"
        return like.empty(shape)
    assert isinstance(like, np.ndarray)
    return np.empty(shape, like.dtype)


class Completion(Protocol):
    """Work that was launched on a GPU for one entry; the host is told before the GPU has done it.

    See docs/protocol.md#gpu-streams.

    Attributes:
        device: the GPU's number.
    """

    @property
    def device(self) -> int: ...

    def holding(self, held: object) -> Completion:
        """Return the completion of another entry of the same launch; `held` is kept alive as long as the work needs it."""

    def follow(self, stream: int) -> None:
        """Let what is launched on `stream` from now on come after it; does not wait. What the entry held is let go.

        Raises:
            HorovodInternalError: when the work failed, or the job.
        """

    def passed(self) -> bool:
        """Return whether it is done."""

    def wait(self) -> None:
        """Block the host until it is done; for frameworks without streams.

        Raises:
            HorovodInternalError: like `follow`.
        """


Pair: TypeAlias = tuple[int, int, int]
"""Addresses of a source (0: fill with zeros) and a target, and a number of elements."""


class DeviceAccess(Protocol):
    """What an adapter may ask of the plane for GPUs, from any thread."""

    def lend(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, *, stream: int, owner: object,
             empty: Callable[[tuple[int, ...]], DeviceArray] | None = None) -> DeviceArray:
        """Describe a dense array whose values were produced on `stream`; what follows there is not waited for.

        Raises:
            UnsupportedError: for a second GPU, and while `stream` is being captured into a CUDA graph.
        """

    def ready(self, stream: int) -> Event:
        """Return a new point in the work of `stream`: all that was launched there so far.

        Raises:
            UnsupportedError: while `stream` is being captured into a CUDA graph.
        """

    def join(self, stream: int, other: int) -> None:
        """Let what is launched on `stream` from now on come after what was launched on `other`."""

    def pack(self, pairs: Sequence[Pair], source: str, target: str, stream: int) -> bool:
        """Copy many arrays by as few kernels as possible, casting from dtype to dtype; False where there are no kernels."""

    def carries(self, collective: int, op: int | None, dtype: str) -> bool:
        """Say whether the plane can do it; the answer is the same on all ranks."""

    def missing(self) -> str:
        """Return why there is no plane for GPUs here, and what to do; "" when there is one."""

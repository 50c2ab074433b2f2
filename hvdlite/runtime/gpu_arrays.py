"""CuPy arrays as arrays of the runtime, for `hvdlite.ops` and for adapters of frameworks that support DLPack.

This module does not import CuPy: a caller with a CuPy array has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hvdlite.core.array import dtype_name
from hvdlite.core.device import AnyArray, DeviceAccess, DeviceArray
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.handoff.handle import Handle, Handles


def cupy() -> Any:
    """Return CuPy when it is imported, else None."""
    return sys.modules.get("cupy")


def is_on_gpu(array: object) -> bool:
    """Return whether `array` is a CuPy array."""
    module = cupy()
    return module is not None and isinstance(array, module.ndarray)


def wrap(array: Any, name: str, devices: DeviceAccess | None, collective: Collective, op: ReduceOp | None = None, *,
         in_place: bool = False) -> DeviceArray:
    """Describe a CuPy array to the GPU plane; it is ready after the work on CuPy's current stream so far.

    Args:
        in_place: whether the result must be in this array.

    Raises:
        UnsupportedError: without a GPU plane, for operations that NCCL does not have, and for an array in place that is not
            C-contiguous.
    """
    missing = "this job has no plane for GPUs" if devices is None else devices.unavailable_reason()
    if missing or devices is None:
        raise UnsupportedError(f"'{name}' is on a GPU: {missing}; or pass cupy.asnumpy(array)")
    if not devices.supports(collective, op, dtype_name(array.dtype)):
        with_op = "" if op is None else f" with {op.name.capitalize()}"
        raise UnsupportedError(f"'{name}': NCCL has no {collective.name.lower()} of {array.dtype}{with_op}; pass "
                               "cupy.asnumpy(array)")
    if not array.flags.c_contiguous:
        if in_place:
            raise UnsupportedError(f"'{name}': the array of shape {list(array.shape)} is not C-contiguous; pass "
                                   "cupy.ascontiguousarray(...)")
        array = cupy().ascontiguousarray(array)
    return _wrapped(array, devices, cupy().cuda.get_current_stream(int(array.device.id)))


def empty_like(like: DeviceArray) -> DeviceArray:
    """Return memory for a result of the same shape and dtype."""
    assert like.empty is not None
    return like.empty(like.shape)


def _wrapped(array: Any, devices: DeviceAccess, stream: Any) -> DeviceArray:
    device, dtype = array.device, array.dtype

    def empty(shape: tuple[int, ...], dtype: Any = dtype) -> DeviceArray:
        with device, stream:  # CuPy reuses memory in the order of a stream: the caller's
            made = cupy().empty(shape, dtype)
        return _wrapped(made, devices, stream)
    return devices.wrap(int(array.data.ptr), tuple(array.shape), array.dtype, int(array.device.id),
                        stream=int(stream.ptr), owner=array, empty=empty,
                        allocate=lambda nbytes: empty((nbytes,), "u1"))


class GpuHandle:
    """A collective on CuPy arrays in flight, like `Handle`: done means launched.

    `wait` makes CuPy's current stream wait for the result.
    """

    __slots__ = ("_handle",)

    def __init__(self, handle: Handle | Handles) -> None:
        self._handle = handle

    def done(self) -> bool:
        """Return whether `wait` would not block."""
        return self._handle.done()

    def wait(self) -> Any:
        """Wait and return the result, as CuPy arrays; may be called again."""
        result = self._handle.wait()
        for completion in self._handle.completions():
            completion.block_stream(cupy().cuda.get_current_stream(completion.device).ptr)
        return _result(result)


def in_flight(handle: Handle | Handles, given: AnyArray | Sequence[AnyArray]) -> Any:
    """Return the caller's handle for a collective on `given`: the handle itself, unless an array is on a GPU."""
    arrays = given if isinstance(given, (list, tuple)) else [given]
    return GpuHandle(handle) if any(type(array) is DeviceArray for array in arrays) else handle


def _result(result: Any) -> Any:
    if type(result) is DeviceArray:
        return result.owner
    if isinstance(result, (list, tuple)):
        return type(result)(_result(part) for part in result)
    return result

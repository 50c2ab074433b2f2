"""The arrays that are given to collectives: checks, and CuPy arrays as arrays of the runtime, for `hvdlite.ops` and for
adapters of frameworks that support DLPack.

This module does not import CuPy: a caller with a CuPy array has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hvdlite.core.array import check_reducible, dtype_name
from hvdlite.core.device import AnyArray, DeviceAccess, DeviceArray
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.handoff.handle import Handle, Handles


def reducible(name: str, source: AnyArray | None, output: AnyArray, op: ReduceOp) -> str:
    """Return the dtype's name of arrays that can be reduced with `op`, or raise `UnsupportedError`.

    `source` must be of `output`'s shape and dtype; None stands for a rank that contributes nothing.
    """
    dtype = transportable(name, output)
    check_reducible(dtype, op, f"'{name}'")
    if source is None or source is output:
        return dtype
    if source.shape != output.shape or source.dtype != output.dtype:
        raise UnsupportedError(f"'{name}': source is {source.dtype}{list(source.shape)}, "
                               f"output {output.dtype}{list(output.shape)}; they must be equal")
    return transportable(name, source)


def check_writeable(name: str, output: AnyArray) -> None:
    """Raise `UnsupportedError` for an array that cannot receive a result."""
    if type(output) is not DeviceArray and not output.flags.writeable:  # type: ignore[union-attr]
        raise UnsupportedError(f"'{name}': the array of shape {list(output.shape)} is read-only, and would be overwritten; "
                               "pass a copy")


def check_rows(name: str, array: AnyArray, what: str) -> None:
    """Raise `UnsupportedError` for a scalar, of which no rows can be cut or joined."""
    if array.ndim == 0:
        raise UnsupportedError(f"'{name}': {what} the first dimension, and a scalar has none; pass an array of shape (1,)")


def transportable(name: str, array: AnyArray) -> str:
    """Return the dtype's name of an array that a plane can take, or raise `UnsupportedError`."""
    dtype = dtype_name(array.dtype, name)
    if type(array) is not DeviceArray and not array.flags.c_contiguous:  # type: ignore[union-attr]
        raise UnsupportedError(f"'{name}': the array of shape {list(array.shape)} is not C-contiguous; "
                               "pass numpy.ascontiguousarray(...)")
    return dtype


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

"""GPU tensors of torch as arrays of the runtime: addresses, streams, and the order of waits.

Rules (docs/protocol.md#gpu-streams)
- A tensor is enqueued with an event on the caller's current stream. The plane waits for the event on its own stream, so the
  host does not wait.
- `synchronize` makes the caller's current stream wait for the result. The host blocks only until the work is launched.
- The runtime keeps the tensors until then. torch's allocator reuses memory in the order of the stream for which it was
  allocated, so memory that another stream uses must not be freed before.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite.core.array import SUPPORTED_DTYPES
from hvdlite.core.device import DeviceAccess, DeviceArray
from hvdlite.core.errors import HorovodInternalError, UnsupportedError
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.handoff.handle import Handle, Handles

_DTYPES = {getattr(torch, name): dtype for name, dtype in SUPPORTED_DTYPES.items() if hasattr(torch, name)}
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in a GPU's memory."""
    return tensor.is_cuda


def cuda_index(tensor: torch.Tensor) -> int:
    """Return CUDA's index of a tensor's GPU."""
    return tensor.get_device()


def current_stream(index: int) -> int:
    """Return the address of the stream that is current on this thread; 0 is CUDA's default stream."""
    if _raw_stream is not None:
        return _raw_stream(index)
    return int(torch.cuda.current_stream(index).cuda_stream)


def bytes_tensor(array: DeviceArray) -> torch.Tensor:
    """Return a tensor over an array's bytes; it keeps them alive."""
    return torch.as_tensor(_CudaArrayInterface(array), device=f"cuda:{array.device}")


class _CudaArrayInterface:
    """An array's bytes with the CUDA array interface, version 2, which does not synchronize."""

    def __init__(self, array: DeviceArray) -> None:
        self._array = array  # torch keeps this object as long as the tensor exists
        self.__cuda_array_interface__ = {"shape": (array.nbytes,), "typestr": "|u1", "data": (array.pointer, False),
                                         "version": 2, "strides": None}


def as_tensor(array: DeviceArray) -> torch.Tensor:
    """Return a tensor over an array."""
    dtype = next(dtype for dtype, name in _DTYPES.items() if name == array.dtype)
    flat = bytes_tensor(array.flat()).view(dtype) if array.nbytes else torch.empty(0, dtype=dtype,
                                                                                   device=memory_device(array.device))
    if not array.strides:
        return flat.view(array.shape)
    return flat.as_strided(array.shape, array.strides)


def memory_device(index: int) -> torch.device:
    """Return a GPU, as torch's object."""
    return torch.device("cuda", index)


def wrap(tensor: torch.Tensor, devices: DeviceAccess) -> DeviceArray:
    """Describe a dense, contiguous tensor to the GPU plane; it is ready after the work on the current stream so far.

    Raises:
        UnsupportedError: for a dtype without a counterpart, a second GPU, and within a CUDA graph's capture.
    """
    index = cuda_index(tensor)
    return _wrapped(tensor, devices, index, current_stream(index))


def _wrapped(tensor: torch.Tensor, devices: DeviceAccess, index: int, stream: int) -> DeviceArray:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise UnsupportedError(f"dtype {tensor.dtype} is not supported")
    return devices.wrap(tensor.data_ptr(), tuple(tensor.shape), dtype, index, stream=stream, owner=tensor,
                        empty=functools.partial(_empty, tensor.dtype, devices, index, stream),
                        allocate=functools.partial(allocate, devices, index, stream))


def _empty(dtype: torch.dtype, devices: DeviceAccess, index: int, stream: int, shape: tuple[int, ...]) -> DeviceArray:
    """Allocate a result; called by the background thread. `stream` may still use the memory that torch allocates."""
    with allocating(index, stream):
        tensor = torch.empty(shape, dtype=dtype, device=memory_device(index))
    return _wrapped(tensor, devices, index, stream)


def allocate(devices: DeviceAccess, index: int, stream: int, nbytes: int) -> DeviceArray:
    """Allocate memory for the plane; called by its threads, like `_empty`.

    Raises:
        MemoryError: when torch has none, also after it has given back what it keeps unused.
    """
    try:
        return _empty(torch.uint8, devices, index, stream, (nbytes,))
    except torch.cuda.OutOfMemoryError as error:
        raise MemoryError(f"{nbytes} bytes: {error}") from None
    except RuntimeError as error:
        raise HorovodInternalError(f"CUDA failed in allocating {nbytes} bytes on GPU {index}: {error}") from error


def allocating(index: int, stream: int) -> Any:
    """Return a context in which torch allocates for a stream."""
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=index) if stream else torch.cuda.default_stream(index))


def to_transportable(tensor: torch.Tensor, devices: DeviceAccess | None, collective: Collective,
                     op: ReduceOp | None = None) -> torch.Tensor:
    """Return a contiguous tensor in memory that a plane supports: itself, or a copy in host memory, with a warning once.

    All ranks make the same choice if they have the same libraries.
    """
    if not is_on_gpu(tensor):
        return tensor
    reason = "there is no plane for GPUs in this job" if devices is None else devices.unavailable_reason()
    if not reason and devices is not None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if devices.supports(collective, op, dtype):
            return tensor
        with_op = "" if op is None else f" with {op.name.capitalize()}"
        reason = f"NCCL has no {collective.name.lower()} of {dtype}{with_op}"
    return to_host(tensor, reason)


def to_host(tensor: torch.Tensor, why: str) -> torch.Tensor:
    """Return a copy in pinned host memory; wait for it."""
    warnings.warn(f"tensors on a GPU go over host memory, and the host waits for it: {why}", RuntimeWarning, stacklevel=2)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
    return copy.copy_(tensor)


def empty_result_like(copy: torch.Tensor) -> torch.Tensor:
    """Return memory for a result, like a copy from `to_transportable`."""
    return torch.empty_like(copy)


def wait(handle: Handle | Handles) -> Any:
    """Wait for a handle, make this thread's current stream wait for its result, and return the result."""
    result = handle.wait()
    for completion in handle.completions():
        completion.block_stream(current_stream(completion.device))
    return result


def dtype_name(dtype: torch.dtype) -> str:
    """Return the runtime's name of a dtype."""
    return str(dtype).removeprefix("torch.")


def record_stream(tensors: Sequence[torch.Tensor]) -> None:
    """Make torch's allocator keep the tensors' memory until this thread's current stream has used it."""
    for tensor in tensors:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))

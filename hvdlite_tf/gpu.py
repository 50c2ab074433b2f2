"""TensorFlow's tensors on GPUs, through DLPack and CuPy.

TensorFlow does not expose its streams, so the host waits before NCCL reads a tensor, and again before TensorFlow reads the
result. In a graph, `tf.py_function` (TensorFlow's operation EagerPyFunc) calls Python with tensors where they are: it has a
kernel for GPUs, for all dtypes but 32-bit integers. This module has not been run on a GPU yet.

TensorFlow frees a result when its last use is launched, and may still read it then. So results are kept until the next wait
for the GPU that begins after that.

TensorFlow's index counts only its visible GPUs (`tf.config.set_visible_devices`), the index of CUDA and CuPy all of them.
DLPack contains TensorFlow's index.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite import api
from hvdlite.core.array import BFLOAT16, aligned_empty
from hvdlite.core.device import AnyArray, DeviceAccess, DeviceArray
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.handoff.handle import Handle, Handles
from hvdlite.runtime import arguments
from hvdlite.runtime.arguments import wrap

_SHARED = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64", "complex64",
           "complex128")
"""The dtypes that both TensorFlow and CuPy exchange through DLPack, bfloat16 as uint16; others go through host memory."""
_GPU: int = 2
"""kDLCUDA."""
_NO_STREAM: int = -1
"""The host has waited for the values already, so that no stream has to."""


def is_on_gpu(tensor: Any) -> bool:
    """Return whether an eager tensor is in a GPU's memory (32-bit integers of GPUs' operations are not)."""
    return isinstance(tensor, tf.Tensor) and "GPU" in (getattr(tensor, "backing_device", "") or "")


def devices_for(inputs: Sequence[Any], op: ReduceOp | None) -> DeviceAccess | None:
    """Return the access to the GPU plane if it supports all of these tensors, else None: then they go through host memory.

    Args:
        op: of a reduction; None for collectives without one.
    """
    if not inputs or not all(map(is_on_gpu, inputs)):
        return None
    devices = api.runtime().devices
    if devices is None or devices.unavailable_reason():
        return None
    _check_memory()
    return devices if _all_supported(devices, inputs, op) else None


def may_be_there(inputs: Sequence[Any], op: ReduceOp | None) -> bool:
    """Return whether the GPU plane supports all of these tensors of a graph, if TensorFlow places them on a GPU."""
    if not inputs or not tf.config.get_visible_devices("GPU"):
        return False
    devices = api.runtime().devices
    return devices is not None and not devices.unavailable_reason() and _all_supported(devices, inputs, op)


def _all_supported(devices: DeviceAccess, inputs: Sequence[Any], op: ReduceOp | None) -> bool:
    collective = Collective.BROADCAST if op is None else Collective.ALLREDUCE
    names = [tf.as_dtype(each.dtype).name for each in inputs]
    return all(name in _SHARED and devices.supports(collective, op, name) for name in names)


@functools.cache
def _check_memory() -> None:
    """Warn, once, if TensorFlow takes all memory of a GPU: NCCL and hvdlite need some."""
    config = tf.config
    taken = [device.name for device in config.get_visible_devices("GPU")
             if not config.experimental.get_memory_growth(device) and not config.get_logical_device_configuration(device)]
    if taken:
        warnings.warn(f"TensorFlow takes nearly all memory of {', '.join(taken)} unless TF_FORCE_GPU_ALLOW_GROWTH=true is "
                      "set, and NCCL needs some: call tf.config.experimental.set_memory_growth(gpu, True) for each gpu of "
                      "tf.config.list_physical_devices('GPU') before anything uses one", RuntimeWarning, stacklevel=2)


def call(function: Callable[..., Sequence[AnyArray]], inputs: Sequence[Any], devices: DeviceAccess) -> list[tf.Tensor]:
    """Call a function of arrays on tensors in a GPU's memory."""
    arrays = [as_cupy(tf.bitcast(each, tf.uint16) if each.dtype == tf.bfloat16 else each) for each in inputs]
    own = tf_index(inputs[0])
    with arrays[0].device:
        unused = _results.unused()
        synchronise()
        _results.release(unused)
        wrapped = [wrap(array, "tensor", devices, Collective.BROADCAST) for array in arrays]
        results = function(*(_as_bfloat16(array) if each.dtype == tf.bfloat16 else array
                             for each, array in zip(inputs, wrapped, strict=True)))
    return [_returned(each, own) if isinstance(each, DeviceArray) else tf.convert_to_tensor(each) for each in results]


def _as_bfloat16(array: DeviceArray) -> DeviceArray:
    """Return the same memory, and results like it, as bfloat16; CuPy, which owns it, has 16-bit integers there."""
    empty = array.empty
    assert empty is not None
    return dataclasses.replace(array, dtype=BFLOAT16, empty=lambda shape: _as_bfloat16(empty(shape)))


def _returned(array: DeviceArray, own: int) -> tf.Tensor:
    """Return a tensor over the memory of a result."""
    _results.keep(array.owner)
    tensor = tensor_of(with_device_index(array.owner, own))
    return tf.bitcast(tensor, tf.bfloat16) if array.dtype == BFLOAT16 else tensor


class _Results:
    """The CuPy arrays that tensors share memory with."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrays: dict[int, Any] = {}  # by identity

    def keep(self, array: Any) -> None:
        with self._lock:
            self._arrays[id(array)] = array

    def unused(self) -> list[int]:
        """Return which ones no tensor shares any more."""
        with self._lock:
            return [key for key in self._arrays if sys.getrefcount(self._arrays[key]) <= 2]  # one is the argument's

    def release(self, unused: Sequence[int]) -> None:
        """Give up arrays that were unused before a wait for the GPU."""
        with self._lock:
            for key in unused:
                self._arrays.pop(key, None)


_results = _Results()


def synchronise() -> None:
    """Wait for the work that TensorFlow has launched on CuPy's current GPU."""
    importlib.import_module("cupy").cuda.runtime.deviceSynchronize()


def finished(handle: Handle | Handles) -> Any:
    """Wait until a result is complete, on the GPU too."""
    result = handle.wait()
    for completion in handle.completions():
        completion.wait()
    return result


def empty_like(like: AnyArray) -> AnyArray:
    """Return memory for a result of the same shape and dtype."""
    return arguments.empty_like(like) if isinstance(like, DeviceArray) else aligned_empty(like.shape, like.dtype)


def copied(array: AnyArray) -> AnyArray:
    """Return a copy that a collective may overwrite."""
    out = empty_like(array)
    if isinstance(array, DeviceArray):
        assert isinstance(out, DeviceArray)
        out.owner[...] = array.owner  # type: ignore[index]
        synchronise()
    else:
        assert isinstance(out, np.ndarray)
        np.copyto(out, array)
    return out


def as_cupy(tensor: Any) -> Any:
    """Return a CuPy array over a tensor."""
    return with_device_index(importlib.import_module("cupy").from_dlpack(_Exported(tensor)), cuda_index(tensor))


def with_device_index(array: Any, index: int) -> Any:
    """Return a CuPy array over the same memory that states another index of its GPU."""
    if array.device.id == index:
        return array
    cupy = importlib.import_module("cupy")
    memory = cupy.cuda.UnownedMemory(array.data.ptr, array.nbytes, array, index)
    return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0))


def tf_index(tensor: Any) -> int:
    """Return TensorFlow's index of the device that a tensor is on."""
    return int(tensor.backing_device.rsplit(":", 1)[1])


def cuda_index(tensor: Any) -> int:
    """Return CUDA's index of the GPU that a tensor is on."""
    visible = tf.config.get_visible_devices("GPU")
    seen = visible[min(tf_index(tensor), len(visible) - 1)]  # TensorFlow can split one GPU into several
    return int(seen.name.rsplit(":", 1)[1])


def tensor_of(array: Any) -> tf.Tensor:
    """Return a tensor over a CuPy array."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__(stream=_NO_STREAM))


class _Exported:
    """A tensor with the DLPack methods that CuPy calls: TensorFlow's own export takes no stream."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return tf.experimental.dlpack.to_dlpack(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _GPU, cuda_index(self._tensor)

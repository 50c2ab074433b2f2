"""TensorFlow tensors as the runtime's arrays and back, in eager mode and inside `tf.function`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite.core.array import ALIGNMENT, BFLOAT16, SUPPORTED_DTYPES, Array, unsupported_dtype
from hvdlite.core.types import ReduceOp
from hvdlite_tf import gpu
from hvdlite_tf.errors import as_tensorflow, remembering

Function = Callable[..., Sequence[Any]]


@as_tensorflow
def run(function: Function, inputs: Sequence[Any], dtypes: Sequence[tf.DType],
        shapes: Sequence[tf.TensorShape | None], op: ReduceOp | None = None, *, on_gpu: bool = False) -> list[tf.Tensor]:
    """Call a function of arrays on tensors; inside `tf.function`, call it when the graph runs.

    Args:
        function: takes read-only C-contiguous arrays, and returns new ones, which it must not change afterwards.
        dtypes: of the returned arrays.
        shapes: of the returned arrays, as far as known; None for unknown.
        op: of a reduction.
        on_gpu: whether the function takes arrays in a GPU's memory, too.
    """
    check_not_xla()
    if tf.executing_eagerly():
        devices = gpu.devices_for(inputs, op) if on_gpu else None
        if devices is not None:
            return gpu.call(function, inputs, devices)
        return [as_tensor(result) for result in function(*(as_array(each) for each in inputs))]
    if on_gpu and gpu.may_be_there(inputs, op):
        results = tf.py_function(lambda *tensors: run(function, tensors, dtypes, shapes, op, on_gpu=True), list(inputs),
                                 list(dtypes))
    else:
        called = remembering(lambda *arrays: list(function(*(np.asarray(each, order="C") for each in arrays))))
        results = tf.numpy_function(called, list(inputs), list(dtypes), stateful=True)
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return results


def check_dtypes(name: str, tensors: Sequence[Any]) -> None:
    """Raise `UnsupportedError` if a collective's tensor, such as one of strings, is of a dtype that no plane supports."""
    for tensor in tensors:
        if tensor.dtype.name not in SUPPORTED_DTYPES:
            raise unsupported_dtype(f"tf.{tensor.dtype.name}", name)


def as_array(value: Any) -> Array:
    """Return an eager tensor's memory as a read-only array; a variable's or another value's as an array."""
    if isinstance(value, tf.Tensor) and value.shape.rank == 0:
        return np.asarray(value.numpy())  # its __array__ returns a NumPy scalar, not an array
    return np.asarray(value, order="C")


def as_tensor(array: Array) -> tf.Tensor:
    """Return a tensor over an array that is no longer changed; without a copy where TensorFlow allows it."""
    if array.nbytes and array.dtype != BFLOAT16 and array.dtype.kind != "b" and array.flags.writeable \
            and array.ctypes.data % ALIGNMENT == 0:  # TensorFlow ends the process for an unaligned array
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.convert_to_tensor(array)


def check_not_xla() -> None:
    """Raise a clear error while XLA compiles: it cannot call Python."""
    if tf.executing_eagerly():
        return
    from tensorflow.python.ops import control_flow_util  # the only way to detect XLA
    graph = tf.compat.v1.get_default_graph()
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        raise ValueError("hvdlite's collectives cannot be compiled by XLA; use jit_compile=False (in model.compile and "
                         "tf.function)")

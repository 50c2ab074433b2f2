"""Collectives on tensors of Keras' backend, as in `horovod.keras`.

On TensorFlow they are those of `hvdlite_tf`, and work inside `tf.function` too. On torch and JAX they are for eager code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from hvdlite import ops
from hvdlite.core.array import SUPPORTED_DTYPES, Array
from hvdlite.core.types import ReduceOp
from hvdlite_tf.compression import Compression, Compressor


def allreduce(value: Any, name: str | None = None, average: bool | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, op: ReduceOp | None = None,
              compression: type[Compressor] = Compression.none) -> Any:
    """Return the reduction over all ranks of a tensor, or of a value that Keras can convert to one, with the same dtype."""
    tensor = keras.ops.convert_to_tensor(value)
    if keras.backend.backend() == "tensorflow":
        from hvdlite_tf import ops as tf_ops
        return tf_ops.allreduce(tensor, average, compression=compression, op=op, prescale_factor=prescale_factor,
                                postscale_factor=postscale_factor, name=name)

    def reduce(array: Array) -> Array:
        target = compression.target_for(array.dtype.name)
        sent = array if target is None else array.astype(SUPPORTED_DTYPES[target])
        reduced: Array = ops.allreduce(sent, average, name, op, prescale_factor, postscale_factor)
        return reduced
    return _called(reduce, tensor)


def allgather(value: Any, name: str | None = None) -> Any:
    """Return all ranks' tensors concatenated along the first dimension."""
    tensor = keras.ops.convert_to_tensor(value)
    if keras.backend.backend() == "tensorflow":
        from hvdlite_tf import ops as tf_ops
        return tf_ops.allgather(tensor, name)
    return _called(lambda array: ops.allgather(array, name), tensor)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return rank `root_rank`'s tensor."""
    tensor = keras.ops.convert_to_tensor(value)
    if keras.backend.backend() == "tensorflow":
        from hvdlite_tf import ops as tf_ops
        return tf_ops.broadcast(tensor, root_rank, name)
    return _called(lambda array: ops.broadcast(array, root_rank, name), tensor)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = ReduceOp.AVERAGE) -> Any:
    """Return this rank's rows of the reduction of a tensor over all ranks."""
    tensor = keras.ops.convert_to_tensor(value)
    if keras.backend.backend() == "tensorflow":
        from hvdlite_tf import ops as tf_ops
        return tf_ops.reducescatter(tensor, op=op, name=name)
    return _called(lambda array: ops.reducescatter(array, name, op), tensor)


def _called(function: Callable[[Array], Array], tensor: Any) -> Any:
    result = function(keras.ops.convert_to_numpy(tensor))
    return keras.ops.convert_to_tensor(result, dtype=keras.backend.standardize_dtype(tensor.dtype))

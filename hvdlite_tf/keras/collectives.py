"""Collectives on tensors of Keras' backend, as in `horovod.keras`.

On TensorFlow they are those of `hvdlite_tf`, which also work inside `tf.function`, and on torch those of `hvdlite_torch`.
Both are differentiable. On JAX collectives take values, outside of compiled functions and derivatives.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

import keras

from hvdlite import ops
from hvdlite.core.array import SUPPORTED_DTYPES, Array
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.types import ReduceOp
from hvdlite_tf.compression import Compression, Compressor

_FRONTENDS: Final = {"tensorflow": "hvdlite_tf.ops", "torch": "hvdlite_torch.ops"}
"""Modules with differentiable collectives, by Keras' backend."""


def allreduce(value: Any, name: str | None = None, average: bool | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, op: ReduceOp | None = None,
              compression: type[Compressor] = Compression.none) -> Any:
    """Return the reduction over all ranks of a tensor, or of a value that Keras can convert to one, with the same dtype."""
    tensor = keras.ops.convert_to_tensor(value)
    factors: dict[str, Any] = {"op": op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    if keras.backend.backend() == "tensorflow":
        from hvdlite_tf import ops as tf_ops
        return tf_ops.allreduce(tensor, average, compression=compression, name=name, **factors)
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    target = compression.target_for(dtype)
    if keras.backend.backend() == "torch":
        from hvdlite_torch import ops as torch_ops
        return keras.ops.cast(torch_ops.allreduce(keras.ops.cast(tensor, target or dtype), average, name, **factors), dtype)

    def reduce(array: Array) -> Array:
        sent = array if target is None else array.astype(SUPPORTED_DTYPES[target])
        return ops.allreduce(sent, average, name, **factors)
    return _called(reduce, tensor, name)


def allgather(value: Any, name: str | None = None, *, horovod_gradient: bool = True) -> Any:
    """Return all ranks' tensors concatenated along the first dimension.

    Args:
        horovod_gradient: average the gradients of all ranks' results, as Horovod does; False: sum them, which is exact.
    """
    return _collective("allgather", value, name, horovod_gradient)


def broadcast(value: Any, root_rank: int, name: str | None = None, *, horovod_gradient: bool = True) -> Any:
    """Return rank `root_rank`'s tensor.

    Args:
        horovod_gradient: like `allgather`'s.
    """
    return _collective("broadcast", value, name, horovod_gradient, root_rank=root_rank)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = ReduceOp.AVERAGE, *,
                  horovod_gradient: bool = True) -> Any:
    """Return this rank's rows of the reduction of a tensor over all ranks.

    Args:
        horovod_gradient: multiply the gradient by the number of ranks, as Horovod does; False: the exact gradient.
    """
    return _collective("reducescatter", value, name, horovod_gradient, op=op)


def _collective(operation: str, value: Any, name: str | None, horovod_gradient: bool, **arguments: Any) -> Any:
    """Call a collective of the backend's frontend, which is differentiable, or of NumPy's where the backend has none."""
    tensor, frontend = keras.ops.convert_to_tensor(value), _FRONTENDS.get(keras.backend.backend())
    if frontend is None:
        return _called(lambda array: getattr(ops, operation)(array, name=name, **arguments), tensor, name)
    differentiable = getattr(importlib.import_module(frontend), operation)
    return differentiable(tensor, name=name, horovod_gradient=horovod_gradient, **arguments)


def _called(function: Callable[[Array], Array], tensor: Any, name: str | None) -> Any:
    try:
        array = keras.ops.convert_to_numpy(tensor)
    except TypeError as error:  # JAX's for a tracer
        raise UnsupportedError(f"'{name or 'unnamed'}': a collective on the {keras.backend.backend()} backend takes a "
                               "value, not a tensor of a compiled or differentiated function such as a loss in fit; use "
                               "KERAS_BACKEND=tensorflow or torch for collectives in a loss") from error
    return keras.ops.convert_to_tensor(function(array), dtype=keras.backend.standardize_dtype(tensor.dtype))

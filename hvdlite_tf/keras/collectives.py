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
from hvdlite.core.array import Array
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
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    target = compression.target_for(dtype)
    reduced = _collective("allreduce", tensor if target is None else keras.ops.cast(tensor, target), name, average=average,
                          op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor)
    return reduced if target is None else keras.ops.cast(reduced, dtype)


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


def _collective(operation: str, value: Any, name: str | None, horovod_gradient: bool | None = None, **arguments: Any) -> Any:
    """Call a collective of the backend's frontend, which is differentiable, or of NumPy's where the backend has none.

    Args:
        horovod_gradient: of the frontends' collectives that have this argument; None for others.
    """
    tensor, frontend = keras.ops.convert_to_tensor(value), _FRONTENDS.get(keras.backend.backend())
    if frontend is None:
        return _called(lambda array: getattr(ops, operation)(array, name=name, **arguments), tensor, name)
    differentiable = getattr(importlib.import_module(frontend), operation)
    given = {} if horovod_gradient is None else {"horovod_gradient": horovod_gradient}
    return differentiable(tensor, name=name, **arguments, **given)


def _called(function: Callable[[Array], Array], tensor: Any, name: str | None) -> Any:
    try:
        array = keras.ops.convert_to_numpy(tensor)
    except TypeError as error:  # JAX's for a tracer
        raise UnsupportedError(f"'{name or 'unnamed'}': a collective on the {keras.backend.backend()} backend takes a "
                               "value, not a tensor of a compiled or differentiated function such as a loss in fit; use "
                               "KERAS_BACKEND=tensorflow or torch for collectives in a loss") from error
    return keras.ops.convert_to_tensor(function(array), dtype=keras.backend.standardize_dtype(tensor.dtype))

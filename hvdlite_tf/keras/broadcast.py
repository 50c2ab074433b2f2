"""Broadcast of a model's variables, and collectives on tensors of Keras' backend, as in `horovod.keras`.

Random states differ between ranks. Small variables share a broadcast, because each collective has a fixed cost.

On TensorFlow collectives are those of `hvdlite_tf`, which also work inside `tf.function`, and on torch those of
`hvdlite_torch`. Both are differentiable. On JAX collectives take values, outside of compiled functions and derivatives.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import keras
import numpy as np

from hvdlite import api, ops
from hvdlite.core.array import Array
from hvdlite.core.errors import MismatchError, UnsupportedError
from hvdlite.core.types import ReduceOp
from hvdlite_tf.compression import Compression, Compressor
from hvdlite_tf.keras.backends import with_errors_of_backend
from hvdlite_tf.variables import is_random_state, is_sharded, moved_on

_SMALL = 1 << 16
"""Bytes of the largest variable that shares a broadcast."""
_DIGEST = 16
"""Bytes of the digest in front of the variables."""


def broadcast_variables(variables: Sequence[Any], root_rank: int, name: str = "keras.variables") -> None:
    """Overwrite Keras variables with rank `root_rank`'s, outside of any compiled function.

    The state of a sharded optimizer is left alone: each rank has its own part.

    The random states of layers are advanced by the rank, so that no two ranks draw the same numbers.

    Raises:
        MismatchError: when a shape or dtype differs between ranks.
    """
    if api.is_provisional():  # this process joins an elastic job: hvd.elastic.run synchronises the state
        return
    rank, variables = api.runtime().world.rank, [variable for variable in variables if not is_sharded(variable)]
    arrays = values_of_root(variables, root_rank, name)
    if rank == root_rank:
        return
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(moved_on(array, rank, root_rank) if is_random_state(variable) else array)


@with_errors_of_backend
def values_of_root(variables: Sequence[Any], root_rank: int, name: str) -> list[Array]:
    """Return copies of the values that Keras variables have on rank `root_rank`; changes nothing.

    Raises:
        MismatchError: when a shape or dtype differs between ranks.
    """
    runtime = api.runtime()
    arrays = [array_of(variable) for variable in variables]
    small = [index for index, array in enumerate(arrays) if array.nbytes <= _SMALL]
    packed = _packed([arrays[index] for index in small])
    handles = [runtime.broadcast(f"{name}.{index}", array, root_rank)
               for index, array in enumerate(arrays) if array.nbytes > _SMALL]
    expected = packed[:_DIGEST].copy()
    try:
        runtime.broadcast(f"{name}.small", packed, root_rank).wait()
        for handle in handles:
            handle.wait()
        if (packed[:_DIGEST] != expected).any():
            raise MismatchError(f"as many bytes as those of rank {root_rank}, for other shapes or dtypes")
    except MismatchError as error:
        raise MismatchError(f"rank {runtime.world.rank} has other variables than another rank: {_listed(variables)}. Make "
                            f"the same model and optimizer on all ranks. ({error})") from None
    if runtime.world.rank != root_rank:
        _unpack(packed, [arrays[index] for index in small])
    return arrays


def array_of(variable: Any) -> Array:
    """Return a copy of the value of a Keras or TensorFlow variable."""
    value = getattr(variable, "_value", variable)  # in its own dtype: `value` is cast where Keras casts automatically
    return np.array(keras.ops.convert_to_numpy(value), order="C")


def read_back(model: Any) -> None:
    """On the JAX backend, write values to the variables, and make assignments to them effective."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


def _packed(arrays: Sequence[Array]) -> Array:
    """Return the bytes of all arrays, after a digest of their shapes and dtypes."""
    described = repr([(array.shape, array.dtype.name) for array in arrays])
    digest = hashlib.blake2b(described.encode(), digest_size=_DIGEST).digest()
    return np.concatenate([np.frombuffer(digest, np.uint8), *(array.reshape(-1).view(np.uint8) for array in arrays)])


def _unpack(packed: Array, arrays: Sequence[Array]) -> None:
    begin = _DIGEST
    for array in arrays:
        array.reshape(-1).view(np.uint8)[:] = packed[begin:begin + array.nbytes]
        begin += array.nbytes


def _listed(variables: Sequence[Any]) -> str:
    listed = [f"{getattr(variable, 'path', variable.name)} {tuple(variable.shape)}" for variable in variables[:20]]
    return ", ".join(listed) + (", ..." if len(variables) > len(listed) else "")


_FRONTENDS: Final = {"tensorflow": "hvdlite_tf.ops", "torch": "hvdlite_torch.ops"}
"""Modules with differentiable collectives, by Keras' backend."""


def allreduce(value: Any, name: str | None = None, average: bool | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, op: ReduceOp | None = None,
              compression: type[Compressor] = Compression.none) -> Any:
    """Like `hvdlite_tf.allreduce`, of a tensor of Keras' backend, or a value that Keras can convert to one.

    Args:
        value: the same shape and dtype on all ranks; on JAX not inside compiled functions.
    """
    tensor = keras.ops.convert_to_tensor(value)
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    target = compression.target_for(dtype)
    reduced = _collective("allreduce", tensor if target is None else keras.ops.cast(tensor, target), name, average=average,
                          op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor)
    return reduced if target is None else keras.ops.cast(reduced, dtype)


def allgather(value: Any, name: str | None = None, *, horovod_gradient: bool = True) -> Any:
    """Return all ranks' tensors concatenated along the first dimension.

    Args:
        value: at least 1-D, of any dtype; the same on all ranks but for the number of rows.
        name: the same on all ranks; unnamed calls are matched by their order.
        horovod_gradient: average the gradients of all ranks' results, as Horovod does; False: sum them, which is exact.

    Raises:
        UnsupportedError: for a scalar; otherwise like `allreduce`.
    """
    return _collective("allgather", value, name, horovod_gradient)


def broadcast(value: Any, root_rank: int, name: str | None = None, *, horovod_gradient: bool = True) -> Any:
    """Return rank `root_rank`'s tensor.

    Args:
        value: any dtype and shape, the same on all ranks.
        root_rank: the rank, in the numbering of the job.
        name: the same on all ranks; unnamed calls are matched by their order.
        horovod_gradient: as in `allgather`.

    Raises:
        UnsupportedError: for a root that does not exist; otherwise like `allreduce`.
    """
    return _collective("broadcast", value, name, horovod_gradient, root_rank=root_rank)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = ReduceOp.AVERAGE, *,
                  horovod_gradient: bool = True) -> Any:
    """Return this rank's rows of the reduction of a tensor over all ranks.

    Args:
        value: at least 1-D; the same shape and dtype on all ranks. Rows are divided as evenly as possible, the first ranks
            get one more.
        name: the same on all ranks; unnamed calls are matched by their order.
        op: Average (default), Sum, Product, Min or Max.
        horovod_gradient: multiply the gradient by the number of ranks, as Horovod does; False: the exact gradient.

    Raises:
        UnsupportedError: for a scalar; otherwise like `allreduce`.
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

"""Broadcast of a model's variables; random states differ between ranks.

Small variables share a broadcast, because each collective has a fixed cost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.errors import MismatchError
from hvdlite_tf.keras.backends import with_errors_of_backend
from hvdlite_tf.variables import is_random_state, moved_on

_SMALL = 1 << 16
"""Bytes of the largest variable that shares a broadcast."""
_DIGEST = 16
"""Bytes of the digest in front of the variables."""


def broadcast_variables(variables: Sequence[Any], root_rank: int, name: str = "keras.variables") -> None:
    """Overwrite Keras variables with rank `root_rank`'s, outside of any compiled function.

    The random states of layers are advanced by the rank, so that no two ranks draw the same numbers.

    Raises:
        MismatchError: when a shape or dtype differs between ranks.
    """
    if api.is_provisional():  # this process joins an elastic job: hvd.elastic.run synchronises the state
        return
    rank = api.runtime().world.rank
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

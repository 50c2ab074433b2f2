"""What the Keras frontend needs of a backend: reduce a step's gradients, average a few numbers, broadcast variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.types import ReduceOp
from hvdlite.training.exchange import Exchange, samples, scaled
from hvdlite_tf.compression import Compression


class ArrayExchange(Exchange):
    """Reduces lists of gradients as arrays; on Keras' JAX backend, and on torch what autograd's hooks do not see.

    `sparse_as_dense` has no meaning: gradients are dense on these backends.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__("keras", **arguments)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if not self.is_shared:
            return list(gradients)
        results = list(gradients)
        present = [index for index, gradient in enumerate(results) if gradient is not None]
        original = [keras.backend.standardize_dtype(results[index].dtype) for index in present]
        sent = [keras.ops.cast(results[index], self._compression.target_for(dtype) or dtype)
                for index, dtype in zip(present, original, strict=True)]
        all_clusters = self._clusters_of(variables)
        clusters = [all_clusters[index] for index in present]
        counted = [] if samples() is None else [keras.ops.convert_to_tensor(samples(), dtype="int32")]

        def reduce(arrays: Sequence[Array]) -> list[Array]:
            a_round = self._round(clusters, int(arrays[-1]) if counted else None)
            for place in reversed(range(len(present))):  # the last layers' gradients came first
                a_round.give(place, arrays[place])
            reduced, weight = a_round.finish()
            factor = self._unweight(weight)
            return [*(scaled(array, factor) for array in reduced), *arrays[len(present):]]
        outputs = call(reduce, [*sent, *counted])[:len(present)]
        for index, dtype, reduced in zip(present, original, outputs, strict=True):
            results[index] = keras.ops.cast(reduced, dtype)
        return results


def exchange(**arguments: Any) -> Exchange:
    """Return what reduces gradients on the backend that Keras uses."""
    arguments.setdefault("compression", Compression.none)
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from hvdlite_tf.gradients import GradientExchange
        return GradientExchange(**arguments)
    if backend == "torch":
        from hvdlite_tf.keras.torch_exchange import TorchExchange
        return TorchExchange(**arguments)
    return ArrayExchange(**arguments)


def call(function: Callable[[Sequence[Array]], Sequence[Array]], tensors: Sequence[Any]) -> list[Any]:
    """Call a function of arrays that returns arrays of the same shapes and dtypes, on tensors of any backend."""
    backend = keras.backend.backend()
    if not tensors:
        return []
    if backend == "tensorflow":
        from hvdlite_tf.arrays import run
        return run(lambda *arrays: function(arrays), list(tensors), [tensor.dtype for tensor in tensors],
                   [tensor.shape for tensor in tensors])
    if backend == "jax":
        import jax
        from jax.experimental import io_callback
        shapes = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in tensors]
        # Ordered: callbacks block, so two that ran in another order on another rank would wait for each other.
        return list(io_callback(lambda *arrays: list(function([np.asarray(each, order="C") for each in arrays])), shapes,
                                *tensors, ordered=True))
    if backend == "torch":
        from hvdlite_torch.framework import as_tensor, on_host
        results = function([on_host(tensor, "gradient") for tensor in tensors])
        return [as_tensor(array).to(tensor.device) for array, tensor in zip(results, tensors, strict=True)]
    return [keras.ops.convert_to_tensor(array) for array in function([np.asarray(tensor) for tensor in tensors])]


def everywhere(flag: Any, name: str, process_set: int) -> Any:
    """Return whether a scalar boolean tensor is true on all ranks of a process set."""
    def reduce(arrays: Sequence[Array]) -> list[Array]:
        result = np.empty_like(arrays[0])
        api.runtime().allreduce(name, arrays[0], result, ReduceOp.MIN, process_set=process_set).wait()
        return [result]
    return keras.ops.cast(call(reduce, [keras.ops.cast(flag, "int32")])[0], "bool")


def broadcast_variables(variables: Sequence[Any], root_rank: int, name: str = "keras.variables") -> None:
    """Overwrite Keras variables with rank `root_rank`'s, outside of any compiled function."""
    runtime = api.runtime()
    arrays = [np.array(keras.ops.convert_to_numpy(variable.value), order="C") for variable in variables]
    handles = [runtime.broadcast(f"{name}.{index}", array, root_rank) for index, array in enumerate(arrays)]
    for variable, array, handle in zip(variables, arrays, handles, strict=True):
        handle.wait()
        if runtime.world.rank != root_rank:
            variable.assign(array)

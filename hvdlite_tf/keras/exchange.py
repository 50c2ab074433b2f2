"""The interface of a Keras backend: reduce a step's gradients, agree on a flag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.types import ReduceOp
from hvdlite.training.exchange import ArrayExchange, Exchange, samples
from hvdlite_tf.compression import Compression


class JaxExchange(ArrayExchange):
    """Reduces gradients on Keras' JAX backend, where every variable has a gradient, and a dense one.

    `sparse_as_dense` has no meaning.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__("keras", **arguments)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if not self.is_shared:
            return list(gradients)
        slots = self._slots_of(variables)
        given = {slot: gradient for slot, gradient in zip(slots, gradients, strict=True) if gradient is not None}
        original = {slot: keras.backend.standardize_dtype(gradient.dtype) for slot, gradient in given.items()}
        sent = [keras.ops.cast(gradient, self._wire_dtype(original[slot])) for slot, gradient in given.items()]
        present, is_counted = list(given), samples() is not None
        counted = [] if samples() is None else [keras.ops.convert_to_tensor(samples(), dtype="float32")]

        def reduce(arrays: Sequence[Array]) -> list[Array]:
            own = float(arrays[-1]) if is_counted else None
            weight = self._give(dict(zip(present, arrays, strict=False)), slots, own)
            reduced = self._finish(present, None if own is None else weight)
            return [*(reduced[slot] for slot in present), *arrays[len(present):]]  # type: ignore[list-item]  # dense ones
        outputs = dict(zip(given, call(reduce, [*sent, *counted]), strict=False))
        return [keras.ops.cast(outputs[slot], original[slot]) if slot in given else None for slot in slots]


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
    return JaxExchange(**arguments)


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

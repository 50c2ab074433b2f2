"""Batch normalization over the batches of all ranks, for Keras 3 on each of its backends.

There is one collective a layer and direction. The forward pass gathers and combines each rank's (count, mean, variance) of
every channel. The backward pass sums the gradients of the combined mean and variance. Both are exact for batches of
different sizes and with masks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.types import ReduceOp
from hvdlite.training.moments import combined_moments
from hvdlite_tf.step_weight import weight_of_step

_MARK = "_hvdlite_original"


@keras.saving.register_keras_serializable("hvdlite")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Like Keras' `BatchNormalization`, with mean and variance of the batches of all ranks, which may differ in size.

    All ranks call their layers in the same order. With one rank, and outside of training, it is ordinary batch
    normalization.

    Args:
        process_set: the ranks that share statistics; on others it is ordinary batch normalization.
        fused: accepted for Horovod's sake.
        named: as for Keras' layer; not `synchronized`.

    Raises:
        ValueError: for `fused` other than False.
    """

    def __init__(self, process_set: ProcessSet = global_process_set, fused: bool | None = False, **named: Any) -> None:
        if fused or fused is None:
            raise ValueError(f"fused={fused}: SyncBatchNormalization is not fused; leave the argument out")
        super().__init__(**named)
        self._process_set = process_set

    def _moments(self, inputs: Any, mask: Any) -> Any:
        if not _is_shared(self._process_set):
            return super()._moments(inputs, mask)
        return moments(inputs, mask, self._reduction_axes, collective_name(self.name), self._process_set)


def install() -> None:
    """Make Keras' own `BatchNormalization(synchronized=True)` use all ranks; may be called again.

    Keras synchronises it over the replicas of the current `tf.distribute` strategy, of which there is one outside a scope.
    """
    layer = keras.layers.BatchNormalization
    if hasattr(keras, "ops") and not hasattr(layer._moments, _MARK):  # Keras 3
        layer._moments = _synchronizing(layer._moments)


def _synchronizing(original: Any) -> Any:
    @functools.wraps(original)
    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        if self.synchronized and api.is_initialized() and _is_shared(global_process_set) and not _in_foreign_strategy():
            return moments(inputs, mask, self._reduction_axes, collective_name(self.name), global_process_set)
        return original(self, inputs, mask)
    setattr(_moments, _MARK, original)
    return _moments


def _is_shared(process_set: ProcessSet) -> bool:
    members = api.runtime().members(api.set_id(process_set))
    return len(members) > 1 and api.rank() in members


def _in_foreign_strategy() -> bool:
    """Return whether a strategy that is not hvdlite's synchronises this layer."""
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    from hvdlite_tf.keras.scope import BaseStrategy
    return tf.distribute.has_strategy() and not isinstance(tf.distribute.get_strategy(), BaseStrategy)


def collective_name(layer: str) -> str:
    """Return the name of a layer's collectives: without Keras' counters, which count the layers of the process.

    Layers whose names differ only in the counter share a name: they are matched by the order in which they run.
    """
    return f"sync_batch_norm.{re.sub(r'(_[0-9]+)+$', '', layer)}"


def moments(inputs: Any, mask: Any, axes: Sequence[int], name: str, process_set: ProcessSet) -> tuple[Any, Any]:
    """Return mean and variance of each channel over the batches of all ranks. Differentiable.

    Args:
        inputs: float32 or float64.
        mask: the positions that count, without the last dimension; None for all.
        axes: the dimensions to reduce.
        name: of the collective.
    """
    ops = keras.ops
    if mask is None:
        shape = ops.shape(inputs)
        count = functools.reduce(lambda one, other: one * other, (ops.cast(shape[axis], inputs.dtype) for axis in axes))
        weighted = inputs
    else:
        weights = ops.broadcast_to(ops.expand_dims(ops.cast(mask, inputs.dtype), -1), ops.shape(inputs))
        count = ops.sum(weights, axes)
        weighted = inputs * weights
    at_least_one = ops.maximum(count, 1)
    mean = ops.sum(weighted, axes) / at_least_one
    per_channel = [1 if axis in axes else -1 for axis in range(len(inputs.shape))]
    squares = ops.square(inputs - ops.reshape(ops.stop_gradient(mean), per_channel))  # its derivative by the mean is zero
    variance = ops.sum(squares if mask is None else squares * weights, axes) / at_least_one
    count = ops.broadcast_to(count, ops.shape(mean))
    combined = _combine(ops.stack([count, mean, variance]), name, api.set_id(process_set))
    return combined[1], combined[2]


def _combine(own: Any, name: str, process_set: int) -> Any:
    """Return (count, mean, variance) of each channel over all ranks, from this rank's. Differentiable."""
    from hvdlite_tf.keras.backends import call  # here, because that package imports this module
    counted = weight_of_step()

    def combined(own: Any) -> Any:
        return call(lambda arrays: [_gathered(arrays[0], name, process_set)], [own])[0]

    def gradient(own: Any, whole: Any, upstream: Any) -> Any:
        ops = keras.ops
        # Gradients are averaged over ranks later, perhaps weighted by samples; here all ranks have the same weight.
        weight = None if counted is None else ops.maximum(ops.cast(counted, own.dtype), 1)
        sent = upstream if weight is None else upstream * weight
        total = call(lambda arrays: [_summed(arrays[0], f"{name}.gradient", process_set)], [sent])[0]
        if weight is not None:
            total = total / weight
        share = own[0] / ops.maximum(whole[0], 1)
        variance = share * total[2]
        return ops.stack([ops.zeros_like(share), share * total[1] + 2 * (own[1] - whole[1]) * variance, variance])
    return _with_gradient(combined, gradient)(own)


def _gathered(own: Array, name: str, process_set: int) -> Array:
    """Return (count, mean, variance) over all ranks, computed in float64, with equal results on every rank."""
    runtime = api.runtime()
    everywhere = runtime.allgather(name, own, process_set=process_set).wait().reshape(-1, *own.shape).astype(np.float64)
    counts, means, variances = everywhere[:, 0], everywhere[:, 1], everywhere[:, 2]
    return np.stack(combined_moments(counts, means, counts * variances)).astype(own.dtype)


def _summed(own: Array, name: str, process_set: int) -> Array:
    total = np.empty_like(own)
    api.runtime().allreduce(name, own, total, ReduceOp.SUM, process_set=process_set, blocking=True).wait()
    return total


def _with_gradient(compute: Callable[[Any], Any], gradient: Callable[[Any, Any, Any], Any]) -> Callable[[Any], Any]:
    """Return a function of a tensor whose gradient is a function of the tensor, the result and the result's gradient."""
    if keras.backend.backend() != "torch":
        def function(own: Any) -> Any:
            whole = compute(own)
            return whole, lambda *upstream, **_: gradient(own, whole, upstream[0])
        return keras.ops.custom_gradient(function)
    import torch

    class Combined(torch.autograd.Function):  # Keras' custom_gradient on torch calls a failing function again
        @staticmethod
        def forward(ctx: Any, own: Any) -> Any:
            whole = own.clone() if own.device.type == "meta" else compute(own.detach())  # "meta": Keras asks for shapes
            ctx.save_for_backward(own, whole)
            return whole

        @staticmethod
        def backward(ctx: Any, upstream: Any) -> Any:
            own, whole = ctx.saved_tensors
            return gradient(own, whole, upstream)
    return Combined.apply

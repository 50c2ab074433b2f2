"""Keras on TensorFlow: gradients are reduced as by a `DistributedGradientTape`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdlite.core.array import Array
from hvdlite_tf.arrays import run
from hvdlite_tf.gradients import TensorFlowStepReducer

create_step_reducer = TensorFlowStepReducer


def copies(values: Sequence[Any]) -> list[Any]:
    """See the package. TensorFlow copies a value when its variable next changes."""
    return [tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=value.dtype) for value in values]


def call(function: Callable[[Sequence[Array]], Sequence[Array]], tensors: Sequence[Any],
         like: Sequence[Any]) -> list[Any]:
    """See the package."""
    return run(lambda *arrays: function(arrays), list(tensors), [tensor.dtype for tensor in like],
               [tensor.shape for tensor in like])

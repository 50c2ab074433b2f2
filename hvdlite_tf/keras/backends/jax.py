"""Keras on JAX: functions of arrays are ordered callbacks of compiled functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from hvdlite.core.array import Array
from hvdlite_tf.keras.backends.common import KerasStepReducer
from hvdlite_tf.versions import OLDEST_JAX, check_installed

check_installed(wanted=OLDEST_JAX)

if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == 1:
    # JAX has a single thread for work on the CPU then, in which a callback would wait for its own arguments
    # (jax-ml/jax#24255). This has an effect until JAX first computes.
    jax.config.update("jax_cpu_enable_async_dispatch", False)


class JaxStepReducer(KerasStepReducer):
    """Reduces gradients inside Keras' compiled training step."""

    def _call(self, function: Callable[[Sequence[Array]], Sequence[Array]], tensors: Sequence[Any]) -> list[Any]:
        return call(function, tensors)


def create_step_reducer(**arguments: Any) -> JaxStepReducer:
    """See the package."""
    return JaxStepReducer(**arguments)


def call(function: Callable[[Sequence[Array]], Sequence[Array]], tensors: Sequence[Any]) -> list[Any]:
    """See the package. Callbacks block, so they are ordered: with different orders, two ranks would wait for each other."""
    shapes = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in tensors]
    return list(io_callback(lambda *arrays: list(function([np.asarray(each, order="C") for each in arrays])), shapes,
                            *tensors, ordered=True))

"""Keras on JAX: functions of arrays are ordered callbacks of compiled functions, on XLA's buffers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from hvdlite.core.array import Array
from hvdlite.training.gradients.framework import SMALL
from hvdlite_tf.keras.backends.common import KerasStepReducer
from hvdlite_tf.keras.backends.common import copies as copies
from hvdlite_tf.versions import OLDEST_JAX, check_installed

check_installed(wanted=OLDEST_JAX)

try:
    from jax.experimental.buffer_callback import buffer_callback as buffer_callback
except ImportError:  # JAX before 0.6.1
    buffer_callback = None

if buffer_callback is None and hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == 1:
    # JAX has a single thread for work on the CPU then, in which an `io_callback` would wait for its own arguments
    # (jax-ml/jax#24255). This has an effect until JAX first computes.
    jax.config.update("jax_cpu_enable_async_dispatch", False)

_NUMBER = jax.ShapeDtypeStruct((), np.int32)
Function = Callable[[Sequence[Array]], Sequence[Array]]


class JaxStepReducer(KerasStepReducer):
    """Reduces gradients inside Keras' compiled training step."""

    def _call(self, function: Function, tensors: Sequence[Any]) -> list[Any]:
        return call(function, tensors, copied=SMALL)  # larger gradients are copied when they are given


create_step_reducer = JaxStepReducer


def call(function: Function, tensors: Sequence[Any], like: Sequence[Any] | None = None, *,
         copied: float = float("inf")) -> list[Any]:
    """See the package. Callbacks block, so they are ordered: with different orders, two ranks would wait for each other.

    Args:
        copied: bytes up to which the function gets copies. A larger array may be XLA's own memory, which the function must
            not use after it has returned or raised, not even in a collective that goes on.
    """
    shapes = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in (tensors if like is None else like)]
    if buffer_callback is None or jax.default_backend() != "cpu" or jax.local_device_count() > 1:
        return list(io_callback(lambda *arrays: list(function([np.asarray(each, order="C") for each in arrays])), shapes,
                                *tensors, ordered=True))

    def on_buffers(_: Any, outputs: Sequence[Any], turn: Any, *inputs: Any) -> None:
        arrays = [np.asarray(each) for each in inputs]
        results = function([each.copy() if each.nbytes <= copied else each for each in arrays])
        for output, result in zip(outputs, (np.asarray(turn), *results), strict=True):
            np.copyto(np.asarray(output), result)
    # Not ordered by itself: it begins after one ordered callback, and the next ones begin after another that waits for it.
    turn = io_callback(lambda: np.int32(0), _NUMBER, ordered=True)
    over, *results = buffer_callback(on_buffers, [_NUMBER, *shapes])(turn, *tensors)
    io_callback(lambda _: None, None, over, ordered=True)
    return results

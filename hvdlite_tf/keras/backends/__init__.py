"""The Keras backends: how each of them reduces a step's gradients, and calls functions of arrays on its tensors.

    common.py       for eager backends; the base of jax.py
    jax.py          through ordered callbacks from compiled functions, on XLA's buffers
    tensorflow.py   through `numpy_function`
    torch.py        by autograd's hooks, during the backward pass

A backend's module has `create_step_reducer`, which is its class of step reducers, and the functions `call` and `copies`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import keras
import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import ReduceOp
from hvdlite.training.step_reducer import StepReducer
from hvdlite_tf.compression import Compression

P = ParamSpec("P")
R = TypeVar("R")


def create_step_reducer(**arguments: Any) -> StepReducer:
    """Return the step reducer of the current backend; the arguments are those of `StepReducer`."""
    arguments.setdefault("compression", Compression.none)
    return _backend().create_step_reducer(**arguments)


def call(function: Callable[[Sequence[Array]], Sequence[Array]], tensors: Sequence[Any],
         like: Sequence[Any] | None = None) -> list[Any]:
    """Call a function of arrays that returns arrays, on tensors of the current backend.

    Args:
        like: tensors with the shapes, dtypes and devices of the results; None for those of `tensors`.
    """
    like = tensors if like is None else like
    return _backend().call(function, tensors, like) if like else []


def cond(predicate: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    """Like `keras.ops.cond`, which puts its own text around errors, also where nothing is compiled."""
    try:
        is_true = bool(predicate)
    except TypeError:  # TensorFlow's and JAX's for a tensor of a compiled function
        return keras.ops.cond(predicate, true_fn, false_fn)
    return true_fn() if is_true else false_fn()


def values_of(variables: Sequence[Any]) -> list[Any]:
    """Return the variables' values as tensors."""
    return list(map(keras.ops.convert_to_tensor, variables))


def copies(variables: Sequence[Any]) -> list[Any]:
    """Return copies of the variables' values, on their devices."""
    return list(_backend().copies([getattr(variable, "_value", variable) for variable in variables]))


def all_ranks_true(flag: Any, reducer: StepReducer, label: str | None = None) -> Any:
    """Return whether a scalar boolean tensor is true on all ranks that share a reducer's gradients.

    Args:
        label: equal on all ranks: the tensor is to be true on all ranks of the job.
    """
    def reduce(arrays: Sequence[Array]) -> list[Array]:
        result = np.empty_like(arrays[0])
        reducer.take_part().allreduce(
            f"{label or reducer.label}.finite", arrays[0], result, ReduceOp.MIN,
            process_set=GLOBAL_PROCESS_SET_ID if label else reducer.process_set).wait()
        return [result]
    return keras.ops.cast(call(reduce, [keras.ops.cast(flag, "int32")])[0], "bool")


def with_errors_of_backend(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of values: on TensorFlow its errors are TensorFlow's, too."""
    if keras.backend.backend() != "tensorflow":
        return function
    from hvdlite_tf.errors import as_tensorflow
    return as_tensorflow(function)


def _backend() -> Any:
    name = keras.backend.backend()
    return importlib.import_module(f"{__name__}.{name if name in ('jax', 'tensorflow', 'torch') else 'common'}")

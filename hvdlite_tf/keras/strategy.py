"""`MirroredStrategy` for Keras on torch and JAX, with the names of `tf.distribute.Strategy`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import numpy as np

from hvdlite import api, ops
from hvdlite.core.types import ReduceOp
from hvdlite.training.mirrored.scopes import parse_reduce_op
from hvdlite.training.objects import allgather_object
from hvdlite_tf.keras import scope, step


class MirroredStrategy(scope.BaseStrategy):
    """Trains one replica of the model on each rank, in step: create and compile the model in `with strategy.scope():`.

    The batches of `fit`, `evaluate` and `predict` are global, and so are the results. Without a launcher there is one
    replica. Optimizers that are created or compiled in the scope average gradients, weighted by samples in `fit`. Training
    begins with rank 0's variables. BatchNormalization normalizes each rank's shard separately.

    The arguments are those of `scope.BaseStrategy`.
    """

    @contextmanager
    def scope(self) -> Iterator[MirroredStrategy]:
        """Return the context in which to create and compile models, optimizers and datasets."""
        with scope.entered(self):
            yield self

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call `fn` on this rank and return its result. Variables that it creates get rank 0's values."""
        self.variable_mirror.mirror_pending(must_match=True)
        with scope.making(self):
            return fn(*args, **(kwargs or {}))

    def weighted_step(self, samples: Any, variables: Callable[[], Sequence[Any]]) -> AbstractContextManager[None]:
        """Like the base class's."""
        return step.weighted_later(samples, variables)

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """Return the sum or mean of a value over all ranks, as a NumPy array; means of integers are floats.

        Args:
            reduce_op: "SUM" or "MEAN".
            axis: reduce this dimension too; the mean is then over all ranks' elements.

        Raises:
            ValueError: for another op.
        """
        op, array = parse_reduce_op(reduce_op), np.asarray(keras.ops.convert_to_numpy(value))
        if axis is None:
            averages_integers = op is ReduceOp.AVERAGE and array.dtype.kind in "biu"
            return ops.allreduce(array.astype(keras.config.floatx()) if averages_integers else array, op=op)
        total = ops.allreduce(array.sum(axis), op=ReduceOp.SUM)
        return total if op is ReduceOp.SUM else total / ops.allreduce(np.array(array.shape[axis]), op=ReduceOp.SUM)

    def gather(self, value: Any, axis: int) -> Any:
        """Return all ranks' values concatenated along a dimension, as a NumPy array."""
        runtime = api.runtime()
        return np.concatenate(allgather_object(runtime, keras.ops.convert_to_numpy(value),
                                               runtime.names.unnamed("keras", "gather")), axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return this rank's value, alone in a tuple."""
        return (value,)

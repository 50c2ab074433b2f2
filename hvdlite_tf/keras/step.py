"""What a training step's losses and gradients are, which decides how ranks' gradients are put together.

- Inside `train_step` of a model of the scope Keras sees one replica. This rank's loss is a mean over its share, and gradients
  are averaged, weighted by samples. The same holds in loops that `strategy.run` knows nothing of.
- Inside `strategy.run` on TensorFlow the contract of `tf.distribute` holds: losses are parts of the global batch's loss, and
  gradients are summed.

Keras' losses can divide by something else than samples: by valid tokens, by the sum of sample weights, or by nothing. Inside
`train_step` such a loss is multiplied by a correction that makes the average over samples the global batch's loss. With n
samples and the divisor D on this rank, and N and T over all ranks, it is (D / n) * (N / T); for a sum, N / n.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.types import ReduceOp
from hvdlite.training.exchange import counting
from hvdlite_tf.keras.exchange import call

_MARK = "_hvdlite_original"


class Step:
    """One step of a model on this rank.

    Args:
        samples: of this rank's share of the global batch, a number or a scalar tensor; None when the batch is this rank's
            alone, as when a model is only applied.
    """

    def __init__(self, samples: Any = None) -> None:
        self.samples = samples
        self._ordinals = itertools.count()

    def totals(self, *amounts: Any) -> list[Any]:
        """Return sums over all ranks of scalars, as float32 tensors.

        All ranks call this in the same order within a step.
        """
        name = f"keras.step.{next(self._ordinals)}"

        def reduce(arrays: Sequence[Array]) -> list[Array]:
            result = np.empty_like(arrays[0])
            api.runtime().allreduce(name, arrays[0], result, ReduceOp.SUM).wait()
            return [result]
        own = keras.ops.stack([keras.ops.cast(amount, "float32") for amount in amounts])
        (summed,) = call(reduce, [keras.ops.stop_gradient(own)])
        return [summed[index] for index in range(len(amounts))]

    def correction(self, divisor: Any | None) -> Any:
        """Return by what to multiply a loss, so that the average over samples is the loss of the global batch.

        Args:
            divisor: what the sum of this rank's losses was divided by; None for nothing.
        """
        if divisor is None:
            (samples,) = self.totals(self.samples)
            return samples / keras.ops.cast(self.samples, "float32")
        samples, divisors = self.totals(self.samples, divisor)
        own = keras.ops.stop_gradient(keras.ops.cast(divisor, "float32"))
        return keras.ops.divide_no_nan(own * samples, keras.ops.cast(self.samples, "float32") * divisors)


_current: ContextVar[Step | None] = ContextVar("hvdlite_step", default=None)
_sums: ContextVar[bool] = ContextVar("hvdlite_sums", default=False)


def current() -> Step | None:
    """Return the step that this thread is in."""
    return _current.get()


@contextmanager
def one_replica(samples: Any = None) -> Iterator[None]:
    """Be in a step; see `Step`."""
    token = _current.set(Step(samples))
    try:
        with counting(samples):
            yield
    finally:
        _current.reset(token)


@contextmanager
def summing() -> Iterator[None]:
    """Be inside `strategy.run` on TensorFlow."""
    token = _sums.set(True)
    try:
        yield
    finally:
        _sums.reset(token)


def gradient_op() -> ReduceOp:
    """Return how gradients are reduced that are applied now."""
    return ReduceOp.SUM if _sums.get() and _current.get() is None else ReduceOp.AVERAGE


def weighted(gradients: Sequence[Any]) -> list[Any]:
    """Return gradients such that their plain average over ranks is the one over samples."""
    step = _current.get()
    if step is None or step.samples is None or api.size() == 1:
        return list(gradients)
    (samples,) = step.totals(step.samples)
    factor = keras.ops.cast(step.samples, "float32") * api.size() / samples
    return [_times(gradient, factor) for gradient in gradients]


def install() -> None:
    """Let Keras' losses be corrected inside a step; again is fine."""
    from keras.src.losses import loss  # all of Keras' losses reduce their values by one function of this module
    if not hasattr(loss.reduce_weighted_values, _MARK):
        loss.reduce_weighted_values = _correcting(loss.reduce_weighted_values, loss.apply_mask)


def _times(gradient: Any, factor: Any) -> Any:
    if gradient is None:
        return None
    if hasattr(gradient, "indices") and hasattr(gradient, "dense_shape"):  # tf.IndexedSlices
        return type(gradient)(gradient.values * keras.ops.cast(factor, gradient.values.dtype), gradient.indices,
                              gradient.dense_shape)
    return gradient * keras.ops.cast(factor, gradient.dtype)


def _correcting(original: Any, apply_mask: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def reduce_weighted_values(*arguments: Any, **named: Any) -> Any:
        reduced = original(*arguments, **named)
        step = _current.get()
        if step is None or step.samples is None or api.size() == 1:
            return reduced
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        given = bound.arguments
        values, weights, mask = given["values"], given["sample_weight"], given["mask"]
        reduction = given["reduction"]
        if reduction in (None, "none") or not len(values.shape):  # nothing that Keras has divided
            return reduced
        if reduction == "sum":
            divisor = None
        elif reduction == "mean_with_sample_weight" and weights is not None:
            weights = keras.ops.cast(weights, "float32")
            divisor = keras.ops.sum(weights if mask is None else apply_mask(
                weights, keras.ops.convert_to_tensor(mask), dtype="float32", reduction=reduction))
        elif mask is not None:
            divisor = keras.ops.sum(keras.ops.cast(mask, "float32"))
        else:
            return reduced
        return reduced * keras.ops.cast(step.correction(divisor), reduced.dtype)
    setattr(reduce_weighted_values, _MARK, original)
    return reduce_weighted_values

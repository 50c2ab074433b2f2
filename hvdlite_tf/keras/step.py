"""The combination of all ranks' gradients in a training step: an average weighted by samples, or a sum.

- Inside `train_step` of a model of the scope Keras sees one replica. This rank's loss is a mean over its shard, and
  gradients are averaged, weighted by samples. The same holds in loops outside of `strategy.run`.
- Inside `strategy.run` on TensorFlow the contract of `tf.distribute` holds: losses are parts of the global batch's loss, and
  gradients are summed.

Keras' losses can have another divisor than the number of samples: valid tokens, the sum of sample weights, or none. Inside
`train_step` such a loss is the sum over this rank's shard, multiplied by a correction that makes the average over samples
the global batch's loss. With n samples on this rank, N samples and the divisor T over all ranks, it is N / (n * T); for a
sum, N / n. The latter is also the correction of activity regularizers before Keras 3.14: sums over the batch.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np
from keras.src.losses import loss

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.training.step_reducer import weighing
from hvdlite_tf.keras.backends import call

_log = logging.getLogger("hvdlite")
_MARK = "_hvdlite_original"


class Step:
    """One step of a model on this rank.

    Args:
        data: the step's data from Keras, a structure of tensors.
        is_share: whether the data is this rank's shard of a global batch, as in training; otherwise losses are not
        corrected.
        is_part: whether the data is part of a global batch in spite of that.
    """

    def __init__(self, data: Any, is_share: bool, is_part: bool) -> None:
        self._leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
        self.is_share, self.is_part = is_share and api.size() > 1, is_part and api.size() > 1
        self._ordinals = itertools.count()
        self._corrections: list[Any] = []  # the last one

    @property
    def samples(self) -> Any:
        """This rank's samples: a number, or a scalar tensor."""
        return keras.ops.shape(self._leaves[0])[0]

    @property
    def tensors(self) -> list[Any]:
        """The data as dense tensors, also those that a sparse or ragged one consists of."""
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf
            return tf.nest.flatten(self._leaves, expand_composites=True)  # type: ignore[no-any-return]
        parts = ((leaf.data, leaf.indices) if hasattr(leaf, "todense") else (leaf,) for leaf in self._leaves)
        return list(itertools.chain.from_iterable(parts))

    def correction(self, divisor: Any | None) -> Any:
        """Return a factor for the sum of this rank's losses; the average over samples is then the global batch's loss.

        Args:
            divisor: this rank's part of the number by which the global batch's sum is divided; None for a sum.
        """
        own = keras.ops.cast(self.samples, "float32")
        if divisor is None:
            return self._samples_everywhere() / own
        samples, divisors = self._corrected(lambda rows: rows.sum(0), self.samples, divisor)
        return keras.ops.divide_no_nan(samples, own * divisors)

    def share_of_sum(self, gradients: Sequence[Any]) -> Any:
        """Return the weight of this rank's gradients in a plain average; 1 if all ranks have equally many samples."""
        samples, _ = self._together(lambda own: own.sum(0), self.samples, 0.0,
                                    after=[gradient for gradient in gradients if gradient is not None])
        return keras.ops.cast(self.samples, "float32") * api.size() / samples

    def _samples_everywhere(self) -> Any:
        """Return the number of samples of the global batch. All ranks compute a batch that has fewer samples than ranks."""
        size = api.size()

        def counted(own: Array) -> Array:
            is_copied = own[0, 0] < size and (np.abs(own - own[0]) <= 1e-6 * np.abs(own[0])).all()
            return own[0] if is_copied else own.sum(0)
        prints = [keras.ops.sum(_numbers(leaf) * keras.ops.cos(keras.ops.arange(keras.ops.size(leaf), dtype="float32")))
                  for leaf in self.tensors if keras.backend.standardize_dtype(leaf.dtype) != "string"]
        return self._corrected(counted, self.samples, sum(prints))[0]

    def _corrected(self, function: Callable[[Array], Array], *amounts: Any) -> list[Any]:
        results = self._together(function, *amounts, after=self._corrections)
        self._corrections = results[:1]
        return results

    def _together(self, function: Callable[[Array], Array], *amounts: Any, after: Sequence[Any]) -> list[Any]:
        """Apply a function to all ranks' scalars, one row for each rank; all ranks call this in the same order in a step.

        Args:
            after: tensors that must be computed before: JAX calls Python in any order that the arguments allow.
        """
        name = f"keras.step.{next(self._ordinals)}"

        def exchange(arrays: Sequence[Array]) -> list[Array]:
            rows = api.runtime().allgather(name, arrays[0].reshape(1, -1)).wait()
            return [np.ascontiguousarray(function(rows).astype(arrays[0].dtype))]
        own = keras.ops.stack([keras.ops.cast(amount, "float32") for amount in amounts])
        if keras.backend.backend() == "jax":
            for each in after:
                own = own + 0.0 * keras.ops.cast(keras.ops.isnan(keras.ops.reshape(each, (-1,))[0]), "float32")
        (result,) = call(exchange, [keras.ops.stop_gradient(own)])
        return [result[index] for index in range(len(amounts))]


def _numbers(tensor: Any) -> Any:
    return keras.ops.reshape(keras.ops.cast(tensor, "float32"), (-1,))


_current: ContextVar[Step | None] = ContextVar("hvdlite_step", default=None)
_sums: ContextVar[bool] = ContextVar("hvdlite_sums", default=False)


def current() -> Step | None:
    """Return the current step of this thread."""
    return _current.get()


@contextmanager
def one_replica(data: Any, is_share: bool = True, is_part: bool = False) -> Iterator[None]:
    """Return the context of a step; see `Step`."""
    step = Step(data, is_share, is_part)
    token = _current.set(step)
    try:
        with weighing(step.samples if is_share else None):
            yield
    finally:
        _current.reset(token)


@contextmanager
def summing() -> Iterator[None]:
    """Return the context of `strategy.run` on TensorFlow."""
    token = _sums.set(True)
    try:
        yield
    finally:
        _sums.reset(token)


def is_summing() -> bool:
    """Return whether this thread is in `strategy.run` on TensorFlow."""
    return _sums.get()


def prepared(gradients: Sequence[Any], accumulates: bool) -> list[Any]:
    """Return this rank's gradients, scaled so that their average over ranks by `StepReducer` is the gradient to apply.

    Args:
        accumulates: whether the optimizer adds up gradients before they are reduced; then all ranks have the same weight in
            the reduction, and this function applies the weights by samples.
    """
    step, size = _current.get(), api.size()
    if size == 1:
        return list(gradients)
    if step is None:
        return [_times(gradient, size) for gradient in gradients] if _sums.get() else list(gradients)
    if not accumulates or not step.is_share:
        return list(gradients)
    factor = step.share_of_sum(gradients)
    return [_times(gradient, factor) for gradient in gradients]


def weighted_later(samples: Any, variables: Callable[[], Sequence[Any]]) -> AbstractContextManager[None]:
    """Return a context of a step, for collectives in it: on torch their gradients are weighted when variables get them.

    Args:
        samples: this rank's; None where ranks have equal weights.
        variables: returns those that the step trains.
    """
    if keras.backend.backend() != "torch" or samples is None:
        return nullcontext()
    from hvdlite_torch.gradients.weights import weighted_later
    return weighted_later(api.runtime(), float(max(samples, 1)), lambda: [each.value for each in variables()])


@contextmanager
def penalizing(model: Any) -> Iterator[None]:
    """Return a context inside a step in which activity regularizers give the penalty of the global batch's activities."""
    step, layers = _current.get(), _summing_layers(model)
    if step is None or not layers or not step.is_share:
        if layers and step is not None and step.is_part:
            _warn()
        yield
        return
    correction = step.correction(None)  # before the model is called: a layer may be called in a graph of its own
    regularizers = [layer.activity_regularizer for layer in layers]
    for layer, regularizer in zip(layers, regularizers, strict=True):
        object.__setattr__(layer, "activity_regularizer", _corrected_penalty(regularizer, correction))
    try:
        yield
    finally:
        for layer, regularizer in zip(layers, regularizers, strict=True):
            object.__setattr__(layer, "activity_regularizer", regularizer)


def needs_whole_batches(model: Any) -> bool:
    """Return whether a loss or metric could have another divisor than samples, which a part of a batch cannot know.

    A metric that is a function may return one number for a batch, which Keras averages over batches. So it does with the
    losses of single outputs on TensorFlow.
    """
    compiled = getattr(model, "_compile_metrics", None)
    metrics = [metric for given in ("_user_metrics", "_user_weighted_metrics")
               for metric in keras.tree.flatten(getattr(compiled, given, None))]
    if any(callable(metric) and not isinstance(metric, keras.Metric) and not _is_keras(metric) for metric in metrics):
        return True
    if _summing_layers(model):
        return True
    losses = keras.tree.flatten(getattr(getattr(model, "_compile_loss", None), "_user_loss", None))
    outputs = getattr(model, "outputs", None) or ()
    if keras.backend.backend() == "tensorflow" and max(len(losses), len(outputs)) > 1:
        return True
    if any(getattr(loss, "reduction", None) in ("sum", "mean_with_sample_weight") for loss in losses):
        return True
    return any(isinstance(layer, keras.layers.Masking) or getattr(layer, "mask_zero", False)
               or (hasattr(type(layer), "compute_mask") and not _is_keras(type(layer).compute_mask))
               for layer in model._flatten_layers())


def install() -> None:
    """Install the corrections of Keras' losses and metrics inside a step; may be called again."""
    replace(keras.metrics.Mean, "update_state", _weighting)
    replace(loss, "reduce_weighted_values", _correcting)  # all of Keras' losses use this function for the reduction


def replace(owner: Any, name: str, hook: Callable[[Any], Any]) -> None:
    """Replace a function of a class or module by what a hook makes of it; again is fine."""
    original = getattr(owner, name)
    if not hasattr(original, _MARK):
        replacement = functools.wraps(original)(hook(original))
        setattr(replacement, _MARK, original)
        setattr(owner, name, replacement)


def _summing_layers(model: Any) -> list[Any]:
    """Return the layers whose activity regularizers give sums over the batch. Keras 3.14 divides them by the samples."""
    if tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 14):
        return []
    return [layer for layer in model._flatten_layers() if getattr(layer, "activity_regularizer", None) is not None]


def _corrected_penalty(regularizer: Callable[[Any], Any], correction: Any) -> Callable[[Any], Any]:
    def penalty(activity: Any) -> Any:
        own = regularizer(activity)
        return own * keras.ops.cast(correction, own.dtype) if len(activity.shape) else own
    return penalty


def _is_keras(function: Any) -> bool:
    return str(function.__module__).partition(".")[0] == "keras"


@functools.cache
def _warn() -> None:
    _log.warning("a loss that divides by something else than samples (a sum, or a mean over sample weights or valid tokens) "
                 "is evaluated on parts of batches, so it differs from one process's. Give evaluate arrays, or a dataset "
                 "that is not distributed yet, and compile the model with that loss")


def _times(gradient: Any, factor: Any) -> Any:
    if gradient is None:
        return None
    if hasattr(gradient, "indices") and hasattr(gradient, "dense_shape"):  # tf.IndexedSlices
        return type(gradient)(gradient.values * keras.ops.cast(factor, gradient.values.dtype), gradient.indices,
                              gradient.dense_shape)
    return gradient * keras.ops.cast(factor, gradient.dtype)


def _weighting(original: Any) -> Any:
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        step = _current.get()
        is_function = isinstance(self, keras.metrics.MeanMetricWrapper)
        if step is not None and step.is_share and is_function and sample_weight is None:
            values = keras.ops.convert_to_tensor(values)
            if not len(values.shape):  # a mean over this rank's shard
                sample_weight = step.share_of_sum(())
        return original(self, values, sample_weight=sample_weight)
    return update_state


def _correcting(original: Any) -> Any:
    signature = inspect.signature(original)

    def reduce_weighted_values(*arguments: Any, **named: Any) -> Any:
        step = _current.get()
        if step is None or not (step.is_share or step.is_part):
            return original(*arguments, **named)
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        given = bound.arguments
        values, weights, mask = given["values"], given["sample_weight"], given["mask"]
        reduction = given["reduction"]
        if reduction in (None, "none") or not len(values.shape):  # not divided by Keras
            return original(*arguments, **named)
        if reduction == "sum":
            divisor = None
        elif reduction == "mean_with_sample_weight" and weights is not None:
            weights = keras.ops.cast(weights, "float32")
            divisor = keras.ops.sum(weights if mask is None else loss.apply_mask(  # which multiplies in place
                weights * 1.0, keras.ops.convert_to_tensor(mask), dtype="float32", reduction=reduction))
        elif mask is not None:
            divisor = keras.ops.sum(keras.ops.cast(mask, "float32"))
        else:
            return original(*arguments, **named)
        if step.is_part:
            _warn()
            return original(*arguments, **named)
        given["reduction"] = "sum"  # a division by this rank's divisor, which may be 0, has gradients that are NaN on torch
        summed = original(*bound.args, **bound.kwargs)
        return summed * keras.ops.cast(step.correction(divisor), summed.dtype)
    return reduce_weighted_values

"""A model compiled in the scope: `fit`, `evaluate` and `predict` take global batches and give global results.

Methods are wrapped on this model only: its class and all other models are unchanged.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters.array_slicing import train_validation_split

from hvdlite import api
from hvdlite.core.types import ReduceOp
from hvdlite.training.objects import broadcast_object
from hvdlite.training.step_reducer import current_weight
from hvdlite_tf.keras import shards, step
from hvdlite_tf.keras.broadcast import read_back
from hvdlite_tf.keras.evaluation_data import EvaluationData, without_warnings
from hvdlite_tf.keras.order import order_seed, sync_random_state
from hvdlite_tf.keras.scope import BaseStrategy, distribute_optimizer
from hvdlite_tf.keras.stopping import StopTogetherCallback, averaged, may_stop
from hvdlite_tf.keras.variable_mirror import optimizers_of

WRITERS = tuple(getattr(keras.callbacks, name) for name in (
    "ModelCheckpoint", "CSVLogger", "TensorBoard", "RemoteMonitor", "BackupAndRestore", "ProgbarLogger", "OrbaxCheckpoint")
                if hasattr(keras.callbacks, name))
"""Callbacks that only rank 0 runs."""
METHODS = ("fit", "evaluate", "predict", "train_step", "test_step", "predict_step", "train_on_batch", "test_on_batch",
           "make_train_function", "make_test_function", "make_predict_function", "_symbolic_build",
           "_get_metrics_result_or_logs")
"""Methods of a model that `DistributedModel` replaces by methods of the same names."""
_DEFAULT_BATCH = 32
_HELD_OUT = (np.zeros((1, 1), "float32"),)
"""A placeholder for validation data in Keras' `fit`, which calls this model's `evaluate`; that uses the real data."""


def distribute_model(strategy: BaseStrategy, model: Any) -> None:
    """Distribute a compiled model; may be called again. With one replica the model is unchanged."""
    if strategy.num_replicas_in_sync == 1:
        return
    if vars(model).get("_hvdlite_strategy") is strategy:
        model._hvdlite_mirrored.is_trained = model._hvdlite_mirrored._continues = False  # it has another optimizer
        return
    mirrored = DistributedModel(strategy, model)
    for name in METHODS:
        object.__setattr__(model, name, _replacing(mirrored.original[name], getattr(mirrored, name)))
    object.__setattr__(model, "_hvdlite_strategy", strategy)
    object.__setattr__(model, "_hvdlite_mirrored", mirrored)


class DistributedModel:
    """The wrapped methods of one model.

    Attributes:
        original: the model's own methods, by name.
        is_trained: whether a training has begun with rank 0's values.
    """

    def __init__(self, strategy: BaseStrategy, model: Any) -> None:
        self._strategy, self._model = strategy, model
        self.original: dict[str, Callable[..., Any]] = {name: getattr(model, name) for name in METHODS}
        self._fitting = False
        self._preparing: ExitStack | None = None  # closed when the model is built and has rank 0's values
        self._deferring = ExitStack()  # closed when the current `fit` no longer leaves variables to `mirror_training`
        self._is_built_by_step = False
        self.is_trained = False
        self._continues = False  # whether `train_on_batch` continues its own training
        self._applying_shares = False
        self._fits = 0
        self._is_bare = False  # whether the training data is a structure of inputs without a tuple around it
        self._held_out: EvaluationData | None = None  # validation data of the current training
        self._applied: EvaluationData | None = None  # the data of the current evaluation or prediction

    def fit(self, *arguments: Any, **named: Any) -> Any:
        """Train like the model's method, on this rank's shard of a global batch."""
        given = self._bound("fit", arguments, named)
        held_out = given["validation_data"]
        if given["validation_split"] and held_out is None:
            data = ("x", "y", "sample_weight")
            kept, held_out = train_validation_split(tuple(given[name] for name in data), given["validation_split"])
            given.update(zip(data, kept, strict=True))
        x, arrays = self._data(given, "x", "y", "sample_weight")
        is_bare_before, self._is_bare = self._is_bare, shards.is_bare(arrays)
        batch = given["batch_size"] or _DEFAULT_BATCH
        sync_random_state()
        self._fits += 1
        seed = order_seed(self._fits) if given["shuffle"] else None
        sharing = shards.Sharing(self._strategy.shares)
        local = {"x": shards.training_batches(x, arrays, batch, seed, self._strategy, sharing), "y": None,
                 "sample_weight": None, "batch_size": None, "shuffle": False, "validation_split": 0.0,
                 "validation_steps": None}
        before = self._held_out
        self._held_out = None
        if held_out is not None:
            self._held_out = self._applied_to(held_out, given["validation_batch_size"] or batch, given["validation_steps"])
            local["validation_data"] = _HELD_OUT
        self._distribute_optimizers()
        self._fitting, self._continues = True, False
        try:
            with _local_input(self._strategy), ExitStack() as self._deferring:
                self._deferring.enter_context(self._strategy.variable_mirror.deferred())
                return self.original["fit"](**{**given, **local, "callbacks": self._callbacks(given["callbacks"], sharing),
                                               "verbose": self._verbose(given["verbose"])})
        finally:
            sharing.end()
            self._fitting, self._held_out, self._is_bare = False, before, is_bare_before

    def evaluate(self, *arguments: Any, **named: Any) -> Any:
        """Evaluate like the model's method; each rank computes its part, and all ranks return the same results."""
        if self._held_out is not None and named.get("_use_cached_eval_dataset"):  # Keras' own call, after an epoch
            given = {"callbacks": named["callbacks"], "return_dict": True}
            return self._apply("evaluate", self._held_out, given)
        given = self._bound("evaluate", arguments, named)
        x, arrays = self._data(given, "x", "y", "sample_weight")
        applied = EvaluationData(x, arrays, given["batch_size"] or _DEFAULT_BATCH, given["steps"], self._strategy,
                                 step.needs_whole_batches(self._model))
        return self._apply("evaluate", applied, given)

    def predict(self, *arguments: Any, **named: Any) -> Any:
        """Predict like the model's method; each rank computes its part, and all ranks return all predictions, in order."""
        given = self._bound("predict", arguments, named)
        x, arrays = self._data(given, "x")
        applied = EvaluationData(x, arrays, given["batch_size"] or _DEFAULT_BATCH, given["steps"], self._strategy)
        return applied.joined(self._apply("predict", applied, given))

    def _apply(self, name: str, applied: EvaluationData, given: dict[str, Any]) -> Any:
        """Run Keras' `evaluate` or `predict` on this rank's part."""
        alone: dict[str, Any] = {argument: None for argument in ("y", "sample_weight", "batch_size") if argument in given}
        data, steps = applied.begin()
        before, self._applied = self._applied, applied
        if self._fitting:
            self._mirror_if_different(self._model.non_trainable_variables)  # trainable ones have equal updates on all ranks
        try:
            with _local_input(self._strategy), without_warnings(self._strategy.rank), \
                    self._strategy.variable_mirror.applying_model(), nullcontext() if self._fitting else self._prepared():
                return self.original[name](**{**given, **alone, "x": data, "steps": steps,
                                              "verbose": self._verbose(given.get("verbose", 0))})
        finally:
            self._applied = before
            applied.end()

    def train_step(self, *arguments: Any, **named: Any) -> Any:
        """Run the model's method; inside, Keras sees one replica, and this rank is weighted by its samples."""
        with step.one_replica(_data_of(arguments, named)), step.penalizing(self._model), self._weighted():
            return self.original["train_step"](*_given(arguments, self._is_bare), **named)

    def test_step(self, *arguments: Any, **named: Any) -> Any:
        """Run the model's method; inside, Keras sees one replica. Losses belong to this rank's batch or shard."""
        is_part = self._applied is not None and not self._applied.is_whole
        with step.one_replica(_data_of(arguments, named), self._applying_shares, is_part), step.penalizing(self._model), \
                self._weighted():
            is_bare = self._applied is not None and self._applied.is_bare
            return self.original["test_step"](*_given(arguments, is_bare), **named)

    def predict_step(self, *arguments: Any, **named: Any) -> Any:
        """Run the model's method, with the data in the form in which Keras gives it without a strategy."""
        is_bare = self._applied is not None and self._applied.is_bare
        return self.original["predict_step"](*_given(arguments, is_bare), **named)

    def _weighted(self) -> AbstractContextManager[None]:
        return self._strategy.weighted_step(current_weight(), lambda: self._model.trainable_variables)

    def _symbolic_build(self, *arguments: Any, **named: Any) -> None:
        """Like the model's. On TensorFlow a model that cannot be built here is built by its step, as without a strategy."""
        try:
            self.original["_symbolic_build"](*arguments, **named)
        except Exception:
            if keras.backend.backend() != "tensorflow":
                raise
            self._is_built_by_step = True
            self._deferring.close()

    def make_train_function(self, *arguments: Any, **named: Any) -> Any:
        """Like the model's. Keras calls it when the model is built, and before it reads variables."""
        if self._preparing is not None:
            self.mirror_training()
            self._preparing.close()
        self._renew("train_step")
        return self.original["make_train_function"](*arguments, **named)

    def make_test_function(self, *arguments: Any, **named: Any) -> Any:
        """Like the model's. Keras calls it when the model is built, and before it reads variables."""
        self._mirror_applied()
        self._renew("test_step")
        return self.original["make_test_function"](*arguments, **named)

    def make_predict_function(self, *arguments: Any, **named: Any) -> Any:
        """Like the model's. Keras calls it before it reads variables."""
        self._mirror_applied()
        return self.original["make_predict_function"](*arguments, **named)

    def _renew(self, name: str) -> None:
        """Use a new function for a method, because JAX compiles each function once, with its constants.

        `compile` changes these constants: a schedule, a loss, options of the optimizer.
        """
        object.__setattr__(self._model, name, _replacing(self.original[name], getattr(self, name)))

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        """Return the results of all ranks' metrics; the logs of a custom step are averaged over ranks."""
        counts = self._applied is None or not self._applied.is_spare
        if not counts and keras.backend.backend() == "tensorflow":  # outside of a replica an assignment is collective
            self._strategy.extended.call_for_each_replica(self._model.reset_metrics)  # type: ignore[attr-defined]
        elif not counts:
            self._model.reset_metrics()
        with self._summed_metrics():
            result = self.original["_get_metrics_result_or_logs"](logs)
        return averaged(result, counts) if result is logs and isinstance(logs, dict) else result

    def _on_batch(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Like the model's `train_on_batch` or `test_on_batch`, of a global batch."""
        given = self._bound(name, arguments, named)
        x, arrays = self._data(given, "x", "y", "sample_weight")
        if arrays is None:
            raise ValueError(f"{name} takes the arrays of one batch, not {type(x).__name__}")
        rows = self._strategy.shares.begin().own(shards.rows_of(arrays))
        x, y, weights = (*shards.select_rows(arrays, rows), None, None)[:3]
        self._distribute_optimizers()
        self._fitting = self._applying_shares = True
        is_bare_before, self._is_bare = self._is_bare, False
        try:
            with self._prepared() if name == "test_on_batch" or not self._continues else nullcontext():
                logs = self.original[name](**{**given, "x": x, "y": y, "sample_weight": weights, "return_dict": True})
            self._continues = self._continues or name == "train_on_batch"
            logs = {metric: float(keras.ops.convert_to_numpy(value))
                    for metric, value in self._get_metrics_result_or_logs(logs).items()}
        finally:
            self._fitting = self._applying_shares = False
            self._is_bare = is_bare_before
        return logs if given["return_dict"] else self._model._flatten_metrics_in_order(logs)

    train_on_batch = functools.partialmethod(_on_batch, "train_on_batch")
    test_on_batch = functools.partialmethod(_on_batch, "test_on_batch")

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """Build the model without mirroring, until Keras creates the function that uses the variables."""
        with ExitStack() as self._preparing:
            self._preparing.enter_context(self._strategy.variable_mirror.deferred())
            try:
                yield
            finally:
                self._preparing = None

    def _distribute_optimizers(self) -> None:
        """Distribute the optimizers in the model's attributes (GANs have two)."""
        for optimizer in optimizers_of(self._model):
            distribute_optimizer(self._strategy, optimizer)

    def mirror_training(self) -> None:
        """Copy rank 0's values to the model and its optimizers."""
        model, own = self._model, self._model.optimizer
        if own is not None and not own.built and not self._is_built_by_step:
            with self._strategy.scope():
                own.build(model.trainable_variables)
        state = [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]
        if self.is_trained:  # gradients accumulated since the last update are each rank's own
            state = [variable for variable in state if "gradient_accumulator" not in variable.path]
        self._strategy.variable_mirror.mirror([*model.variables, *state])
        self.is_trained = True

    def _mirror_applied(self) -> None:
        if self._preparing is not None:
            self._mirror_if_different(self._model.variables)
            self._preparing.close()

    def _mirror_if_different(self, variables: Sequence[Any]) -> None:
        """Copy rank 0's values to variables that differ: weights that one rank has set, or each rank's moving averages."""
        if not self._strategy.variable_mirror.are_equal_everywhere(variables):
            self._strategy.variable_mirror.mirror(variables)

    @contextmanager
    def _summed_metrics(self) -> Iterator[None]:
        """Replace metrics by the sums over all ranks in this context, unless they are summed on read.

        The latter is so on TensorFlow, unless a metric was made before the scope.
        """
        variables = [variable for metric in self._model.metrics for variable in metric.variables
                     if not self._strategy.is_summed_on_read(variable)]
        if not variables or self._strategy.num_replicas_in_sync == 1:
            yield
            return
        own = [np.array(keras.ops.convert_to_numpy(variable.value), order="C") for variable in variables]
        runtime = api.runtime()
        sums = [np.empty_like(array) for array in own]
        handles = [runtime.allreduce(f"keras.metric.{index}", array, total, ReduceOp.SUM)
                   for index, (array, total) in enumerate(zip(own, sums, strict=True))]
        try:
            for variable, total, handle in zip(variables, sums, handles, strict=True):
                handle.wait()
                variable.assign(total)
            yield
        finally:
            for variable, array in zip(variables, own, strict=True):
                variable.assign(array)

    def _bound(self, name: str, arguments: Any, named: Any) -> dict[str, Any]:
        """Return all arguments by name: a user's own method may have other positions."""
        bound = inspect.signature(getattr(keras.Model, name)).bind(self._model, *arguments, **named)
        bound.apply_defaults()
        given = dict(bound.arguments)
        del given["self"]
        more = given.pop("kwargs", {})
        return {**given, **more}

    def _data(self, given: dict[str, Any], *names: str) -> tuple[Any, tuple[Any, ...] | None]:
        stateful = [layer.name for layer in self._model._flatten_layers()
                    if isinstance(layer, keras.layers.RNN) and layer.stateful]
        if stateful:
            raise ValueError(f"layers {stateful} are stateful: they keep a state for every sample of a batch, and a "
                             "MirroredStrategy gives each rank only a part of the samples. Train this model with "
                             "DistributedOptimizer and each rank's own data, outside of a scope")
        x = shards.global_dataset(given["x"])
        return x, shards.as_arrays(*(given[name] for name in names)) if shards.is_arrays(x) else None

    def _applied_to(self, held_out: Any, batch_size: int, steps: int | None) -> EvaluationData:
        parts = held_out if isinstance(held_out, (tuple, list)) else (held_out,) if shards.is_arrays(held_out) else None
        arrays = None if parts is None else shards.as_arrays(*parts)
        x = None if arrays is not None else shards.global_dataset(held_out)
        return EvaluationData(x, arrays, batch_size, steps, self._strategy, step.needs_whole_batches(self._model))

    def _callbacks(self, callbacks: Any, sharing: keras.callbacks.Callback) -> Any:
        if callbacks is None:
            callbacks = []
        given = list(callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else
                     callbacks if isinstance(callbacks, (list, tuple)) else [callbacks])
        kept = [each for each in given if self._strategy.rank == 0 or not isinstance(each, WRITERS)]
        return [*kept, _Beginning(self), sharing, StopTogetherCallback(every_batch=any(map(may_stop, given)))]

    def _verbose(self, verbose: Any) -> Any:
        return verbose if self._strategy.rank == 0 else 0


class _Beginning(keras.callbacks.Callback):
    """Begins each training with rank 0's model, optimizers and epoch; only random layers differ."""

    def __init__(self, mirrored: DistributedModel) -> None:
        super().__init__()
        self._mirrored, self._done = mirrored, False

    def on_train_begin(self, logs: Any = None) -> None:
        """Copy rank 0's epoch, which a backup may have restored."""
        self._done = False
        runtime = api.runtime()
        epoch = broadcast_object(runtime, getattr(self.model, "_initial_epoch", None), 0,
                                 runtime.names.unnamed("keras", "initial_epoch"))
        if epoch is not None:
            self.model._initial_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Copy rank 0's values to the model, which Keras has built, and its optimizers."""
        if not self._done:
            self._done = True
            read_back(self.model)  # callbacks have restored their state already
            self._mirrored.mirror_training()


def _replacing(original: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        return method(*arguments, **named)
    return wrapped


def _data_of(arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    """Return the data of a step, which on JAX is the argument after the state."""
    return named.get("data", arguments[-1] if arguments else None)


def _given(arguments: Sequence[Any], is_bare: bool) -> Sequence[Any]:
    """Return the arguments of a step; the data is as Keras gives it without a strategy."""
    return (*arguments[:-1], arguments[-1][0]) if is_bare else arguments


@contextmanager
def _local_input(strategy: Any) -> Iterator[None]:
    """Mark the model's data as this rank's shard while the block runs."""
    before, strategy.has_local_input = strategy.has_local_input, True
    try:
        yield
    finally:
        strategy.has_local_input = before

"""Patches of Keras for distributed optimizers and losses; they are applied once, when this package is imported.

- `Trainer.compile`: TensorFlow's XLA cannot call Python, so with a distributed optimizer "auto" is off. A model that is
  compiled in the scope of a `MirroredStrategy` is distributed.
- `Trainer.make_train_function`: a training step that was compiled before the optimizer was wrapped, or in another world, is
  compiled again.
- `LossScaleOptimizer`: it tests reduced gradients, which are equal on all ranks, so an overflow on one rank skips the step
  on all ranks. If they differ (accumulation, local variables, workers), the ranks combine their tests. Its variables,
  which are saved, include those of its inner optimizer, of which a sharded one has a part.
- `CallbackList.set_model`: `fit` begins with the callback that merges what workers have learned.
- The reduction of losses; see `step.py`.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from contextlib import ExitStack
from typing import Any

import keras

from hvdlite_tf.keras import scope, step
from hvdlite_tf.keras.backends import all_ranks_true
from hvdlite_tf.keras.distributed_model import distribute_model
from hvdlite_tf.keras.optimizer import distributed_in, is_distributed
from hvdlite_tf.keras.outer import SynchronizeOuterCallback, outer_in, outers_of
from hvdlite_tf.keras.sharded import load_whole, save_whole

_log = logging.getLogger("hvdlite")


def install() -> None:
    """Install all hooks; may be called again."""
    for name, hook in (("compile", _compiling), ("make_train_function", _making)):
        step.replace(next(owner for owner in keras.Model.__mro__ if name in vars(owner)), name, hook)
    scaler = keras.optimizers.LossScaleOptimizer
    for name, hook in (("apply", _applying), ("stateless_apply", _applying_statelessly), ("check_finite", _checking),
                       ("save_own_variables", _saving), ("load_own_variables", _loading)):
        step.replace(scaler, name, hook)
    step.replace(keras.callbacks.CallbackList, "set_model", _setting)
    step.install()


def _compiling(original: Any) -> Any:
    signature = inspect.signature(original)

    def compile(self: Any, *arguments: Any, **named: Any) -> Any:
        bound = signature.bind(self, *arguments, **named)
        strategy = scope.scopes.current()
        if strategy is None and isinstance(getattr(self, "_distribute_strategy", None), scope.BaseStrategy):
            strategy = self._distribute_strategy  # of the scope in which a TensorFlow model was created
        if strategy is not None and bound.arguments.get("optimizer", "rmsprop") is not None:
            with strategy.scope():
                bound.arguments["optimizer"] = keras.optimizers.get(bound.arguments.get("optimizer", "rmsprop"))
                scope.distribute_optimizer(strategy, bound.arguments["optimizer"])
        if keras.backend.backend() == "tensorflow" and distributed_in(bound.arguments.get("optimizer")) is not None:
            wanted = bound.arguments.get("jit_compile", "auto")
            if wanted is True:
                raise ValueError("jit_compile=True: XLA cannot call hvdlite's collectives; compile the model with "
                                 "jit_compile=False")
            if wanted == "auto":
                _log.info("jit_compile is off: XLA cannot call hvdlite's collectives")
                bound.arguments["jit_compile"] = False
        if strategy is not None and getattr(self, "_distribute_strategy", strategy) is None:  # created before the scope
            self._distribute_strategy = strategy
        if strategy is None:
            return original(*bound.args, **bound.kwargs)
        with strategy.scope():
            original(*bound.args, **bound.kwargs)
        distribute_model(strategy, self)
        return None
    return compile


def _making(original: Any) -> Any:
    def make_train_function(self: Any, force: bool = False) -> Any:
        optimizer = distributed_in(getattr(self, "optimizer", None))
        reducer = None if optimizer is None else optimizer._hvdlite_step_reducer()
        if reducer is not None:
            reducer.take_part()
        trained_with = None if reducer is None else (weakref.ref(reducer), reducer.world)
        if trained_with != vars(self).get("_hvdlite_trained_with"):
            object.__setattr__(self, "_hvdlite_trained_with", trained_with)
            if reducer is not None and keras.backend.backend() == "tensorflow" and self.jit_compile:
                _log.info("jit_compile is off: XLA cannot call hvdlite's collectives")
                self.jit_compile = False
            force = True
        if optimizer is not None and optimizer.built:
            optimizer._hvdlite_watch(optimizer._trainable_variables)
        return original(self, force)
    return make_train_function


def _setting(original: Any) -> Any:
    def set_model(self: Any, model: Any) -> None:
        if model is not None and outers_of(model) and not any(
                isinstance(each, SynchronizeOuterCallback) for each in self.callbacks):
            self.callbacks.insert(0, SynchronizeOuterCallback(self.callbacks))
        original(self, model)
    return set_model


def _applying(original: Any) -> Any:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if not is_distributed(self.inner_optimizer):
            return original(self, grads, trainable_variables)
        variables = self.inner_optimizer._trainable_variables if trainable_variables is None else trainable_variables
        with self.inner_optimizer._hvdlite_reducing(grads, variables) as reduced:
            return original(self, reduced, trainable_variables)
    return apply


def _applying_statelessly(original: Any) -> Any:
    def stateless_apply(self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        if not is_distributed(self.inner_optimizer):
            return original(self, optimizer_variables, grads, trainable_variables)
        inner = self.inner_optimizer
        values = list(zip(inner._trainable_variables, trainable_variables, strict=False))  # the variables have none here
        with ExitStack() as stack:
            with keras.StatelessScope(state_mapping=values):
                reduced = stack.enter_context(inner._hvdlite_reducing(grads, inner._trainable_variables))
            return original(self, optimizer_variables, reduced, trainable_variables)
    return stateless_apply


def _saving(original: Any) -> Any:
    def save_own_variables(self: Any, store: Any) -> None:
        if not save_whole(self, store):
            original(self, store)
    return save_own_variables


def _loading(original: Any) -> Any:
    def load_own_variables(self: Any, store: Any) -> None:
        if not load_whole(self, store):
            original(self, store)
    return load_own_variables


def _checking(original: Any) -> Any:
    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        if not is_distributed(self.inner_optimizer):
            return finite
        outer = outer_in(self.inner_optimizer)
        if outer is not None:  # workers count the same steps
            return all_ranks_true(finite, outer._hvdlite_step_reducer(), outer.hvdlite_exchanges.label)
        state = self.inner_optimizer._hvdlite_state
        if state.are_reduced and not state.local:  # these gradients are the same on all ranks that share them
            return finite
        reducer = self.inner_optimizer._hvdlite_step_reducer()
        return all_ranks_true(finite, reducer) if reducer.is_used else finite
    return check_finite

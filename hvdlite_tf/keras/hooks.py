"""Three places where Keras must know of hvdlite; changed once, when this package is imported.

- `Trainer.compile`: TensorFlow's XLA cannot call Python, so with a distributed optimizer "auto" means no. In the scope of a
  `MirroredStrategy`, what is compiled becomes the strategy's.
- `LossScaleOptimizer.check_finite`: an overflow on one rank skips the step on all of them, or gradients of different steps
  would be paired.
- The reduction of losses; see `step.py`.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import keras

from hvdlite_tf.keras import scope, step
from hvdlite_tf.keras.exchange import everywhere
from hvdlite_tf.keras.mirrored_model import adopt_model
from hvdlite_tf.keras.optimizer import is_distributed

_log = logging.getLogger("hvdlite")
_MARK = "_hvdlite_original"


def install() -> None:
    """Install both hooks; again is fine."""
    trainer = next(owner for owner in keras.Model.__mro__ if "compile" in vars(owner))
    if not hasattr(trainer.compile, _MARK):
        trainer.compile = _compiling(trainer.compile)
    scaler = keras.optimizers.LossScaleOptimizer
    if not hasattr(scaler.check_finite, _MARK):
        scaler.check_finite = _checking(scaler.check_finite)
    step.install()


def _compiling(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile(self: Any, *arguments: Any, **named: Any) -> Any:
        bound = signature.bind(self, *arguments, **named)
        strategy = scope.current() or _strategy_of(self)
        if strategy is not None and bound.arguments.get("optimizer", "rmsprop") is not None:
            with strategy.scope():
                bound.arguments["optimizer"] = keras.optimizers.get(bound.arguments.get("optimizer", "rmsprop"))
                scope.adopt_optimizer(strategy, bound.arguments["optimizer"])
        if keras.backend.backend() == "tensorflow" and _holds_distributed(bound.arguments.get("optimizer")):
            wanted = bound.arguments.get("jit_compile", "auto")
            if wanted is True:
                raise ValueError("jit_compile=True: XLA cannot call hvdlite's collectives; compile the model with "
                                 "jit_compile=False")
            if wanted == "auto":
                _log.info("jit_compile is off: XLA cannot call hvdlite's collectives")
                bound.arguments["jit_compile"] = False
        if strategy is not None and getattr(self, "_distribute_strategy", strategy) is None:  # made before the scope
            self._distribute_strategy = strategy
        if strategy is None:
            return original(*bound.args, **bound.kwargs)
        with strategy.scope():
            original(*bound.args, **bound.kwargs)
        adopt_model(strategy, self)
        return None
    setattr(compile, _MARK, original)
    return compile


def _checking(original: Any) -> Any:
    @functools.wraps(original)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        exchange = self.inner_optimizer._hvdlite_exchange() if is_distributed(self.inner_optimizer) else None
        if exchange is None or not exchange.is_shared:
            return finite
        return everywhere(finite, f"{exchange.label}.finite", exchange.process_set)
    setattr(check_finite, _MARK, original)
    return check_finite


def _strategy_of(model: Any) -> scope.Mirrored | None:
    """Return the strategy in whose scope a TensorFlow model was made."""
    strategy = getattr(model, "_distribute_strategy", None)
    return strategy if isinstance(strategy, scope.Mirrored) else None


def _holds_distributed(optimizer: Any) -> bool:
    return is_distributed(optimizer) or is_distributed(getattr(optimizer, "inner_optimizer", None))

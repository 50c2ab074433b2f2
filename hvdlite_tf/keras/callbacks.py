"""Horovod's callbacks, for Keras 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from hvdlite import api, boundaries
from hvdlite.training.slowness import log_slowness
from hvdlite_tf.keras.backends import with_errors_of_backend
from hvdlite_tf.keras.broadcast import broadcast_variables, read_back
from hvdlite_tf.keras.checkpoints import Checkpoint
from hvdlite_tf.keras.outer import outers_of
from hvdlite_tf.keras.stopping import StopTogetherCallback, averaged, refuse_uneven_steps
from hvdlite_tf.keras.variable_mirror import optimizers_of

__all__ = ["BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "Checkpoint", "LearningRateScheduleCallback",
           "LearningRateWarmupCallback", "MetricAverageCallback", "SlownessCallback", "StopOnRequestCallback",
           "StopTogetherCallback"]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts one rank's model and optimizers at the beginning of training.

    As in Horovod, the broadcast happens at the first batch, or after it for variables that the first batch creates (on
    TensorFlow, a model without an `Input`): then the first gradients are computed from each rank's own weights.

    The optimizers are the model's own and those in its attributes.

    The random states of layers such as Dropout are broadcast too, but advanced by a different distance on every rank.

    Args:
        root_rank: the rank whose state all ranks take.
        device: accepted for compatibility with Horovod.
        local_variables: variables that are not broadcast.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Sequence[Any] = ()) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local = {id(variable) for variable in local_variables or ()}
        self._done = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Start a new training.

        Raises:
            ValueError: on all ranks, when they have different numbers of steps in an epoch.
        """
        self._done = False
        refuse_uneven_steps(self)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcast, if the model is built."""
        own = self.model.optimizer
        if not self._done and self.model.built and optimizers_of(self.model):
            if own is not None and not own.built:
                own.build(self.model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast the variables that the first batch has created."""
        if not self._done:
            self._broadcast()

    def _broadcast(self) -> None:
        self._done = True
        if getattr(self.model, "_hvdlite_resumed", False):
            return  # from a checkpoint, with what each rank had for itself
        read_back(self.model)
        optimizers = optimizers_of(self.model)
        variables = [*self.model.variables, *(variable for optimizer in optimizers for variable in optimizer.variables)]
        broadcast_variables([variable for variable in variables if id(variable) not in self._local], self.root_rank,
                            "keras.broadcast")
        for optimizer in outers_of(self.model):
            optimizer.hvdlite_exchanges.restart(optimizer.hvdlite_exchanges.of_root(self.root_rank))


class MetricAverageCallback(keras.callbacks.Callback):
    """Average the values of an epoch's logs over all ranks; put it before callbacks that read logs.

    Args:
        device: accepted for Horovod's sake.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    @with_errors_of_backend
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the logs in place."""
        if logs:
            logs.update(averaged(logs))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to a multiple of the initial one.

    Args:
        initial_lr: the rate that is multiplied.
        multiplier: a function of the epoch, or a number that is raised to the epochs since `start_epoch`.
        start_epoch, end_epoch: the first epoch in which it acts, and the first one in which it does not any more.
        staircase: change the rate once per epoch, else with every batch, by fractions of an epoch. Several batches in one
            call (`steps_per_execution`) use the rate of the first one; the epoch ends with the rate of its last batch.
        momentum_correction: scale momentum by the change of the rate for one batch (Goyal et al., "Accurate, Large Minibatch
            SGD", 2017), where the optimizer has a momentum that can be set.
        steps_per_epoch: needed without `staircase` where Keras does not know it.

    Raises:
        ValueError: without `initial_lr`, or if the number of steps cannot be determined.
    """

    def __init__(self, initial_lr: float, multiplier: float | Callable[[float], float], start_epoch: int = 0,
                 end_epoch: int | None = None, staircase: bool = True, momentum_correction: bool = True,
                 steps_per_epoch: int | None = None) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is needed: what the multiplier multiplies")
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase, self.steps_per_epoch = staircase, steps_per_epoch
        self.momentum_correction = momentum_correction
        self.current_epoch = 0
        self._restore: float | None = None
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            base = float(multiplier)
            self.staircase = True
            self.multiplier = lambda epoch: base ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        """Determine the number of steps of an epoch, if it is needed."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError("steps_per_epoch is needed: Keras does not know how many steps an epoch has")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Record the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Adjust the rate."""
        if not self._acts():
            return
        if self.staircase and batch == 0:
            self._adjust(self.current_epoch)
        elif not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(self.current_epoch + batch / self.steps_per_epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Restore the value of momentum."""
        if self._restore is not None:
            self._optimizer().momentum = self._restore
            self._restore = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the rate of the epoch's last batch."""
        if not self.staircase and self._acts():  # the last batch may be part of an execution of several batches
            assert self.steps_per_epoch is not None
            self._adjust(epoch + (self.steps_per_epoch - 1) / self.steps_per_epoch, corrects_momentum=False)
        if logs is not None:
            logs["lr"] = float(keras.ops.convert_to_numpy(self._optimizer().learning_rate))

    def _acts(self) -> bool:
        return self.start_epoch <= self.current_epoch and (self.end_epoch is None or self.current_epoch < self.end_epoch)

    def _adjust(self, epoch: float, corrects_momentum: bool = True) -> None:
        read_back(self.model)
        optimizer = self._optimizer()
        before = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        after = self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = after
        momentum = getattr(optimizer, "momentum", None)
        runs_eagerly = getattr(self.model, "run_eagerly", False)
        corrects_momentum = corrects_momentum and self.momentum_correction
        if corrects_momentum and isinstance(momentum, float) and momentum and before and runs_eagerly:
            self._restore = momentum
            optimizer.momentum = momentum * after / before

    def _optimizer(self) -> Any:
        optimizer = self.model.optimizer
        return getattr(optimizer, "inner_optimizer", optimizer)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Increases the learning rate linearly from first_lr to initial_lr, batch by batch (Goyal et al., 2017).

    Args:
        initial_lr: the rate for all ranks together, usually the rate for one times `size()`.
        warmup_epochs: the number of epochs that this takes.
        momentum_correction, steps_per_epoch: as in `LearningRateScheduleCallback`.
        verbose: above 0, rank 0 prints when the warm-up is over.
        first_lr: the rate at which it begins (default: initial_lr / size()).
    """

    def __init__(self, initial_lr: float, warmup_epochs: int = 5, momentum_correction: bool = True,
                 steps_per_epoch: int | None = None, verbose: int = 0, first_lr: float | None = None) -> None:
        def multiplier(epoch: float) -> float:
            epoch += 1.0 / (self.steps_per_epoch or 1)  # the last batch of the last epoch has the full rate
            first = first_lr / initial_lr if first_lr is not None and initial_lr else 1.0 / api.size()
            return first + (1.0 - first) * min(epoch, warmup_epochs) / warmup_epochs
        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the rate, and report the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and api.rank() == 0:
            rate = float(keras.ops.convert_to_numpy(self._optimizer().learning_rate))
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves only the best model, like Keras' `ModelCheckpoint` with `save_best_only`.

    Args:
        monitor, verbose, mode, save_freq, save_weights_only: as in `keras.callbacks.ModelCheckpoint`.
        filepath: the file; may be set later, as an attribute.
    """

    def __init__(self, monitor: str = "val_loss", verbose: int = 0, mode: str = "auto", save_freq: Any = "epoch",
                 save_weights_only: bool = False, filepath: str | None = None) -> None:
        placeholder = "best.weights.h5" if save_weights_only else "best.keras"
        super().__init__(filepath=filepath or placeholder, monitor=monitor, verbose=verbose, save_best_only=True,
                         save_weights_only=save_weights_only, mode=mode, save_freq=save_freq)


class StopOnRequestCallback(keras.callbacks.Callback):
    """Ends `fit` after the same batch on all ranks when one of them is asked to stop; see `hvd.stop_requested`.

    Put it before callbacks that save. `fit` returns as usual; `hvd.stop_requested()` after it is True from then on.
    """

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop, if it is time."""
        if boundaries.stop_requested():
            self.model.stop_training = True


class SlownessCallback(keras.callbacks.Callback):
    """Prints on rank 0, at the end of each epoch, which rank the others wait for and the likely cause, if there is one.

    Args:
        writer: see `hvd.log_slowness`; None only prints.
    """

    def __init__(self, writer: Any = None) -> None:
        super().__init__()
        self._writer = writer

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compare the ranks."""
        found = log_slowness(epoch, self._writer)
        if found is not None and api.rank() == 0:
            print(found, flush=True)


def __dir__() -> list[str]:
    return sorted(__all__)

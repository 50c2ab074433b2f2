"""Agreement on the end of training, so that all ranks stop in the same batch.

If only one rank leaves the loop, the others wait for its gradients forever. Each rank has its own `model.stop_training`: a
callback may set it for a reason that only this rank sees, such as the loss of its shard of a batch.
"""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np

from hvdlite import api
from hvdlite.core.types import ReduceOp
from hvdlite.training.objects import allgather_object
from hvdlite_tf.keras.elastic_callbacks import EPOCH_IS_OVER

_NEVER_STOPS = tuple(getattr(keras.callbacks, name) for name in (
    "BackupAndRestore", "CSVLogger", "EarlyStopping", "History", "LearningRateScheduler", "ModelCheckpoint",
    "OrbaxCheckpoint", "ProgbarLogger", "ReduceLROnPlateau", "RemoteMonitor", "SwapEMAWeights", "TensorBoard")
                     if hasattr(keras.callbacks, name))
"""Keras' callbacks that do not set `stop_training` in a batch."""
_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


class StopTogetherCallback(keras.callbacks.Callback):
    """Stops training on all ranks as soon as one rank stops, and ends epochs together. Put it last, on all ranks.

    When one rank's `model.stop_training` is set at the end of a batch, or at the beginning or end of an epoch, it is set on
    all ranks. When ranks have different numbers of steps in an epoch, each epoch ends after the smallest number. Where Keras
    does not know the number of steps, give `fit` the same `steps_per_epoch` on all ranks.

    Args:
        every_batch: check after every batch, which costs one reduction of a few bytes; otherwise only at the beginning and
            end of an epoch. One rank's True is enough.
    """

    def __init__(self, every_batch: bool = True) -> None:
        super().__init__()
        self._wants_every_batch = every_batch
        self._every_batch = every_batch
        self._own: int | None = None  # this rank's steps per epoch
        self._last: int | None = None  # steps after which epochs end, if some rank has fewer
        self._are_steps_known = True

    def set_model(self, model: Any) -> None:
        """Record in the model that ranks end epochs together."""
        super().set_model(model)
        object.__setattr__(model, "_hvdlite_stops_together", True)

    def set_params(self, params: Any) -> None:
        """Agree on the number of steps, before any callback reads it.

        Raises:
            ValueError: on all ranks, when some rank has fewer steps than one execution of the training function takes.
        """
        super().set_params(params)
        runtime = api.runtime()
        self._own = params.get("steps")
        everywhere = allgather_object(runtime, (self._own, self._wants_every_batch), runtime.names.unnamed("keras", "steps"))
        steps = [each for each, _ in everywhere]
        self._every_batch = any(wanted for _, wanted in everywhere)
        self._are_steps_known, self._last = None not in steps, None
        if self._are_steps_known and min(steps) != max(steps):
            together = getattr(self.model, "steps_per_execution", 1)
            together = together if isinstance(together, int) else 1
            self._last = params["steps"] = min(steps) // together * together
            if self._last == 0:
                raise ValueError(f"ranks have {steps} steps in an epoch, and steps_per_execution is {together}: give every "
                                 "rank at least as many steps")
            if runtime.world.rank == 0:
                warnings.warn(f"ranks have {steps} steps in an epoch, in rank order: every epoch ends after {self._last}",
                              stacklevel=2)

    def on_train_end(self, logs: Any = None) -> None:
        """Remove the record from the model."""
        object.__setattr__(self.model, "_hvdlite_stops_together", False)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Agree, for a callback that has decided at the beginning of the epoch."""
        self._agree()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Determine whether all ranks have another batch, if Keras has not determined it."""
        if not self._are_steps_known:
            self._check_data(has_ended=False)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Agree, and skip the rest of the epoch after the agreed number of steps."""
        if self._last is not None and batch >= self._last:
            return  # other ranks' epochs have ended
        if self._every_batch:
            self._agree()
        if self._last is not None and batch + 1 == self._last:
            self._idle(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Agree, for a callback that has decided at the end of the epoch."""
        if not self._are_steps_known:
            self._check_data(has_ended=not self.model.stop_training)
        self._agree()

    def _idle(self, logs: Any) -> None:
        """Skip this rank's other batches of the epoch: Keras cannot end an epoch early and go on training."""
        assert self._own is not None and self._last is not None
        model, trained = self.model, self.model.train_function
        left = -(-(self._own - self._last) // getattr(model, "steps_per_execution", 1))

        def idle(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                model.train_function = trained
            return (logs, arguments[0]) if len(arguments) == 2 else logs  # JAX' function takes and returns the state
        if left > 0:
            model.train_function = idle

    def _agree(self) -> None:
        wants_to_stop = bool(self.model.stop_training) and self.model.stop_training is not EPOCH_IS_OVER
        if _sum("keras.stop", wants_to_stop):
            self.model.stop_training = True

    def _check_data(self, has_ended: bool) -> None:
        world = api.runtime().world
        ended = _sum("keras.data_ended", has_ended)
        if 0 < ended < world.size:
            raise RuntimeError(f"{ended} of {world.size} ranks have come to the end of their data in this epoch, and rank "
                               f"{world.rank} {'is one of them' if has_ended else 'is not'}: give fit the same "
                               "steps_per_epoch on all ranks")


def refuse_uneven_steps(callback: Any) -> None:
    """Compare the ranks' numbers of steps per epoch; call it on all ranks from a callback's `on_train_begin`.

    Raises:
        ValueError: on all ranks, when they differ and epochs do not end together.
    """
    runtime = api.runtime()
    own = (callback.params.get("steps"), bool(getattr(callback.model, "_hvdlite_stops_together", False)))
    everywhere = allgather_object(runtime, own, runtime.names.unnamed("keras", "steps"))
    steps = [each for each, _ in everywhere]
    known = [each for each in steps if each is not None]
    if known and min(known) != max(known) and not all(together for _, together in everywhere):
        raise ValueError(f"ranks have {steps} steps in an epoch, in rank order: those with more would wait for the others "
                         f"for ever. Give fit steps_per_epoch={min(known)} on all ranks, or end epochs together with "
                         "hvd.callbacks.StopTogetherCallback()")


def may_stop(callback: Any) -> bool:
    """Return whether a callback may set `stop_training` in a batch."""
    if type(callback) in _NEVER_STOPS or type(callback).__module__.startswith("hvdlite_tf."):
        return False
    return any(hook in vars(callback) or getattr(type(callback), hook, None) is not getattr(keras.callbacks.Callback, hook)
               for hook in _BATCH_HOOKS)


def averaged(logs: dict[str, Any], counts: bool = True) -> dict[str, Any]:
    """Return logs with the means of their numbers over ranks.

    Args:
        counts: whether this rank's numbers count.
    """
    runtime = api.runtime()
    numbers = {name: np.asarray(keras.ops.convert_to_numpy(value), np.float64) for name, value in logs.items()
               if np.ndim(keras.ops.convert_to_numpy(value)) == 0}
    if runtime.world.size == 1 or not numbers:
        return logs
    names = sorted(numbers)
    own = np.array([1.0, *(numbers[name] for name in names)]) if counts else np.zeros(len(names) + 1)
    total = np.empty_like(own)
    runtime.allreduce(f"keras.logs.{'.'.join(names)}", own, total, ReduceOp.SUM, blocking=True).wait()
    return {**logs, **{name: float(value / total[0]) for name, value in zip(names, total[1:], strict=True)}}


def _sum(name: str, flag: bool) -> int:
    """Return the number of ranks on which a condition holds."""
    runtime = api.runtime()
    if runtime.world.size == 1:
        return int(flag)
    total = np.empty(1, np.int64)
    runtime.allreduce(name, np.array([flag], np.int64), total, ReduceOp.SUM, blocking=True).wait()
    return int(total[0])

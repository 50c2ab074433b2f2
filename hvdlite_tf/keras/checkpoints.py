"""Keras' objects in checkpoints, on any backend: `hvd.save` and `hvd.load` (docs/checkpoints.md).

`Checkpoint` saves a training of `fit`, and resumes it. `load_model` is for models that Keras has saved.
"""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Iterable, Sequence
from typing import Any, Final

import h5py
import keras
import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.errors import UnsupportedError
from hvdlite.training.checkpoints import kinds, load, save
from hvdlite.training.checkpoints.directory import Every
from hvdlite_tf.compression import Compression, Compressor
from hvdlite_tf.keras.backends import with_errors_of_backend
from hvdlite_tf.keras.broadcast import array_of, read_back
from hvdlite_tf.keras.optimizer import DistributedOptimizer, distributed_in
from hvdlite_tf.keras.outer import outer_in
from hvdlite_tf.keras.sharded import load_whole, sharded_in, whole_values
from hvdlite_tf.variables import is_elsewhere, is_sharded

__all__ = ["load", "load_model", "save"]

_OUTER: Final = "hvdlite.outer"
"""The name of the state of an optimizer's exchanges between workers, after its variables."""
_WEIGHTS: Final = "model.weights.h5"
"""The name of the weights in a model that Keras has saved."""


class KerasKind(kinds.Kind):
    """Models, layers, optimizers, and variables of Keras and TensorFlow, or lists of them."""

    name, order = "keras", 0

    def owns(self, value: Any) -> bool:
        return isinstance(value, (keras.Layer, keras.optimizers.Optimizer)) or _is_variable(value) or (
            isinstance(value, list) and value != [] and all(map(_is_variable, value)))

    def gather(self, value: Any) -> None:
        read_back(value)
        optimizer = sharded_in(value)
        if optimizer is not None:
            optimizer.consolidate_state(to=None)
        outer = outer_in(getattr(value, "optimizer", value))  # a model's, too
        if outer is not None:
            is_model = isinstance(value, keras.Layer)
            outer.synchronize_outer(*([value] if is_model else []))
            if not is_model:
                outer.hvdlite_exchanges.gather(value)

    def state_of(self, value: Any) -> Any:
        variables = _variables(value)
        outer, more = outer_in(value), []
        arrays: Iterable[Array] = whole_values(value) or map(array_of, variables)
        if outer is not None:
            (arrays, state), outer.hvdlite_exchanges.gathered = outer.hvdlite_exchanges.gathered, ((), None)
            more = [{"name": _OUTER, "value": state}]
        return [{"name": variable.name, "value": array} for variable, array in zip(variables, arrays, strict=True)] + more

    def array_of(self, leaf: Any) -> Array | None:
        is_tensor = keras.backend.backend() != "torch" and not isinstance(leaf, np.ndarray) and keras.ops.is_tensor(leaf)
        return np.array(keras.ops.convert_to_numpy(leaf), order="C") if is_tensor else None

    def tensor_of(self, array: Array) -> Any:
        return keras.ops.convert_to_tensor(array)

    def check(self, name: str, value: Any, state: Any) -> bool:
        variables = _variables(value)
        own = [(f"variable {index}", tuple(each.shape), keras.backend.standardize_dtype(each.dtype))
               for index, each in enumerate(variables)  # Keras numbers names anew in each process
               if not is_elsewhere(each)]
        elsewhere = {f"variable {index}" for index, each in enumerate(variables) if is_elsewhere(each)}
        saved = [(f"variable {index}", each["value"].shape, each["value"].dtype.name)
                 for index, each in enumerate(state) if each["name"] != _OUTER]
        kinds.refuse_other(name, own, [each for each in saved if each[0] not in elsewhere])
        return True

    def load(self, value: Any, state: Any) -> bool:
        variables, outer = _variables(value), outer_in(value)
        exchanges = next((each["value"] for each in state if each["name"] == _OUTER), None)
        state = [each for each in state if each["name"] != _OUTER]
        if outer is not None:
            outer.hvdlite_exchanges.restart(exchanges)
        if sharded_in(value) is not None:
            return load_whole(value, {str(index): saved["value"] for index, saved in enumerate(state)})
        for variable, saved in zip(variables, state, strict=True):
            variable.assign(saved["value"])
        return True


def _variables(value: Any) -> Sequence[Any]:
    """Return the variables of an object, in their order."""
    if isinstance(value, list) or _is_variable(value):
        if any(map(is_sharded, value if isinstance(value, list) else [value])):
            raise UnsupportedError("this rank has a part of a sharded optimizer's variables only; give the optimizer itself")
        return value if isinstance(value, list) else [value]
    read_back(value)
    own: Any = value.variables
    return list(own() if callable(own) else own)


def _is_variable(value: Any) -> bool:
    return isinstance(value, keras.Variable) or (callable(getattr(value, "assign", None)) and hasattr(value, "trainable"))


kinds.add(KerasKind())
if keras.backend.backend() == "torch":
    import hvdlite_torch.checkpoints  # noqa: F401 - torch's random states, which Keras' layers draw from


def load_model(filepath: Any, custom_optimizers: Any = None, custom_objects: dict[str, Any] | None = None,
               compression: type[Compressor] = Compression.none, legacy_opts: bool = False,
               backward_passes_per_step: int | None = None, average_aggregated_gradients: bool = False) -> Any:
    """Load a Keras model and wrap its optimizer, whose state is kept.

    Args:
        filepath: as in `keras.models.load_model`.
        custom_optimizers: classes of optimizers that are not registered with Keras.
        custom_objects: as in `keras.models.load_model`.
        compression: as in `DistributedOptimizer`.
        legacy_opts: accepted for Horovod's sake.
        backward_passes_per_step, average_aggregated_gradients: as they were given to `DistributedOptimizer`; needed when the
            saved optimizer accumulates gradients, because a saved model does not show whether they were summed or averaged.

    Raises:
        ValueError: without `backward_passes_per_step`, when the saved optimizer accumulates gradients.
    """
    objects = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects or None)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or distributed_in(optimizer) is not None:  # in a scope it is distributed already
        return model
    steps = getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps
    if steps and backward_passes_per_step is None:
        raise ValueError(
            f"the optimizer of '{filepath}' accumulates {steps} backward passes, and a saved model does not say whether "
            "their gradients were summed (hvdlite's default) or averaged. Give load_model what DistributedOptimizer was "
            f"given: backward_passes_per_step={steps} for sums, with average_aggregated_gradients=True for averages; or "
            "backward_passes_per_step=1 when it was the optimizer's own gradient_accumulation_steps, which averages")
    if _has_exchanges(filepath):
        warnings.warn(f"'{filepath}' was saved with outer=, which load_model does not restore: gradients are averaged "
                      "in each step. To go on with outer=, compile the model with hvd.DistributedOptimizer(..., outer=...), "
                      "call optimizer.build(model.trainable_variables), and load the file with model.load_weights",
                      stacklevel=2)
    DistributedOptimizer(optimizer, compression=compression, backward_passes_per_step=backward_passes_per_step or 1,
                         average_aggregated_gradients=average_aggregated_gradients)
    return model


def _has_exchanges(filepath: Any) -> bool:
    """Return whether a file of Keras has the state of exchanges, which a plain optimizer does not look for."""
    if not zipfile.is_zipfile(filepath):
        return False
    with zipfile.ZipFile(filepath) as archive:
        if _WEIGHTS not in archive.namelist():
            return False
        with archive.open(_WEIGHTS) as weights, h5py.File(weights) as file:
            return bool(file.visit(lambda name: name.endswith("hvdlite_exchanges") or None))


class Checkpoint(keras.callbacks.Callback):
    """Saves model, optimizer and position with `hvd.save`, and resumes by itself when `fit` begins with such a directory.

    Give it to `fit` on all ranks, before callbacks that change the model at the end of an epoch. `fit` goes on with the
    epoch in which it was, and returns at once when all epochs are done. What it is given is saved too: with `data`, from
    `hvd.resumable`, at any batch (after `data.callback` in the list); without it at ends of epochs, because an epoch could
    only begin again.

    It also saves at the end of `fit`: after `StopOnRequestCallback` has ended it, nothing is lost.

    Args:
        directory: as in `hvd.save`.
        every: the time between two checkpoints: seconds, or such as "90 s", "10 min", "2 h". Rank 0's clock counts.
        objects: more to save and load, by name.

    Raises:
        ValueError: for something else than an interval, and for an object of a name that it needs itself.
    """

    def __init__(self, directory: str | os.PathLike[str], every: str | float = "10 min", **objects: Any) -> None:
        super().__init__()
        refused = sorted({"model", "optimizer", "epoch"} & set(objects))
        if refused:
            raise ValueError(f"Checkpoint saves '{refused[0]}' itself; call the object something else")
        self._directory, self._objects = os.path.abspath(directory), objects
        self._every = Every(every)
        self._is_due = False
        self._is_saved = False  # what has been trained
        self._epoch = 0  # in which training would go on
        self._batch = -1  # the last one of the present epoch

    @with_errors_of_backend
    def on_train_begin(self, logs: Any = None) -> None:
        """Load the newest checkpoint, if there is one."""
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        found = load(self._directory, **self._all())
        self.model._hvdlite_resumed = found is not None  # what it has must not be broadcast again
        if found is not None:
            data = self._objects.get("data")
            self.model._initial_epoch = self._epoch = found["epoch"] if data is None else data.epoch
            self._is_saved = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self._epoch, self._batch = epoch, -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save, if it is time and the data can go on from here."""
        self._batch, self._is_saved = batch, False
        self._is_due = self._every.is_due() or self._is_due
        if self._is_due and "data" in self._objects:
            self._save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save, if it has become time in this epoch."""
        if not self.model.stop_training or self._batch + 1 == self.params.get("steps"):
            self._epoch, self._is_saved = epoch + 1, False
        if self._is_due:
            self._save()

    def on_train_end(self, logs: Any = None) -> None:
        """Save where `fit` has ended."""
        if not self._is_saved:
            self._save()

    def _all(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.model.optimizer, **self._objects}

    @with_errors_of_backend
    def _save(self) -> None:
        self._is_due, self._is_saved = False, True
        save(self._directory, **self._all(), epoch=self._epoch)

"""Elastic training with Keras 3, on any backend: `hvd.elastic.run`, its state, and callbacks; see docs/elastic.md."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import keras

from hvdlite.core.array import Array
from hvdlite.core.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvdlite.training.elastic import run
from hvdlite.training.elastic.state import ObjectState, State
from hvdlite_tf.keras.broadcast import array_of, broadcast_variables, read_back
from hvdlite_tf.keras.elastic_callbacks import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from hvdlite_tf.variables import is_random_state

__all__ = ["CommitStateCallback", "HorovodInternalError", "HostsUpdatedInterrupt", "KerasState", "ObjectState", "State",
           "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


class VariablesState(ObjectState):
    """A state with variables, beside plain attributes; subclasses define which ones."""

    def __init__(self, **kwargs: Any) -> None:
        self._values = self._copied_values()
        super().__init__(**kwargs)

    def save(self) -> None:
        """Copy the variables and all attributes."""
        values = self._copied_values()
        super().save()
        self._values = values

    def restore(self) -> None:
        """Go back to the last `save` or `sync`."""
        for variable, value in zip(self._variables(), self._values, strict=True):
            variable.assign(keras.ops.copy(value))  # variables may change in place
        super().restore()

    def sync(self) -> None:
        """Take rank 0's state, and save it; random states of layers are advanced by the rank.

        Raises:
            MismatchError: when rank 0 has other variables.
            ValueError: when rank 0's state was made of other parts than this rank's.
        """
        self._check_parts(self._bcast_object(self._parts()))
        self._broadcast()
        values = self._copied_values()
        super().sync()
        self._values = values

    def _replicated(self, sent: Collection[str]) -> Iterator[tuple[str, Array | int]]:
        yield from super()._replicated(sent)
        for index, variable in enumerate(self._variables()):
            if not is_random_state(variable):  # these differ between ranks
                yield f"variables.{index} {getattr(variable, 'path', variable.name)}", array_of(variable)

    def _variables(self) -> list[Any]:
        raise NotImplementedError

    def _broadcast(self) -> None:
        """Give the variables rank 0's values."""
        raise NotImplementedError

    def _copied_values(self) -> list[Any]:
        """Return copies of the values, on their devices. TensorFlow copies them when the variable next changes."""
        return [keras.ops.copy(keras.ops.stop_gradient(getattr(variable, "_value", variable)))
                for variable in self._variables()]


class KerasState(VariablesState):
    """The state of a training with Keras: a model, its optimizer, and plain attributes.

    An optimizer without variables is built for the model's trainable variables.

    Args:
        model: a model that has been built.
        optimizer: default: the one that the model was compiled with.
        kwargs: attributes, such as `batch=0, epoch=0`, which the callbacks keep up to date.

    Raises:
        ValueError: for a model that has not been built.
        UnsupportedError: when an attribute cannot be copied or pickled, naming it.
    """

    _not_state = ObjectState._not_state | {"model", "optimizer", "backend"}

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", True):
            raise ValueError(f"the model '{model.name}' has no variables yet: begin it with keras.Input(shape), or call "
                             "model.build(input_shape) or the model on one batch, before you make the state")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if self.optimizer is not None and not getattr(self.optimizer, "built", True):
            self.optimizer.build(model.trainable_variables)
        super().__init__(**kwargs, _position_in_epoch=(0, 0))

    def restore(self) -> None:
        """Go back to the last `save` or `sync`."""
        if hasattr(self.model, "_jax_state_synced"):
            self.model._jax_state_synced = True  # what a broken-off step has left is not to be written back
        super().restore()

    def _parts(self) -> list[str]:
        count = len(self.model.variables)
        return [*super()._parts(), f"a model with {count} variables", f"an optimizer with {len(self._variables()) - count}"]

    def _variables(self) -> list[Any]:
        own = getattr(self.optimizer, "variables", [])
        return [*self.model.variables, *(own() if callable(own) else own)]

    def _broadcast(self) -> None:
        read_back(self.model)
        broadcast_variables(self._variables(), 0, "elastic.variables")

    def _copied_values(self) -> list[Any]:
        read_back(self.model)
        return super()._copied_values()

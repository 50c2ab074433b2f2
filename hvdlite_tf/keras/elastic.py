"""Elastic training with Keras 3, on any backend: `hvd.elastic.run`, its state, and callbacks; see docs/elastic.md."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import keras

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.errors import HorovodInternalError, HostsUpdatedInterrupt, UnsupportedError
from hvdlite.training.elastic import run
from hvdlite.training.elastic.state import ComparedState, ObjectState, Part, State
from hvdlite.training.replicas import digest
from hvdlite_tf.keras import checkpoints  # noqa: F401 - it knows variables
from hvdlite_tf.keras.backends import copies
from hvdlite_tf.keras.broadcast import array_of, read_back, values_of_root
from hvdlite_tf.keras.elastic_callbacks import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from hvdlite_tf.keras.elastic_fit import fit
from hvdlite_tf.keras.optimizer import distributed_in
from hvdlite_tf.keras.outer import outer_in
from hvdlite_tf.variables import is_random_state, moved_on

__all__ = ["CommitStateCallback", "HorovodInternalError", "HostsUpdatedInterrupt", "KerasState", "ObjectState", "State",
           "UpdateBatchStateCallback", "UpdateEpochStateCallback", "fit", "run"]

_RANDOM = "random states"
"""The part of a state with the random states of layers, which differ between ranks."""


class VariablesState(ComparedState):
    """A state with variables, beside plain attributes; subclasses define which ones."""

    def __init__(self, **kwargs: Any) -> None:
        self._values = copies(self._variables())
        super().__init__(**kwargs)

    def save(self) -> None:
        """Copy the variables and all attributes."""
        values = copies(self._variables())
        super().save()
        self._values = values

    def restore(self) -> None:
        """Go back to the last `save` or `sync`."""
        for variable, value in zip(self._variables(), self._values, strict=True):
            variable.assign(keras.ops.copy(value))  # variables may change in place
        super().restore()

    def sync(self) -> None:
        """Take rank 0's state, and save it; random states of layers are advanced by the rank.

        Groups of variables and attributes that differ on some rank are sent. Nothing changes before everything has come.

        Raises:
            MismatchError: when rank 0 has other variables.
            UnsupportedError: on all ranks, when one of rank 0's attributes cannot be pickled.
            ValueError: when rank 0's state was made of other parts than this rank's.
            ReplicaMismatchError: on all ranks, when the states are not equal afterwards.
        """
        groups = {name: [each for each in group if not is_random_state(each)] for name, group in self._groups().items()}
        random = [each for each in self._variables() if is_random_state(each)]
        states = {name: Part([], group, [digest(array_of(each)) for each in group]) for name, group in groups.items()}
        states[_RANDOM] = Part(list(map(array_of, random)))  # a few numbers
        found = self._compare(states, {name: Part(value) for name, value in self._attributes().items()})
        sent = [variable for name, group in groups.items() if name in found.sent for variable in group]
        arrays = values_of_root(sent, 0, "elastic.variables") if sent else []
        if found.lacking:
            rank = api.runtime().world.rank
            arrays += [moved_on(array, rank, 0) for array in found.parts[_RANDOM].structure]
            for variable, array in zip([*sent, *random], arrays, strict=True):
                variable.assign(array)
        self._assign({name: found.parts[name].structure for name in found.lacking - states.keys()})
        self._take_position(found.position)
        VariablesState.save(self)
        known = {id(each): number for name, group in groups.items() if name not in found.lacking
                 for each, number in zip(group, states[name].digests, strict=True)}
        self._check_replicas(self._replicated(found.parts.keys() - states.keys(), known))

    def _replicated(self, sent: Collection[str], known: Mapping[int, Any] = MappingProxyType({})
                    ) -> Iterator[tuple[str, Array | int]]:
        yield from super()._replicated(sent)
        for index, variable in enumerate(self._variables()):
            if not is_random_state(variable):  # these differ between ranks
                name = f"variables.{index} {getattr(variable, 'path', variable.name)}"
                yield name, known.get(id(variable)) or array_of(variable)

    def _groups(self) -> dict[str, list[Any]]:
        """Return the variables, in groups that are compared and sent."""
        raise NotImplementedError

    def _durable_parts(self) -> dict[str, Any]:
        return {**super()._durable_parts(), "its variables": self._variables()}

    def _variables(self) -> list[Any]:
        """Return them; their values are up to date."""
        return [variable for group in self._groups().values() for variable in group]


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
        if getattr(getattr(distributed_in(self.optimizer), "_hvdlite_settings", None), "sharded", False):
            raise UnsupportedError("an optimizer with sharded=True cannot be part of an elastic state: when a rank is lost, "
                                   "so is the optimizer state of the variables that it owns")
        if outer_in(self.optimizer) is not None:
            raise UnsupportedError("an optimizer with outer= cannot be part of an elastic state: its workers have states of "
                                   "their own")
        if self.optimizer is not None and not getattr(self.optimizer, "built", True):
            self.optimizer.build(model.trainable_variables)
        super().__init__(**kwargs, _position_in_epoch=(0, 0), _place=None, _callbacks=None)

    def restore(self) -> None:
        """Go back to the last `save` or `sync`."""
        if hasattr(self.model, "_jax_state_synced"):
            self.model._jax_state_synced = True  # what a broken-off step has left is not to be written back
        super().restore()

    def _variables(self) -> list[Any]:
        read_back(self.model)
        return super()._variables()

    def _parts(self) -> list[str]:
        own, others, optimizer = map(len, self._groups().values())
        return [*super()._parts(), f"a model with {own} trainable and {others} other variables",
                f"an optimizer with {optimizer}"]

    def _groups(self) -> dict[str, list[Any]]:
        own = getattr(self.optimizer, "variables", [])
        trained = {id(variable) for variable in self.model.trainable_variables}
        return {"model": [each for each in self.model.variables if id(each) in trained],
                "model's other variables": [each for each in self.model.variables if id(each) not in trained],
                "optimizer": list(own() if callable(own) else own)}

    def _small_copy(self, room: Any) -> Any:
        """Copy what a body may change before an optimizer's step: moving statistics, random states, rates."""
        if keras.backend.backend() == "jax":
            return None  # a step that fails has given XLA the memory of the parameters
        variables = [] if room is None else room[0]
        if room is None:  # to list them takes as long as to copy them
            _, others, optimizer = self._groups().values()
            variables = [*others, *(each for each in optimizer if not tuple(each.shape))]
        return variables, copies(variables), super()._small_copy(None)

    def _load_small(self, small: Any) -> None:
        variables, values, others = small
        for variable, value in zip(variables, values, strict=True):
            variable.assign(keras.ops.copy(value))
        super()._load_small(others)



def __dir__() -> list[str]:
    return sorted(__all__)

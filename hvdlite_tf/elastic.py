"""Elastic training with TensorFlow 2: `hvd.elastic.run` and its states; see docs/elastic.md."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from hvdlite.core.array import Array
from hvdlite_tf.functions import broadcast_variables, refuse_session
from hvdlite_tf.keras.elastic import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    KerasState,
    ObjectState,
    State,
    assign,
    named_values,
    run,
    values_of,
)

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "TensorFlowKerasState",
           "TensorFlowState", "run"]


class TensorFlowKerasState(KerasState):
    """The state of a training with a Keras model; see `hvdlite_tf.keras.elastic.KerasState`.

    Args:
        model, optimizer, kwargs: as in `KerasState`.
        backend: accepted for Horovod's sake.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        del backend
        super().__init__(model, optimizer, **kwargs)


class TensorFlowState(ObjectState):
    """The state of a training with variables of your own.

    Args:
        variables: TensorFlow's or Keras' variables.
        session: of TensorFlow 1; not supported.
        kwargs: plain attributes.

    Raises:
        ValueError: without variables, because TensorFlow 2 does not know them all.
        NotImplementedError: for a session.
        UnsupportedError: when an attribute cannot be copied or pickled, naming it.
    """

    _not_state = ObjectState._not_state | {"variables", "session"}

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        refuse_session(session)
        if variables is None:
            raise ValueError("TensorFlow 2 has no list of all variables: give TensorFlowState(variables=[...]), or use "
                             "TensorFlowKerasState(model, optimizer)")
        self.variables = list(variables)
        self._values = values_of(self.variables)
        super().__init__(**kwargs)

    def save(self) -> None:
        """Copy the variables and all attributes."""
        values = values_of(self.variables)
        super().save()
        self._values = values

    def restore(self) -> None:
        """Go back to the last `save` or `sync`."""
        assign(self.variables, self._values)
        super().restore()

    def _replicated(self, sent: Collection[str]) -> Iterator[tuple[str, Array | int]]:
        yield from super()._replicated(sent)
        yield from named_values(self.variables)

    def sync(self) -> None:
        """Take rank 0's state, and save it.

        Raises:
            MismatchError: when rank 0 has other variables.
            ValueError: when rank 0's state was made of other parts than this rank's.
        """
        self._check_parts()
        broadcast_variables(self.variables, 0)
        values = values_of(self.variables)
        super().sync()
        self._values = values

    def _parts(self) -> list[str]:
        return [*super()._parts(), f"{len(self.variables)} variables"]

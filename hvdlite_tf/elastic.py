"""Elastic training with TensorFlow 2: `hvd.elastic.run` and its states; see docs/elastic.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdlite_tf.functions import refuse_session
from hvdlite_tf.keras.elastic import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    KerasState,
    ObjectState,
    State,
    VariablesState,
    fit,
    run,
)

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "TensorFlowKerasState",
           "TensorFlowState", "fit", "run"]


class TensorFlowKerasState(KerasState):
    """The state of a training with a Keras model; see `hvdlite_tf.keras.elastic.KerasState`.

    Args:
        model, optimizer, kwargs: as in `KerasState`.
        backend: accepted for Horovod's sake.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


class TensorFlowState(VariablesState):
    """The state of a training with variables of your own.

    Args:
        variables: TensorFlow's or Keras' variables.
        session: of TensorFlow 1; not supported.
        kwargs: plain attributes.

    Raises:
        ValueError: without variables, because TensorFlow 2 has no list of all variables; for what is no variable.
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
        for each in self.variables:
            if not hasattr(each, "assign"):
                raise ValueError(f"TensorFlowState takes variables, such as model.variables, and no {type(each).__name__}")
        super().__init__(**kwargs)

    def _parts(self) -> list[str]:
        return [*super()._parts(), f"{len(self.variables)} variables"]

    def _groups(self) -> dict[str, list[Any]]:
        return {"variables": self.variables}


def __dir__() -> list[str]:
    return sorted(__all__)

"""Broadcasts of variables and objects, so that all ranks start with the same state; ranks and sizes as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvdlite import api
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.training import objects
from hvdlite_tf.errors import as_tensorflow
from hvdlite_tf.ops import broadcast_, collective, int32_tensor
from hvdlite_tf.variables import is_random_state, is_sharded


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set,
                        inplace: bool = False) -> None:
    """Overwrite variables (TensorFlow's or Keras') with rank `root_rank`'s.

    The state of a sharded optimizer is left alone: each rank has its own part.

    The random states of Keras' layers are advanced, so that no two ranks draw the same numbers.

    Args:
        variables: such as `model.variables`, or one of them.
        root_rank: the rank whose values all get.
        process_set: the ranks that take part.
        inplace: accepted for compatibility with Horovod; variables are always overwritten.

    Raises:
        MismatchError: on all ranks, when a shape or dtype differs between them.
        ValueError: for a value that is not a variable.
    """
    if api.is_provisional():  # this process joins an elastic job: hvd.elastic.run synchronises the state
        return
    given = [each for each in (variables if isinstance(variables, Iterable) else [variables]) if not is_sharded(each)]
    own = [getattr(variable, "value", variable) if not isinstance(variable, tf.Variable) else variable for variable in given]
    for variable, mine in zip(given, own, strict=True):
        if not isinstance(mine, tf.Variable):
            raise ValueError("broadcast_variables takes variables, such as model.variables, and no "
                             f"{type(variable).__name__}; for values there is hvd.broadcast")
    broadcast_(own, root_rank, process_set=process_set)
    for variable, mine in zip(given, own, strict=True):
        if is_random_state(variable):
            mine.assign_add(tf.constant([api.rank() - root_rank, 0], mine.dtype))


def broadcast_global_variables(root_rank: int) -> None:
    """Raise an error: TensorFlow 2 has no global variables.

    Args:
        root_rank: as in `broadcast_variables`.

    Raises:
        RuntimeError: always; the message names the replacement.
    """
    raise RuntimeError("there are no global variables in TensorFlow 2; use hvd.broadcast_variables(model.variables, "
                       f"root_rank={root_rank})")


@as_tensorflow
def broadcast_object(obj: Any, root_rank: int = 0, session: Any = None, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Any:
    """Return rank `root_rank`'s picklable object on every rank.

    Args:
        obj: picklable; that of the other ranks is ignored.
        root_rank: the rank whose object all get.
        session: must be None: TensorFlow 2 has no sessions.
        name: the same on all ranks; unnamed calls are matched by their order.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: like every collective.
    """
    refuse_session(session)
    if api.is_provisional():
        return obj
    name = api.runtime().names.of_call("tf", "broadcast_object", name, api.set_id(process_set))
    return objects.broadcast_object(api.runtime(), obj, root_rank, name, api.set_id(process_set))


def broadcast_object_fn(root_rank: int = 0, session: Any = None, name: str | None = None,
                        process_set: ProcessSet = global_process_set) -> Callable[[Any], Any]:
    """Return a function of an object; it is like `broadcast_object`."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


@as_tensorflow
def allgather_object(obj: Any, session: Any = None, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return every rank's picklable object, in rank order.

    Args:
        obj: picklable.
        session: must be None: TensorFlow 2 has no sessions.
        name: the same on all ranks; unnamed calls are matched by their order.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: like every collective.
    """
    refuse_session(session)
    name = api.runtime().names.of_call("tf", "allgather_object", name, api.set_id(process_set))
    return objects.allgather_object(api.runtime(), obj, name, api.set_id(process_set))


@collective
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks of a process set, when the graph runs (int32).

    Args:
        process_set_id: `process_set_id` of a registered process set; 0: all ranks.
        name: accepted for Horovod's sake.
    """
    return int32_tensor(lambda: len(api.runtime().members(process_set_id)))


@collective
def rank_op(name: str | None = None) -> tf.Tensor:
    """Return this rank, when the graph runs (int32).

    Args:
        name: accepted for Horovod's sake.
    """
    return int32_tensor(api.rank)


@collective
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's local rank, when the graph runs (int32).

    Args:
        name: accepted for Horovod's sake.
    """
    return int32_tensor(api.local_rank)


@collective
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of ranks on this host, when the graph runs (int32).

    Args:
        name: accepted for Horovod's sake.
    """
    return int32_tensor(api.local_size)


@collective
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return 1 when this rank is in a process set, else 0, when the graph runs (int32).

    Args:
        process_set_id: as in `size_op`.
        name: accepted for Horovod's sake.
    """
    return int32_tensor(lambda: int(api.rank() in api.runtime().members(process_set_id)))


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Return whether TensorFlow has a GPU.

    Args:
        ext_base_name, verbose: accepted for compatibility with Horovod.
    """
    return bool(tf.config.list_physical_devices("GPU"))


def refuse_session(session: Any) -> None:
    """Raise an error for a session of TensorFlow 1."""
    if session is not None:
        raise NotImplementedError("sessions are TensorFlow 1's; leave the session out")

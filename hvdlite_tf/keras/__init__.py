"""hvdlite for Keras 3, on its TensorFlow, torch and JAX backends: `import hvdlite_tf.keras as hvd`."""

from __future__ import annotations

import math as _math
from collections.abc import Iterable as _Iterable
from typing import Any

import keras as _keras
import numpy as _np

from hvdlite import api as _api
from hvdlite import frontend, join
from hvdlite.frontend import *
from hvdlite.training import objects as _objects
from hvdlite.training.memory_report import MemoryReport as _MemoryReport
from hvdlite.training.memory_report import gather_report as _gather_report
from hvdlite_tf.compression import Compression
from hvdlite_tf.keras import callbacks, elastic
from hvdlite_tf.keras.backends import with_errors_of_backend as _with_errors_of_backend
from hvdlite_tf.keras.broadcast import allgather, allreduce, broadcast, reducescatter
from hvdlite_tf.keras.broadcast import broadcast_variables as _broadcast_variables
from hvdlite_tf.keras.checkpoints import load, load_model, save
from hvdlite_tf.keras.hooks import install as _install
from hvdlite_tf.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from hvdlite_tf.keras.outer import DiLoCo, LocalSGD
from hvdlite_tf.keras.resumable_data import resumable
from hvdlite_tf.sync_batch_norm import SyncBatchNormalization
from hvdlite_tf.sync_batch_norm import install as _install_sync_batch_norm

__all__ = [
    "Compression", "DiLoCo", "DistributedOptimizer", "LocalSGD", "MirroredStrategy", "PartialDistributedOptimizer",
    "SyncBatchNormalization", "allgather", "allgather_object", "allreduce", "broadcast", "broadcast_global_variables",
    "broadcast_object", "broadcast_variables", "callbacks", "elastic", "join", "load", "load_model", "memory_report",
    "reducescatter", "resumable", "save",
]
__all__ += frontend.__all__

if _keras.backend.backend() == "tensorflow":
    from hvdlite_tf.keras.tf_strategy import MirroredStrategy
else:
    from hvdlite_tf.keras.strategy import MirroredStrategy  # type: ignore[assignment]

if _keras.backend.backend() == "jax":
    import hvdlite_tf.keras.backends.jax as _jax  # noqa: F401 - before JAX first computes

_install()
_install_sync_batch_norm()


def memory_report(model: _keras.Model) -> _MemoryReport:
    """Return what each rank's memory is used for, in bytes; all ranks call this. `print` shows a table.

    Gradients are values that Keras passes on, and count nowhere.

    Args:
        model: its variables count, and those of the optimizer with which it is compiled.

    Raises:
        HorovodInternalError: like every collective.
    """
    optimizer = getattr(model, "optimizer", None)
    return _gather_report(_nbytes(model.variables), 0, 0 if optimizer is None else _nbytes(optimizer.variables))


def _nbytes(variables: _Iterable[_keras.Variable]) -> int:
    return sum(_math.prod(variable.shape) * _np.dtype(variable.dtype).itemsize for variable in variables)


def broadcast_variables(variables: Any, root_rank: int) -> None:
    """Overwrite Keras variables (`model.variables`) with rank `root_rank`'s.

    The random states of layers (Dropout) are advanced, so that no two ranks draw the same numbers.

    Args:
        variables: such as `model.variables`, or one of them.
        root_rank: the rank whose values all get.

    Raises:
        ValueError: for a value that is not a variable.
    """
    given = list(variables) if isinstance(variables, _Iterable) else [variables]
    for variable in given:
        if not isinstance(variable, _keras.Variable):
            raise ValueError("broadcast_variables takes variables, such as model.variables, and no "
                             f"{type(variable).__name__}; for values there is hvd.broadcast")
    _broadcast_variables(given, root_rank)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise an error: Keras 3 has no global variables.

    Args:
        root_rank: as in `broadcast_variables`.

    Raises:
        RuntimeError: always; the message names the replacement.
    """
    raise RuntimeError("Keras 3 has no global variables; use hvd.callbacks.BroadcastGlobalVariablesCallback, or "
                       f"hvd.broadcast_variables(model.variables, root_rank={root_rank})")


@_with_errors_of_backend
def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return rank `root_rank`'s picklable object on every rank.

    Args:
        obj: picklable; that of the other ranks is ignored.
        root_rank: the rank whose object all get.
        name: the same on all ranks; unnamed calls are matched by their order.

    Raises:
        HorovodInternalError: like every collective.
    """
    if _api.is_provisional():
        return obj
    runtime = _api.runtime()
    return _objects.broadcast_object(runtime, obj, root_rank, name or runtime.names.unnamed("keras", "broadcast_object"))


@_with_errors_of_backend
def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return every rank's picklable object, in rank order.

    Args:
        obj: picklable.
        name: the same on all ranks; unnamed calls are matched by their order.

    Raises:
        HorovodInternalError: like every collective.
    """
    runtime = _api.runtime()
    return _objects.allgather_object(runtime, obj, name or runtime.names.unnamed("keras", "allgather_object"))


def __dir__() -> list[str]:
    return sorted(__all__)

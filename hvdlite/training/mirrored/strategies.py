"""The common part of all frontends' strategies: starting ranks from inside a script, and the names of reductions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdlite import api
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.types import ReduceOp
from hvdlite.launch.run_function import run

_OPS = {"SUM": ReduceOp.SUM, "MEAN": ReduceOp.AVERAGE}


class LaunchableStrategy:
    """Base of strategies.

    Args:
        devices: the number of ranks for `launch` without a launcher; a list of devices stands for its length.

    Attributes:
        devices: that number, or None.

    Raises:
        ValueError: for anything else.
        UnsupportedError: in an elastic job.
    """

    def __init__(self, devices: int | Sequence[Any] | None) -> None:
        if api.is_elastic():
            raise UnsupportedError(f"{type(self).__name__} has one replica for each rank that there is when it is made, and "
                                   "the ranks of an elastic job change: use hvd.DistributedOptimizer and hvd.elastic.run, "
                                   "or start the job without --min-np and --host-discovery-script")
        count = len(devices) if isinstance(devices, (list, tuple)) else devices
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ValueError(f"devices must be a number of ranks from 1, or a list of devices, not {devices!r}")
        self.devices = count

    def launch(self, main: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call `main` on `devices` new ranks and return the result of rank 0; see `hvdlite.run`.

        Calls `main` in this process if a launcher has started it, or if there is no number of devices.
        """
        if self.devices in (None, 1) or api.runtime().world.size > 1:
            return main(*args, **(kwargs or {}))
        return run(main, args, kwargs, np=self.devices)[0]


def parse_reduce_op(op: Any) -> ReduceOp:
    """Return the reduction that a strategy's `reduce` is asked for: "SUM" or "MEAN" in any case, or a `ReduceOp`.

    Raises:
        ValueError: for anything else.
    """
    name = getattr(op, "value", op)  # TensorFlow's are enums of these words
    if isinstance(name, str):
        if name.upper() not in _OPS:
            raise ValueError(f"reduce takes 'SUM' or 'MEAN', or a ReduceOp, not {op!r}")
        return _OPS[name.upper()]
    return ReduceOp(op)

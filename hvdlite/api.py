"""What a training script calls: one-line collectives on the current runtime, on NumPy arrays.

This is the only file with process-wide state: the one `Runtime` of the process, shared by all adapters, and the exit,
exception and fork hooks that end it properly.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hvdlite.bootstrap.environments import find_place
from hvdlite.core import launch_contract
from hvdlite.core.array import Array
from hvdlite.core.config import Config
from hvdlite.core.errors import NotInitializedError, PeerLostError, UnsupportedError
from hvdlite.core.process_set import ProcessSet, check_global, global_process_set
from hvdlite.core.types import ReduceOp
from hvdlite.planes.arithmetic import Casts
from hvdlite.runtime.assemble import assemble
from hvdlite.runtime.handle import Handle
from hvdlite.runtime.runtime import Runtime

Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT

_lock = threading.RLock()
_runtime: Runtime | None = None
_users = 0  # init() calls that no shutdown() has answered yet
_hooks_installed = False
_casts = Casts.of_numpy()


def init(comm: object = None, process_sets: Sequence[ProcessSet] | None = None) -> None:
    """Join the job described by the environment; alone (size 1) when there is none.

    Idempotent: further calls share the runtime, and as many `shutdown()` calls end it.

    Args:
        comm: only None (all ranks) for now.
        process_sets: only None for now.

    Raises:
        LaunchError: when the launch environment is incomplete or the ranks cannot meet.
        ConfigError: for an unknown or invalid `HVDLITE_*` variable.
        UnsupportedError: for a communicator or process sets.
    """
    global _runtime, _users
    if (comm is not None and comm != []) or process_sets:
        raise UnsupportedError("init() with a communicator or process sets is not implemented yet; call init()")
    with _lock:
        if _runtime is None:
            config = Config.from_environment(os.environ)
            _configure_logging(config)
            started = assemble(find_place(os.environ, os.getppid()), config, _casts)
            started.start()
            _runtime, _users = started, 0
            _install_hooks()
        _users += 1


def shutdown() -> None:
    """Leave the job when this answers the last `init()`; rank 0 waits for the others to leave too."""
    global _runtime, _users
    with _lock:
        _users = max(0, _users - 1)
        if _runtime is not None and _users == 0:
            _runtime.shutdown()
            _runtime = None


def runtime() -> Runtime:
    """Return the process's runtime.

    Raises:
        NotInitializedError: before `init()` and after `shutdown()`.
    """
    if _runtime is None:
        raise NotInitializedError("hvdlite is not initialised; call hvd.init() first")
    return _runtime


def offer_casts(widen: Callable[[Array, Array], object], narrow: Callable[[Array, Array], object]) -> None:
    """Let reductions of 16-bit floats use a framework's vectorised conversions; see `planes.arithmetic.Casts`."""
    _casts.widen, _casts.narrow = widen, narrow


def is_initialized() -> bool:
    """Return whether `init()` has been called and the last `shutdown()` has not."""
    return _runtime is not None


def rank() -> int:
    """Return this process's number among all, 0..size()-1."""
    return runtime().world.rank


def size() -> int:
    """Return the number of processes of the job."""
    return runtime().world.size


def local_rank() -> int:
    """Return this process's number among those of its host."""
    return runtime().world.local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return runtime().world.local_size


def cross_rank() -> int:
    """Return this host's number among the hosts that have a process with this local rank."""
    return runtime().world.cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process with this local rank."""
    return runtime().world.cross_size


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks; always so while a job has one host."""
    world = runtime().world
    return world.local_size * world.cross_size == world.size


def reduce_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Return the operation meant by Horovod's two arguments; the default is Average.

    Raises:
        ValueError: when both are given.
    """
    if average is not None:
        if op is not None:
            raise ValueError("give either op or the deprecated average, not both")
        warnings.warn("average is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    return Average if op is None else ReduceOp(op)


def allreduce_async(array: ArrayLike, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
                    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                    process_set: ProcessSet = global_process_set) -> Handle:
    """Like `allreduce`, returning a handle at once; `array` must not be written until it is done."""
    source = _contiguous(array, process_set)
    return runtime().allreduce(_name(name, "allreduce"), source, np.empty_like(source), reduce_op(op, average),
                               prescale=prescale_factor, postscale=postscale_factor)


def allreduce(array: ArrayLike, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
              prescale_factor: float = 1.0, postscale_factor: float = 1.0,
              process_set: ProcessSet = global_process_set) -> Array:
    """Return the reduction over all ranks of an array that has the same shape and dtype everywhere.

    Args:
        array: bool (Min, Max only), integer, float16/32/64, bfloat16 or complex (Sum, Average only); any shape.
        average: deprecated; use `op`.
        name: the same on all ranks; unnamed calls are matched by their order.
        op: Average (default), Sum, Min or Max. Integer averages are truncated toward zero; 16-bit floats are summed in
            float32.
        prescale_factor: factor on every rank's values before the reduction.
        postscale_factor: factor on the result.
        process_set: only the global one for now.

    Raises:
        MismatchError: on all ranks, when they disagree about shape, dtype, op or factors.
        PeerLostError: when a rank died (`PeerFailedError`: raised, `PeerLeftError`: left).
        DuplicateNameError, UnsupportedError: at the call.
    """
    return _result(allreduce_async(array, average, name, op, prescale_factor, postscale_factor, process_set))


def allreduce_async_(array: Array, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
                     prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                     process_set: ProcessSet = global_process_set) -> Handle:
    """Like `allreduce_async`, in place; `array` must be C-contiguous."""
    check_global(process_set)
    return runtime().allreduce(_name(name, "allreduce"), array, array, reduce_op(op, average),
                               prescale=prescale_factor, postscale=postscale_factor)


def allreduce_(array: Array, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
               prescale_factor: float = 1.0, postscale_factor: float = 1.0,
               process_set: ProcessSet = global_process_set) -> Array:
    """Like `allreduce`, in place; returns `array`."""
    return _result(allreduce_async_(array, average, name, op, prescale_factor, postscale_factor, process_set))


def broadcast_async(array: ArrayLike, root_rank: int, name: str | None = None,
                    process_set: ProcessSet = global_process_set) -> Handle:
    """Like `broadcast`, returning a handle at once."""
    return runtime().broadcast(_name(name, "broadcast"), np.array(_contiguous(array, process_set)), root_rank)


def broadcast(array: ArrayLike, root_rank: int, name: str | None = None,
              process_set: ProcessSet = global_process_set) -> Array:
    """Return rank `root_rank`'s array; all ranks pass one of the same shape and dtype.

    Raises:
        UnsupportedError: for a root that does not exist; otherwise like `allreduce`.
    """
    return _result(broadcast_async(array, root_rank, name, process_set))


def broadcast_async_(array: Array, root_rank: int, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Handle:
    """Like `broadcast_async`, in place; `array` must be C-contiguous."""
    check_global(process_set)
    return runtime().broadcast(_name(name, "broadcast"), array, root_rank)


def broadcast_(array: Array, root_rank: int, name: str | None = None,
               process_set: ProcessSet = global_process_set) -> Array:
    """Like `broadcast`, in place; returns `array`."""
    return _result(broadcast_async_(array, root_rank, name, process_set))


def allgather_async(array: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Like `allgather`, returning a handle at once."""
    return runtime().allgather(_name(name, "allgather"), _contiguous(array, process_set))


def allgather(array: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """Return all ranks' arrays concatenated along the first dimension, which may differ between ranks.

    Raises:
        UnsupportedError: for a scalar; otherwise like `allreduce`.
    """
    return _result(allgather_async(array, name, process_set))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it."""
    check_global(process_set)
    runtime().barrier(_name(None, "barrier")).wait()


def poll(handle: Handle) -> bool:
    """Return whether `synchronize(handle)` would not block."""
    return handle.done()


def synchronize(handle: Handle) -> Array | None:
    """Wait for an asynchronous call and return its result, or raise its error."""
    result: Array | None = handle.wait()
    return result


def _name(name: str | None, kind: str) -> str:
    return runtime().unnamed("numpy", kind) if name is None else name


def _contiguous(array: ArrayLike, process_set: ProcessSet) -> Array:
    check_global(process_set)
    return np.asarray(array, order="C")



def _result(handle: Handle) -> Array:
    result: Array | None = handle.wait()
    assert result is not None
    return result


# --- hooks: installed once, by the first init() ----------------------------------------------------------------------


def _configure_logging(config: Config) -> None:
    logger = logging.getLogger("hvdlite")
    logger.setLevel(config.log_level)
    if not logger.handlers and not logging.getLogger().handlers:  # a script with its own logging keeps it
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


def _install_hooks() -> None:
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_in_child)
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> Any:
        previous(kind, error, where)  # first: the cause is on the screen before the others hear of it
        sys.stderr.flush()
        _report_failure(kind, error, where)

    sys.excepthook = excepthook


def _report_failure(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """Tell the other ranks and the launcher that this one ends with an exception."""
    current = _runtime
    if current is None or current.in_child:
        return
    text = "".join(traceback.format_exception(kind, error, where))
    suffered = [known.rank for known in (*_causes(error), current.failure)
                if isinstance(known, PeerLostError) and known.rank >= 0]
    origin = suffered[0] if suffered else current.world.rank
    current.fail(kind.__name__, str(error), text, origin)
    directory = os.environ.get(launch_contract.JOB_DIRECTORY)
    if directory:
        launch_contract.FailureRecord(current.world.rank, origin, time.time(), kind.__name__, str(error),
                                      text).write(directory)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _at_exit() -> None:
    global _users
    with _lock:
        _users = 0
    shutdown()


def _in_child() -> None:
    if _runtime is not None:
        _runtime.close_in_child()

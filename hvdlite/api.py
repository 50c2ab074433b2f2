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
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID, ProcessSet, global_process_set
from hvdlite.core.types import ReduceOp
from hvdlite.planes.arithmetic import Casts
from hvdlite.runtime.assemble import assemble
from hvdlite.runtime.handle import Handle, Handles
from hvdlite.runtime.runtime import Runtime

Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT

_lock = threading.RLock()
_runtime: Runtime | None = None
_users = 0  # init() calls that no shutdown() has answered yet
_hooks_installed = False
_casts = Casts.of_numpy()


def init(comm: object = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job described by the environment; alone (size 1) when there is none.

    Idempotent: further calls share the runtime, and as many `shutdown()` calls end it.

    Args:
        comm: only None (all ranks) for now.
        process_sets: sets to register at once, the same on all ranks; more can be added later (Horovod's "dynamic" is
            always on, and accepted).

    Raises:
        LaunchError: when the launch environment is incomplete or the ranks cannot meet.
        ConfigError: for an unknown or invalid `HVDLITE_*` variable.
        UnsupportedError: for a communicator, or process sets that do not fit the job.
    """
    global _runtime, _users
    if comm is not None and comm != []:
        raise UnsupportedError("init() with a communicator is not implemented yet; call init()")
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ValueError(f'process_sets must be a list of ProcessSet or "dynamic", not {process_sets!r}')
    with _lock:
        if _runtime is None:
            config = Config.from_environment(os.environ)
            _configure_logging(config)
            started = assemble(find_place(os.environ, os.getppid()), config, _casts)
            started.start()
            _runtime, _users = started, 0
            global_process_set.fill(started.world.size, started.world.rank)
            _install_hooks()
        _users += 1
    for process_set in () if process_sets is None or isinstance(process_sets, str) else process_sets:
        if process_set.process_set_id is None:
            add_process_set(process_set)


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


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set and return it; all ranks of the job call this, in the same order, members or not.

    Raises:
        UnsupportedError: for ranks that do not exist, or a set that exists already.
        MismatchError: when ranks disagree about the members.
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if made.process_set_id is not None:
        raise UnsupportedError(f"{made} is registered already")
    current = runtime()
    made.register(current.add_process_set(made.ranks or ()).wait(), current.world.rank)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set; all ranks of the job call this. Return False for the global set and for unregistered ones.

    Raises:
        MismatchError: when ranks name different sets; on work that was still under way in the set.
    """
    if process_set.process_set_id in (None, GLOBAL_PROCESS_SET_ID):
        return False
    runtime().remove_process_set(set_id(process_set)).wait()
    process_set.register(None, None)
    return True


def process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the members of every registered process set, by id."""
    return {number: list(ranks) for number, ranks in runtime().process_sets().items()}


def set_id(process_set: ProcessSet) -> int:
    """Return the id of a registered process set.

    Raises:
        UnsupportedError: when it is not registered.
    """
    if process_set.process_set_id is None:
        raise UnsupportedError(f"{process_set} is not registered; call hvd.add_process_set on all ranks first")
    return process_set.process_set_id


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
    source = _contiguous(array)
    return runtime().allreduce(_name(name, "allreduce", process_set), source, np.empty_like(source), reduce_op(op, average),
                               prescale=prescale_factor, postscale=postscale_factor, process_set=set_id(process_set))


def allreduce(array: ArrayLike, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
              prescale_factor: float = 1.0, postscale_factor: float = 1.0,
              process_set: ProcessSet = global_process_set) -> Array:
    """Return the reduction over all ranks of an array that has the same shape and dtype everywhere.

    Args:
        array: bool (Min, Max only), integer, float16/32/64, bfloat16 or complex (no Min, Max); any shape.
        average: deprecated; use `op`.
        name: the same on all ranks; unnamed calls are matched by their order.
        op: Average (default), Sum, Product, Min, Max or Adasum (floating point only; see `hvdlite.planes.adasum`). Integer
            averages are truncated toward zero; 16-bit floats are accumulated in float32.
        prescale_factor: factor on every rank's values before the reduction.
        postscale_factor: factor on the result.
        process_set: the ranks that take part.

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
    return runtime().allreduce(_name(name, "allreduce", process_set), array, array, reduce_op(op, average),
                               prescale=prescale_factor, postscale=postscale_factor, process_set=set_id(process_set))


def allreduce_(array: Array, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
               prescale_factor: float = 1.0, postscale_factor: float = 1.0,
               process_set: ProcessSet = global_process_set) -> Array:
    """Like `allreduce`, in place; returns `array`."""
    return _result(allreduce_async_(array, average, name, op, prescale_factor, postscale_factor, process_set))


def grouped_allreduce_async(arrays: Sequence[ArrayLike], average: bool | None = None, name: str | None = None,
                            op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                            process_set: ProcessSet = global_process_set) -> Handles:
    """Like `grouped_allreduce`, returning one handle at once."""
    sources = [_contiguous(array) for array in arrays]
    return _grouped(sources, [np.empty_like(source) for source in sources], average, name, op, prescale_factor,
                    postscale_factor, process_set)


def grouped_allreduce(arrays: Sequence[ArrayLike], average: bool | None = None, name: str | None = None,
                      op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set) -> list[Array]:
    """Like `allreduce`, of several arrays that are negotiated as one: none is reduced before all are there on all ranks."""
    result: list[Array] = grouped_allreduce_async(arrays, average, name, op, prescale_factor, postscale_factor,
                                                  process_set).wait()
    return result


def grouped_allreduce_async_(arrays: Sequence[Array], average: bool | None = None, name: str | None = None,
                             op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                             process_set: ProcessSet = global_process_set) -> Handles:
    """Like `grouped_allreduce_async`, in place; the arrays must be C-contiguous."""
    return _grouped(arrays, arrays, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_(arrays: Sequence[Array], average: bool | None = None, name: str | None = None,
                       op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                       process_set: ProcessSet = global_process_set) -> list[Array]:
    """Like `grouped_allreduce`, in place; returns `arrays`."""
    result: list[Array] = grouped_allreduce_async_(arrays, average, name, op, prescale_factor, postscale_factor,
                                                   process_set).wait()
    return result


def reduce(array: ArrayLike, root_rank: int, name: str | None = None, op: ReduceOp | None = None,
           prescale_factor: float = 1.0, postscale_factor: float = 1.0,
           process_set: ProcessSet = global_process_set) -> Array | None:
    """Like `allreduce`, but only rank `root_rank` gets the result; the others get None."""
    source = _contiguous(array)
    output = np.empty_like(source) if runtime().world.rank == root_rank else None
    handle = runtime().reduce(_name(name, "reduce", process_set), source, output, root_rank, reduce_op(op, None),
                              prescale=prescale_factor, postscale=postscale_factor, process_set=set_id(process_set))
    result: Array | None = handle.wait()
    return result


def reducescatter_async(array: ArrayLike, name: str | None = None, op: ReduceOp | None = None,
                        prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                        process_set: ProcessSet = global_process_set) -> Handle:
    """Like `reducescatter`, returning a handle at once."""
    return runtime().reducescatter(_name(name, "reducescatter", process_set), _contiguous(array), reduce_op(op, None),
                                   prescale=prescale_factor, postscale=postscale_factor, process_set=set_id(process_set))


def reducescatter(array: ArrayLike, name: str | None = None, op: ReduceOp | None = None, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set) -> Array:
    """Return this rank's rows of the reduction over all ranks.

    Rows (the first dimension) are cut as evenly as possible; the first ranks get one more.

    Raises:
        UnsupportedError: for a scalar; otherwise like `allreduce`.
    """
    return _result(reducescatter_async(array, name, op, prescale_factor, postscale_factor, process_set))


def grouped_reducescatter(arrays: Sequence[ArrayLike], name: str | None = None, op: ReduceOp | None = None,
                          prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                          process_set: ProcessSet = global_process_set) -> list[Array]:
    """Like `reducescatter`, of several arrays at once."""
    names = _member_names(name, "grouped_reducescatter", len(arrays), process_set)
    handles = [reducescatter_async(array, each, op, prescale_factor, postscale_factor, process_set)
               for array, each in zip(arrays, names, strict=True)]
    return [_result(handle) for handle in handles]


def broadcast_async(array: ArrayLike, root_rank: int, name: str | None = None,
                    process_set: ProcessSet = global_process_set) -> Handle:
    """Like `broadcast`, returning a handle at once."""
    return runtime().broadcast(_name(name, "broadcast", process_set), np.array(_contiguous(array)), root_rank,
                               process_set=set_id(process_set))


def broadcast(array: ArrayLike, root_rank: int, name: str | None = None,
              process_set: ProcessSet = global_process_set) -> Array:
    """Return rank `root_rank`'s array; all ranks pass one of the same shape and dtype.

    Raises:
        UnsupportedError: for a root that does not exist, or is not in the set; otherwise like `allreduce`.
    """
    return _result(broadcast_async(array, root_rank, name, process_set))


def broadcast_async_(array: Array, root_rank: int, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Handle:
    """Like `broadcast_async`, in place; `array` must be C-contiguous."""
    return runtime().broadcast(_name(name, "broadcast", process_set), array, root_rank, process_set=set_id(process_set))


def broadcast_(array: Array, root_rank: int, name: str | None = None,
               process_set: ProcessSet = global_process_set) -> Array:
    """Like `broadcast`, in place; returns `array`."""
    return _result(broadcast_async_(array, root_rank, name, process_set))


def allgather_async(array: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Like `allgather`, returning a handle at once."""
    return runtime().allgather(_name(name, "allgather", process_set), _contiguous(array), process_set=set_id(process_set))


def allgather(array: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """Return all ranks' arrays concatenated along the first dimension, which may differ between ranks.

    Raises:
        UnsupportedError: for a scalar; otherwise like `allreduce`.
    """
    return _result(allgather_async(array, name, process_set))


def grouped_allgather(arrays: Sequence[ArrayLike], name: str | None = None,
                      process_set: ProcessSet = global_process_set) -> list[Array]:
    """Like `allgather`, of several arrays at once."""
    names = _member_names(name, "grouped_allgather", len(arrays), process_set)
    handles = [allgather_async(array, each, process_set) for array, each in zip(arrays, names, strict=True)]
    return [_result(handle) for handle in handles]


def gather(array: ArrayLike, root_rank: int, name: str | None = None,
           process_set: ProcessSet = global_process_set) -> Array | None:
    """Like `allgather`, but only rank `root_rank` gets the result; the others get None."""
    result: Array | None = runtime().gather(_name(name, "gather", process_set), _contiguous(array), root_rank,
                                            process_set=set_id(process_set)).wait()
    return result


def scatter(array: ArrayLike, root_rank: int, name: str | None = None,
            process_set: ProcessSet = global_process_set) -> Array:
    """Return this rank's rows of rank `root_rank`'s array; all ranks pass one of the same shape and dtype.

    Rows are cut as by `reducescatter`.
    """
    return _result(runtime().scatter(_name(name, "scatter", process_set), _contiguous(array), root_rank,
                                     process_set=set_id(process_set)))


def alltoall_async(array: ArrayLike, splits: Sequence[int] | None = None, name: str | None = None,
                   process_set: ProcessSet = global_process_set) -> Handle:
    """Like `alltoall`, returning a handle at once; its result is always (array, rows received from each rank)."""
    return runtime().alltoall(_name(name, "alltoall", process_set), _contiguous(array), splits,
                              process_set=set_id(process_set))


def alltoall(array: ArrayLike, splits: Sequence[int] | None = None, name: str | None = None,
             process_set: ProcessSet = global_process_set) -> Any:
    """Send rows to each rank and return those received, in rank order.

    Args:
        array: at least 1-D; the rows for rank 0 first, then those for rank 1, and so on.
        splits: how many rows go to each rank; rows beyond their sum stay here. Default: equal shares.

    Returns:
        The array; with `splits`, the pair of it and the number of rows received from each rank.

    Raises:
        UnsupportedError: for splits that do not fit, or rows that cannot be shared equally; otherwise like `allreduce`.
        MismatchError: when the ranks' shapes differ after the first dimension.
    """
    received, rows = alltoall_async(array, splits, name, process_set).wait()
    return received if splits is None else (received, rows)


def send_async(array: ArrayLike, dst: int, name: str | None = None) -> Handle:
    """Like `send`, returning a handle at once; `array` must not be written until it is done."""
    return runtime().send(transfer_name("numpy", name, rank(), dst), _contiguous(array), dst)


def send(array: ArrayLike, dst: int, name: str | None = None) -> None:
    """Send an array to rank `dst`, which calls `recv`; return when it has arrived there.

    Two ranks that send to each other before they receive wait for each other: let one receive first, or use `send_async`.

    Args:
        name: as given to `recv`; unnamed sends from one rank to another are matched by their order.

    Raises:
        MismatchError: on both ranks, when shape or dtype differ; or when one of them has joined.
        PeerLostError: when a rank of the job died.
        UnsupportedError: for a rank that does not exist, or this one.
    """
    send_async(array, dst, name).wait()


def recv_async(array: Array, src: int, name: str | None = None) -> Handle:
    """Like `recv`, returning a handle at once; `array` must not be used until it is done."""
    return runtime().receive(transfer_name("numpy", name, src, rank()), array, src)


def recv(array: Array, src: int, name: str | None = None) -> Array:
    """Overwrite a C-contiguous array with what rank `src` sends, of the same shape and dtype; return it. See `send`."""
    return _result(recv_async(array, src, name))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it."""
    runtime().barrier(_name(None, "barrier", process_set), process_set=set_id(process_set)).wait()


def join(device: int = -1) -> int:
    """Take no further part until all ranks have called this; return the rank that came last.

    For ranks that run out of data before the others: the others' collectives go on without this rank, which contributes
    nothing. Average goes on dividing by the number of ranks, unless HVDLITE_JOIN_DIVIDES_BY_ACTIVE is set.

    Args:
        device: accepted for Horovod's sake; not needed.

    Raises:
        PeerLeftError: when a rank leaves without joining.
    """
    del device
    last: int = runtime().join().wait()
    return last


def poll(handle: Handle | Handles) -> bool:
    """Return whether `synchronize(handle)` would not block."""
    return handle.done()


def synchronize(handle: Handle | Handles) -> Any:
    """Wait for an asynchronous call and return its result, or raise its error."""
    return handle.wait()


def transfer_name(adapter: str, name: str | None, sender: int, receiver: int) -> str:
    """Return the name under which a tensor from one rank to another is negotiated."""
    way = f"{sender}to{receiver}"
    return runtime().unnamed(adapter, f"send.{way}") if name is None else f"send.{way}.{name}"


def _grouped(sources: Sequence[Array], outputs: Sequence[Array], average: bool | None, name: str | None,
             op: ReduceOp | None, prescale: float, postscale: float, process_set: ProcessSet) -> Handles:
    return runtime().grouped_allreduce(_name(name, "grouped_allreduce", process_set), sources, outputs,
                                       reduce_op(op, average), prescale=prescale, postscale=postscale,
                                       process_set=set_id(process_set))


def _member_names(name: str | None, kind: str, count: int, process_set: ProcessSet) -> list[str]:
    """Return Horovod's names for the members of a group."""
    base = _name(name, kind, process_set)
    return [f"{base}_{index}of{count}" for index in range(1, count + 1)]


def _name(name: str | None, kind: str, process_set: ProcessSet) -> str:
    return runtime().unnamed("numpy", kind, set_id(process_set)) if name is None else name


def _contiguous(array: ArrayLike) -> Array:
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

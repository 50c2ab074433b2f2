"""Collectives on NumPy and CuPy arrays, one line each on the process's runtime.

The result of a CuPy array is a CuPy array on CuPy's current stream: the host does not wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hvdlite import boundaries
from hvdlite.api import runtime, set_id
from hvdlite.core.array import Array
from hvdlite.core.device import AnyArray, DeviceArray
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.types import Collective, ReduceOp, reduce_op
from hvdlite.handoff.handle import Handle, Handles
from hvdlite.runtime.arguments import GpuHandle, empty_like, in_flight, is_on_gpu, wrap
from hvdlite.runtime.names import member_names


def allreduce_async(array: ArrayLike, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
                    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                    process_set: ProcessSet = global_process_set) -> Handle:
    """Like `allreduce`, but return a handle immediately; `array` must not be written until it is done."""
    return _allreduce(array, name, reduce_op(op, average), prescale_factor, postscale_factor, process_set)


def _allreduce(array: ArrayLike, name: str | None, op: ReduceOp, prescale: float, postscale: float,
               process_set: ProcessSet, *, blocking: bool = False) -> Handle:
    source = readable(array, name, Collective.ALLREDUCE, op)
    handle = runtime().allreduce(_name(name, "allreduce", process_set), source, _room(source), op, prescale=prescale,
                                 postscale=postscale, process_set=set_id(process_set), blocking=blocking)
    return handle_of(handle, source)


def allreduce(array: ArrayLike, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
              prescale_factor: float = 1.0, postscale_factor: float = 1.0,
              process_set: ProcessSet = global_process_set) -> Array:
    """Return the reduction over all ranks of an array that has the same shape and dtype everywhere.

    Args:
        array: bool (Min, Max only), integer, float16/32/64, bfloat16 or complex (no Min, Max); any shape.
        average: deprecated; use `op`.
        name: the same on all ranks; unnamed calls are matched by their order.
        op: Average (default), Sum, Product, Min, Max or Adasum (floating point only; see `hvdlite.planes.adasum`). Average
            of integers is the exact mean, truncated toward zero; Sum and Product of integers wrap. 16-bit floats are
            accumulated in float32.
        prescale_factor: factor on every rank's values before the reduction; integers are truncated toward zero after it.
        postscale_factor: factor on the result, likewise.
        process_set: the ranks that take part.

    Raises:
        MismatchError: on all ranks, when they disagree about shape, dtype, op or factors.
        PeerLostError: if a rank died (`PeerFailedError`: it raised; `PeerLeftError`: it left).
        DuplicateNameError, UnsupportedError: at the call.
    """
    return result_of(_allreduce(array, name, reduce_op(op, average), prescale_factor, postscale_factor, process_set,
                              blocking=True))


def allreduce_async_(array: Array, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
                     prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                     process_set: ProcessSet = global_process_set) -> Handle:
    """Like `allreduce_async`, in place; `array` must be C-contiguous."""
    return _allreduce_in_place(array, name, reduce_op(op, average), prescale_factor, postscale_factor, process_set)


def _allreduce_in_place(array: Array, name: str | None, op: ReduceOp, prescale: float, postscale: float,
                        process_set: ProcessSet, *, blocking: bool = False) -> Handle:
    target = writable(array, name, Collective.ALLREDUCE, op)
    handle = runtime().allreduce(_name(name, "allreduce", process_set), target, target, op, prescale=prescale,
                                 postscale=postscale, process_set=set_id(process_set), blocking=blocking)
    return handle_of(handle, target)


def allreduce_(array: Array, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
               prescale_factor: float = 1.0, postscale_factor: float = 1.0,
               process_set: ProcessSet = global_process_set) -> Array:
    """Like `allreduce`, in place; returns `array`."""
    return result_of(_allreduce_in_place(array, name, reduce_op(op, average), prescale_factor, postscale_factor, process_set,
                                       blocking=True))


def grouped_allreduce_async(arrays: Sequence[ArrayLike], average: bool | None = None, name: str | None = None,
                            op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                            process_set: ProcessSet = global_process_set) -> Handles:
    """Like `grouped_allreduce`, but return one handle immediately."""
    sources = [readable(array, name, Collective.ALLREDUCE, reduce_op(op, average)) for array in arrays]
    return _grouped(sources, [_room(source) for source in sources], average, name, op, prescale_factor, postscale_factor,
                    process_set)


def grouped_allreduce(arrays: Sequence[ArrayLike], average: bool | None = None, name: str | None = None,
                      op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set) -> list[Array]:
    """Like `allreduce`, of several arrays that are negotiated as one: none is reduced before all are ready on all ranks."""
    result: list[Array] = grouped_allreduce_async(arrays, average, name, op, prescale_factor, postscale_factor,
                                                  process_set).wait()
    return result


def grouped_allreduce_async_(arrays: Sequence[Array], average: bool | None = None, name: str | None = None,
                             op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                             process_set: ProcessSet = global_process_set) -> Handles:
    """Like `grouped_allreduce_async`, in place; the arrays must be C-contiguous."""
    targets = [writable(array, name, Collective.ALLREDUCE, reduce_op(op, average)) for array in arrays]
    return _grouped(targets, targets, average, name, op, prescale_factor, postscale_factor, process_set)


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
    """Like `allreduce`, but only rank `root_rank` gets the result; the others get None.

    Args:
        root_rank: the rank, in the numbering of the job.
    """
    source = readable(array, name, Collective.REDUCE, reduce_op(op, None))
    output = _room(source) if runtime().world.rank == root_rank else None
    handle = runtime().reduce(_name(name, "reduce", process_set), source, output, root_rank, reduce_op(op, None),
                              prescale=prescale_factor, postscale=postscale_factor, process_set=set_id(process_set))
    result: Array | None = handle_of(handle, source).wait()
    return result


def reducescatter_async(array: ArrayLike, name: str | None = None, op: ReduceOp | None = None,
                        prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                        process_set: ProcessSet = global_process_set) -> Handle:
    """Like `reducescatter`, but return a handle immediately."""
    return _reducescatter(array, name, op, prescale_factor, postscale_factor, process_set)


def _reducescatter(array: ArrayLike, name: str | None, op: ReduceOp | None, prescale: float, postscale: float,
                   process_set: ProcessSet, *, blocking: bool = False) -> Handle:
    source = readable(array, name, Collective.REDUCESCATTER, reduce_op(op, None))
    handle = runtime().reducescatter(_name(name, "reducescatter", process_set), source, reduce_op(op, None),
                                     prescale=prescale, postscale=postscale, process_set=set_id(process_set),
                                     blocking=blocking)
    return handle_of(handle, source)


def reducescatter(array: ArrayLike, name: str | None = None, op: ReduceOp | None = None, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set) -> Array:
    """Return this rank's rows of the reduction over all ranks.

    Rows (the first dimension) are divided as evenly as possible; the first ranks get one row more.

    Args:
        array: at least 1-D; the same shape and dtype on all ranks.

    Raises:
        UnsupportedError: for a scalar; otherwise like `allreduce`.
    """
    return result_of(_reducescatter(array, name, op, prescale_factor, postscale_factor, process_set, blocking=True))


def grouped_reducescatter(arrays: Sequence[ArrayLike], name: str | None = None, op: ReduceOp | None = None,
                          prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                          process_set: ProcessSet = global_process_set) -> list[Array]:
    """Like `reducescatter`, of several arrays at once."""
    names = member_names(_name(name, "grouped_reducescatter", process_set), len(arrays))
    handles = [reducescatter_async(array, each, op, prescale_factor, postscale_factor, process_set)
               for array, each in zip(arrays, names, strict=True)]
    return [result_of(handle) for handle in handles]


def broadcast_async(array: ArrayLike, root_rank: int, name: str | None = None,
                    process_set: ProcessSet = global_process_set) -> Handle:
    """Like `broadcast`, but return a handle immediately."""
    return broadcast_async_(_copied(array), root_rank, name, process_set)


def broadcast(array: ArrayLike, root_rank: int, name: str | None = None,
              process_set: ProcessSet = global_process_set) -> Array:
    """Return rank `root_rank`'s array; all ranks pass one of the same shape and dtype.

    Args:
        array: any dtype and shape, the same on all ranks.
        root_rank: the rank, in the numbering of the job.

    Raises:
        UnsupportedError: for a root that does not exist, or is not in the set; otherwise like `allreduce`.
    """
    return broadcast_(_copied(array), root_rank, name, process_set)


def broadcast_async_(array: Array, root_rank: int, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Handle:
    """Like `broadcast_async`, in place; `array` must be C-contiguous."""
    return _broadcast(array, root_rank, name, process_set)


def _broadcast(array: Array, root_rank: int, name: str | None, process_set: ProcessSet, *, blocking: bool = False) -> Handle:
    target = writable(array, name, Collective.BROADCAST)
    handle = runtime().broadcast(_name(name, "broadcast", process_set), target, root_rank, process_set=set_id(process_set),
                                 blocking=blocking)
    return handle_of(handle, target)


def broadcast_(array: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """Like `broadcast`, in place; returns `array`."""
    return result_of(_broadcast(array, root_rank, name, process_set, blocking=True))


def allgather_async(array: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Like `allgather`, but return a handle immediately."""
    return _allgather(array, name, process_set)


def _allgather(array: ArrayLike, name: str | None, process_set: ProcessSet, *, blocking: bool = False) -> Handle:
    source = readable(array, name, Collective.ALLGATHER)
    handle = runtime().allgather(_name(name, "allgather", process_set), source, process_set=set_id(process_set),
                                 blocking=blocking)
    return handle_of(handle, source)


def allgather(array: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """Return all ranks' arrays concatenated along the first dimension, which may differ between ranks.

    Args:
        array: at least 1-D, of any dtype; the same on all ranks but for the number of rows.

    Raises:
        UnsupportedError: for a scalar; otherwise like `allreduce`.
    """
    return result_of(_allgather(array, name, process_set, blocking=True))


def grouped_allgather(arrays: Sequence[ArrayLike], name: str | None = None,
                      process_set: ProcessSet = global_process_set) -> list[Array]:
    """Like `allgather`, of several arrays at once."""
    names = member_names(_name(name, "grouped_allgather", process_set), len(arrays))
    handles = [allgather_async(array, each, process_set) for array, each in zip(arrays, names, strict=True)]
    return [result_of(handle) for handle in handles]


def gather(array: ArrayLike, root_rank: int, name: str | None = None,
           process_set: ProcessSet = global_process_set) -> Array | None:
    """Like `allgather`, but only rank `root_rank` gets the result; the others get None.

    Args:
        root_rank: the rank, in the numbering of the job.
    """
    source = readable(array, name, Collective.GATHER)
    handle = runtime().gather(_name(name, "gather", process_set), source, root_rank, process_set=set_id(process_set))
    result: Array | None = handle_of(handle, source).wait()
    return result


def scatter(array: ArrayLike, root_rank: int, name: str | None = None,
            process_set: ProcessSet = global_process_set) -> Array:
    """Return this rank's rows of rank `root_rank`'s array; all ranks pass one of the same shape and dtype.

    Rows are divided as by `reducescatter`.

    Args:
        array: at least 1-D, of any dtype; its values count on rank `root_rank` only.
        root_rank: the rank, in the numbering of the job.

    Raises:
        UnsupportedError: for a scalar, and for a root that does not exist, or is not in the set; otherwise like `allreduce`.
    """
    source = readable(array, name, Collective.SCATTER)
    handle = runtime().scatter(_name(name, "scatter", process_set), source, root_rank, process_set=set_id(process_set))
    return result_of(handle_of(handle, source))


def alltoall_async(array: ArrayLike, splits: Sequence[int] | None = None, name: str | None = None,
                   process_set: ProcessSet = global_process_set) -> Handle:
    """Like `alltoall`, but return a handle immediately; its result is always (array, rows received from each rank)."""
    return _alltoall(array, splits, name, process_set)


def _alltoall(array: ArrayLike, splits: Sequence[int] | None, name: str | None, process_set: ProcessSet, *,
              blocking: bool = False) -> Handle:
    source = readable(array, name, Collective.ALLTOALL)
    handle = runtime().alltoall(_name(name, "alltoall", process_set), source, splits, process_set=set_id(process_set),
                                blocking=blocking)
    return handle_of(handle, source)


def alltoall(array: ArrayLike, splits: Sequence[int] | None = None, name: str | None = None,
             process_set: ProcessSet = global_process_set) -> Any:
    """Send rows to each rank and return those received, in rank order.

    Args:
        array: at least 1-D; the rows for rank 0 first, then those for rank 1, and so on.
        splits: the number of rows for each rank; rows beyond their sum are not sent. Default: equal parts.

    Returns:
        The array; with `splits`, the pair of it and the number of rows received from each rank.

    Raises:
        UnsupportedError: for splits that do not fit, or rows that cannot be divided equally; otherwise like `allreduce`.
        MismatchError: when the ranks' shapes differ after the first dimension.
    """
    received, rows = _alltoall(array, splits, name, process_set, blocking=True).wait()
    return received if splits is None else (received, rows)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it.

    Args:
        process_set: the ranks that take part.
    """
    runtime().barrier(_name(None, "barrier", process_set), process_set=set_id(process_set), blocking=True).wait()


def join(device: int = -1) -> int:
    """Take no further part until all ranks have called this; return the rank that came last.

    For ranks that run out of data before the others: the other ranks' collectives go on without this rank, which contributes
    nothing. Average still divides by the number of all ranks, unless HVDLITE_JOIN_DIVIDES_BY_ACTIVE is set.

    Args:
        device: accepted for compatibility with Horovod; not needed.

    Raises:
        PeerLeftError: when a rank leaves without joining.
        HostsUpdatedInterrupt: in an elastic job, when members come or go.
    """
    del device
    return boundaries.join(runtime())


def poll(handle: Handle | Handles) -> bool:
    """Return whether `synchronize(handle)` would not block.

    Args:
        handle: what an asynchronous collective has returned.
    """
    return handle.done()


def synchronize(handle: Handle | Handles) -> Any:
    """Wait for an asynchronous call and return its result, or raise its error.

    Args:
        handle: what an asynchronous collective has returned.
    """
    return handle.wait()


def _grouped(sources: Sequence[AnyArray], outputs: Sequence[AnyArray], average: bool | None, name: str | None,
             op: ReduceOp | None, prescale: float, postscale: float, process_set: ProcessSet) -> Handles:
    handles = runtime().grouped_allreduce(_name(name, "grouped_allreduce", process_set), sources, outputs,
                                          reduce_op(op, average), prescale=prescale, postscale=postscale,
                                          process_set=set_id(process_set))
    flying: Handles = in_flight(handles, sources)
    return flying


def _name(name: str | None, kind: str, process_set: ProcessSet) -> str:
    return runtime().names.unnamed("numpy", kind, set_id(process_set)) if name is None else name


def _copied(array: ArrayLike) -> Any:
    return array.copy() if is_on_gpu(array) else np.array(_contiguous(array))  # type: ignore[union-attr]


def _contiguous(array: ArrayLike) -> Array:
    return np.asarray(array, order="C")


def readable(array: ArrayLike, name: str | None, collective: Collective, op: ReduceOp | None = None) -> AnyArray:
    """Return what a collective reads, as the runtime takes it."""
    if is_on_gpu(array):
        return wrap(array, name or collective.name.lower(), runtime().devices, collective, op)
    return _contiguous(array)


def writable(array: Array, name: str | None, collective: Collective, op: ReduceOp | None = None) -> AnyArray:
    """Return what a collective reads and writes."""
    if is_on_gpu(array):
        return wrap(array, name or collective.name.lower(), runtime().devices, collective, op, in_place=True)
    return array


def _room(source: AnyArray) -> AnyArray:
    """Return memory for a result like `source`."""
    return empty_like(source) if type(source) is DeviceArray else np.empty_like(source)


def handle_of(handle: Handle, source: AnyArray) -> Handle:
    """Return the handle that a script gets of a collective on an array."""
    return GpuHandle(handle) if type(source) is DeviceArray else handle  # type: ignore[return-value]


def result_of(handle: Handle) -> Array:
    """Wait for a collective that has a result on every rank, and return it."""
    result: Array | None = handle.wait()
    assert result is not None
    return result

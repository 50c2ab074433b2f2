"""Gloo through torch: TCP between hosts, without MPI. torch is imported only when it is used.

The process groups are separate from torch's: torch's default process group and its store are never used, and ranks exchange
their addresses over the control plane. Gloo's connections are unencrypted TCP, like MPI's and NCCL's: use a trusted network.

Gloo's threads work on the memory of the arrays. A finished operation wakes this rank from Gloo's thread, so the background
thread waits for it without polling, and a death interrupts the wait. The connections of operations in progress are then
ended, before the interpreter ends: Python ends threads that call into it afterwards, in the middle of C++, and that ends the
process.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import importlib
import importlib.util
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.errors import LaunchError
from hvdlite.core.system_limits import explained, reserve_descriptors
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.planes.arithmetic import Casts
from hvdlite.planes.base import OobTexts, WaitUntil
from hvdlite.planes.gloo_listener import end_connections, handled_connections, stop_accepting, stop_handling
from hvdlite.planes.launch_thread import LaunchThread
from hvdlite.planes.process_group import library_error
from hvdlite.planes.process_group_plane import ProcessGroupPlane

_log = logging.getLogger("hvdlite")

NO_TIMEOUT_SECONDS: Final = 10 * 365 * 86_400.0
"""Gloo requires a timeout, in nanoseconds; ten years fit."""
ABORT_SECONDS: Final = 2.0
"""Time for Gloo to end operations whose connections were ended, and to close those."""
CONNECTED_AT_ONCE: Final = 64
"""Ranks of a group that all connect when it is made; then nobody else can connect. In a larger group two ranks connect when
they first exchange data, and Gloo goes on listening.
"""
SPARE_FOR_STRANGERS: Final = 1 << 16
"""Descriptors more than needed, if the hard limit allows: as many connections as one address can make to Gloo's port."""

_SUMMED_AS = {np.dtype(name): np.dtype(other) for name, other in {
    "int8": "int8", "uint8": "uint8", "int32": "int32", "uint32": "int32", "int64": "int64", "uint64": "int64",
    "float32": "float32", "float64": "float64", "complex64": "float32", "complex128": "float64"}.items()}
"""Dtypes that Gloo sums, and the dtype to use: integers of one width wrap alike, complex numbers are two floats."""
EXCHANGED_BYTES = 256 << 10
"""Bytes that two ranks send each other at a time. With 1 Gbit/s between them, 4 MiB each way take 67 ms at once, and 38 ms
in pieces.
"""
_COMPARED = frozenset(map(np.dtype, ("int8", "uint8", "int32", "int64")))


def unavailable_reason() -> str:
    """Return why this plane cannot be used here and what to do; "" if it can."""
    if importlib.util.find_spec("torch") is None:
        return "it needs torch, which brings Gloo: pip install torch"
    return ""


def gloo_plane(rank: int, oob: OobTexts, wake: Callable[[], None], address: str, *, timeout: float, chunk: int,
               casts: Casts | None = None) -> ProcessGroupPlane:
    """Return the plane of one rank; it connects with the first plan of a process set.

    Args:
        wake: makes this rank's `WaitUntil` evaluate its predicate; called from Gloo's thread.
        address: this host's IP address for the other hosts, or the name of a network interface.
        timeout: seconds after which Gloo aborts an operation; may be infinite.
    """
    warn_once = functools.cache(_log.warning)
    connect = functools.partial(_connect, rank, oob, wake, address, timeout, warn_once)
    return ProcessGroupPlane("gloo", rank, connect, chunk=chunk, casts=casts)


def _connect(rank: int, oob: OobTexts, wake: Callable[[], None], address: str, timeout: float,
             warn: Callable[[str], object], process_set_id: int, ranks: tuple[int, ...],
             wait_until: WaitUntil) -> GlooProcessGroup:
    distributed = _imported("torch.distributed", wake, wait_until)
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise LaunchError("this build of torch comes without Gloo: install one from pypi.org or download.pytorch.org")
    gloo = distributed.ProcessGroupGloo
    store = _store_class()(oob, f"gloo.{process_set_id}", ranks, ranks.index(rank), wait_until)
    options = gloo._Options()
    options._timeout = datetime.timedelta(seconds=min(timeout, NO_TIMEOUT_SECONDS))
    options._threads = 2
    is_name = not set(address) <= set("0123456789abcdef.:%")
    device_address = {"interface": address} if is_name else {"hostname": address}
    options._devices = [_device(gloo, device_address)]
    try:
        with reserve_descriptors(len(ranks) + 8, f"Gloo, which connects each of {len(ranks)} ranks with others,",
                                 spare=SPARE_FOR_STRANGERS):
            group = gloo(store, ranks.index(rank), len(ranks), options)
    except RuntimeError as error:
        if store.failure is not None:
            raise store.failure from None
        raise library_error("Gloo", ranks, error, wait_until) from error
    made = GlooProcessGroup(group, ranks, wake, store)
    if len(ranks) <= CONNECTED_AT_ONCE:
        try:
            made.connect_all(wait_until)
        except BaseException:
            made.close()
            raise
        if not stop_accepting(store.published) and sys.platform.startswith("linux"):
            warn("Gloo's port on this rank stays open to strangers, because its socket was not found or the kernel refused "
                 "a filter: programs that reach it can take descriptors of this rank (docs/security.md, What remains)")
    return made


def _imported(module: str, wake: Callable[[], None], wait_until: WaitUntil) -> Any:
    """Import a module in a thread of its own: torch takes minutes on a busy machine, and this rank still answers others."""
    thread = LaunchThread(f"hvdlite-import-{module}", wake)
    try:
        with explained(f"the thread that imports {module}"):
            return thread.run(lambda: importlib.import_module(module), wait_until)
    finally:
        thread.end(0.0)


def _device(gloo: Any, address: Mapping[str, str]) -> Any:
    """Return the device of an address; with lazy connections if this torch supports them."""
    try:
        return gloo.create_device(**address, lazy_init=True)
    except TypeError:  # an older torch connects all ranks immediately
        return gloo.create_device(**address)


@functools.cache
def _store_class() -> Any:
    """Return the class of the store by which members of a group connect; defined late, because torch is imported late."""
    distributed = importlib.import_module("torch.distributed")

    class OobStore(distributed.Store):  # type: ignore[misc, name-defined]
        """A torch Store over out-of-band messages. Every rank sets one key, which ends in its index, and reads its peers'.

        Gloo reads from its own thread, in the middle of an operation.

        Args:
            label: under which the ranks publish their texts.
            index: of this rank among `ranks`.
            wait_until: for reads by the background thread.

        Attributes:
            failure: what reading has failed with.
            is_closed: whether nobody needs what is read any more.
        """

        def __init__(self, oob: OobTexts, label: str, ranks: Sequence[int], index: int, wait_until: WaitUntil) -> None:
            super().__init__()
            self.failure: BaseException | None = None
            self.is_closed = False
            self._oob, self._label, self._ranks, self._index = oob, label, ranks, index
            self._wait_until = wait_until
            self._texts: dict[int, bytes] = {}

        @property
        def published(self) -> bytes:
            """This rank's text, which contains the address of its listener."""
            return self._texts.get(self._index, b"")

        @property
        def texts(self) -> list[bytes]:
            """This rank's text, and those of others that were read."""
            return list(self._texts.values())

        def close(self) -> None:
            """Let Gloo's thread go on, with an error, if it waits for a text."""
            self.is_closed = True
            self._oob.look()

        def withdraw(self) -> None:
            """Remove this rank's text: nobody reads it any more."""
            self._oob.withdraw(self._label)

        def set(self, key: str, value: bytes | str) -> None:
            assert key.endswith(f"/{self._index}") and not self._texts, f"Gloo sets {key}"
            self._texts[self._index] = value.encode() if isinstance(value, str) else bytes(value)
            self._oob.publish(self._label, self._texts[self._index])

        def get(self, key: str) -> bytes:
            self.wait([key])
            return self._texts[int(key.rpartition("/")[2])]

        def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
            try:
                for index in (int(key.rpartition("/")[2]) for key in keys):
                    if index not in self._texts:
                        self._texts[index] = self._oob.fetch(self._label, self._ranks[index], self._wait_until,
                                                             lambda: self.is_closed)
            except BaseException as error:  # Gloo converts it to a RuntimeError
                self.failure = error
                raise

    return OobStore


class GlooProcessGroup:
    """Implements `ProcessGroup` over torch's ProcessGroupGloo."""

    def __init__(self, group: Any, ranks: Sequence[int], wake: Callable[[], None], store: Any) -> None:
        self._group, self._ranks, self._wake = group, ranks, wake
        self._store = store  # Gloo does not keep the Python side of its store alive
        self._size = len(ranks)
        self._index: int = group.rank()
        self._pid = os.getpid()
        self._begun = 0  # operations started
        self._has_failed = False  # or was interrupted, one of them
        self._done: list[Any] = []  # operations finished
        self._tensor = importlib.import_module("torch").from_numpy  # over the same memory
        self._distributed = importlib.import_module("torch.distributed")
        self._reductions: dict[ReduceOp, Any] = {}

    def connect_all(self, wait_until: WaitUntil) -> None:
        """Connect this rank with all others, by exchanging a byte with each; all ranks of the group call this."""
        bounds = range(self._size + 1)
        self.alltoall(np.zeros(self._size, np.uint8), bounds, np.empty(self._size, np.uint8), bounds, 1, wait_until)

    def reduces(self, collective: Collective, op: ReduceOp, dtype: np.dtype[np.generic], nbytes: int) -> bool:
        if collective is Collective.REDUCESCATTER or op is ReduceOp.ADASUM:
            return False
        if op is ReduceOp.SUM:
            return dtype in _SUMMED_AS
        if op is ReduceOp.PRODUCT:
            return dtype.kind in "iuf" and dtype in _SUMMED_AS
        return dtype in _COMPARED  # NaNs of floats would be lost

    def allreduce(self, values: Array, op: ReduceOp, wait_until: WaitUntil) -> None:
        if op not in self._reductions:
            self._reductions[op] = self._distributed.AllreduceOptions()
            self._reductions[op].reduceOp = self._op(op)
        self._run(lambda tensor: self._group.allreduce([tensor], self._reductions[op]), _addable(values, op), wait_until)

    def reduce(self, values: Array, op: ReduceOp, root: int, wait_until: WaitUntil) -> None:
        options = self._distributed.ReduceOptions()
        options.reduceOp, options.rootRank = self._op(op), root
        self._run(lambda tensor: self._group.reduce([tensor], options), _addable(values, op), wait_until)

    def reduce_scatter(self, values: Array, bounds: Sequence[int], out: Array, op: ReduceOp, wait_until: WaitUntil) -> None:
        raise NotImplementedError("Gloo scatters parts of equal size only; see `reduces`")

    def broadcast(self, values: Array, root: int, wait_until: WaitUntil) -> None:
        self._run(lambda tensor: self._broadcast(tensor, root), values, wait_until)

    def allgather(self, own: Array, out: Array, bounds: Sequence[int], wait_until: WaitUntil) -> None:
        """See `ProcessGroup`. Gloo gathers parts of equal size only, so every rank broadcasts its part."""
        parts = [out[begin:end] for begin, end in itertools.pairwise(bounds)]
        if own.size and own.ctypes.data != parts[self._index].ctypes.data:
            np.copyto(parts[self._index], own)
        mine, *others = parts[self._index], *parts[:self._index], *parts[self._index + 1:]
        if self._exchanges_in_pieces(mine, *others):
            self._exchange(mine, others[0], wait_until)
            return
        begun = [self._broadcast(self._tensor(part.view(np.uint8)), root) for root, part in enumerate(parts) if part.size]
        self._wait(begun, wait_until)

    def gather(self, own: Array, out: Array | None, bounds: Sequence[int], root: int, wait_until: WaitUntil) -> None:
        to_root = [0] * (root + 1) + [own.size] * (self._size - root)
        empty = np.empty(0, own.dtype)
        here = self._index == root and out is not None
        self.alltoall(own, to_root, out if here and out is not None else empty, bounds if here else [0] * (self._size + 1),
                      bounds[-1], wait_until)

    def scatter(self, values: Array | None, out: Array, bounds: Sequence[int], root: int, wait_until: WaitUntil) -> None:
        from_root = [0] * (root + 1) + [out.size] * (self._size - root)
        given = np.empty(0, out.dtype) if values is None else values[:bounds[-1]]
        self.alltoall(given, [0] * (self._size + 1) if values is None else bounds, out, from_root, bounds[-1], wait_until)

    def alltoall(self, values: Array, bounds: Sequence[int], out: Array, out_bounds: Sequence[int], max_count: int,
                 wait_until: WaitUntil) -> None:
        unit = out.itemsize
        sent, received = (np.diff(each).tolist() for each in (bounds, out_bounds))
        begin, own = bounds[0], self._index
        given, taken = ([each[first:last] for first, last in itertools.pairwise(limits)]
                        for each, limits in ((values, bounds), (out, out_bounds)))
        if self._exchanges_in_pieces(given[own - 1], taken[own - 1]):
            np.copyto(taken[own], given[own])
            self._exchange(given[own - 1], taken[own - 1], wait_until)
            return
        sending = values[begin:bounds[-1]].view(np.uint8)
        self._wait([self._group.alltoall_base(
            self._tensor(out[:out_bounds[-1]].view(np.uint8)), self._tensor(sending), [count * unit for count in received],
            [count * unit for count in sent], self._distributed.AllToAllOptions())], wait_until)

    def _exchanges_in_pieces(self, *parts: Array) -> bool:
        """Return whether `_exchange` is used for what two ranks give and take; both ranks make the same choice."""
        return self._size == 2 and max(part.nbytes for part in parts) > EXCHANGED_BYTES

    def _exchange(self, given: Array, taken: Array, wait_until: WaitUntil) -> None:
        """Exchange data with the only other rank in pieces: Gloo sends and receives a large tensor one after the other."""
        sending, receiving = given.view(np.uint8), taken.view(np.uint8)
        begun = []
        for begin in range(0, max(sending.size, receiving.size), EXCHANGED_BYTES):
            source, target = (each[begin:begin + EXCHANGED_BYTES] for each in (sending, receiving))
            splits = [[part.size * (rank != self._index) for rank in range(2)] for part in (target, source)]
            begun.append(self._group.alltoall_base(self._tensor(target), self._tensor(source), *splits,
                                                   self._distributed.AllToAllOptions()))
        self._wait(begun, wait_until)

    def close(self) -> None:
        if self._pid != os.getpid():
            _leak(self._group)  # a forked child: its destructor would wait for threads that only the parent has
            return
        self._store.close()
        try:
            if self._has_failed:
                self._end_operations()
        finally:
            if self._in_progress():
                _leak(self._group)  # its destructor would wait
            del self._group
            self._store.withdraw()

    def _end_operations(self) -> None:
        """Let the destructor not wait for what an operation that has failed, or was interrupted, has left behind."""
        end_connections(self._store.texts)
        until = time.monotonic() + ABORT_SECONDS
        while ((connections := handled_connections(self._store.published)) or self._in_progress()) and (
                time.monotonic() < until):
            time.sleep(0.01)
        stop_handling(connections)

    def _in_progress(self) -> bool:
        return len(self._done) < self._begun

    def _broadcast(self, tensor: Any, root: int) -> Any:
        options = self._distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._group.broadcast([tensor], options)

    def _run(self, begin: Callable[[Any], Any], values: Array, wait_until: WaitUntil) -> None:
        if values.size:
            self._wait([begin(self._tensor(values))], wait_until)

    def _wait(self, begun: list[Any], wait_until: WaitUntil) -> None:
        """Wait for operations; the list is empty afterwards: an operation keeps its connections, and an error this frame."""
        self._done.clear()
        self._begun = len(begun)
        try:
            for work in begun:
                work.get_future().add_done_callback(self._wake_up)
            wait_until(lambda: not self._in_progress())
            try:
                for work in begun:
                    work.wait()
            except RuntimeError as error:
                raise library_error("Gloo", self._ranks, error, wait_until) from error
        except BaseException:
            self._has_failed = True
            raise
        finally:
            work = None
            begun.clear()

    def _wake_up(self, future: Any) -> None:
        """Record a finished operation; called in Gloo's thread."""
        self._done.append(future)
        self._wake()

    def _op(self, op: ReduceOp) -> Any:
        return getattr(self._distributed.ReduceOp, op.name)


def _addable(values: Array, op: ReduceOp) -> Array:
    """Return a view of a dtype that Gloo sums."""
    return values.view(_SUMMED_AS[values.dtype]) if op in (ReduceOp.SUM, ReduceOp.PRODUCT) else values


def _leak(thing: Any) -> None:
    """Leak an object: it is never destroyed, not even at exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


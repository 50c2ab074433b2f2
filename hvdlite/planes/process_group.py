"""The interface of a process group: the ranks of one process set, as a message-passing library (MPI, Gloo) connects them.

`LaunchThread` is a thread for library calls that cannot be interrupted (docs/protocol.md#threads).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.errors import HorovodInternalError
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.planes.base import WaitUntil

DIAGNOSIS_SECONDS: Final = 3.0
"""Time for the control plane to detect a dead rank after a library has reported an error."""


class ProcessGroup(Protocol):
    """The ranks of one process set in a library. Ranks are indices in the set; all make the same calls in the same order.

    Arrays are flat and contiguous. Bounds are the element offsets at which the parts begin, and the last one ends.
    """

    def reduces(self, collective: Collective, op: ReduceOp, dtype: np.dtype[np.generic], nbytes: int) -> bool:
        """Return whether the library performs this reduction itself, with the same result on all ranks (also for NaNs)."""

    def allreduce(self, values: Array, op: ReduceOp, wait_until: WaitUntil) -> None:
        """Reduce in place; `op` is never Average."""

    def reduce(self, values: Array, op: ReduceOp, root: int, wait_until: WaitUntil) -> None:
        """Like `allreduce`; `values` holds the result on the root and is undefined on other ranks."""

    def reduce_scatter(self, values: Array, bounds: Sequence[int], out: Array, op: ReduceOp, wait_until: WaitUntil) -> None:
        """Reduce each rank's part of `values` into its `out`."""

    def broadcast(self, values: Array, root: int, wait_until: WaitUntil) -> None:
        """Copy the root's values to all ranks."""

    def allgather(self, own: Array, out: Array, bounds: Sequence[int], wait_until: WaitUntil) -> None:
        """Copy every rank's `own` into its part of `out`; `own` may already be that part."""

    def gather(self, own: Array, out: Array | None, bounds: Sequence[int], root: int, wait_until: WaitUntil) -> None:
        """Like `allgather`, on the root only."""

    def scatter(self, values: Array | None, out: Array, bounds: Sequence[int], root: int, wait_until: WaitUntil) -> None:
        """Copy each rank's part of the root's values into its `out`."""

    def alltoall(self, values: Array, bounds: Sequence[int], out: Array, out_bounds: Sequence[int], max_count: int,
                 wait_until: WaitUntil) -> None:
        """Send every rank its part of `values`, and receive each rank's part into `out`.

        Args:
            max_count: an upper bound of the elements that any rank sends or receives; equal on all ranks.
        """

    def close(self) -> None:
        """Release the group; operations in progress are aborted."""


Connect = Callable[[int, tuple[int, ...], WaitUntil], ProcessGroup]
"""Create the process group of a process set, given its id and ranks; all members call this at the same plan."""


def library_error(library: str, ranks: Sequence[int], error: Exception, wait_until: WaitUntil) -> HorovodInternalError:
    """Convert a library's error: wait for the control plane to name a dead rank, which raises; else return the error."""
    deadline = time.monotonic() + DIAGNOSIS_SECONDS
    wait_until(lambda: time.monotonic() >= deadline)
    return HorovodInternalError(f"{library} failed between ranks {list(ranks)}, though all of them are alive: {error}. Is "
                                "there a firewall between the hosts, or the wrong network chosen?")


T = TypeVar("T")


class LaunchThread:
    """Executes calls one after the other. A call that does not return is abandoned with its thread.

    Args:
        begin: called by the thread before the first call.
        wake: makes the waiting background thread evaluate its predicate.
    """

    def __init__(self, name: str, wake: Callable[[], None], begin: Callable[[], None] = lambda: None) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._wake, self._begin = wake, begin
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False

    def run(self, function: Callable[[], T], wait_until: WaitUntil) -> T:
        """Call `function` in the thread, and return its result or raise its exception.

        The background thread handles messages within `wait_until` meanwhile. If `wait_until` raises, the call is abandoned.
        """
        if not self._started:
            self._started = True
            self._thread.start()
        future: Future[T] = Future()
        self._calls.put((function, future))
        wait_until(future.done)
        return future.result()

    def end(self, timeout: float) -> bool:
        """End the thread after the calls so far; return whether it has ended within `timeout` seconds."""
        if not self._started:
            return True
        self._calls.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        begun: BaseException | None = None
        try:
            self._begin()
        except BaseException as error:
            begun = error
        while (call := self._calls.get()) is not None:
            function, future = call
            try:
                if begun is not None:
                    raise begun
                future.set_result(function())
            except BaseException as error:  # raised by `run`
                future.set_exception(error)
            del call, function, future  # release their references before the next call
            self._wake()

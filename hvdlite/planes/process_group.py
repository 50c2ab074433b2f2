"""The interface of a process group: the ranks of one process set, as a message-passing library (MPI, Gloo) connects them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

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

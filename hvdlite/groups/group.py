"""A group of ranks whose collectives are carried out in the order of calls, without negotiation.

Every rank calls the same collectives in the same order, as in MPI, NCCL and `torch.distributed`. So the number of a call is
its name, and nobody has to be asked when it may begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hvdlite.core.array import Array
from hvdlite.groups.call import Call
from hvdlite.groups.history import PastCall
from hvdlite.groups.operations import Operation


class OrderedGroup(Protocol):
    """One rank's end of a group. Callable from any thread; calls of different threads are carried out in their order.

    Attributes:
        name: for messages.
        rank: this rank's index in the group.
        size: number of ranks.
        timeout: seconds after which a call fails on a rank that still waits.
        members: for messages: the name of each rank.
    """

    name: str
    rank: int
    size: int
    timeout: float
    members: tuple[str, ...]

    def start(self, operations: Sequence[Operation], finish: Callable[[], None] | None = None, *,
              blocking: bool = False, timeout: float | None = None) -> Call:
        """Start operations; return their call, which may be over.

        Arrays belong to the call until it is over. Its error is one of

        - `MismatchError`, on all ranks: they do not call the same. The rest of the call is not done; the group goes on.
        - `OperationTimeoutError`; `PeerLeftError` or another `PeerLostError`; `HorovodInternalError` for what was aborted or
          destroyed; and `MemoryError`, of which the other ranks hear. The group cannot be used any more on this rank.
        - what `finish` raises; the group goes on.
        - `ForkedProcessError`, in a forked child.

        Args:
            finish: called when the operations are done, before the call is over; by the thread that carries them out.
            blocking: the calling thread waits for it anyway: it may carry the operations out itself, and the call is over.
            timeout: seconds from when its turn comes; by default the group's.
        """

    def when_over(self, calls: Sequence[Call], callback: Callable[[], None]) -> None:
        """Call a function when calls of this group are over: at this place in the order of calls.

        So collectives that the function calls are carried out after those that the rank has called before, and before those
        that it calls afterwards, on every rank. The function may wait for them. It runs on the thread that ends the last of
        the calls, or at once if they are over; if the rank has made other calls in the meantime, when those are over, too.
        Sends and receives have no place in the order.
        """

    def send(self, values: Array, to: int, tag: int) -> Call:
        """Send bytes (uint8, flat) to a rank; never waits for it. Messages of the same pair and tag arrive in order."""

    def receive(self, values: Array, source: int | None, tag: int) -> Call:
        """Receive bytes into `values` from a rank, or from any; their number must be the sender's. See `Call.source`."""

    def past_calls(self) -> list[PastCall]:
        """Return the last collectives that this rank has called, oldest first. Callable while others are under way."""

    def watch(self, troubled: Callable[[], object]) -> None:
        """Call a function when collectives fail, and whenever rank 0 gathers a report.

        It runs on the thread that finds out, which may be the runtime's background thread: it must not wait for other ranks,
        nor raise.
        """

    def drain(self, seconds: float) -> None:
        """Wait at most so long until all collectives and sends of this rank are over; receives are not waited for.

        Returns at once in a callback of a call, and where a call has been interrupted by a signal: nothing can go on there.
        """

    def abort(self, reason: str) -> None:
        """Fail all calls under way and all later ones, on this rank."""

    def close(self) -> None:
        """Leave the group; the memory is freed when all ranks have left. Calls under way fail. Idempotent."""

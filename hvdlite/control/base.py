"""The control plane's contract: small messages between rank 0 and the others, and one place to wait.

The connections form a tree. On one host all ranks are children of rank 0. On several hosts the first rank of each, its
leader, is a child of rank 0, and the others of the host are children of their leader.

The background thread of a rank blocks in one place only: `wait`. It returns when a message arrived, when a peer was lost, or
when this rank was woken (by a user thread with work, or by a peer that arrived at a barrier). So a wait in the middle of a
collective notices a dead peer like any other wait.

`InprocControl` is that of a job of one rank, and of tests between threads of a process: no sockets, no encoding.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import queue
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from hvdlite.negotiation.messages import Decision, DirectMessage, HostReport, Report

yield_processor = ctypes.CDLL(None).sched_yield
"""Let another thread run, such as the script's. It releases the GIL, which `os.sched_yield` does since Python 3.13 only."""


@dataclasses.dataclass(frozen=True)
class ReportReceived:
    """A rank's report arrived (on rank 0 only)."""

    rank: int
    report: Report


@dataclasses.dataclass(frozen=True)
class HostReportReceived:
    """A report of the leader of the host of `ranks` arrived (on rank 0 only)."""

    ranks: tuple[int, ...]
    report: HostReport


@dataclasses.dataclass(frozen=True)
class PeerLost:
    """A rank is gone; `reason` describes how that was detected."""

    rank: int
    reason: str


Event = ReportReceived | HostReportReceived | Decision | DirectMessage | PeerLost
"""Rank 0 receives reports; it makes its decisions and direct messages itself, and the other ranks receive them."""


class ControlPlane(Protocol):
    """A rank's connections to its parent and its children. Only `wake` may be called outside the background thread.

    Attributes:
        parent: the rank that relays to and from rank 0: this host's leader, or rank 0 itself.
        children: the ranks for which this rank relays. They need it until they have left.
    """

    @property
    def parent(self) -> int: ...

    @property
    def children(self) -> frozenset[int]: ...

    def send_report(self, report: Report) -> None:
        """Send to rank 0; never blocks. Not called on rank 0."""

    def send_decision(self, decision: Decision) -> None:
        """Send to all other ranks; never blocks. Only called on rank 0."""

    def send_direct_messages(self, messages: Sequence[DirectMessage]) -> None:
        """Send messages to single ranks; they arrive before decisions that are sent later. Like `send_decision`."""

    def wait(self, timeout: float | None, spin: float = 0.0) -> list[Event]:
        """Block until something happened or `timeout` seconds passed; return the events (none for a wake-up).

        Args:
            spin: seconds to poll before sleeping; waking up costs more time than most messages take.
        """

    def wake(self) -> None:
        """Make the current or next `wait` return; callable from any thread and from signal handlers."""

    def wake_rank(self, rank: int) -> None:
        """Make the `wait` of another rank on this host return."""

    def flush(self, timeout: float) -> None:
        """Block until everything sent has been handed to the operating system, or `timeout` seconds passed."""

    def close_in_child(self) -> None:
        """In a forked child: close its copies of the descriptors, leaving the parent's connections alone."""

    def close(self) -> None:
        """Release every descriptor; further calls are errors, except `wake` and `close`."""


_Events: TypeAlias = "queue.SimpleQueue[Event | None]"
"""One rank's incoming events and wake-ups (None): a queue into which a finalizer may put in the middle of a put."""


class InprocControl:
    """Like `StarControl`, between threads."""

    parent = 0
    children: frozenset[int] = frozenset()

    def __init__(self, rank: int, queues: Sequence[_Events]) -> None:
        self._rank = rank
        self._queues = queues

    @classmethod
    def star(cls, size: int) -> list[InprocControl]:
        """Return the connected control planes of `size` ranks."""
        queues: list[_Events] = [queue.SimpleQueue() for _ in range(size)]
        return [cls(rank, queues) for rank in range(size)]

    def send_report(self, report: Report) -> None:
        self._queues[0].put(ReportReceived(self._rank, report))

    def send_decision(self, decision: Decision) -> None:
        for other in self._queues[1:]:
            other.put(decision)

    def send_direct_messages(self, messages: Sequence[DirectMessage]) -> None:
        for message in messages:
            if message.rank:
                self._queues[message.rank].put(message)

    def wait(self, timeout: float | None, spin: float = 0.0) -> list[Event]:
        del spin  # the others need this process's GIL
        own, taken = self._queues[self._rank], []
        with contextlib.suppress(queue.Empty):
            taken.append(own.get(timeout=timeout) if timeout != 0 else own.get_nowait())
            while True:
                taken.append(own.get_nowait())
        return [event for event in taken if event is not None]

    def wake(self) -> None:
        self.wake_rank(self._rank)

    def wake_rank(self, rank: int) -> None:
        self._queues[rank].put(None)

    def flush(self, timeout: float) -> None:
        del timeout  # an event is delivered immediately

    def close_in_child(self) -> None:
        pass  # there are no descriptors

    def close(self) -> None:
        pass

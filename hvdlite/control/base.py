"""The control plane's contract: small messages between rank 0 and the others, and one place to wait.

The connections form a tree. On one host all ranks are children of rank 0. On several hosts the first rank of each, its
leader, is a child of rank 0, and the others of the host are children of their leader.

The background thread of a rank blocks in one place only: `wait`. It returns when a message arrived, when a peer was lost, or
when this rank was woken (by a user thread with work, or by a peer that arrived at a barrier). So a wait in the middle of a
collective notices a dead peer like any other wait.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Protocol

from hvdlite.negotiation.messages import Decision, DirectMessage, HostReport, RankReport, Report

yield_processor = ctypes.CDLL(None).sched_yield
"""Let another thread run, such as the script's. It releases the GIL, which `os.sched_yield` does since Python 3.13 only."""


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


Event = RankReport | HostReportReceived | Decision | DirectMessage | PeerLost
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

"""The interface of the control plane: small messages between rank 0 and the other ranks, and one blocking wait.

On several hosts the first rank of each, its leader, speaks with rank 0, and the others of that host with their leader.

A rank has exactly one place where its runtime thread blocks: `wait`. It returns when a message arrived, when a peer was
lost, or when this rank was woken (a user thread with work, or a peer that arrived at a barrier). So a wait
in the middle of a collective notices a dead peer like any other wait.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Protocol

from hvdlite.negotiation.messages import Decision, DirectMessage, HostReport, Report

yield_processor = ctypes.CDLL(None).sched_yield
"""Let another thread run, the script's above all; unlike `os.sched_yield` before Python 3.13 it releases the GIL."""


@dataclasses.dataclass(frozen=True)
class ReportReceived:
    """A rank told the coordinator something (only on rank 0)."""

    rank: int
    report: Report


@dataclasses.dataclass(frozen=True)
class HostReportReceived:
    """The leader of the host of `ranks` told the coordinator something (only on rank 0)."""

    ranks: tuple[int, ...]
    report: HostReport


@dataclasses.dataclass(frozen=True)
class DecisionReceived:
    """The coordinator decided something (never on rank 0, which decides itself)."""

    decision: Decision


@dataclasses.dataclass(frozen=True)
class DirectMessageReceived:
    """The coordinator told this rank something (never on rank 0)."""

    message: DirectMessage


@dataclasses.dataclass(frozen=True)
class PeerLost:
    """A rank is gone; `reason` says what was seen."""

    rank: int
    reason: str


Event = ReportReceived | HostReportReceived | DecisionReceived | DirectMessageReceived | PeerLost


class ControlPlane(Protocol):
    """A star around rank 0. All methods but `wake` belong to the runtime thread.

    Attributes:
        parent: the rank through which this one speaks with rank 0: its host's leader, or rank 0 itself.
        children: the ranks that speak with rank 0 through this one. They need it until they have left.
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
        """Send each other rank its own; they arrive before decisions that are sent later. Like `send_decision`."""

    def wait(self, timeout: float | None, spin: float = 0.0) -> list[Event]:
        """Block until something happened or `timeout` seconds passed; return what did (nothing for a doorbell).

        Args:
            spin: seconds to look without sleeping first; waking up costs more than most messages take.
        """

    def wake(self) -> None:
        """Make the current or next `wait` return; callable from any thread and from signal handlers."""

    def wake_rank(self, rank: int) -> None:
        """Make the `wait` of another rank on this host return."""

    def flush(self, timeout: float) -> None:
        """Block until everything sent has been handed to the operating system, or `timeout` seconds passed."""

    def forget(self) -> None:
        """In a forked child: close its copies of the descriptors, leaving the parent's connections alone."""

    def close(self) -> None:
        """Release every descriptor; further calls are errors, except `wake` and `close`."""

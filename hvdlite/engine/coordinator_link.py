"""The link from a rank's background thread to the coordinator: the control plane, or a call within rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hvdlite.control.base import ControlPlane, Event, PeerLost
from hvdlite.negotiation.controller import Controller
from hvdlite.negotiation.messages import FailureNotice, Report, TraceEvent


class CoordinatorLink(Protocol):
    """One rank's link to the coordinator. Only the background thread calls it."""

    @property
    def busy(self) -> bool:
        """Whether something is to be looked after although this rank itself waits for nothing."""

    @property
    def urgent(self) -> bool:
        """Whether stalls are to be looked for at once, before it is time again."""

    def send_report(self, report: Report) -> None:
        """Send what this rank reports."""

    def receive(self, event: Event) -> FailureNotice | None:
        """Handle a report of another rank or the loss of one; return the failure that this rank has to announce itself."""

    def decide(self) -> Sequence[Event]:
        """Let the coordinator answer what has been reported; return its messages to this rank in the same process."""

    def fail(self, notice: FailureNotice) -> None:
        """Notify all ranks that the job ends."""

    def check_stalls(self, now: float) -> bool:
        """Detect stalled tensors and silent ranks; return whether the coordinator has something to decide for that."""

    def tracing_changed(self, on: bool) -> None:
        """This rank begins or ends tracing, as a decision demands."""

    def close(self, trace: Sequence[TraceEvent], error: Exception) -> None:
        """The job is over; `trace` is the rest of this rank's events."""


class RemoteCoordinator:
    """The coordinator is in another process; decisions arrive over the control plane."""

    busy = urgent = False

    def __init__(self, control: ControlPlane, controller: Controller) -> None:
        self._control, self._controller = control, controller

    def send_report(self, report: Report) -> None:
        self._control.send_report(report)

    def receive(self, event: Event) -> FailureNotice | None:
        """Rank 0 may not see the loss of a peer that this rank sees, so this rank announces it."""
        return FailureNotice(event.rank, "lost", event.reason) if isinstance(event, PeerLost) else None

    def decide(self) -> Sequence[Event]:
        return ()

    def fail(self, notice: FailureNotice) -> None:
        self._controller.fail(notice)
        report = self._controller.report()
        if report is not None:
            self._control.send_report(report)

    def check_stalls(self, now: float) -> bool:
        return False

    def tracing_changed(self, on: bool) -> None:
        pass  # rank 0 writes the timeline

    def close(self, trace: Sequence[TraceEvent], error: Exception) -> None:
        pass

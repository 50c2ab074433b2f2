"""The duties of rank 0: the coordinator, stall reports, the timeline and autotune.

`CoordinatorLink` is the link from a rank's background thread to the coordinator: the control plane, or a call within rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.control.star import (
    ControlPlane,
    Event,
    HostReportReceived,
    PeerLost,
)
from hvdlite.diagnostics.flight_recorder import FlightRecorder
from hvdlite.diagnostics.report_server import ReportServer
from hvdlite.diagnostics.stall_inspector import StallInspector
from hvdlite.diagnostics.timeline import Timeline
from hvdlite.engine.autotune import Autotuner
from hvdlite.engine.connections import Clock
from hvdlite.negotiation.controller import Controller
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.messages import FailureNotice, HostReport, MergedRequests, RankReport, Report, TraceEvent
from hvdlite.negotiation.oob_store import OobStore


class CoordinatorLink:
    """One rank's link to the coordinator, which is in another process: decisions arrive over the control plane.

    Only the background thread calls it.

    Attributes:
        urgent: stalls are to be looked for at once, before it is time again.
    """

    urgent = False

    def __init__(self, control: ControlPlane, controller: Controller) -> None:
        self._control, self._controller = control, controller

    @property
    def busy(self) -> bool:
        """Whether something is to be looked after although this rank itself waits for nothing."""
        return False

    def send_report(self, report: Report) -> None:
        """Send what this rank reports."""
        self._control.send_report(report)

    def receive(self, event: Event) -> FailureNotice | None:
        """Handle a report of another rank or the loss of one; return the failure that this rank has to announce itself.

        Rank 0 may not see the loss of a peer that this rank sees.
        """
        return FailureNotice(event.rank, "lost", event.reason) if isinstance(event, PeerLost) else None

    def decide(self) -> Sequence[Event]:
        """Let the coordinator answer what has been reported; return its messages to this rank in the same process."""
        return ()

    def fail(self, notice: FailureNotice) -> None:
        """Notify all ranks that the job ends."""
        self._controller.fail(notice)
        report = self._controller.report()
        if report is not None:
            self._control.send_report(report)

    def check_stalls(self, now: float) -> bool:
        """Detect stalled tensors and silent ranks; return whether the coordinator has something to decide for that."""
        return False

    def tracing_changed(self, on: bool) -> None:
        """This rank begins or ends tracing, as a decision demands; rank 0 writes the timeline."""

    def close(self, trace: Sequence[TraceEvent], error: Exception) -> None:
        """The job is over; `trace` is the rest of this rank's events."""


class RankZero(CoordinatorLink):
    """The link of rank 0, where the coordinator is.

    Attributes:
        stall_inspector: detects stalled tensors and silent ranks.
        timeline: the timeline's file.
        report_server: answers requests for reports; None without a job directory. Set before the thread starts.
        urgent: a side message has arrived, which may be what the stall inspector waits for.
    """

    def __init__(self, coordinator: Coordinator, control: ControlPlane, controller: Controller, recorder: FlightRecorder,
                 clock: Clock, stall_inspector: StallInspector, timeline: Timeline, autotuner: Autotuner | None) -> None:
        super().__init__(control, controller)
        self.stall_inspector, self.timeline = stall_inspector, timeline
        self.report_server: ReportServer | None = None
        self._coordinator, self._recorder, self._clock, self._autotuner = coordinator, recorder, clock, autotuner
        self._oob_store = OobStore(coordinator.epoch)

    @property
    def busy(self) -> bool:
        return self.stall_inspector.busy

    def send_report(self, report: Report) -> None:
        self._receive_report(0, report)

    def receive(self, event: Event) -> FailureNotice | None:
        match event:
            case RankReport(rank, report):
                self._receive_report(rank, report)
            case HostReportReceived(ranks, merged):
                self._receive_host_report(ranks, merged)
            case PeerLost(rank, reason):
                self._coordinator.lose(rank, reason)
        return None

    def decide(self) -> Sequence[Event]:
        """Send what the coordinator decides to the other ranks; return what concerns this one."""
        if self._autotuner is not None:
            self._autotuner.look()
        if not self._coordinator.has_news:  # the loop asks several times a round, and out-of-band messages are news too
            return ()
        decision = self._coordinator.decide()
        events: list[Event] = []
        if messages := (*self._coordinator.take_direct_messages(), *self._oob_store.take_direct_messages()):
            self._control.send_direct_messages(messages)
            events += [message for message in messages if message.rank == 0]
        if decision is not None:
            self._control.send_decision(decision)
            events.append(decision)
        return events

    def fail(self, notice: FailureNotice) -> None:
        self._coordinator.fail(notice)
        decision = self._coordinator.decide()
        if decision is not None:
            self._control.send_decision(decision)

    def check_stalls(self, now: float) -> bool:
        self.urgent = False
        return self.stall_inspector.look(now)

    def tracing_changed(self, on: bool) -> None:
        if on:
            self.timeline.started()

    def close(self, trace: Sequence[TraceEvent], error: Exception) -> None:
        try:
            if self.report_server is not None:
                self.report_server.close()
        finally:  # user threads may wait for the timeline
            self.timeline.close(trace, error)

    def _receive_report(self, rank: int, report: Report) -> None:
        """Handle what a rank, rank 0 included, reports."""
        self._coordinator.receive(rank, report, self._clock())
        self._observe(rank, report)

    def _receive_host_report(self, ranks: tuple[int, ...], merged: HostReport) -> None:
        """Handle what a leader passes on."""
        if merged.epoch != self._coordinator.epoch:
            return
        self._coordinator.receive_host(ranks, merged, self._clock())
        for item in merged.items:
            if isinstance(item, RankReport):
                self._observe(item.rank, item.report)
            elif isinstance(item, MergedRequests):
                self._recorder.ready_elsewhere(item.ranks, item.requests)
            else:
                self._recorder.ready_elsewhere(ranks, (item,))

    def _observe(self, rank: int, report: Report) -> None:
        """Handle what is not the coordinator's business in a report."""
        if report.epoch != self._coordinator.epoch:
            return
        message = report.side_message
        if message is not None:
            self.urgent = True
            self.stall_inspector.receive(rank, message)
            self._oob_store.receive(rank, message)
            if message.ping:
                self._coordinator.order(pong=(rank,))
        self._recorder.ready_elsewhere((rank,), report.items)
        if message is not None or report.leaving:
            self.timeline.receive(rank, () if message is None else message.trace, report.leaving)

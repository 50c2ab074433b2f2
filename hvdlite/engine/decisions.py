"""Applies decisions on a rank: some fields take effect when a decision arrives, the others in their order.

`failure_error` is the exception that a rank raises when the job fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from hvdlite.core.errors import (
    DeadlockError,
    HorovodInternalError,
    PeerFailedError,
    PeerLeftError,
    PeerLostError,
    StallError,
)
from hvdlite.diagnostics.flight_recorder import FlightRecorder
from hvdlite.engine.execution import Execution
from hvdlite.engine.oob import OobChannel
from hvdlite.engine.rank_zero import CoordinatorLink
from hvdlite.handoff.handoff import Handoff
from hvdlite.negotiation.controller import Controller
from hvdlite.negotiation.messages import Decision, FailureNotice, RankStatus, SideMessage


class JobFailed(Exception):
    """Unwinds the background thread, because the job has failed on some rank."""

    def __init__(self, notice: FailureNotice) -> None:
        super().__init__(notice)
        self.notice = notice


class Decisions:
    """The decisions that one rank has received. Only the background thread calls it.

    `Decision` documents which of its fields count on arrival, even in the middle of a plan, and in which order the others
    are applied. `accept` and `apply_next` follow it, field by field.

    Attributes:
        has_left: whether this rank has: its own leaving is accepted, and everything that was decided before is done.

    Args:
        handoff: its state gets the tuned knobs, and the ranks that have left.
        oob: whose waiters look again when ranks have left.
        status: describes this rank for stall reports.
    """

    def __init__(self, controller: Controller, coordinator: CoordinatorLink, execution: Execution, handoff: Handoff,
                 recorder: FlightRecorder, oob: OobChannel, status: Callable[[], RankStatus]) -> None:
        self.has_left = False
        self._rank = controller.rank
        self._controller, self._coordinator, self._execution = controller, coordinator, execution
        self._state, self._waiters, self._recorder = handoff.state, handoff.waiters, recorder
        self._oob, self._status = oob, status
        self._queue: deque[Decision] = deque()  # received and not applied

    def __bool__(self) -> bool:
        return bool(self._queue)

    def accept(self, decision: Decision) -> None:
        """Receive a decision: follow the fields that count on arrival, and queue it. One of another world is dropped.

        Raises:
            JobFailed: when the decision ends the job.
        """
        if self._controller.is_foreign(decision):
            return
        if decision.failure is not None:
            raise JobFailed(decision.failure)
        if self._rank in decision.status_requests:
            self._controller.send_side_message(SideMessage(status=self._status()))
        if decision.left:
            self._state.departed.update(decision.left)
            self._oob.look()
        if self._rank in decision.deferred:
            self._waiters.defer()
        self._queue.append(decision)

    def apply_next(self) -> None:
        """Follow the fields of the oldest queued decision that count in order."""
        decision = self._queue.popleft()
        if decision.timeline is not None:
            self._recorder.trace(decision.timeline)
            self._controller.send_side_message(SideMessage(trace=self._recorder.take_trace()))
            self._coordinator.tracing_changed(decision.timeline)
        self._recorder.cycle(decision.sequence)
        if decision.tuned:
            self._state.tuned.update(decision.tuned)
            self._execution.tune(dict(decision.tuned))
        self._execution.open_pairs(decision.responses)
        self._execution.carry_out(self._controller.apply(decision), self._state.departed)  # `closed` to `responses`
        if self._rank in decision.left:
            self.has_left = True


def failure_notice(error: Exception, rank: int) -> FailureNotice:
    """Return what `rank` reports about an error on it. It may have suffered from a rank that nobody can name."""
    if isinstance(error, PeerLostError) and error.rank == -1:
        return FailureNotice(-1, "lost", str(error))
    return FailureNotice(rank, type(error).__name__, str(error))


def failure_error(notice: FailureNotice, rank: int, names: Sequence[str] = ()) -> HorovodInternalError:
    """Return the exception that `rank` raises for a failure of the job.

    Args:
        names: of the ranks, in the text; by default their numbers.
    """
    origin = names[notice.origin] if names and notice.origin >= 0 else str(notice.origin)
    if notice.kind == StallError.__name__:
        return StallError(f"{notice.message}\n{notice.traceback}", notice.origin, notice.blamed)
    if notice.kind == DeadlockError.__name__:
        return DeadlockError(notice.message, notice.origin)
    if notice.origin == rank:
        return PeerFailedError(f"this rank ({origin}) failed with {notice.kind}: {notice.message}", rank)
    if notice.kind == PeerLeftError.__name__:
        return PeerLeftError(f"rank {origin} left the job while others still needed it: {notice.message}",
                             notice.origin)
    if notice.origin == -1:
        return PeerLostError(notice.message, notice.origin)
    if notice.kind == "lost":
        return PeerLostError(f"rank {origin} was lost: {notice.message}", notice.origin, notice.blamed)
    cause = f"\n\nrank {origin}'s traceback:\n{notice.traceback.rstrip()}" if notice.traceback else ""
    return PeerFailedError(f"rank {origin} failed with {notice.kind}: {notice.message}{cause}", notice.origin)

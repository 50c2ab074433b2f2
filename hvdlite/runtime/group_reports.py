"""The reports of an ordered group through the job's runtime, or the one on which the group lives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from hvdlite.diagnostics.flight_recorder import FlightRecorder
from hvdlite.diagnostics.progress import Progress
from hvdlite.engine.engine import Engine
from hvdlite.groups.group_end import GroupEnd
from hvdlite.handoff.handle import BlockedWaiters
from hvdlite.handoff.inbox import Inbox, Task
from hvdlite.negotiation.messages import CallWait, GroupCalls, Response


class GroupReports:
    """Implements `ordered.reporter.Reporter`.

    Args:
        clock: the same for all ranks of the job, in seconds.
        waiters: in the inbox, they let rank 0 know of long waits.
        suspect: see `Reporter.suspect`.
        fail: tells the other ranks of an exception, and ends the runtime on which the group lives.
        progress: of this rank.
    """

    def __init__(self, inbox: Inbox, engine: Engine, recorder: FlightRecorder, clock: Callable[[], float],
                 waiters: BlockedWaiters, suspect: Callable[[], object], fail: Callable[[BaseException], object],
                 progress: Progress) -> None:
        self.clock, self.progress = clock, progress
        self._inbox, self._engine, self._recorder, self._waiters = inbox, engine, recorder, waiters
        self._suspect, self._fail = suspect, fail

    def called(self) -> None:
        self._inbox.last_caller = threading.get_ident()

    def began(self, name: str) -> None:
        self._engine.history.add(name)

    def ended(self, name: str, response: Response, begun: float, met: float) -> None:
        recorder = self._recorder
        recorder.carried_out(name)
        if recorder.tracing:
            done = self.clock()
            self._inbox.post(Task(lambda: recorder.ordered(name, response, begun, met, done)))

    def waits_changed(self) -> None:
        self._inbox.post(self._waiters)

    def failed(self, error: Exception) -> None:
        self._fail(error)

    def suspect(self) -> None:
        self._suspect()


class ReportedGroup:
    """Implements `handoff.groups.Group` for the runtime to which a group reports.

    Args:
        identity: the same on all ranks of the group, and of no other group.
        ranks: of the runtime: those of the group, in its order.
        failure: returns what has ended the runtime, if the group does not live on it: it fails with the runtime then, but
            not when that ends as it should. None: it lives there.
    """

    def __init__(self, end: GroupEnd, identity: str, ranks: Sequence[int],
                 failure: Callable[[], Exception | None] | None = None) -> None:
        self._end, self._identity, self._ranks, self._failure = end, identity, ranks, failure

    @property
    def is_waiting(self) -> bool:
        return self._end.is_waiting

    @property
    def troubled(self) -> Callable[[], object]:
        return self._end.troubled

    def silence(self) -> None:
        if self._failure is None or self._failure() is not None:
            self._end.silence()

    def fail(self, error: Exception) -> None:
        reason = error if self._failure is None else self._failure()
        if reason is not None:
            self._end.fail(reason)

    def calls(self) -> GroupCalls:
        return GroupCalls(self._identity, self._end.begun, tuple(
            CallWait(wait.name, wait.sequence, self._of_runtime(wait.ranks), self._of_runtime(wait.missing), wait.seconds)
            for wait in self._end.long_waits()))

    def blocked_threads(self) -> frozenset[int] | None:
        return self._end.blocked_threads()

    def _of_runtime(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._ranks[rank] for rank in ranks)

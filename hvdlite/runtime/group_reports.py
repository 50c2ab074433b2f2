"""The reports of an ordered group through the runtime on which it lives."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hvdlite.diagnostics.flight_recorder import FlightRecorder
from hvdlite.diagnostics.progress import Progress
from hvdlite.engine.engine import Engine
from hvdlite.handoff.handle import Handle
from hvdlite.handoff.inbox import Inbox, Task
from hvdlite.negotiation.messages import Response


class GroupReports:
    """Implements `ordered.reporter.Reporter`.

    Args:
        clock: the same for all ranks of the job, in seconds.
        barrier: requests a negotiated barrier of all ranks.
        fail: tells the other ranks of an exception, and ends the runtime.
        progress: of this rank.
    """

    def __init__(self, inbox: Inbox, engine: Engine, recorder: FlightRecorder, clock: Callable[[], float],
                 barrier: Callable[[str], Handle], fail: Callable[[BaseException], object],
                 progress: Progress) -> None:
        self.clock, self.progress = clock, progress
        self._inbox, self._engine, self._recorder = inbox, engine, recorder
        self._barrier, self._fail = barrier, fail

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

    def request(self, name: str) -> Handle:
        return self._barrier(name)

    def failed(self, error: Exception) -> None:
        self._fail(error)

    def suspect(self) -> None:
        self._inbox.post(Task(self._engine.suspect_others))

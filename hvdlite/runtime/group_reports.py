"""The reports of an ordered group through the runtime on which it lives."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hvdlite.diagnostics.flight_recorder import FlightRecorder
from hvdlite.engine.engine import Engine
from hvdlite.handoff.handle import Handle
from hvdlite.handoff.inbox import Inbox, Task
from hvdlite.negotiation.messages import Response


class GroupReports:
    """Implements `ordered.reporter.Reporter`.

    Args:
        clock: the same for all ranks of the job, in seconds.
        barrier: requests a negotiated barrier of all ranks.
    """

    def __init__(self, inbox: Inbox, engine: Engine, recorder: FlightRecorder, clock: Callable[[], float],
                 barrier: Callable[[str], Handle]) -> None:
        self.clock = clock
        self._inbox, self._engine, self._recorder, self._barrier = inbox, engine, recorder, barrier

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

    def suspect(self) -> None:
        self._inbox.post(Task(self._engine.suspect_others))

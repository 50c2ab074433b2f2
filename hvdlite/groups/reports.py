"""What a group reports to the runtime on which it lives, for reports, the timeline and the search for stalled ranks."""

from __future__ import annotations

import threading

from hvdlite.core.texts import LONGEST_MESSAGE, LONGEST_TRACEBACK, shortened, text_of
from hvdlite.diagnostics.progress import Progress
from hvdlite.handoff.inbox import Task
from hvdlite.negotiation.messages import FailureNotice, Response
from hvdlite.runtime import tracebacks
from hvdlite.runtime.runtime import Runtime


class Reports:
    """Reports nothing: for a group of one rank. Callable from any thread.

    Attributes:
        progress: counts the time that the script's threads wait.
    """

    def __init__(self) -> None:
        self.progress = Progress()

    def clock(self) -> float:
        """Return the time in seconds, the same for all ranks of the group."""
        return 0.0

    def called(self) -> None:
        """The script's thread that calls this calls a collective."""

    def began(self, name: str) -> None:
        """A call begins, under its name for reports."""

    def ended(self, name: str, response: Response, begun: float, met: float) -> None:
        """A call is done, which began, and had all ranks, at these times."""

    def suspect(self) -> None:
        """This rank has waited for long in the middle of a call that all ranks have made."""


class RuntimeReports(Reports):
    """Reports to the runtime of the job, or of the group if that is a world of its own.

    Args:
        ranks: of the runtime: those of the group.
    """

    def __init__(self, runtime: Runtime, ranks: tuple[int, ...]) -> None:
        self.progress, self.clock = runtime.progress, runtime.connections.clock  # type: ignore[method-assign]
        self._inbox, self._waiters = runtime.handoff.inbox, runtime.handoff.waiters
        self._engine, self._recorder = runtime.engine, runtime.recorder
        self._others = tuple(rank for rank in ranks if rank != runtime.world.rank)

    def called(self) -> None:
        self._inbox.last_caller = threading.get_ident()

    def began(self, name: str) -> None:
        self._engine.history.add(name)

    def ended(self, name: str, response: Response, begun: float, met: float) -> None:
        recorder = self._recorder
        recorder.finished(name, "a group")
        if recorder.tracing:
            done = self.clock()
            self._inbox.post(Task(lambda: recorder.ordered(name, response, begun, met, done)))

    def waits_changed(self) -> None:
        """Calls in which this rank has waited for long are others than before, or it waits for other ranks."""
        self._inbox.post(self._waiters)

    def suspect(self) -> None:
        self._inbox.post(Task(lambda: self._engine.suspect(self._others)))


def notice_of(error: BaseException, rank: int) -> FailureNotice:
    """Return the notice by which `rank` reports an error that the other ranks cannot see."""
    return FailureNotice(rank, type(error).__name__, shortened(text_of(error), LONGEST_MESSAGE),
                         shortened(tracebacks.text_of(error), LONGEST_TRACEBACK))

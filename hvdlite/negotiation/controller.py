"""Every rank's role: collect what became ready here into reports, and follow decisions. Pure, like the coordinator.

Rules kept here
- Decisions are applied in sequence; a gap or a repetition is an error, never skipped.
- A response to a name this rank has not submitted is ignored: it is a refusal for ranks that have (a rank that left).
"""

from __future__ import annotations

from hvdlite.core.errors import ProtocolError
from hvdlite.negotiation.messages import Decision, FailureNotice, Report, Request, Response


class Controller:
    """The negotiating half of one rank."""

    def __init__(self, rank: int, *, epoch: int = 0) -> None:
        self.rank = rank
        self.epoch = epoch
        self.applied = 0
        self.retired = 0
        self._outgoing: list[Request] = []
        self._unanswered: dict[str, Request] = {}
        self._leaving = False
        self._failure: FailureNotice | None = None
        self._unsaid = False

    def submit(self, request: Request) -> None:
        """A tensor is ready here. Its name must not be unanswered (the runtime refuses that at the call)."""
        assert request.name not in self._unanswered, f"'{request.name}' is still being processed"
        self._unanswered[request.name] = request
        self._outgoing.append(request)
        self._unsaid = True

    def leave(self) -> None:
        """This rank will submit nothing more."""
        self._leaving = self._unsaid = True

    def fail(self, failure: FailureNotice) -> None:
        """This rank cannot go on."""
        if self._failure is None:
            self._failure, self._unsaid = failure, True

    def report(self) -> Report | None:
        """Return what has not been told yet, or None."""
        if not self._unsaid:
            return None
        report = Report(self.epoch, self.applied, self.retired, tuple(self._outgoing),
                        leaving=self._leaving, failure=self._failure)
        self._outgoing, self._unsaid = [], False
        return report

    def apply(self, decision: Decision) -> list[Response]:
        """Return what to do, in order; every rank that submitted the same tensors gets the same list.

        Raises:
            ProtocolError: when a decision is missing or repeated.
        """
        if decision.epoch != self.epoch:
            return []
        if decision.sequence != self.applied + 1:
            raise ProtocolError(f"decision {decision.sequence} follows {self.applied}")
        self.applied = decision.sequence
        concerning = []
        for response in decision.responses:
            if response.names[0] in self._unanswered:  # a fused response concerns all ranks or none
                concerning.append(response)
                for name in response.names:
                    del self._unanswered[name]
        return concerning

    def unanswered(self) -> frozenset[str]:
        """The names submitted and not answered yet."""
        return frozenset(self._unanswered)

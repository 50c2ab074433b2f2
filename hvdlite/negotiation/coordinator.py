"""Rank 0's role: turn reports into decisions. Pure: no sockets, threads, clock or environment.

Rules kept here
- A tensor is answered exactly once, when every rank has reported it: with an operation, or with an error for all.
- Error responses are never remembered: the name is free again, and the job goes on with other tensors.
- Decisions are numbered without gaps; nothing is decided while nothing was reported.
- The first failure ends the job. It names its origin; failures that arrive later are consequences and are dropped.
- A rank that left cannot report any more, so whatever still waits for it is answered with an error.
"""

from __future__ import annotations

import dataclasses

from hvdlite.core.types import Collective
from hvdlite.negotiation.agreement import disagreement
from hvdlite.negotiation.fusion import fuse, payload_bytes, response_to
from hvdlite.negotiation.messages import Decision, ErrorKind, FailureNotice, Report, Request, Response
from hvdlite.negotiation.readiness import ReadinessTable


@dataclasses.dataclass(frozen=True)
class Stall:
    """A tensor that waits for some ranks."""

    name: str
    waited: float  # seconds
    submitted: tuple[int, ...]
    missing: tuple[int, ...]

    def __str__(self) -> str:
        return (f"'{self.name}' has waited {self.waited:.0f} s: submitted by ranks {list(self.submitted)}, "
                f"not yet by ranks {list(self.missing)}")


class Coordinator:
    """Collects the ranks' reports and decides what all of them do next."""

    def __init__(self, size: int, *, fusion_threshold: int, epoch: int = 0) -> None:
        self.size = size
        self.epoch = epoch
        self._threshold = fusion_threshold
        self._table = ReadinessTable(size)
        self._sequence = 0
        self._ready: list[tuple[Response, int]] = []
        self._refused: list[Response] = []
        self._leaving: list[int] = []  # accepted in the next decision
        self._left: set[int] = set()
        self._retired = dict.fromkeys(range(size), 0)
        self._failure: FailureNotice | None = None
        self._failure_told = False

    @property
    def left(self) -> frozenset[int]:
        """The ranks that have left."""
        return frozenset(self._left)

    def receive(self, rank: int, report: Report, now: float) -> None:
        """Take in what `rank` says; `now` is seconds on any monotonic clock."""
        if report.epoch != self.epoch:
            return
        if report.buckets or report.flushes or report.stale:
            self.fail(FailureNotice(rank, "ProtocolError", "names a bucket that was never learned"))
            return
        self._retired[rank] = max(self._retired[rank], report.retired)
        if report.failure is not None:
            self.fail(report.failure)
        for request in report.requests:
            self._take(rank, request, now)
        if report.leaving and rank not in self._left:
            self._left.add(rank)
            self._leaving.append(rank)
            self._refuse_waiting()

    def fail(self, failure: FailureNotice) -> None:
        """End the job for `failure`, unless it ends already."""
        if self._failure is None:
            self._failure = failure

    def lose(self, rank: int, reason: str) -> None:
        """A rank is gone without having left: end the job, naming it."""
        if rank not in self._left:
            self.fail(FailureNotice(rank, "lost", reason))

    def decide(self) -> Decision | None:
        """Return the next decision, or None when there is nothing to say."""
        failure = None if self._failure_told else self._failure
        if not (self._ready or self._refused or self._leaving or failure):
            return None
        self._sequence += 1
        responses = (*self._refused, *fuse(self._ready, self._threshold))
        decision = Decision(self.epoch, self._sequence, min(self._retired.values()), responses,
                            left=tuple(self._leaving), failure=failure)
        self._ready, self._refused, self._leaving = [], [], []
        self._failure_told = self._failure is not None
        return decision

    def stalls(self, now: float, after: float) -> list[Stall]:
        """Return the tensors that have waited at least `after` seconds and were not returned before."""
        found = []
        for name, waiting in self._table.waiting().items():
            if now - waiting.since >= after and not waiting.warned:
                waiting.warned = True
                missing = tuple(rank for rank in range(self.size) if rank not in waiting.requests)
                found.append(Stall(name, now - waiting.since, tuple(sorted(waiting.requests)), missing))
        return found

    def next_stall(self, after: float) -> float | None:
        """Return when `stalls` next has something to return, on the clock of `receive`; None when nothing waits."""
        times = [waiting.since + after for waiting in self._table.waiting().values() if not waiting.warned]
        return min(times, default=None)

    def check_invariants(self) -> None:
        """Fail when the state contradicts the rules at the top of this file."""
        self._table.check_invariants()
        assert not (self._left and self._table.waiting()), "a tensor waits for a rank that left"

    def _take(self, rank: int, request: Request, now: float) -> None:
        try:
            requests = self._table.add(rank, request, now)
        except ValueError as error:
            self.fail(FailureNotice(rank, "ProtocolError", str(error)))
            return
        if requests is None:
            if self._left:
                self._refuse_waiting()
            return
        problem = disagreement(requests)
        if problem is not None:
            self._refused.append(_refusal(request, ErrorKind.MISMATCH, problem))
            return
        self._ready.append((response_to(requests), payload_bytes(request)))

    def _refuse_waiting(self) -> None:
        """Answer what waits for a rank that left; ranks still to report it are answered when they do."""
        gone = ", ".join(map(str, sorted(self._left)))
        who = f"rank {gone}" if len(self._left) == 1 else f"ranks {gone}"
        for name, requests in self._table.take_all().items():
            text = f"'{name}' needs all ranks, but {who} left the job normally (script ended, or shutdown() called)"
            self._refused.append(_refusal(next(iter(requests.values())), ErrorKind.LEFT, text))


def _refusal(request: Request, kind: ErrorKind, text: str) -> Response:
    return Response(names=(request.name,), collective=Collective(request.collective), dtype=request.dtype,
                    error=kind, error_text=text)

"""The control plane between threads of one process, for tests: no sockets, no encoding."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Sequence

from hvdlite.control.base import DecisionReceived, DirectMessageReceived, Event, PeerLost, ReportReceived
from hvdlite.negotiation.messages import Decision, DirectMessage, Report


class _Mailbox:
    """One rank's incoming events and wake-ups (None), in a queue into which a finalizer may put in the middle of a put."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()

    def post(self, event: Event) -> None:
        self._events.put(event)

    def wake(self) -> None:
        self._events.put(None)

    def take(self, timeout: float | None) -> list[Event]:
        taken: list[Event | None] = []
        with contextlib.suppress(queue.Empty):
            taken.append(self._events.get(timeout=timeout) if timeout != 0 else self._events.get_nowait())
            while True:
                taken.append(self._events.get_nowait())
        return [event for event in taken if event is not None]


class InprocControl:
    """Like `StarControl`, between threads."""

    parent = 0
    children: frozenset[int] = frozenset()

    def __init__(self, rank: int, mailboxes: Sequence[_Mailbox]) -> None:
        self._rank = rank
        self._mailboxes = mailboxes
        self._closed = False

    @classmethod
    def star(cls, size: int) -> list[InprocControl]:
        """Return the connected control planes of `size` ranks."""
        mailboxes = [_Mailbox() for _ in range(size)]
        return [cls(rank, mailboxes) for rank in range(size)]

    def send_report(self, report: Report) -> None:
        self._mailboxes[0].post(ReportReceived(self._rank, report))

    def send_decision(self, decision: Decision) -> None:
        for mailbox in self._mailboxes[1:]:
            mailbox.post(DecisionReceived(decision))

    def send_direct_messages(self, messages: Sequence[DirectMessage]) -> None:
        for message in messages:
            if message.rank:
                self._mailboxes[message.rank].post(DirectMessageReceived(message))

    def wait(self, timeout: float | None, spin: float = 0.0) -> list[Event]:
        del spin  # the others need this process's GIL
        return self._mailboxes[self._rank].take(timeout)

    def wake(self) -> None:
        self._mailboxes[self._rank].wake()

    def wake_rank(self, rank: int) -> None:
        self._mailboxes[rank].wake()

    def flush(self, timeout: float) -> None:
        del timeout  # a post is delivered at once

    def forget(self) -> None:
        self._closed = True

    def close(self) -> None:
        self._closed = True

    def sever(self, reason: str = "severed by a test") -> None:
        """Let every other rank see this one die (fault injection)."""
        for rank, mailbox in enumerate(self._mailboxes):
            if rank != self._rank:
                mailbox.post(PeerLost(self._rank, f"{reason} at {time.time():.3f}"))

"""The control plane of a job of one rank, and of tests between threads of a process: no sockets, no encoding."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Sequence

from hvdlite.control.base import DecisionReceived, DirectMessageReceived, Event, ReportReceived
from hvdlite.negotiation.messages import Decision, DirectMessage, Report


class _EventQueue:
    """One rank's incoming events and wake-ups (None), in a queue into which a finalizer may put in the middle of a put."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()

    def put(self, event: Event) -> None:
        self._events.put(event)

    def wake(self) -> None:
        self._events.put(None)

    def get_all(self, timeout: float | None) -> list[Event]:
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

    def __init__(self, rank: int, queues: Sequence[_EventQueue]) -> None:
        self._rank = rank
        self._queues = queues
        self._closed = False

    @classmethod
    def star(cls, size: int) -> list[InprocControl]:
        """Return the connected control planes of `size` ranks."""
        queues = [_EventQueue() for _ in range(size)]
        return [cls(rank, queues) for rank in range(size)]

    def send_report(self, report: Report) -> None:
        self._queues[0].put(ReportReceived(self._rank, report))

    def send_decision(self, decision: Decision) -> None:
        for other in self._queues[1:]:
            other.put(DecisionReceived(decision))

    def send_direct_messages(self, messages: Sequence[DirectMessage]) -> None:
        for message in messages:
            if message.rank:
                self._queues[message.rank].put(DirectMessageReceived(message))

    def wait(self, timeout: float | None, spin: float = 0.0) -> list[Event]:
        del spin  # the others need this process's GIL
        return self._queues[self._rank].get_all(timeout)

    def wake(self) -> None:
        self._queues[self._rank].wake()

    def wake_rank(self, rank: int) -> None:
        self._queues[rank].wake()

    def flush(self, timeout: float) -> None:
        del timeout  # an event is delivered immediately

    def close_in_child(self) -> None:
        self._closed = True

    def close(self) -> None:
        self._closed = True

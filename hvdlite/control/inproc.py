"""The control plane of a job of one rank, and of tests between threads of a process: no sockets, no encoding."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Sequence
from typing import TypeAlias

from hvdlite.control.base import Event, ReportReceived
from hvdlite.negotiation.messages import Decision, DirectMessage, Report

_Events: TypeAlias = "queue.SimpleQueue[Event | None]"
"""One rank's incoming events and wake-ups (None): a queue into which a finalizer may put in the middle of a put."""


class InprocControl:
    """Like `StarControl`, between threads."""

    parent = 0
    children: frozenset[int] = frozenset()

    def __init__(self, rank: int, queues: Sequence[_Events]) -> None:
        self._rank = rank
        self._queues = queues

    @classmethod
    def star(cls, size: int) -> list[InprocControl]:
        """Return the connected control planes of `size` ranks."""
        queues: list[_Events] = [queue.SimpleQueue() for _ in range(size)]
        return [cls(rank, queues) for rank in range(size)]

    def send_report(self, report: Report) -> None:
        self._queues[0].put(ReportReceived(self._rank, report))

    def send_decision(self, decision: Decision) -> None:
        for other in self._queues[1:]:
            other.put(decision)

    def send_direct_messages(self, messages: Sequence[DirectMessage]) -> None:
        for message in messages:
            if message.rank:
                self._queues[message.rank].put(message)

    def wait(self, timeout: float | None, spin: float = 0.0) -> list[Event]:
        del spin  # the others need this process's GIL
        own, taken = self._queues[self._rank], []
        with contextlib.suppress(queue.Empty):
            taken.append(own.get(timeout=timeout) if timeout != 0 else own.get_nowait())
            while True:
                taken.append(own.get_nowait())
        return [event for event in taken if event is not None]

    def wake(self) -> None:
        self.wake_rank(self._rank)

    def wake_rank(self, rank: int) -> None:
        self._queues[rank].put(None)

    def flush(self, timeout: float) -> None:
        del timeout  # an event is delivered immediately

    def close_in_child(self) -> None:
        pass  # there are no descriptors

    def close(self) -> None:
        pass

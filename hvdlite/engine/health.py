"""The health check on every rank: when to look for stalls, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable

from hvdlite.diagnostics.stall_inspector import CoordinatorWatchdog
from hvdlite.engine.coordinator_link import CoordinatorLink
from hvdlite.engine.execution import Execution
from hvdlite.engine.limits import Clock
from hvdlite.negotiation.messages import SideMessage


class HealthCheck:
    """Looks from time to time while something is pending; otherwise it does nothing. Only the background thread calls it.

    Args:
        interval: seconds between two looks.
        send: sends a side message to the coordinator.
        lost: ends the job, because the rank through which this one speaks with rank 0 does not answer.
        decide: lets the coordinator decide.
    """

    def __init__(self, watchdog: CoordinatorWatchdog, coordinator: CoordinatorLink, execution: Execution, clock: Clock,
                 interval: float, *, send: Callable[[SideMessage], None], lost: Callable[[str], None],
                 decide: Callable[[], object]) -> None:
        self._watchdog, self._coordinator, self._execution, self._clock = watchdog, coordinator, execution, clock
        self._interval, self._next_look = interval, -math.inf
        self._send, self._lost, self._decide = send, lost, decide

    def heard(self) -> None:
        """Rank 0 has sent something."""
        self._watchdog.received()

    def look(self) -> float | None:
        """Look if it is time; return when to look again, in seconds, or None while nothing is pending."""
        execution, coordinator = self._execution, self._coordinator
        if not (execution.waits or coordinator.busy):
            self._watchdog.received()
            return None
        now = self._clock()
        if now < self._next_look and not coordinator.urgent:
            return self._interval
        self._next_look = now + self._interval
        side_message = self._watchdog.look(now, execution.waits, execution.partners, execution.moving_since)
        if side_message is not None:
            self._send(side_message)
        if reason := self._watchdog.gave_up(now):
            self._lost(reason)
        if coordinator.check_stalls(now):
            self._decide()
            return 0.0  # the decision is to be applied before this rank sleeps
        return self._interval

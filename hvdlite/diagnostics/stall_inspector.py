"""Detection of stalled tensors, silent ranks and circular waits (docs/protocol.md#silence).

While a tensor waits for some ranks, rank 0's `StallInspector` asks these ranks for their status now and then. A rank that
answers is slow: it is reported when the warning time has passed. A rank that does not answer within seconds is stopped, or
something in it holds the GIL: it is reported at once, with what its `ProcessProbe` finds, and ends the job after a longer
time.

On every rank a `CoordinatorWatchdog` checks in the same way that rank 0 is alive, and reports the partners of a collective
that has been under way for long, about which rank 0 would not ask. Neither does anything while nobody waits.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from hvdlite.core.errors import DeadlockError
from hvdlite.diagnostics.process_probe import ProcessProbe
from hvdlite.diagnostics.stall_report import RankState, StallReport, location_in_dump
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.messages import FailureNotice, OverdueWork, RankStatus, SideMessage
from hvdlite.negotiation.stalls import GpuStall, Stall, circle_of_messages, gpu_stall

_log = logging.getLogger("hvdlite")

ANSWER_SECONDS: Final = 2.0
"""Seconds that a rank has to answer."""
DEADLOCK_SECONDS: Final = 1.0
"""Seconds that ranks wait for each other in a circle before the job ends."""
LEADER_SECONDS: Final = 5.0
"""Seconds that a rank waits for its leader longer than the leader waits for rank 0, so that the leader can blame rank 0."""
LOOKS: Final = 4
"""Checks during the shortest of the times."""
_UNSEEN: Final = "its process is stopped, or something in it holds the GIL"


@dataclasses.dataclass(frozen=True)
class Times:
    """In seconds; 0 is never."""

    stall: float  # after which a waiting tensor is reported
    shutdown: float  # after which it ends the job
    silence: float  # after which a rank that is waited for is asked
    lost: float  # after which one that does not answer is given up

    @property
    def look(self) -> float:
        """Seconds before the first check; infinite when everything is off."""
        return min((time for time in (self.stall, self.shutdown, self.silence) if time > 0), default=math.inf)


Receiver = Callable[[StallReport], None]


@dataclasses.dataclass
class _PendingReport:
    """A report for which ranks' answers are still coming in."""

    stalls: list[Stall]
    asked: set[int]
    until: float
    receivers: list[Receiver]
    ends_job: bool = False


class StallInspector:
    """Detects stalled tensors, silent ranks and circles of waits; runs on rank 0.

    Args:
        deliver: gets every report on stalls.
        story: returns what happened to a tensor here.
    """

    def __init__(self, coordinator: Coordinator, times: Times, probe: ProcessProbe, deliver: Receiver,
                 story: Callable[[str], str]) -> None:
        self._coordinator = coordinator
        self._times = times
        self._probe = probe
        self._deliver = deliver
        self._story = story
        self._next_look = math.inf  # on the caller's clock; infinite while nothing waits
        self._asked: dict[int, float] = {}  # when; not answered since
        self._ask_again: dict[int, float] = {}  # answered: when to ask again
        self._silent: dict[int, str] = {}  # reported: its stacks
        self._pending: _PendingReport | None = None
        self._wanted: list[Receiver] = []  # on demand, not begun
        self._report_requested = False  # by some rank's user
        self._statuses: dict[int, RankStatus] = {}  # what ranks answered when they were last asked
        self._overdue: deque[OverdueWork] = deque()  # on GPUs, not looked at
        self._overdue_reported: set[tuple[int, int, bool]] = set()  # process set, sequence number, whether it ends the job
        self._suspects: set[int] = set()  # ranks that hold up others in the middle of a collective
        self._stuck: frozenset[int] = frozenset()  # ranks that wait for each other in a circle
        self._stuck_since = math.inf
        self._stuck_reported = False

    def receive(self, rank: int, message: SideMessage) -> None:
        """Handle what a rank reports beside tensors."""
        if message.status is not None:
            self._statuses[rank] = message.status
        self._suspects.update(message.slow_peers)
        self._report_requested |= message.requests_report
        if message.overdue is not None:
            self._overdue.append(message.overdue)

    def demand(self, receiver: Receiver) -> None:
        """Make a report now, of everything that waits and of every rank."""
        self._wanted.append(receiver)

    @property
    def busy(self) -> bool:
        """Whether there is anything to look after."""
        coordinator = self._coordinator
        return bool(coordinator.is_anything_pending or coordinator.blocked or self._suspects or self._report_requested
                    or self._overdue or self._wanted or self._pending or self._asked)

    def look(self, now: float) -> bool:
        """Do what is due at `now`; return whether the coordinator has something to send for it."""
        coordinator = self._coordinator
        if self._report_requested:
            self._report_requested = False
            self.demand(self._deliver)
        if not self.busy:
            self._next_look = math.inf
            return False
        acted = self._find_deadlock(now) | self._find_overdue(now)
        if self._wanted:
            wanted, self._wanted = self._wanted, []
            everybody = set(range(coordinator.size)) - coordinator.negotiator.left
            acted = self._begin(coordinator.pending(now), everybody, now, wanted)
        if self._next_look == math.inf:
            self._next_look = now + (0.0 if self._suspects else self._times.look)
        if now >= self._next_look or not self._silent.keys().isdisjoint(self._statuses):
            self._next_look = now + self._times.look / LOOKS
            acted = self._find_stalls(now) | self._find_silence(now) | acted
        pending = self._pending
        if pending and (now >= pending.until or pending.asked <= self._statuses.keys() | self._silent.keys()):
            self._pending = None
            acted = self._finish(pending, now) or acted
        return acted

    def _find_deadlock(self, now: float) -> bool:
        stuck, text = self._coordinator.blocked.deadlock(certain=False)
        if stuck != self._stuck:
            self._stuck, self._stuck_since, self._stuck_reported = stuck, now, False
        if not stuck or now - self._stuck_since < DEADLOCK_SECONDS:
            return False
        if self._coordinator.blocked.deadlock()[0] or 0 < self._times.stall <= now - self._stuck_since:
            self._coordinator.fail(FailureNotice(min(stuck), DeadlockError.__name__, text))
            return True
        if not self._stuck_reported:  # another thread may still help them
            self._stuck_reported = True
            _log.warning("%s", text)
        return False

    def _find_stalls(self, now: float) -> bool:
        found = self._coordinator.new_stalls(now, self._times.stall) if self._times.stall > 0 else []
        ends = self._times.shutdown > 0 and any(stall.waited >= self._times.shutdown
                                                for stall in self._coordinator.pending(now))
        if not found and not ends:
            return False
        if ends:
            found = self._coordinator.pending(now)
        missing = {rank for stall in found for rank in stall.missing}
        reference = min((rank for stall in found for rank in stall.enqueued), default=0)  # for comparison
        return self._begin(found, missing | {reference}, now, [self._deliver], ends_job=ends)

    def _find_overdue(self, now: float) -> bool:
        acted = False
        while self._overdue:
            work = self._overdue.popleft()
            ends = 0 < self._times.shutdown <= work.seconds
            key = work.process_set_id, work.sequence, ends
            if key not in self._overdue_reported:  # by another of its ranks
                self._overdue_reported.add(key)
                acted = self._begin([gpu_stall(work)], set(work.ranks), now, [self._deliver], ends_job=ends) or acted
        return acted

    def _find_silence(self, now: float) -> bool:
        coordinator, after = self._coordinator, self._times.silence
        awaited = self._suspects | (coordinator.missing(now, after) if after > 0 else set())
        self._suspects.clear()
        ask = [rank for rank in awaited if rank and rank not in self._asked and now >= self._ask_again.get(rank, -math.inf)]
        self._ask(ask, now)
        acted = bool(ask)
        for rank, when in list(self._asked.items()):
            waited = now - when
            if rank in self._statuses:
                del self._asked[rank]
                self._ask_again[rank] = now + after
                if self._silent.pop(rank, None) is not None:
                    _log.warning("rank %d answers again", rank)
            elif rank not in self._silent and waited >= ANSWER_SECONDS:
                self._report_silence(rank, waited)
            elif 0 < self._times.lost <= waited:
                coordinator.lose(rank, f"it has not answered for {waited:.0f} s (HVDLITE_HEARTBEAT_TIMEOUT): "
                                       f"{self._state(rank)}", is_silent=True)
                acted = True
        return acted

    def _report_silence(self, rank: int, waited: float) -> None:
        self._silent[rank] = stacks = self._probe.stacks(rank)
        location = location_in_dump(stacks)
        _log.warning("rank %d has not answered for %.0f s: %s%s%s", rank, waited, self._state(rank),
                     f"; it is in {location}" if location else "", f"\n{stacks.rstrip()}" if stacks else "")

    def _state(self, rank: int) -> str:
        return self._probe.state(rank) or _UNSEEN

    def _ask(self, ranks: Iterable[int], now: float) -> None:
        ranks = sorted(ranks)
        self._coordinator.order(status_requests=ranks)
        for rank in ranks:
            self._statuses.pop(rank, None)
            self._asked.setdefault(rank, now)

    def _begin(self, stalls: list[Stall], ask: set[int], now: float, receivers: list[Receiver], *,
               ends_job: bool = False) -> bool:
        ask = ask - self._pending.asked if self._pending else ask
        self._ask(ask, now)
        if self._pending is None:
            self._pending = _PendingReport(stalls, ask, now + ANSWER_SECONDS, receivers, ends_job)
            return bool(ask)
        known = {(type(stall), stall.name) for stall in stalls}
        self._pending.stalls = stalls + [stall for stall in self._pending.stalls if (type(stall), stall.name) not in known]
        self._pending.asked |= ask
        self._pending.receivers += [receiver for receiver in receivers if receiver not in self._pending.receivers]
        self._pending.ends_job |= ends_job
        return bool(ask)

    def _finish(self, pending: _PendingReport, now: float) -> bool:
        """Make the report; return whether it ends the job."""
        waiting = {stall.name: stall for stall in self._coordinator.pending(now)}
        stalls: list[Stall] = []
        for stall in pending.stalls:
            if not isinstance(stall, GpuStall):
                stalls.append(waiting.get(stall.name, stall))  # leaders have reported by now whom they wait for
            elif (known := stall.with_progress({rank: status.gpu for rank, status in self._statuses.items()},
                                               stall.missing)) is not None:
                stalls.append(known)
        if not stalls and pending.stalls:
            return False  # GPUs have finished meanwhile
        rank_states = {rank: self._rank_state(rank) for rank in sorted(pending.asked)}
        stories = {stall.name: story for stall in stalls if (story := self._story(stall.name))}
        report = StallReport(stalls, rank_states, stories, circle_of_messages(waiting.values()))
        for receiver in pending.receivers:
            receiver(report)
        if pending.ends_job and report.missing:
            self._coordinator.fail(FailureNotice(report.missing[0], "StallError", "\n".join(
                report.diagnosis(rank) for rank in report.missing), report.text(), tuple(report.missing)))
            return True
        return False

    def _rank_state(self, rank: int) -> RankState:
        status = self._statuses.get(rank)
        if status is not None:
            return RankState(rank, self._coordinator.state(rank), status)
        stacks = self._silent.get(rank) or self._probe.stacks(rank)
        return RankState(rank, self._state(rank), None, stacks)


class CoordinatorWatchdog:
    """Detects that rank 0 does not answer; runs on every rank.

    Args:
        parent: the rank through which rank 0 is asked, and answers.
        after: seconds of waiting after which to ask; 0 turns it off.
        lost: seconds without an answer after which rank 0 is given up; 0 is never.
    """

    def __init__(self, rank: int, parent: int, after: float, lost: float, probe: ProcessProbe) -> None:
        self._rank = rank
        self._parent = parent
        self._probe = probe
        self._after, self._lost = after or math.inf, (lost or math.inf) + (LEADER_SECONDS if parent else 0.0)
        self._since = math.inf  # since when it waits without a message from rank 0; infinite while it does not
        self._asked = math.inf  # when it asked rank 0, without an answer
        self._warned = False
        self._named = -math.inf  # when it last named its partners

    def received(self) -> None:
        """Rank 0 has sent something."""
        self._since = self._asked = math.inf
        if self._warned:
            self._warned = False
            _log.warning("rank %d: rank %d answers again", self._rank, self._parent)

    def look(self, now: float, waits: bool, partners: Iterable[int], partners_since: float) -> SideMessage | None:
        """Return what is to be reported to rank 0, if anything.

        Args:
            waits: whether this rank has enqueued something and not got it back.
            partners: the ranks of the collective that it is in the middle of, since `partners_since`.
        """
        if not waits:
            self._since = self._asked = math.inf
            return None
        if self._since == math.inf:
            self._since = now
        slow_peers: tuple[int, ...] = ()
        if now - max(partners_since, self._named) >= self._after:
            slow_peers = tuple(rank for rank in partners if rank != self._rank)
            self._named = now
        ping = self._rank != 0 and self._asked == math.inf and now - self._since >= self._after
        if ping:
            self._asked = now
        elif now - self._asked >= ANSWER_SECONDS and not self._warned:
            self._warned = True
            leads = ", which speaks with rank 0 for this host," if self._parent else ""
            _log.warning("rank %d: rank %d%s has not answered for %.0f s: %s", self._rank, self._parent, leads,
                         now - self._asked, self._state())
        return SideMessage(ping=ping, slow_peers=slow_peers) if ping or slow_peers else None

    def gave_up(self, now: float) -> str:
        """Return why the parent is lost, or ""."""
        if now - self._asked < self._lost:
            return ""
        return f"it has not answered for {now - self._asked:.0f} s (HVDLITE_HEARTBEAT_TIMEOUT): {self._state()}"

    def _state(self) -> str:
        location = location_in_dump(self._probe.stacks(self._parent))
        return (self._probe.state(self._parent) or _UNSEEN) + (f"; it is in {location}" if location else "")

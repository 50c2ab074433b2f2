"""The background thread of a rank: negotiate the work in the inbox, apply decisions, move tensors.

Theory of operation
- The thread turns the inbox into a report, handles received messages, and applies decisions strictly in order.
- Its only places to block are `ControlPlane.wait`, from the loop or, through `_wait_until`, from within a plane. Both
  handle messages and send reports, so a barrier neither delays the next report nor misses a death.
- The first failure ends the job on this rank: it is reported to the coordinator and logged once, and every pending and later
  call raises it. The thread itself never dies silently.

The way of a request: `Inbox` -> `Engine._take` -> `Controller.enqueue`, `report` -> `CoordinatorLink.send_report`. On rank 0
`RankZero` -> `Coordinator.receive` -> `Negotiator.receive_request`, and when the last rank has made it `agreement`, `fusion`
and `Coordinator.decide`. Back on every rank `Decisions.accept`, `apply_next` -> `Controller.apply` -> `Execution.carry_out`
-> `Plane.execute` -> `Entry.complete`.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Final, NoReturn

from hvdlite.control.star import Event, yield_processor
from hvdlite.core.config import Config
from hvdlite.core.errors import HorovodInternalError, MismatchError
from hvdlite.core.standstill import standstill
from hvdlite.core.system_limits import explained
from hvdlite.core.world import World
from hvdlite.diagnostics.flight_recorder import FlightRecorder
from hvdlite.diagnostics.stall_inspector import LOOKS, CoordinatorWatchdog, StallInspector, Times
from hvdlite.diagnostics.stall_report import CallHistory, StallReport
from hvdlite.diagnostics.timeline import Timeline
from hvdlite.engine.autotune import Autotuner
from hvdlite.engine.connections import FLUSH_SECONDS, LISTEN_SECONDS, LOOK_SECONDS, TRACE_BATCH, Connections
from hvdlite.engine.decisions import Decisions, JobFailed, failure_error, failure_notice
from hvdlite.engine.execution import Execution
from hvdlite.engine.mailboxes import Mailboxes
from hvdlite.engine.rank_zero import CoordinatorLink, RankZero
from hvdlite.handoff.buckets import BucketEntry
from hvdlite.handoff.entry import Entry
from hvdlite.handoff.handle import BlockedWaiters
from hvdlite.handoff.handoff import Handoff
from hvdlite.handoff.inbox import Item, Task
from hvdlite.negotiation.controller import Controller
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.messages import (
    Decision,
    DirectMessage,
    FailureNotice,
    LayoutStale,
    MailboxStale,
    OverdueWork,
    RankStatus,
    Retired,
    RoundDone,
    SideMessage,
)

_log = logging.getLogger("hvdlite")

POLL_SECONDS: Final = 200e-6
"""How long an engine is polled before messages are looked for."""


class Engine:
    """The background thread and its private state.

    Args:
        serves: the ranks that need this one until they have left: on rank 0 all, on a host's leader the host's.
        spin: seconds to poll for messages before sleeping, while a user thread is blocked.
        look_seconds: how often to look for stalls while something is pending.

    Attributes:
        history: the collectives that this rank has called last.
    """

    def __init__(self, connections: Connections, controller: Controller, coordinator: CoordinatorLink, handoff: Handoff,
                 recorder: FlightRecorder, watchdog: CoordinatorWatchdog, *, serves: frozenset[int], spin: float,
                 look_seconds: float) -> None:
        self._rank, self._serves, self._spin = controller.rank, serves, spin
        self._connections, self._control = connections, connections.control
        self._controller, self._coordinator = controller, coordinator
        self._inbox, self._waiters, self._state = handoff.inbox, handoff.waiters, handoff.state  # shared with user threads
        self._recorder, self._clock = recorder, connections.clock
        self.history = CallHistory()
        self._mailboxes = Mailboxes(connections.mailbox_area, handoff, controller, recorder, self.history,
                                    casts=connections.casts, spin=spin)
        self._execution = Execution(connections, handoff, controller, recorder, self._mailboxes, self._wait_until)
        self._decisions = Decisions(controller, coordinator, self._execution, handoff, recorder, connections.oob,
                                    self._status)
        self._watchdog, self._look_seconds, self._next_look = watchdog, look_seconds, -math.inf
        connections.oob.connect(controller.send_side_message, self._inbox.post)
        self._listened = self._clock()  # when messages were last handled
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name=f"hvdlite-rank-{self._rank}", daemon=True)

    # --- user threads ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        with explained(f"the background thread of rank {self._rank}"):
            self._thread.start()

    def join(self, timeout: float | None) -> None:
        """Wait until the thread has ended, at most `timeout` seconds; without one as long as it takes."""
        self._thread.join(timeout)

    def awaited(self) -> str:
        """Say for what this rank still waits when it leaves, for a log line."""
        if self._state.closing is not None:
            frame = sys._current_frames().get(self._thread.ident or 0)
            where = "".join(traceback.format_stack(frame)) if frame is not None else "it has just ended"
            return f" for its background thread, which closes:\n{where}"
        if not self._decisions.has_left and 0 not in self._serves:
            return " for rank 0 to confirm"
        return f" for ranks {sorted(self._serves - self._state.departed)} to leave"

    # --- tasks that user threads put into the inbox ------------------------------------------------------------------

    def leave(self) -> None:
        """Leave the job: pending handles fail; what is agreed on is still done, for the others."""
        self._leaving = True
        self._controller.leave()
        error = self._state.closing_error()
        for entry in self._execution.pending():
            entry.abandon(error)
        self._mailboxes.leave(error)
        self._recorder.trace(False)

    def fail(self, notice: FailureNotice) -> NoReturn:
        """This rank notices a failure first: report it to the others, and end.

        Raises:
            JobFailed: always.
        """
        self._coordinator.fail(notice)
        raise JobFailed(notice)

    def stop(self, reason: str) -> NoReturn:
        """The world of an elastic job ends, by order of the launcher or of this rank's script.

        The others receive the reason, so that they do not take this rank for lost.

        Raises:
            JobFailed: always.
        """
        self.fail(FailureNotice(-1, "stopped", reason))

    def request_report(self) -> None:
        """Let rank 0 report which tensors wait for which ranks."""
        self._controller.send_side_message(SideMessage(requests_report=True))

    def report_overdue(self, work: OverdueWork) -> None:
        """Report to rank 0 what this rank's GPU has not finished for long."""
        self._controller.send_side_message(SideMessage(overdue=work))

    def mailbox_bytes(self) -> int:
        """Return the memory of this rank's part of mailboxes; callable from any thread."""
        return sum(list(self._mailboxes.held.values()))

    def suspect(self, others: tuple[int, ...]) -> None:
        """Let rank 0 see whether others are alive: this rank has waited long in the middle of a call of a group of them."""
        self._controller.send_side_message(SideMessage(slow_peers=others))

    # --- the loop --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except JobFailed as failed:
            self._state.failure = failure_error(failed.notice, self._rank, self._connections.rank_names)
            if (failed.notice.origin != self._rank and failed.notice.kind != "stopped"
                    and not (self._waiters or self._mailboxes.in_use
                             or any(group.runner for group in list(self._state.groups)))
                    and failed.notice.kind != MismatchError.__name__):  # which the ranks concerned raise themselves
                # No thread raises it now.
                _log.error("rank %d: %s", self._rank, str(self._state.failure).splitlines()[0])
        finally:
            self._close()

    def _serve(self) -> None:
        try:
            while not (self._decisions.has_left and self._state.departed >= self._serves):
                self._exchange()
                while self._decisions:
                    self._decisions.apply_next()
        except JobFailed:
            raise
        except Exception as error:  # a defect, or no memory: report it rather than die silently
            _log.exception("rank %d: the background thread failed", self._rank)
            self.fail(failure_notice(error, self._rank))

    def _exchange(self, *, within_plan: bool = False, sleep: bool = True) -> None:
        """Send this rank's report, handle received messages, and block when idle.

        Within a plan it blocks although decisions are queued: they come after the plan.
        """
        self._listened = self._clock()
        self._send_report()
        received = self._decide()
        busy = not sleep or received or (bool(self._decisions) and not within_plan)
        inbox = self._inbox
        if not busy:
            inbox.awake = False
            busy = bool(inbox.items)
        try:
            events = self._control.wait(0 if busy else self._look(), self._spin if self._waiters else 0.0)
        finally:
            inbox.awake = True
        for event in events:
            self._receive(event)
        self._decide()

    def _send_report(self) -> None:
        """Turn what user threads enqueued into a report."""
        items = self._inbox.items
        while items:
            self._take(items.popleft())
        unreported = self._recorder.unreported
        if unreported and (self._controller.has_news or unreported >= TRACE_BATCH or self._leaving):
            self._controller.send_side_message(SideMessage(trace=self._recorder.take_trace()))
        report = self._controller.report()
        if report is not None:
            self._coordinator.send_report(report)

    def _take(self, item: Item) -> None:
        match item:
            case Entry(request=request):
                self.history.add(request.name)
                self._execution.add(item)
                self._controller.enqueue(request)
            case BucketEntry(bucket=bucket, ready=ready):
                self.history.add(item.handle.name)
                self._execution.add_bucket(item)
                expanded = self._controller.enqueue_bucket(bucket.definition, ready)
                if expanded is not None:
                    self._execution.split(expanded)
            case RoundDone():
                self._controller.round_done(item)
            case LayoutStale(layout):
                self._controller.mark_stale(layout)
            case Retired():
                self._controller.retire(item)
            case MailboxStale():
                self._mailboxes.stale(item)
            case BlockedWaiters():
                self._controller.block(item.blocked(list(self._state.groups)))
            case Task():
                item.run()

    def _decide(self) -> bool:
        """On rank 0: let the coordinator answer what has been reported.

        Return whether this rank itself got a direct message, which the plan under way may wait for.
        """
        is_addressed = False
        for event in self._coordinator.decide():
            self._receive(event)
            is_addressed = is_addressed or isinstance(event, DirectMessage)
        return is_addressed

    def _receive(self, event: Event) -> None:
        match event:
            case Decision() as decision:
                self._watchdog.received()
                self._decisions.accept(decision)
            case DirectMessage() as message:
                if self._controller.is_foreign(message):
                    return
                self._execution.add_receive_splits(message.receive_splits)
                self._connections.oob.receive(message.oob_messages)
            case _:
                notice = self._coordinator.receive(event)
                if notice is not None and notice.origin not in self._state.departed:
                    self.fail(notice)

    def _wait_until(self, predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
        if poll_interval:
            _poll(predicate, poll_interval, lambda: self._waiters, self._glance)
        while not predicate():
            self._exchange(within_plan=True)
        if self._clock() - self._listened > LISTEN_SECONDS:  # the last to arrive everywhere still receives messages
            self._exchange(within_plan=True, sleep=False)
            self._send_report()

    def _glance(self) -> None:
        """Handle messages in the middle of a plan, without blocking."""
        self._exchange(within_plan=True, sleep=False)
        self._look()

    def _look(self) -> float | None:
        """Look for stalls if it is time; return when to look again, in seconds, or None while nothing is pending."""
        coordinator, execution = self._coordinator, self._execution
        is_late = self._mailboxes.act_again()
        if not (execution.waits or coordinator.busy):
            self._watchdog.received()
            self._next_look = -math.inf  # being idle is no standstill
            return self._look_seconds if is_late else None
        now = self._clock()
        if now < self._next_look and not coordinator.urgent:
            return self._look_seconds
        if standstill(self._next_look, now, 0.0):
            self._next_look = -math.inf  # what has arrived meanwhile is received first
            return self._look_seconds
        self._next_look = now + self._look_seconds
        message = self._watchdog.look(now, execution.waits, execution.partners, execution.moving_since)
        if message is not None:
            self._controller.send_side_message(message)
            self._send_report()
        if reason := self._watchdog.gave_up(now):
            self.fail(FailureNotice(self._control.parent, "lost", reason, blamed=(self._control.parent,)))
        if coordinator.check_stalls(now):
            self._decide()
            return 0.0  # the decision is to be applied before this rank sleeps
        return self._look_seconds

    def _status(self) -> RankStatus:
        self._notify_groups()
        devices = self._connections.devices
        waiting = [*(entry.handle.name for entry in self._execution.pending()), *self._mailboxes.waiting.values(),
                   *(wait.name for group in list(self._state.groups) for wait in group.calls().waits)]
        return self.history.status(self._inbox.last_caller, waiting, () if devices is None else devices.progress(),
                                   self._waiters.progress.ledger())

    def _notify_groups(self) -> None:
        """Notify those who watch groups that a report is gathered, or that the job fails: each of them once."""
        for notify in {group.on_report for group in list(self._state.groups)}:
            notify()

    def _close(self) -> None:
        """Close every part, whatever others raise; in the end no thread waits for this one any more."""
        state, connections = self._state, self._connections
        if state.failure is None and not self._decisions.has_left:
            state.failure = HorovodInternalError("the background thread ended unexpectedly; see the log")
        error = state.closing_error()
        parts: list[Callable[[], Any]] = [
            *([] if state.failure is None else [self._notify_groups]),
            lambda: state.fail_groups(error),
            lambda: self._control.flush(FLUSH_SECONDS), lambda: connections.oob.close(error),
            lambda: self._execution.fail(error), connections.plane.close]
        devices = connections.devices
        if devices is not None:
            parts.append(lambda: devices.close(state.failure))
        parts += [self._control.close, lambda: self._coordinator.close(self._recorder.take_trace(), error)]
        try:
            for close in parts:
                try:
                    close()
                except Exception:
                    _log.exception("rank %d: a part of the runtime could not be closed", self._rank)
        finally:
            state.ended.set()
            self._inbox.abandon_all()


def build_engine(world: World, config: Config, connections: Connections, coordinator: Coordinator | None, handoff: Handoff,
                 recorder: FlightRecorder) -> tuple[Engine, RankZero | None]:
    """Return a rank's background thread, not yet started, and rank 0's duties when this is rank 0.

    Args:
        coordinator: on rank 0 only.
    """
    control, clock, probe = connections.control, connections.clock, connections.probe
    times = Times(config.stall_check_time_seconds, config.stall_shutdown_time_seconds, config.silence_check_seconds,
                  config.heartbeat_timeout)
    controller = Controller(world.rank, epoch=world.epoch)
    rank_zero = None
    if coordinator is not None:
        deliver = functools.partial(StallReport.deliver, path=config.stall_report_file)
        rank_zero = RankZero(coordinator, control, controller, recorder, clock,
                             StallInspector(coordinator, times, probe, deliver, recorder.story),
                             Timeline(world.size, lambda on: coordinator.order(timeline=on, now=clock()), clock),
                             Autotuner(config, coordinator, clock) if config.autotune else None)
    watchdog = CoordinatorWatchdog(world.rank, control.parent, config.silence_check_seconds, config.heartbeat_timeout, probe)
    link = rank_zero or CoordinatorLink(control, controller)
    engine = Engine(connections, controller, link, handoff, recorder, watchdog,
                    serves=frozenset(range(world.size)) if rank_zero else control.children,
                    spin=config.spin_microseconds * 1e-6 if world.size > 1 else 0.0,
                    look_seconds=min(LOOK_SECONDS, times.look / LOOKS))
    return engine, rank_zero


def _poll(predicate: Callable[[], bool], poll_interval: float, hurried: Callable[[], object],
         look_out: Callable[[], object]) -> None:
    """Wait for a library that makes progress only while it is called (MPI), and look out for messages, which may raise.

    Args:
        poll_interval: seconds to sleep between looks, for the script to have the processor.
        hurried: returns whether the script is blocked in a wait, and so leaves the processor to this thread.
    """
    while not predicate():
        if hurried():
            until = time.perf_counter() + POLL_SECONDS
            while time.perf_counter() < until:
                if predicate():
                    return
                yield_processor()
        else:
            time.sleep(poll_interval)
        look_out()

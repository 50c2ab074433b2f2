"""One rank's runtime: user threads hand tensors in, one background thread negotiates and moves them.

Theory of operation
- A call makes an `Entry`, appends it to the inbox and rings this rank's doorbell if the thread may be asleep. It never
  blocks and takes one lock, which guards the set of names in use.
- A full bucket of a gradient set takes the same way, as one `BucketEntry`; user threads fill it without asking anybody.
- The thread turns the inbox into a report, takes in what others say, and executes decisions strictly in order.
- Its only places to block are `ControlPlane.wait`, from the loop or, through `_wait_until`, from within a plane. Both
  take in messages and send reports, so a barrier neither delays the next report nor misses a death.
- The first failure ends the runtime: it is told to the coordinator, logged once, and raised by every pending and later
  call. The thread itself never dies silently.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from hvdlite.control.base import (
    ControlPlane,
    DecisionReceived,
    DirectMessageReceived,
    Event,
    HostReportReceived,
    PeerLost,
    ReportReceived,
)
from hvdlite.core.config import Config
from hvdlite.core.device import DeviceAccess
from hvdlite.core.errors import (
    DuplicateNameError,
    ForkedProcessError,
    HorovodInternalError,
    NotInitializedError,
    UnsupportedError,
)
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.world import Hosts, World
from hvdlite.diagnostics.flight_recorder import FlightRecorder
from hvdlite.diagnostics.report_server import ReportServer
from hvdlite.diagnostics.stall_inspector import LOOKS, CoordinatorWatchdog, ProcessProbe, Receiver, StallInspector, Times
from hvdlite.diagnostics.stall_report import StallReport, rank_status
from hvdlite.diagnostics.timeline import Timeline
from hvdlite.engine.autotune import Autotuner
from hvdlite.engine.execution import Execution
from hvdlite.engine.failures import failure_error
from hvdlite.engine.limits import EAGER_TRAFFIC, FLUSH_SECONDS, LISTEN_SECONDS, LOOK_SECONDS, RECENT, TRACE_BATCH
from hvdlite.engine.oob import OobChannel
from hvdlite.engine.polling import poll
from hvdlite.handoff.buckets import BucketEntry
from hvdlite.handoff.entry import Entry
from hvdlite.handoff.handle import Handle
from hvdlite.negotiation.controller import Controller
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.messages import (
    Decision,
    FailureNotice,
    HostReport,
    LayoutStale,
    MergedRequests,
    RankReport,
    Report,
    Retired,
    RoundDone,
    SideMessage,
    Wait,
)
from hvdlite.negotiation.oob_store import OobStore
from hvdlite.planes.base import DevicePlane, Plane
from hvdlite.runtime.declared import DeclaredSets, Item

_log = logging.getLogger("hvdlite")

_SHUT_DOWN = "hvdlite was shut down on this rank before the collective was complete"


class _Ended(Exception):
    """Unwinds the runtime thread once the job has failed; the reason is kept by the runtime."""


class Runtime(DeclaredSets):
    """One rank's engine; made by `runtime.assemble`, shared by all adapters of a process.

    Args:
        coordinator: on rank 0 only.
        probe: what is known of the ranks of this host without asking them; None where nothing is.
        clock: seconds on a monotonic clock, the same for all ranks of the job.
        oob: what its planes swap when they connect.
        hosts: of all ranks; None when they share one.
        devices: the plane for tensors on GPUs; None where there is none.
    """

    def __init__(self, world: World, config: Config, control: ControlPlane, plane: Plane, coordinator: Coordinator | None,
                 probe: ProcessProbe | None = None, clock: Callable[[], float] = time.monotonic,
                 oob: OobChannel | None = None, hosts: Hosts | None = None, devices: DevicePlane | None = None) -> None:
        super().__init__(min(config.eager_limit, EAGER_TRAFFIC // world.size))
        self.world = world
        self.hosts = hosts or Hosts((tuple(range(world.size)),))
        self.config = config
        self._control, self._coordinator = control, coordinator
        self._clock, self._spin = clock, config.spin_microseconds * 1e-6
        self._controller = Controller(world.rank)
        self._oob = oob or OobChannel(world.rank)
        self._inbox: deque[Item] = deque()
        self._oob.speak_through(self._controller.send_side_message, self._inbox.append, control.wake)
        self._names: set[tuple[int, str]] = set()  # with their process sets
        self._names_lock = threading.Lock()
        self._recorder = FlightRecorder(world.rank, plane.name, clock)
        self._work = Execution(world.rank, world.size, plane, self._recorder, clock, devices=devices,
                               wait_until=self._wait_until, free=self._free, mark_stale=self._controller.mark_stale,
                               start_anew=self._start_anew)
        self._plane, self._devices = plane, devices
        if devices is not None:
            devices.set_error_handler(lambda error: self.fail(type(error).__name__, str(error), ""))
        self._decisions: deque[Decision] = deque()  # received and not applied
        times = Times(config.stall_check_time_seconds, config.stall_shutdown_time_seconds, config.silence_check_seconds,
                      config.heartbeat_timeout)
        deliver = functools.partial(StallReport.deliver, path=config.stall_report_file)
        self._stall_inspector = (None if coordinator is None else
                                 StallInspector(coordinator, times, probe, deliver, self.story))
        self._oob_store = OobStore()  # rank 0's
        self._autotuner = None if coordinator is None or not config.autotune else Autotuner(config, coordinator, clock)
        self._watchdog = CoordinatorWatchdog(world.rank, control.parent, config.silence_check_seconds,
                                             config.heartbeat_timeout, probe)
        self._look_seconds = min(LOOK_SECONDS, times.look / LOOKS)
        self._next_look = -math.inf
        self._listened = clock()  # when messages were last taken in
        self._recent: deque[str] = deque(maxlen=RECENT)  # names of the last collectives
        self._count = 0  # of them, since the beginning
        self._caller = threading.get_ident()  # the thread that last called one
        self._report_requested = False
        self._mark_cycles = False  # in the timeline
        self._report_server: ReportServer | None = None
        self._timeline = None if coordinator is None else Timeline(
            world.size, lambda on: coordinator.order(timeline=on), clock)
        self._awake = True  # False only around a blocking wait; see _submit
        self._leaving = self._told_leaving = self._left = False
        self._departed: set[int] = set()  # ranks that left normally
        self._own_failure: FailureNotice | None = None  # handed in by `fail`
        self._failure: HorovodInternalError | None = None
        self._pid, self._ended = os.getpid(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"hvdlite-rank-{world.rank}", daemon=True)

    def start(self) -> None:
        """Start the background thread."""
        self._thread.start()

    @property
    def failure(self) -> HorovodInternalError | None:
        """What ended the job, or None while it runs."""
        return self._failure

    def fail(self, kind: str, message: str, traceback: str, origin: int | None = None) -> None:
        """Tell all ranks that this one cannot go on, and wait until that is on its way.

        Args:
            origin: the rank where the failure began, when this one merely suffers from it.
            kind: the exception's type name.
            message: its text.
            traceback: its formatted traceback, shown to the other ranks as the cause.
        """
        if self.in_child or self._ended.is_set():
            return
        self._own_failure = FailureNotice(self.world.rank if origin is None else origin, kind, message, traceback)
        self._control.wake()
        self._ended.wait(FLUSH_SECONDS)

    def shutdown(self) -> None:
        """Leave the job: pending handles fail, work already agreed on is finished for the others' sake.

        Rank 0 serves until all others have left too, and the leader of a host until its host's have, at most
        `shutdown_timeout` seconds (0: for ever); then it logs whom it waits for. Idempotent; nothing in a forked child.
        """
        if self.in_child or self._leaving:
            return
        self._leaving = True
        self._control.wake()
        if not self._ended.wait(self.config.shutdown_timeout or None):
            _log.error("rank %d: gave up waiting in shutdown() after %.0f s%s (HVDLITE_SHUTDOWN_TIMEOUT)",
                       self.world.rank, self.config.shutdown_timeout, self._missing_leavers())
        self._thread.join(FLUSH_SECONDS)

    @property
    def plane_name(self) -> str:
        """The data plane that carries tensors."""
        return self._plane.name

    @property
    def devices(self) -> DeviceAccess | None:
        """Return what adapters may ask of the plane for GPUs; None where all tensors are on the host."""
        return self._devices

    @property
    def in_child(self) -> bool:
        """Whether this process is a forked child, to which the runtime does not belong."""
        return self._pid != os.getpid()

    def open_desk(self, directory: str) -> None:
        """On rank 0: answer requests for reports that come through the job's directory."""
        self._report_server = ReportServer(directory, self.demand_report)

    def close_in_child(self) -> None:
        """In a forked child: close every descriptor, so that the parent's death is not hidden by it.

        What is shared with the parent is left as it is: its pages (`memory.shared`), its connections, what it published.
        """
        if self._report_server is not None:
            self._report_server.close_in_child()
        self._control.close_in_child()
        self._plane.close()
        self.progress.withdraw()

    # --- process sets ----------------------------------------------------------------------------------------------

    def members(self, process_set: int) -> tuple[int, ...]:
        if process_set not in self._work.process_sets:
            raise UnsupportedError(f"there is no process set {process_set}; it was removed, or never added")
        return self._work.process_sets[process_set]

    def _find_set(self, members: tuple[int, ...]) -> int | None:
        return self._work.process_sets.find(members)

    # --- looking in ------------------------------------------------------------------------------------------------

    def story(self, name: str) -> str:
        """Return what happened to a tensor on this rank lately, one line an event; "" when nothing is remembered."""
        return self._recorder.story(name)

    def request_report(self) -> None:
        """Let rank 0 report who waits for whom, on its standard error; callable from signal handlers. Does not wait."""
        self._report_requested = True
        self._control.wake()

    def demand_report(self, receiver: Receiver) -> None:
        """On rank 0: let `receiver` have a report on who waits for whom; it is called by the runtime thread."""
        inspector = self._stall_inspector
        assert inspector is not None, "reports are rank 0's"
        self._hand_in(lambda: inspector.demand(receiver))

    def start_timeline(self, path: str, mark_cycles: bool = False) -> None:
        """Write what all ranks do to `path` from now on; on rank 0 only, elsewhere a call does nothing.

        Args:
            mark_cycles: show decisions.

        Raises:
            ConfigError: when the file cannot be written.
        """
        self._mark_cycles = mark_cycles and self.world.rank == 0
        self._order_timeline(path)

    def stop_timeline(self) -> None:
        """End the timeline, and return when its file is complete; on rank 0 only, elsewhere a call does nothing."""
        self._order_timeline("")

    def _order_timeline(self, path: str) -> None:
        self._check_usable("timeline")
        timeline = self._timeline
        if timeline is not None:
            handle = Handle("timeline", self._sleepers, Wait(GLOBAL_PROCESS_SET_ID, "timeline"))
            order = timeline.order(path, handle.settle)
            self._hand_in(lambda: timeline.change(order))
            handle.wait()

    # --- handing in ------------------------------------------------------------------------------------------------

    def _submit(self, entry: Entry, *, at_once: bool = True) -> Handle:
        name = entry.request.name
        self._check_usable(name)
        with self._names_lock:
            if entry.key in self._names:
                raise DuplicateNameError(f"'{name}' is still being processed on rank {self.world.rank}; wait for its handle "
                                         "first, or use another name")
            self._names.add(entry.key)
        self._hand_in(entry, at_once=at_once)
        return entry.handle

    def _check_usable(self, name: str) -> None:
        if self.in_child:
            raise ForkedProcessError(f"'{name}': this process (pid {os.getpid()}) was forked from rank "
                                     f"{self.world.rank} (pid {self._pid}); collectives belong to the rank itself. "
                                     "Start workers with the spawn method if they must call init()")
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self._leaving:
            raise NotInitializedError(f"'{name}': hvdlite has been shut down; call init() again")

    def _hand_in(self, item: Item, *, at_once: bool = True) -> None:
        self._caller = threading.get_ident()
        self._inbox.append(item)
        # The thread clears _awake, then looks into the inbox, then sleeps: whoever sees it awake has been seen.
        if at_once and not self._awake:
            self._control.wake()
        if self._ended.is_set():
            self._fail_inbox()  # the thread ended between the caller's check and the append

    def _slip_in(self, item: Item) -> None:
        """Like `_hand_in`, in the middle of anything: takes no lock but the doorbell's, which its holder may take again."""
        if not (self.in_child or self._leaving or self._ended.is_set()):
            self._inbox.append(item)
            if not self._awake:
                self._control.wake()

    def _tell_blocked(self) -> None:
        self._hand_in(lambda: self._controller.block(self._sleepers.blocked()))

    def _about_to_sleep(self) -> None:
        if (self._spin or self._inbox) and not self._awake:
            self._control.wake()  # it may sleep already, since before the caller did, or not know yet what it is to do

    # --- the background thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._finished():
                self._exchange()
                while self._decisions:
                    self._apply(self._decisions.popleft())
        except _Ended:
            pass
        except Exception as error:  # a defect, or no memory: tell everybody rather than die silently
            _log.exception("rank %d: the runtime thread failed", self.world.rank)
            with contextlib.suppress(_Ended):
                self._give_up(FailureNotice(self.world.rank, type(error).__name__, str(error)))
        finally:
            self._close()

    def _finished(self) -> bool:
        """Whether this rank has left, and so have those who need it: on rank 0 everybody, on a leader its host's."""
        if self._coordinator is not None:
            return self._left and len(self._coordinator.left) == self.world.size
        return self._left and self._departed >= self._control.children

    def _exchange(self, *, within_plan: bool = False, sleep: bool = True) -> None:
        """Say what is new, take in what others say, and sleep when there is nothing else to do.

        Within a plan it sleeps although decisions are queued: they come after the plan.
        """
        self._listened = self._clock()
        self._say()
        self._decide()
        busy = not sleep or (bool(self._decisions) and not within_plan)
        if not busy:
            self._awake = False
            busy = bool(self._inbox)
        try:
            events = self._control.wait(0 if busy else self._look_out(), self._spin if self._sleepers else 0.0)
        finally:
            self._awake = True
        for event in events:
            self._take_in(event)
        self._decide()

    def _say(self) -> None:
        """Turn what user threads handed in into a report."""
        if self._own_failure is not None:
            self._give_up(self._own_failure)
        while self._inbox:
            self._take_over(self._inbox.popleft())
        if self._leaving and not self._told_leaving:
            self._told_leaving = True
            self._controller.leave()
            for entry in self._work.pending():
                entry.abandon(HorovodInternalError(_SHUT_DOWN))
            self._recorder.trace(False)
        if self._report_requested:
            self._report_requested = False
            self._controller.send_side_message(SideMessage(requests_report=True))
        if self._recorder.untold and (self._controller.has_news or self._recorder.untold >= TRACE_BATCH or self._leaving):
            self._controller.send_side_message(SideMessage(trace=self._recorder.take_trace()))
        report = self._controller.report()
        if report is not None:
            self._tell(report)

    def _take_over(self, item: Item) -> None:
        match item:
            case Entry(request=request):
                self._remember(request.name)
                self._work.add(item)
                self._controller.submit(request)
            case BucketEntry(bucket=bucket, ready=ready):
                self._remember(item.handle.name)
                self._work.add_bucket(item)
                expanded = self._controller.submit_bucket(bucket.definition, ready)
                if expanded is not None:
                    self._work.split(expanded)
            case RoundDone():
                self._controller.round_done(item)
            case LayoutStale(layout):
                self._controller.mark_stale(layout)
            case Retired():
                self._controller.retire(item)
            case _:
                item()

    def _remember(self, name: str) -> None:
        self._recent.append(name)
        self._count += 1

    def _tell(self, report: Report) -> None:
        if self._coordinator is not None:
            self._hear(0, report)
        else:
            self._control.send_report(report)

    def _decide(self) -> None:
        """On rank 0: answer what has been reported."""
        if self._coordinator is None:
            return
        if self._autotuner is not None:
            self._autotuner.look()
        decision = self._coordinator.decide()
        messages = (*self._coordinator.take_direct_messages(), *self._oob_store.take_direct_messages())
        if messages:
            self._control.send_direct_messages(messages)
            for message in messages:
                if message.rank == 0:
                    self._take_in(DirectMessageReceived(message))
        if decision is not None:
            self._control.send_decision(decision)
            self._accept(decision)

    def _look_out(self) -> float | None:
        """Notice what has waited long; return when to look again, in seconds, or None while nothing waits."""
        work, inspector = self._work, self._stall_inspector
        if not (work.waits or (inspector is not None and inspector.busy)):
            self._watchdog.heard()
            return None
        now = self._clock()
        if now < self._next_look:
            return self._look_seconds
        self._next_look = now + self._look_seconds
        side_message = self._watchdog.look(now, work.waits, work.partners, work.moving_since)
        if side_message is not None:
            self._controller.send_side_message(side_message)
            self._say()
        if lost := self._watchdog.gave_up(now):
            self._give_up(FailureNotice(self._control.parent, "lost", lost))
        if inspector is not None and inspector.look(now):
            self._decide()
            return 0.0  # the decision is to be applied before sleeping
        return self._look_seconds

    def _take_in(self, event: Event) -> None:
        match event:
            case DecisionReceived(decision):
                self._watchdog.heard()
                self._accept(decision)
            case DirectMessageReceived(message):
                self._work.add_receive_splits(message.receive_splits)
                self._oob.take_in(message.oob_messages)
            case ReportReceived(rank, report):
                self._hear(rank, report)
            case HostReportReceived(ranks, merged):
                self._hear_host(ranks, merged)
            case PeerLost(rank, reason) if self._coordinator is not None:
                self._coordinator.lose(rank, reason)
            case PeerLost(rank, reason) if rank not in self._departed:
                self._give_up(FailureNotice(rank, "lost", reason))  # rank 0 may not see that one

    def _hear(self, rank: int, report: Report) -> None:
        """On rank 0: take in what a rank, this one included, reports."""
        assert self._coordinator is not None
        self._coordinator.receive(rank, report, self._clock())
        self._heed(rank, report)

    def _hear_host(self, ranks: Sequence[int], merged: HostReport) -> None:
        """Like `_hear`, of what a leader passes on."""
        assert self._coordinator is not None
        self._coordinator.receive_host(tuple(ranks), merged, self._clock())
        for item in merged.items:
            if isinstance(item, RankReport):
                self._heed(item.rank, item.report)
            elif isinstance(item, MergedRequests):
                self._recorder.ready_elsewhere(item.ranks, item.requests)
            else:
                self._recorder.ready_elsewhere(ranks, (item,))

    def _heed(self, rank: int, report: Report) -> None:
        """What is not the coordinator's business in a report."""
        assert self._coordinator is not None and self._stall_inspector is not None
        if report.epoch != self._coordinator.epoch:
            return
        if report.side_message is not None:
            self._next_look = -math.inf  # it may be what the stall inspector waits for
            self._stall_inspector.receive(rank, report.side_message)
            self._oob_store.receive(rank, report.side_message)
            if report.side_message.ping:
                self._coordinator.order(pong=(rank,))
        self._recorder.ready_elsewhere((rank,), report.items)
        if self._timeline is not None and (report.side_message is not None or report.leaving):
            self._timeline.hear(rank, () if report.side_message is None else report.side_message.trace, report.leaving)

    def _accept(self, decision: Decision) -> None:
        """Queue a decision; what it says of ranks counts at once, even in the middle of a plan."""
        if self.world.rank in decision.status_requests:
            waiting = [entry.handle.name for entry in self._work.pending()]
            begun = self._count - len(self._recent) + 1
            self._controller.send_side_message(SideMessage(status=rank_status(self._caller, tuple(self._recent), begun,
                                                                              waiting)))
        self._departed.update(decision.left)
        if self.world.rank in decision.deferred:
            self._sleepers.defer()
        if decision.failure is not None:
            self._end(decision.failure)
        self._decisions.append(decision)

    def _apply(self, decision: Decision) -> None:
        if decision.timeline is not None:
            self._recorder.trace(decision.timeline)
            self._controller.send_side_message(SideMessage(trace=self._recorder.take_trace()))
            if decision.timeline and self._timeline is not None:
                self._timeline.started()
        if self._mark_cycles:
            self._recorder.cycle(decision.sequence)
        self._work.carry_out(decision, self._controller.apply(decision), frozenset(self._departed))
        if self.world.rank in decision.left:
            self._left = True

    def _free(self, entry: Entry) -> None:
        with self._names_lock:
            self._names.discard(entry.key)

    def _wait_until(self, predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
        if poll_interval:
            poll(predicate, poll_interval, lambda: self._sleepers, self._glance)
        while not predicate():
            self._exchange(within_plan=True)
        if self._clock() - self._listened > LISTEN_SECONDS:  # the last to arrive everywhere still hears what is said
            self._exchange(within_plan=True, sleep=False)
            self._say()

    def _glance(self) -> None:
        """Take in messages in the middle of a plan, without sleeping."""
        self._exchange(within_plan=True, sleep=False)
        self._look_out()

    # --- the end ---------------------------------------------------------------------------------------------------

    def _give_up(self, notice: FailureNotice) -> None:
        """This rank knows of the failure first: tell the others, then end."""
        if self._coordinator is not None:
            self._coordinator.fail(notice)
            decision = self._coordinator.decide()
            if decision is not None:
                self._control.send_decision(decision)
        else:
            self._controller.fail(notice)
            report = self._controller.report()
            if report is not None:
                self._control.send_report(report)
        self._end(notice)

    def _end(self, notice: FailureNotice) -> None:
        if self._failure is None:
            self._failure = failure_error(notice, self.world.rank)
            if notice.origin != self.world.rank:
                _log.error("rank %d: %s", self.world.rank, str(self._failure).splitlines()[0])
        raise _Ended

    def _close(self) -> None:
        """Close every part, whatever others raise; in the end nobody waits for this thread any more."""
        if self._failure is None and not self._left:
            self._failure = HorovodInternalError("the runtime thread ended unexpectedly; see the log")
        parts: list[Callable[[], object]] = [
            lambda: self._control.flush(FLUSH_SECONDS), lambda: self._oob.close(self._last_word()),
            lambda: self._work.fail(self._last_word()), self._plane.close]
        devices, server, timeline = self._devices, self._report_server, self._timeline
        if devices is not None:
            parts.append(lambda: devices.close(self._failure))
        parts.append(self._control.close)
        if server is not None:
            parts.append(server.close)
        if timeline is not None:
            parts.append(lambda: timeline.close(self._recorder.take_trace(), self._last_word()))
        try:
            for close in parts:
                try:
                    close()
                except Exception:
                    _log.exception("rank %d: a part of the runtime could not be closed", self.world.rank)
        finally:
            self._ended.set()
            self._fail_inbox()

    def _fail_inbox(self) -> None:
        """Fail what nobody will take out of the inbox any more; callable from any thread."""
        while True:
            try:
                item = self._inbox.popleft()
            except IndexError:
                return
            if isinstance(item, (Entry, BucketEntry)):
                item.abandon(self._last_word())

    def _last_word(self) -> HorovodInternalError:
        return self._failure or HorovodInternalError(_SHUT_DOWN)

    def _missing_leavers(self) -> str:
        if self._coordinator is not None:
            missing = sorted(set(range(self.world.size)) - self._coordinator.left)
        elif self._left:
            missing = sorted(self._control.children - self._departed)
        else:
            return " for rank 0 to confirm"
        return f" for ranks {missing} to leave"

"""The runtime of a rank: the interface for user threads.

Theory of operation
- A call makes an `Entry`, appends it to the inbox and wakes the background thread if that may be asleep. It never blocks,
  and takes one lock, which guards the set of names in use.
- A full bucket of a gradient set takes the same way, as one `BucketEntry`; user threads fill it without asking anybody.
- The background thread is `engine.engine`. It and user threads share nothing but a `Handoff`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Set

from hvdlite.core.config import Config
from hvdlite.core.device import CPU, AnyArray, DeviceAccess
from hvdlite.core.errors import HorovodInternalError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.texts import LONGEST_MESSAGE, LONGEST_TRACEBACK, shortened
from hvdlite.core.world import Hosts, World
from hvdlite.diagnostics.flight_recorder import FlightRecorder
from hvdlite.diagnostics.progress import Progress
from hvdlite.diagnostics.report_server import ReportServer
from hvdlite.diagnostics.stall_inspector import Receiver
from hvdlite.diagnostics.timeline import TimelineRequest
from hvdlite.engine.connections import EAGER_TRAFFIC, EAGER_WAITED_FOR, FLUSH_SECONDS, Connections
from hvdlite.engine.decisions import failure_notice
from hvdlite.engine.engine import build_engine
from hvdlite.handoff.group_state import GroupState
from hvdlite.handoff.handle import Handle
from hvdlite.handoff.handoff import Handoff
from hvdlite.handoff.inbox import Task
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.messages import FailureNotice, Layout, Wait
from hvdlite.planes.base import Plane
from hvdlite.runtime.agreed_call import AgreedCall
from hvdlite.runtime.collectives import Collectives
from hvdlite.runtime.gradient_sets import GradientSets
from hvdlite.runtime.names import Names

_log = logging.getLogger("hvdlite")


class Runtime(Collectives):
    """One rank of a job; made by `runtime.assemble`, shared by all adapters of a process. Callable from any thread.

    Args:
        coordinator: on rank 0 only.
        hosts: of all ranks; None when they share one.

    Attributes:
        world: this rank's coordinates.
        hosts: which ranks share a host.
        gradients: the calls of gradient reducers.
        names: for calls without one, and for gradient sets.
        stop_request: for `stop_requested`.
        connections, handoff, engine, recorder: for `groups`, which live on it.
    """

    def __init__(self, world: World, config: Config, connections: Connections, coordinator: Coordinator | None,
                 hosts: Hosts | None = None) -> None:
        handoff = Handoff.create(world.rank, world.size, connections.control.wake, spins=config.spin_microseconds > 0,
                                 is_elastic=world.epoch > 0)
        self.hosts = hosts or Hosts((tuple(range(world.size)),))
        eager = blocking = min(config.eager_limit, EAGER_TRAFFIC // world.size)
        if eager and (elsewhere := world.size - len(self.hosts.ranks_by_host[0])):
            blocking = max(eager, EAGER_WAITED_FOR // elsewhere)
        super().__init__(world, handoff, eager, blocking)
        self.world, self.config = world, config
        self.connections, self.handoff = connections, handoff
        self.gradients, self.names = GradientSets(self, handoff), Names(handoff.state)
        self._agreed_calls: dict[str, AgreedCall] = {}
        self.stop_request = self.agreed_call("stop")
        self.recorder = FlightRecorder(connections.plane.name, connections.clock)
        self.engine, self._rank_zero = build_engine(world, config, connections, coordinator, self.handoff, self.recorder)
        if connections.devices is not None:
            connections.devices.set_handlers(
                self._device_failed, lambda work: self._inbox.post(Task(lambda: self.engine.report_overdue(work))),
                (config.stall_check_time_seconds, config.stall_shutdown_time_seconds))

    # --- the job ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the background thread."""
        self.engine.start()

    @property
    def failure(self) -> HorovodInternalError | None:
        """What ended the job, or None while it runs."""
        return self._state.failure

    def _device_failed(self, error: Exception) -> None:
        notice = failure_notice(error, self.world.rank)
        self.fail(notice.kind, notice.message, "", notice.origin)

    def fail(self, kind: str, message: str, traceback: str, origin: int | None = None) -> None:
        """Notify all ranks that this one cannot go on, and wait until that is on its way.

        Args:
            origin: the rank where the failure began, when this one merely suffers from it.
            kind: the exception's type name.
            message: its text.
            traceback: its formatted traceback, shown to the other ranks as the cause.
        """
        if self.in_child or self._state.ended.is_set():
            return
        notice = FailureNotice(self.world.rank if origin is None else origin, kind, shortened(message, LONGEST_MESSAGE),
                               shortened(traceback, LONGEST_TRACEBACK))
        self._inbox.post(Task(lambda: self.engine.fail(notice)))
        self._state.ended.wait(FLUSH_SECONDS)

    def stop(self, reason: str) -> None:
        """Let the world end at once, in the middle of anything; callable from any thread. Does not wait."""
        self._inbox.post(Task(lambda: self.engine.stop(reason)))

    def end(self, reason: str) -> None:
        """Let the world end at once, unless it has, and wait for it: the background thread has ended, and all is closed."""
        self.stop(reason)
        self.engine.join(None)

    def shutdown(self) -> None:
        """Leave the job: pending handles fail, work already agreed on is finished for the others' sake.

        Rank 0 serves until all others have left too, and the leader of a host until its host's have, at most
        `shutdown_timeout` seconds (0: for ever); then it logs whom it waits for. Idempotent; nothing in a forked child.
        """
        if not self._inbox.closed:
            self.leave()
            self.wait_until_left()

    def agreed_call(self, label: str) -> AgreedCall:
        """Return this rank's side of the agreements of a label, which all ranks use."""
        if label not in self._agreed_calls:
            self._agreed_calls[label] = AgreedCall(label, self.world.rank, self.world.size, self.connections.oob)
        return self._agreed_calls[label]

    def leave(self) -> None:
        """Begin a `shutdown`, and do not wait for its end. Idempotent; nothing in a forked child."""
        if not (self.in_child or self._inbox.closed):
            for call in self._agreed_calls.values():
                call.leave()
            self._inbox.closed = True
            self._inbox.post(Task(self.engine.leave))

    def wait_until_left(self) -> None:
        """Wait for the end of a `shutdown`; nothing in a forked child."""
        if self.in_child:
            return
        if not self._state.ended.wait(self.config.shutdown_timeout or None):
            _log.error("rank %d: gave up waiting in shutdown() after %.0f s%s (HVDLITE_SHUTDOWN_TIMEOUT)",
                       self.world.rank, self.config.shutdown_timeout, self.engine.awaited())
        self.engine.join(FLUSH_SECONDS)

    @property
    def in_child(self) -> bool:
        """Whether this process is a forked child, to which the runtime does not belong."""
        return self._inbox.in_child

    def close_in_child(self) -> None:
        """In a forked child: close every descriptor, so that the parent's death is not hidden by it.

        What is shared with the parent is left as it is: its pages (`memory.shared`), its connections, what it published.
        """
        if self._rank_zero is not None and self._rank_zero.report_server is not None:
            self._rank_zero.report_server.close_in_child()
        self.connections.control.close_in_child()
        self.connections.plane.close()
        self.progress.withdraw()

    # --- groups -----------------------------------------------------------------------------------------------------

    def add_group(self, group: GroupState) -> None:
        """Let a group report here, and fail when the background thread ends; now if it has ended."""
        self._state.groups.append(group)
        if self._state.closing is not None:
            self._state.fail_groups(self._state.closing)

    def remove_group(self, group: GroupState) -> None:
        """A group is closed; again is fine."""
        with contextlib.suppress(ValueError):
            self._state.groups.remove(group)

    @property
    def departed(self) -> Set[int]:
        """The ranks that have left the job normally."""
        return self._state.departed

    # --- facts -----------------------------------------------------------------------------------------------------

    @property
    def plane(self) -> Plane:
        """The data plane for tensors on the host, for its facts: only the background thread lets it work."""
        return self.connections.plane

    @property
    def devices(self) -> DeviceAccess | None:
        """Return what adapters may ask of the plane for GPUs; None where all tensors are on the host."""
        return self.connections.devices

    @property
    def progress(self) -> Progress:
        """How far this rank is, for whoever watches the job."""
        return self.handoff.waiters.progress

    @property
    def has_ended(self) -> bool:
        """Whether the background thread has ended, and everything is closed."""
        return self._state.ended.is_set()

    @property
    def joins(self) -> int:
        """How often all ranks have joined."""
        return self._state.joins

    @property
    def has_deferred(self) -> bool:
        """Whether this rank has ever left a wait for later, because ranks waited for each other in a circle."""
        return self.handoff.waiters.have_deferred

    def staging_bytes(self) -> int:
        """Return how much memory this rank keeps for tensors that are not in buckets."""
        return self.connections.plane.staging_bytes() + self.engine.mailbox_bytes()

    def bucket_memory(self) -> list[AnyArray]:
        """Return the memory of all learned buckets of this rank."""
        return [bucket.memory for learned in list(self._state.layouts.values()) for bucket in learned.buckets]

    def learned_layout(self, label: str) -> Layout | None:
        """Return the layout of a gradient set of all ranks in host memory, for the next world of an elastic job."""
        learned = self._state.layouts.get(label)
        if learned is None or any(bucket.response.device != CPU or bucket.response.process_set_id != GLOBAL_PROCESS_SET_ID
                                  for bucket in learned.layout.buckets):
            return None
        return learned.layout

    @property
    def tuned(self) -> dict[str, int]:
        """The knobs that rank 0 has changed."""
        return dict(self._state.tuned)

    # --- reports and the timeline ------------------------------------------------------------------------------------

    def request_report(self) -> None:
        """Let rank 0 report who waits for whom, on its standard error; callable from signal handlers. Does not wait."""
        self._inbox.post(Task(self.engine.request_report))

    def demand_report(self, receiver: Receiver) -> None:
        """On rank 0: let `receiver` have a report on who waits for whom; it is called by the background thread."""
        rank_zero = self._rank_zero
        assert rank_zero is not None, "reports are rank 0's"
        self._inbox.post(Task(lambda: rank_zero.stall_inspector.demand(receiver)))

    def serve_reports(self, directory: str) -> None:
        """On rank 0, before `start`: answer requests for reports that come through the job's directory."""
        assert self._rank_zero is not None, "reports are rank 0's"
        self._rank_zero.report_server = ReportServer(directory, self.demand_report)

    def start_timeline(self, path: str, mark_cycles: bool = False) -> None:
        """Write what all ranks do to `path` from now on; on rank 0 only, elsewhere a call does nothing.

        Args:
            mark_cycles: show decisions.

        Raises:
            ConfigError: when the file cannot be written.
        """
        self._order_timeline(path, mark_cycles)

    def stop_timeline(self) -> None:
        """End the timeline, and return when its file is complete; on rank 0 only, elsewhere a call does nothing."""
        self._order_timeline("", False)

    def _order_timeline(self, path: str, mark_cycles: bool) -> None:
        self._inbox.check_usable("timeline")
        rank_zero, recorder = self._rank_zero, self.recorder
        if rank_zero is None:
            return
        handle = Handle("timeline", self.handoff.waiters, Wait(GLOBAL_PROCESS_SET_ID, "timeline"))

        def change() -> None:
            if path:
                recorder.mark_cycles = mark_cycles
            rank_zero.timeline.change(TimelineRequest(path, handle.settle))

        self._inbox.put(Task(change, handle.settle))
        handle.wait()

"""One rank's runtime: user threads hand tensors in, one background thread negotiates and moves them.

Theory of operation
- A call makes an `Entry`, appends it to the inbox and rings this rank's bell if the thread may be asleep. It never
  blocks and takes one lock, which guards the set of names in use.
- A full bucket of a declared set takes the same way, as one `BucketEntry`; user threads fill it without asking anybody.
- The thread turns the inbox into a report, takes in what others say, and executes decisions strictly in order.
- Its only places to block are `ControlPlane.wait`, from the loop or, through `_wait_until`, from within a plane. Both
  take in messages and send reports, so a barrier neither delays the next report nor misses a death.
- The first failure ends the runtime: it is told to the coordinator, logged once, and raised by every pending and later
  call. The thread itself never dies silently.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from hvdlite.control.base import ControlPlane, DecisionReceived, Event, PeerLost, ReportReceived
from hvdlite.core.array import Array
from hvdlite.core.config import Config
from hvdlite.core.errors import (
    DuplicateNameError,
    ForkedProcessError,
    HorovodInternalError,
    MismatchError,
    NotInitializedError,
    PeerFailedError,
    PeerLeftError,
    PeerLostError,
    UnsupportedError,
)
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.core.world import World
from hvdlite.negotiation.controller import Assist, Controller, Evicted, Expanded, Instruction
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.messages import (
    BucketReady,
    BucketRelease,
    Closing,
    Decision,
    ErrorKind,
    FailureNotice,
    Layout,
    Report,
    Response,
)
from hvdlite.negotiation.process_sets import ProcessSetTable
from hvdlite.planes.base import Part, Plan, Plane
from hvdlite.runtime.buckets import BucketEntry, BucketHandle, LearnedBucket, LearnedLayout, buffer_bytes
from hvdlite.runtime.calls import Calls, Entry, reducible
from hvdlite.runtime.handle import Handle
from hvdlite.runtime.stalls import StallWatch, account

_log = logging.getLogger("hvdlite")

FLUSH_SECONDS: Final = 2.0
RECENT: Final = 10
"""How many collectives a rank remembers for stall reports."""
EAGER_TRAFFIC: Final = 1 << 20
"""Bytes that one eager tensor may bring to rank 0 over all ranks."""
_SHUT_DOWN = "hvdlite was shut down on this rank before the collective was complete"


class _Ended(Exception):
    """Unwinds the runtime thread once the job has failed; the reason is kept by the runtime."""


@dataclasses.dataclass(frozen=True)
class _Abandonment:
    """A layout that does not describe this rank's set any more."""

    layout: int


class Runtime(Calls):
    """One rank's engine; made by `runtime.assemble`, shared by all adapters of a process.

    Args:
        coordinator: on rank 0 only.
        clock: seconds on a monotonic clock.
    """

    def __init__(self, world: World, config: Config, control: ControlPlane, plane: Plane,
                 coordinator: Coordinator | None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(min(config.eager_limit, EAGER_TRAFFIC // world.size))
        self.world = world
        self.config = config
        self._control, self._plane, self._coordinator = control, plane, coordinator
        self._clock = clock
        self._spin = config.spin_microseconds * 1e-6
        self._controller = Controller(world.rank)
        self._inbox: deque[Entry | BucketEntry | Closing | _Abandonment] = deque()
        self._names: set[tuple[int, str]] = set()  # with their process sets
        self._names_lock = threading.Lock()
        self._process_sets = ProcessSetTable(world.size)  # changed by the runtime thread only
        self._entries: dict[tuple[int, str], Entry] = {}  # runtime thread only: handed in and not completed
        self._buckets: dict[int, BucketEntry] = {}  # likewise
        self._layouts: dict[str, LearnedLayout] = {}  # by set; changed by the runtime thread only
        self._decisions: deque[Decision] = deque()  # received and not applied
        self._pairs: set[int] = set()  # process sets of two ranks that are open in the plane
        self._plans: defaultdict[int, int] = defaultdict(int)  # by process set
        self._stall_watch = None if coordinator is None else StallWatch(coordinator, config.stall_check_time_seconds)
        self._recent: deque[str] = deque(maxlen=RECENT)  # names of the last collectives
        self._caller: int | None = None  # the thread that last called one
        self._awake = True  # False only around a blocking wait; see _submit
        self._leaving = False
        self._told_leaving = False
        self._left = False
        self._departed: set[int] = set()  # ranks that left normally
        self._own_failure: FailureNotice | None = None  # handed in by `fail`
        self._failure: HorovodInternalError | None = None
        self._pid = os.getpid()
        self._ended = threading.Event()
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

        Rank 0 serves until all others have left too, at most `shutdown_timeout` seconds, and logs whom it waits for.
        Idempotent. A forked child's copy does nothing.
        """
        if self.in_child or self._leaving:
            return
        self._leaving = True
        self._control.wake()
        if not self._ended.wait(self.config.shutdown_timeout):
            _log.error("rank %d: gave up waiting in shutdown() after %.0f s%s (HVDLITE_SHUTDOWN_TIMEOUT)",
                       self.world.rank, self.config.shutdown_timeout, self._missing_leavers())
        self._thread.join(FLUSH_SECONDS)

    @property
    def in_child(self) -> bool:
        """Whether this process is a forked child, to which the runtime does not belong."""
        return self._pid != os.getpid()

    def close_in_child(self) -> None:
        """In a forked child: close every descriptor, so that the parent's death is not hidden by it."""
        self._control.forget()
        self._plane.close()

    # --- declared sets ---------------------------------------------------------------------------------------------

    def declare(self, name: str, source: Array | None, output: Array, op: ReduceOp, label: str, number: int, *,
                prescale: float = 1.0, postscale: float = 1.0, strides: tuple[int, ...] = (),
                process_set: int = GLOBAL_PROCESS_SET_ID) -> Handle:
        """Like `allreduce`, of a member of declared set `label` in its round `number` (from 1); never travels eagerly.

        Args:
            strides: in elements; how `output` lies in the framework's memory. () is row-major.
        """
        request = self._request(name, Collective.ALLREDUCE, reducible(name, source, output, op), output.shape, op=op,
                                prescale=float(prescale), postscale=float(postscale), absent=source is None, label=label,
                                round=number, strides=strides, process_set=process_set)
        return self._submit(Entry(request, [source], [output], output, self._sleepers))

    def layout(self, label: str, number: int) -> LearnedLayout | None:
        """Return the layout by which round `number` of a set is to be reported; None: member by member."""
        learned = self._layouts.get(label)
        return None if learned is None or number < learned.layout.first_round else learned

    def submit_bucket(self, bucket: LearnedBucket, ready: BucketReady) -> BucketHandle:
        """Every place of a learned bucket is filled. Its memory must not be touched until the handle is done."""
        self._check_usable(bucket.definition.members[0].name)
        entry = BucketEntry(bucket, ready, self._sleepers)
        self._hand_in(entry)
        return entry.handle

    def close_round(self, label: str, number: int, process_set: int = GLOBAL_PROCESS_SET_ID) -> None:
        """All members of a set's round are submitted by this rank; not needed when a bucket said so."""
        self._hand_in(Closing(label, number, process_set))

    def abandon(self, layout: Layout) -> None:
        """A layout does not describe this rank's set any more: end it on all ranks."""
        self._hand_in(_Abandonment(layout.layout))

    # --- process sets ----------------------------------------------------------------------------------------------

    def members(self, process_set: int) -> tuple[int, ...]:
        if process_set not in self._process_sets:
            raise UnsupportedError(f"there is no process set {process_set}; it was removed, or never added")
        return self._process_sets[process_set]

    def process_sets(self) -> Mapping[int, tuple[int, ...]]:
        """Return the members of every process set, by id."""
        return self._process_sets.items()

    def _find_set(self, members: tuple[int, ...]) -> int | None:
        return self._process_sets.find(members)

    # --- handing in ------------------------------------------------------------------------------------------------

    def _submit(self, entry: Entry) -> Handle:
        name = entry.request.name
        self._check_usable(name)
        with self._names_lock:
            if entry.key in self._names:
                raise DuplicateNameError(f"'{name}' is still being processed on rank {self.world.rank}; wait for its handle "
                                         "first, or use another name")
            self._names.add(entry.key)
        self._hand_in(entry)
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

    def _hand_in(self, item: Entry | BucketEntry | Closing | _Abandonment) -> None:
        self._caller = threading.get_ident()
        self._inbox.append(item)
        # The thread clears _awake, then looks into the inbox, then sleeps: whoever sees it awake has been seen.
        if not self._awake:
            self._control.wake()
        if self._ended.is_set():
            self._fail_inbox()  # the thread ended between the caller's check and the append

    def _about_to_sleep(self) -> None:
        if self._spin and not self._awake:
            self._control.wake()  # it may sleep already, since before the caller did

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
        """Whether this rank has left and, on rank 0, everybody else has too."""
        return self._left and (self._coordinator is None or len(self._coordinator.left) == self.world.size)

    def _exchange(self, *, within_plan: bool = False) -> None:
        """Say what is new, take in what others say, and sleep when there is nothing else to do.

        Within a plan it sleeps although decisions are queued: they come after the plan.
        """
        self._say()
        self._decide()
        busy = bool(self._decisions) and not within_plan
        if not busy:
            self._awake = False
            busy = bool(self._inbox)
        try:
            events = self._control.wait(0 if busy else self._watch_stalls(), self._spin if self._sleepers else 0.0)
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
            pending: list[Entry | BucketEntry] = [*self._entries.values(), *self._buckets.values()]
            for entry in pending:
                entry.abandon(HorovodInternalError(_SHUT_DOWN))
        report = self._controller.report()
        if report is not None:
            self._tell(report)

    def _take_over(self, item: Entry | BucketEntry | Closing | _Abandonment) -> None:
        match item:
            case Entry(request=request):
                self._entries[item.key] = item
                self._recent.append(request.name)
                self._controller.submit(request)
            case BucketEntry(bucket=bucket, ready=ready):
                self._buckets[ready.bucket] = item
                self._recent.append(item.handle.name)
                expanded = self._controller.submit_bucket(bucket.definition, ready)
                if expanded is not None:
                    self._split(expanded)
            case Closing():
                self._controller.close(item)
            case _Abandonment(layout):
                self._controller.abandon(layout)

    def _split(self, expanded: Expanded) -> None:
        for entry in self._buckets.pop(expanded.bucket).split(expanded):
            self._entries[entry.key] = entry

    def _tell(self, report: Report) -> None:
        if self._coordinator is not None:
            self._coordinator.receive(0, report, self._clock())
        else:
            self._control.send_report(report)

    def _decide(self) -> None:
        """On rank 0: answer what has been reported."""
        if self._coordinator is None:
            return
        decision = self._coordinator.decide()
        if decision is not None:
            self._control.send_decision(decision)
            self._accept(decision)

    def _watch_stalls(self) -> float | None:
        """On rank 0: look after stalls, and return when to do so again, in seconds; None while nothing waits."""
        if self._stall_watch is None:
            return None
        now = self._clock()
        if self._stall_watch.look(now):
            self._decide()
            return 0.0  # the decision is to be applied before sleeping
        return self._stall_watch.due(now)

    def _take_in(self, event: Event) -> None:
        match event:
            case DecisionReceived(decision):
                self._accept(decision)
            case ReportReceived(rank, report) if self._coordinator is not None:
                self._coordinator.receive(rank, report, self._clock())
            case PeerLost(rank, reason) if self._coordinator is not None:
                self._coordinator.lose(rank, reason)
            case PeerLost(rank, reason) if rank not in self._departed:
                self._end(FailureNotice(rank, "lost", reason))

    def _accept(self, decision: Decision) -> None:
        """Queue a decision; what it says of ranks counts at once, even in the middle of a plan."""
        if self.world.rank in decision.inquiries:
            waiting = [*(name for _, name in self._entries), *(bucket.handle.name for bucket in self._buckets.values())]
            self._controller.account(account(self._caller, self._recent, waiting))
        self._departed.update(decision.left)
        if decision.failure is not None:
            self._end(decision.failure)
        self._decisions.append(decision)

    def _apply(self, decision: Decision) -> None:
        self._open_pairs(decision)
        for instruction in self._controller.apply(decision):
            self._follow(instruction)
        if self.world.rank in decision.left:
            self._left = True

    def _open_pairs(self, decision: Decision) -> None:
        """Let the plane open the process sets of two ranks when they first need it; all ranks do so at the same decision."""
        for response in decision.responses:
            number = response.process_set
            if number < 0 and number not in self._pairs and response.error is ErrorKind.NONE and response.result is None:
                self._pairs.add(number)
                self._plane.open_set(number, self._process_sets[number])

    def _follow(self, instruction: Instruction) -> None:
        match instruction:
            case Response():
                self._perform(instruction)
            case Assist(response):
                self._assist(response)
            case BucketRelease():
                self._reduce_bucket(instruction)
            case Layout():
                self._learn(instruction)
            case Expanded():
                self._split(instruction)
            case Evicted(layout):
                learned = self._layouts.get(layout.label)
                if learned is not None and learned.layout.layout == layout.layout:
                    del self._layouts[layout.label]

    def _learn(self, layout: Layout) -> None:
        ranks = layout.buckets[0].response.contributors
        try:
            buffer = self._plane.fusion_buffer(buffer_bytes(layout), ranks)
        except MemoryError as error:
            _log.warning("rank %d: '%s' goes on without learned buckets: %s", self.world.rank, layout.label, error)
            self._controller.abandon(layout.layout)
            return
        if buffer is not None:
            self._layouts[layout.label] = LearnedLayout(layout, buffer)

    def _reduce_bucket(self, release: BucketRelease) -> None:
        entry = self._buckets[release.bucket]
        memory = [entry.bucket.memory]
        self._execute(entry.bucket.definition.response, memory, memory, entry.bucket.part)
        del self._buckets[release.bucket]
        entry.complete(release.nobody)

    def _perform(self, response: Response) -> None:
        entries = [self._entries[response.process_set, name] for name in response.names]
        if response.error is not ErrorKind.NONE:
            for entry in entries:
                self._release(entry).fail(self._refusal(response))
            return
        for entry in entries:
            entry.prepare(response, self.world.rank, self._process_sets[response.process_set])
        if response.result is not None:
            entries[0].deliver(response.result)
        elif response.collective in (Collective.ADD_PROCESS_SET, Collective.REMOVE_PROCESS_SET):
            self._change_sets(response)
        elif response.collective is Collective.JOIN:
            self._start_anew()
        elif response.collective is not Collective.BARRIER:  # that all ranks reported it is the barrier
            self._execute(response, [source for entry in entries for source in entry.sources],
                          [output for entry in entries for output in entry.outputs])
        for entry in entries:
            self._release(entry).complete(response)

    def _assist(self, response: Response) -> None:
        """Having joined, do this rank's share of the others' work."""
        if response.collective in (Collective.ADD_PROCESS_SET, Collective.REMOVE_PROCESS_SET):
            self._change_sets(response)
        elif (self.world.rank in self._process_sets[response.process_set] and response.result is None
              and response.collective is not Collective.BARRIER):
            self._execute(response, (), ())

    def _change_sets(self, response: Response) -> None:
        if response.collective is Collective.ADD_PROCESS_SET:
            self._plane.open_set(self._process_sets.add(response.splits), response.splits)
        else:
            self._process_sets.remove(response.rows[0])
            self._plane.close_set(response.rows[0], self._wait_until)

    def _execute(self, response: Response, sources: Sequence[Array | None], outputs: Sequence[Array | None],
                 part: Part | None = None) -> None:
        number = response.process_set
        self._plans[number] += 1
        plan = Plan(self._plans[number], self._process_sets[number], response, sources, outputs, part)
        self._plane.execute(plan, self._wait_until)

    def _refusal(self, response: Response) -> HorovodInternalError:
        if response.error is ErrorKind.LEFT:
            return PeerLeftError(response.error_text, min(self._departed, default=-1))
        return MismatchError(response.error_text)

    def _release(self, entry: Entry) -> Entry:
        """Free the entry's name before its handle is completed, so that the waiter can use it again at once."""
        del self._entries[entry.key]
        with self._names_lock:
            self._names.discard(entry.key)
        return entry

    def _wait_until(self, predicate: Callable[[], bool]) -> None:
        while not predicate():
            self._exchange(within_plan=True)

    # --- the end ---------------------------------------------------------------------------------------------------

    def _give_up(self, notice: FailureNotice) -> None:
        """This rank is the origin: tell the others, then end."""
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
        if self._failure is None and not self._left:
            self._failure = HorovodInternalError("the runtime thread ended unexpectedly; see the log")
        self._control.flush(FLUSH_SECONDS)
        for entry in list(self._entries.values()):
            self._release(entry).abandon(self._last_word())
        for bucket in self._buckets.values():
            bucket.abandon(self._last_word())
        self._control.close()
        self._plane.close()
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
        if self._coordinator is None:
            return " for rank 0 to confirm"
        missing = sorted(set(range(self.world.size)) - self._coordinator.left)
        return f" for ranks {missing} to leave"


def failure_error(notice: FailureNotice, rank: int) -> HorovodInternalError:
    """Return the exception that `rank` raises for a failure of the job."""
    if notice.origin == rank:
        return PeerFailedError(f"this rank ({rank}) failed with {notice.kind}: {notice.message}", rank)
    if notice.kind == PeerLeftError.__name__:
        return PeerLeftError(f"rank {notice.origin} left the job while others still needed it: {notice.message}",
                             notice.origin)
    if notice.kind == "lost":
        return PeerLostError(f"rank {notice.origin} was lost: {notice.message}", notice.origin)
    cause = f"\n\nrank {notice.origin}'s traceback:\n{notice.traceback.rstrip()}" if notice.traceback else ""
    return PeerFailedError(f"rank {notice.origin} failed with {notice.kind}: {notice.message}{cause}", notice.origin)

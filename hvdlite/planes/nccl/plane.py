"""Plans for tensors on a GPU become launches on one stream (docs/protocol.md#threads, #gpu-streams).

Theory of operation
- The work of all process sets is launched on one stream, in decision order, so that two communicators cannot wait for each
  other on the GPU. The stream waits for the ready events of the tensors, and an event is recorded after the work. The host
  waits for neither, only until the launch is recorded.
- A separate thread launches, because the first calls of a communicator, and any call while the GPU's queue is full, can
  block until another rank arrives. The background thread waits for the launch interruptibly.
- A communicator is created when its process set has its first tensor on a GPU: the script has chosen its GPU by then. The
  ranks send their `PeerInfo` to the first of them over the control plane, and it answers all. This is also the barrier
  before NCCL's own rendezvous.
- Communicators are always aborted: `ncclCommDestroy` waits for other ranks. Unless the job has failed, all work is waited
  for first, also that of other ranks: an abort stops NCCL's threads, which may still be sending data of this rank's kernels,
  and frees memory that other GPUs may still use (nccl issue 863). The ranks of a removed process set confirm it to each
  other. At shutdown the control plane is closed already, so the GPUs meet in a final all-reduce: its completion on one rank
  implies that all ranks have launched it.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from hvdlite.core.device import Completion, CopySpec, DeviceArray, Event
from hvdlite.core.errors import HorovodInternalError, PeerLostError, UnsupportedError
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.negotiation.messages import GpuProgress, OverdueWork
from hvdlite.planes.base import FusionBuffer, OobChannel, Plan, WaitUntil
from hvdlite.planes.launch_thread import LaunchThread
from hvdlite.planes.nccl import collectives, library
from hvdlite.planes.nccl.collectives import DTYPES, Launch
from hvdlite.planes.nccl.communicators import ABORT_SECONDS, CommunicatorRef, Communicators, abort, nccl_error
from hvdlite.planes.nccl.cupy_device import CupyDevice, EventPool, PooledEvent, StagingBuffer, check_not_captured
from hvdlite.planes.nccl.watcher import POLL_SECONDS, LaunchedGroup, LaunchedWork, Watcher

_log = logging.getLogger("hvdlite")

DRAIN_SECONDS: Final = 30.0
"""Time that `close` waits for work in progress."""
EXIT_SECONDS: Final = 2.0
"""Time that `close` waits for the final all-reduce; it times out on a rank that leaves long before or after the others."""
FREED_SECONDS: Final = 1.0
"""Time that `close` waits, after a failure, for the launch thread. One that makes a communicator, which no abort reaches, is
left behind, with its stream; it ends when NCCL gives up."""
LINGER_SECONDS: Final = 0.1
"""Time for the other GPUs to leave the final all-reduce."""

VERDICT_SECONDS: Final = 2.0
"""See `NcclPlane`; on one host the end of a process ends its connections at once."""

MakeDevice = Callable[[int | None], CupyDevice]
"""Opens the GPU with the given index; None chooses it by the local rank."""


class NcclPlane:
    """Implements `DevicePlane` over NCCL. No library is loaded and no GPU is used before the first tensor.

    Args:
        host: an identifier of this rank's host.
        oob: the out-of-band channel for `PeerInfo`.
        wake: makes this rank's `WaitUntil` evaluate its predicate.
        make_device: opens the GPU.
        unavailable_reason: returns why there is no GPU, or "".
        shared_gpu: whether several ranks may share a GPU.
        exit_timeout: see `EXIT_SECONDS`; 0 skips the final all-reduce.
        clock: in seconds; for work that takes long.
        verdict_seconds: how long the control plane may need to learn that a rank is gone. NCCL may notice it earlier, but
            does not name the rank.
    """

    name = "nccl"

    def __init__(self, rank: int, host: str, oob: OobChannel, wake: Callable[[], None], make_device: MakeDevice,
                 unavailable_reason: Callable[[], str] = library.unavailable_reason, *, shared_gpu: bool = False,
                 exit_timeout: float = EXIT_SECONDS, clock: Callable[[], float] = time.monotonic,
                 verdict_seconds: float = VERDICT_SECONDS) -> None:
        self._rank, self._host, self._oob, self._make_device = rank, host, oob, make_device
        self._find_unavailable_reason = unavailable_reason
        self._thread = LaunchThread(f"hvdlite-nccl-{rank}", wake, lambda: self._opened(None).make_current())
        self._report: Callable[[Exception], None] = lambda error: None
        self._overdue_times: tuple[float, ...] = ()
        self._report_overdue: Callable[[OverdueWork], None] = lambda work: None
        self._launched: dict[int, int] = {}  # by process set: the sequence number of the last plan launched
        self._shared_gpu, self._exit_timeout, self._clock = shared_gpu, exit_timeout, clock
        self._opening = threading.Lock()
        self._device: CupyDevice | None = None
        self._events: EventPool | None = None
        self._reason: str | None = None  # why there is no GPU, once it is known
        self._closing = False
        self._has_ended, self._verdict_seconds = threading.Event(), verdict_seconds
        self._failure: HorovodInternalError | None = None  # what has ended the job
        self._has_entered = False  # the background thread
        self._allocate_by: Callable[[int], DeviceArray] | None = None  # see `DeviceAccess.wrap`
        self._pid = os.getpid()

    # --- for adapters ----------------------------------------------------------------------------------------------

    def unavailable_reason(self) -> str:
        if self._reason is None:
            self._reason = self._find_unavailable_reason()
        return self._reason

    def supports(self, collective: int, op: int | None, dtype: str) -> bool:
        return collectives.supports(Collective(collective), None if op is None else ReduceOp(op), dtype)

    def wrap(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, *, stream: int, owner: object,
             empty: Callable[[tuple[int, ...]], DeviceArray] | None = None,
             allocate: Callable[[int], DeviceArray] | None = None) -> DeviceArray:
        used = self._opened(device)
        if used.index != device:
            raise UnsupportedError(f"rank {self._rank} uses GPU {used.index} and cannot also use GPU {device}: a rank has "
                                   "one GPU")
        ready = self.record_event(stream)
        self._allocate_by = allocate or self._allocate_by
        return DeviceArray(pointer, shape, dtype, device, owner, ready, empty)

    def record_event(self, stream: int) -> PooledEvent:
        check_not_captured(self._opened(None), stream)
        assert self._events is not None
        return self._events.record(stream)

    def wait_stream(self, stream: int, other: int) -> None:
        event = self.record_event(other)
        self._opened(None).wait(stream, event.handle)

    def batched_copy(self, copies: Sequence[CopySpec], source: str, target: str, stream: int, factor: float = 1.0) -> bool:
        if source not in DTYPES or target not in DTYPES:
            return False
        return self._opened(None).batched_copy(copies, source, target, stream, factor)

    # --- for the runtime ------------------------------------------------------------------------------------------

    def set_handlers(self, failed: Callable[[Exception], None], overdue: Callable[[OverdueWork], None],
                     times: Sequence[float]) -> None:
        self._report, self._report_overdue = failed, overdue
        self._overdue_times = tuple(sorted(time for time in times if time > 0))

    def progress(self) -> tuple[GpuProgress, ...]:
        if self._device is None:
            return ()
        try:
            self.enter_thread()
            done, reached = self._watcher.progress()
        except self._device.failure:  # the watcher reports it
            return ()
        return tuple(GpuProgress(number, launched, max(done.get(number, 0), reached.get(number, 0)), done.get(number, 0))
                     for number, launched in sorted(self._launched.items()))

    def enter_thread(self) -> None:
        if not self._has_entered:
            self._opened(None).make_current()
            self._has_entered = True

    def execute(self, plan: Plan, wait_until: WaitUntil) -> Completion:
        device = self._opened(None)
        self.enter_thread()
        try:
            self._communicators.create(plan.response.process_set_id, plan.ranks, wait_until)
            launched = self._thread.run(lambda: self._launch(device, plan), wait_until)
        except PeerLostError:
            self._thread.run(self._verdict, wait_until)  # if there is one, this raises it
            raise
        if not plan.outputs:  # this rank has joined: no entry keeps the work alive, but other ranks need it
            launched.for_entry(None)
        return launched

    def add_process_set(self, process_set_id: int, ranks: tuple[int, ...]) -> None:
        pass  # its communicator is created when it is needed

    def remove_process_set(self, process_set_id: int, wait_until: WaitUntil) -> None:
        device = self._device
        ref = None if device is None else self._communicators.refs.pop(process_set_id, None)
        if device is not None and ref is not None:
            self._thread.run(lambda: self._watcher.drain(DRAIN_SECONDS), wait_until)
            self._oob.gather_and_broadcast(f"nccl.{process_set_id}.end", ref.ranks, b"", lambda texts: b"", wait_until)
            self._watcher.wait_for_poll()
            self._thread.run(lambda: abort([ref], device, ABORT_SECONDS), wait_until)

    def fusion_buffer(self, nbytes: int, ranks: tuple[int, ...], wait_until: WaitUntil) -> FusionBuffer | None:
        """See `DevicePlane.fusion_buffer`; returns GPU memory."""
        if self._rank not in ranks:
            return None
        device = self._opened(None)
        try:
            return FusionBuffer(self._thread.run(lambda: self._zeroed(device, nbytes), wait_until))
        except MemoryError:
            raise
        except device.failure as error:
            raise nccl_error(self._rank, device, None, f"allocating {nbytes} bytes", error) from error

    def row_major(self, array: DeviceArray) -> DeviceArray:
        """See `DevicePlane.row_major`."""
        device = self._opened(None)
        self.enter_thread()
        copied = self._allocate(device, array.nbytes).part(0, array.size, array.dtype)
        copied.shape, copied.prescale = array.shape, array.prescale
        if array.ready is not None:
            device.wait(device.stream, array.ready.handle)
        device.copy_row_major(array, copied, device.stream)
        return copied

    def close(self, failure: HorovodInternalError | None = None) -> None:
        """Abort all communicators.

        Args:
            failure: the error that ends the job early: work in progress is not waited for, and waits for it raise this.
        """
        self._failure = failure
        self._has_ended.set()
        if self._device is None or self._pid != os.getpid():  # a forked child must not call CUDA
            return
        device, communicators = self._device, self._communicators
        if failure is None and not self._watcher.drain(DRAIN_SECONDS):
            _log.warning("rank %d: reductions are still under way on GPU %d after %.0f s; they are given up", self._rank,
                         device.index, DRAIN_SECONDS)
        elif failure is None and self._exit_timeout:
            self._final_allreduce(device, [ref for ref in communicators.refs.values() if len(ref.ranks) > 1])
        refs, self._closing = communicators.close(), True
        self._watcher.end(failure)
        self._watcher.wait_for_poll()
        has_ended = failure is None and self._thread.end(DRAIN_SECONDS)
        stuck = abort(refs, device, ABORT_SECONDS)
        if stuck:
            _log.error("rank %d: %d NCCL communicators did not end within %.0f s; leave this process to free GPU %d",
                       self._rank, stuck, ABORT_SECONDS, device.index)
        elif has_ended or self._thread.end(FREED_SECONDS):  # by now an abort has ended what it was blocked in
            self._release(device)

    def _release(self, device: CupyDevice) -> None:
        """Destroy streams and events: a process of an elastic job makes new ones in each world."""
        assert self._events is not None
        try:
            last, deadline = self._events.record(device.stream), time.monotonic() + FREED_SECONDS
            while not device.is_event_done(last.handle) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)  # the framework may use memory again that is dropped now
            self._events.close()
            device.close()
        except device.failure as error:
            _log.info("rank %d: GPU %d has failed: %s", self._rank, device.index, error)

    def _final_allreduce(self, device: CupyDevice, refs: Sequence[CommunicatorRef]) -> None:
        """Wait until the GPUs of all ranks have finished their work, or until the timeout."""
        deadline = time.monotonic() + self._exit_timeout

        def wait_until(predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
            while not predicate():
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(POLL_SECONDS / 2)

        def allreduce() -> PooledEvent:
            memory = self._staging.get(4)
            for ref in refs:  # in the order of their creation, which is equal on all ranks
                ref.communicator.allReduce(memory, memory, 1, DTYPES["float32"], collectives.SUM, device.stream)
            assert self._events is not None
            return self._events.record(device.stream)

        if not refs:
            return
        troubles: tuple[type[Exception], ...] = (TimeoutError, *device.failure)
        try:
            event = self._thread.run(allreduce, wait_until)
            wait_until(lambda: device.is_event_done(event.handle))
        except troubles as error:
            _log.info("rank %d: left without the others' GPUs: %s %s", self._rank, type(error).__name__, error)
        else:
            time.sleep(LINGER_SECONDS)

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _opened(self, index: int | None) -> CupyDevice:
        """Return the GPU; the first call opens it."""
        if self._device is not None:
            return self._device
        with self._opening:
            if self._device is None:
                if reason := self.unavailable_reason():
                    raise UnsupportedError(f"there is no data plane for GPUs here: {reason}")
                device = self._make_device(index)
                self._events = EventPool(device)
                self._staging = StagingBuffer(device, functools.partial(self._allocate, device))
                self._communicators = Communicators(self._rank, self._host, self._oob, self._thread, device, self._staging,
                                                    shared_gpu=self._shared_gpu)
                self._watcher = Watcher(device, self._communicators, self._fail, self._overdue_times, self._report_overdue,
                                        self._clock)
                self._device = device
        return self._device

    def _allocate(self, device: CupyDevice, nbytes: int) -> DeviceArray:
        """Return new memory of the framework's, or the device's where no framework has lent an array yet."""
        if self._allocate_by is None:
            return device.allocate(nbytes)
        try:
            memory = self._allocate_by(nbytes)
        except UnsupportedError:  # the stream of the array that was lent last is being captured
            return device.allocate(nbytes)
        if memory.ready is not None:
            device.wait(device.stream, memory.ready.handle)
        return memory.after(None)

    def _zeroed(self, device: CupyDevice, nbytes: int) -> DeviceArray:
        """Return zeroed memory: the gaps between a bucket's tensors are never written, but reduced with them."""
        memory = self._allocate(device, nbytes)
        device.zero(memory)
        return memory

    def _launch(self, device: CupyDevice, plan: Plan) -> LaunchedWork:
        if self._closing:
            raise HorovodInternalError("the plane for GPUs is closed")
        response = plan.response
        ref = self._communicators.refs[response.process_set_id]
        communicator = ref.communicator
        try:
            ready = _ready_events(plan)
            for event in ready:
                device.wait(device.stream, event.handle)
            collectives.launch(Launch(device, communicator, self._staging, plan, plan.ranks.index(self._rank),
                                      ref.has_kernels))
            assert self._events is not None
            self._launched[response.process_set_id] = plan.sequence
            group = LaunchedGroup(response.process_set_id, plan.sequence, plan.ranks, response.names, ready, self._clock())
            return LaunchedWork(device, self._events.record(device.stream), self._watcher, group)
        except device.failure as error:
            what = f"{response.collective.name.lower()} of '{response.names[0]}'"
            if len(response.names) > 1:
                what += f" and {len(response.names) - 1} more"
            raise nccl_error(self._rank, device, communicator, what, error) from error

    def _fail(self, error: HorovodInternalError) -> None:
        """Work under way has failed, unless that follows from what has ended the job."""
        if not (isinstance(error, PeerLostError) and self._verdict()):
            self._watcher.end(error)
            self._report(error)

    def _verdict(self) -> bool:
        """Another rank may be gone: wait until the control plane names it; return whether the job has failed."""
        self._has_ended.wait(self._verdict_seconds)
        return self._failure is not None


def _ready_events(plan: Plan) -> list[Event]:
    """Return the distinct ready events of a plan's arrays."""
    arrays = [*plan.sources, *plan.outputs]
    return list({array.ready.handle: array.ready for array in arrays
                 if isinstance(array, DeviceArray) and array.ready is not None}.values())


def create_nccl_plane(rank: int, local_rank: int, host: str, oob: OobChannel, wake: Callable[[], None],
                      environment: Mapping[str, str], *, shared_gpu: bool, verdict_seconds: float) -> NcclPlane:
    """Return an `NcclPlane` over this host's GPUs.

    Args:
        local_rank: chooses the GPU if this rank participates before it has used one.
        environment: the environment of the process.
        shared_gpu, verdict_seconds: see `NcclPlane`.
    """
    return NcclPlane(rank, host, oob, wake, lambda index: CupyDevice(index, local_rank, environment), shared_gpu=shared_gpu,
                     verdict_seconds=verdict_seconds)

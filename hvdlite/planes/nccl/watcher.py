"""GPU work after its launch: completions, and polling for errors."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final

from hvdlite.core.device import Event
from hvdlite.core.errors import HorovodInternalError
from hvdlite.negotiation.messages import OverdueWork
from hvdlite.planes.nccl.communicators import Communicators
from hvdlite.planes.nccl.cupy_device import CupyDevice, PooledEvent, check_not_captured

POLL_SECONDS: Final = 0.01
"""The polling interval. No wait depends on polling: it releases references of unfetched results and detects errors."""
MAX_POLL_SECONDS: Final = 1.0
"""An upper bound of the duration of one poll, unless it hangs."""
_MIN_SLEEP, _MAX_SLEEP = 20e-6, 1e-3


@dataclasses.dataclass(slots=True, eq=False)
class LaunchedGroup:
    """One launch, which may have several entries.

    Attributes:
        names: of the tensors.
        ready: the events for which it waits on the GPU; kept until it is done.
        since: when it was launched, on the plane's clock.
        reported: how many of the times have passed at which it is reported.
    """

    process_set_id: int
    sequence: int
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    ready: Sequence[Event]
    since: float
    reported: int = 0

    def overdue(self, seconds: float) -> OverdueWork:
        """Describe it for rank 0."""
        first, *more = self.names
        name = first + (f"' and {len(more)} more, until '{more[-1]}" if more else "")
        return OverdueWork(self.process_set_id, self.sequence, self.ranks, name, seconds)


class LaunchedWork:
    """The completion of one entry of a launch.

    Attributes:
        keep_alive: an object that is referenced until the only one of `streams`, or the host, has waited for the work.

    Args:
        streams: those for which the memory in `keep_alive` was allocated. Another stream that waits does not keep them from
            reusing it during the work.
    """

    __slots__ = ("_device", "_streams", "_watcher", "event", "group", "keep_alive")

    def __init__(self, device: CupyDevice, event: PooledEvent, watcher: Watcher, group: LaunchedGroup,
                 keep_alive: object = None, streams: Collection[int] = ()) -> None:
        self._device, self.event, self._watcher, self.group = device, event, watcher, group
        self.keep_alive, self._streams = keep_alive, streams

    @property
    def device(self) -> int:
        """The index of the GPU."""
        return self._device.index

    def for_entry(self, keep_alive: object, streams: Collection[int] = ()) -> LaunchedWork:
        """Return the completion of another entry of the same launch."""
        share = LaunchedWork(self._device, self.event, self._watcher, self.group, keep_alive, streams)
        self._watcher.watch(share)
        return share

    def block_stream(self, stream: int) -> None:
        self._watcher.raise_failure()
        check_not_captured(self._device, stream)
        self._device.wait(stream, self.event.handle)
        if not self._streams or (len(self._streams) == 1 and stream in self._streams):
            self.keep_alive = None

    def is_done(self) -> bool:
        return self._device.is_event_done(self.event.handle)

    def wait(self) -> None:
        sleep = _MIN_SLEEP
        while not self.is_done():
            self._watcher.raise_failure()
            time.sleep(sleep)
            sleep = min(2 * sleep, _MAX_SLEEP)
        self._watcher.raise_failure()
        self.keep_alive = None


class Watcher:
    """Polls launched work until it is done, on a thread that sleeps while there is no work.

    Args:
        communicators: whose asynchronous errors it raises.
        fail: called once, with the first error; it ends the watcher unless the job has ended already.
        times: in seconds, ascending: when work that is not done is reported.
        report: called with that work.
        clock: in seconds.
    """

    def __init__(self, device: CupyDevice, communicators: Communicators, fail: Callable[[HorovodInternalError], None],
                 times: Sequence[float] = (), report: Callable[[OverdueWork], None] = lambda work: None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._device, self._communicators, self._fail = device, communicators, fail
        self._times, self._report, self._clock = times, report, clock
        self._done: dict[int, int] = {}  # by process set: the sequence number of the last plan that is done
        self._pending: deque[LaunchedWork] = deque()
        self._failure: HorovodInternalError | None = None
        self._condition = threading.Condition()
        self._polling = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="hvdlite-nccl-watcher", daemon=True)
        self._started = False

    def watch(self, launched: LaunchedWork) -> None:
        """Watch a completion until it is done; called in launch order."""
        with self._condition:
            self._pending.append(launched)
            if not self._started:
                self._started = True
                self._thread.start()
            self._condition.notify()

    def progress(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return by process set the last plan that is done, and the last one to which the GPU has come."""
        done = dict(self._done)
        for launched in self._pending.copy():
            group = launched.group
            if not launched.is_done():  # the stream is there, or waits for what that needs
                is_there = all(self._device.is_event_done(event.handle) for event in group.ready)
                return done, {group.process_set_id: group.sequence if is_there else group.sequence - 1}
            done[group.process_set_id] = group.sequence
        return done, {}

    def drain(self, timeout: float) -> bool:
        """Wait until all watched work is done; return whether it was done within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._pending and self._failure is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS / 2)
        return not self._pending

    def end(self, failure: HorovodInternalError | None) -> None:
        """Stop polling; with a failure, all later waits raise it."""
        with self._condition:
            self._ended = True
            self._failure = self._failure or failure
            self._condition.notify()

    def wait_for_poll(self) -> None:
        """Wait until the current poll has finished, so that communicators that later polls do not find may be aborted."""
        if self._polling.acquire(timeout=MAX_POLL_SECONDS):
            self._polling.release()

    def raise_failure(self) -> None:
        """Raise the recorded error, if there is one."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def _run(self) -> None:
        try:
            self._device.make_current()
            while self._wait_for_work():
                self._poll()
                time.sleep(POLL_SECONDS)
        except Exception as error:
            self._fail(error if isinstance(error, HorovodInternalError) else HorovodInternalError(
                f"a GPU failed while work was under way: {self._device.explain(None, error)}"))

    def _wait_for_work(self) -> bool:
        with self._condition:
            while not self._pending and not self._ended:
                self._condition.wait()
            return not self._ended

    def _poll(self) -> None:
        while self._pending and self._pending[0].is_done():
            launched = self._pending.popleft()
            launched.keep_alive = None
            self._done[launched.group.process_set_id] = launched.group.sequence
        if self._pending and self._times:
            self._report_overdue(self._pending[0].group)
        with self._polling:
            if self._pending and not self._ended:
                self._communicators.check()

    def _report_overdue(self, group: LaunchedGroup) -> None:
        """Report what the GPU is at, if it is time. What was launched later waits for that."""
        seconds = self._clock() - group.since
        passed = sum(limit <= seconds for limit in self._times)
        if passed > group.reported:
            group.reported = passed
            self._report(group.overdue(seconds))

"""One rank's end of an ordered group: its calls are queued, and carried out one after the other.

Theory of operation
- A blocking call in an idle group is carried out by the thread that makes it. Other calls are carried out by the group's
  worker thread, which exists from the first such call on.
- What a callback of a call calls is carried out at once, before what is queued. This place must not depend on whether the
  call is over when a rank asks for the callback. If it is, the callback runs where the script is, and its calls come behind
  what is queued. So if it is not, and others are queued behind it, the callback waits for a *marker*, too: a call without
  operations at the end of the queue (`when_over`). If a callback waits for a queued call, its thread carries out the queue.
- An operation is carried out by `executor.py`. If the ranks differ, all raise `MismatchError`, and the group goes on. Any
  other error ends the group on this rank: the others may be in the middle of a plan. They are told of what they cannot know,
  such as a lack of memory.

The lock is held for moments, and never while a call is carried out. Rules: docs/protocol.md#ordered-groups.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from hvdlite.core.array import Array
from hvdlite.core.errors import ForkedProcessError, HorovodInternalError, MismatchError, PeerLeftError, UnsupportedError
from hvdlite.groups.call import Call, when_all_done
from hvdlite.groups.executor import Executor
from hvdlite.groups.history import PastCall
from hvdlite.groups.long_waits import PATIENCE_SECONDS, LongWait
from hvdlite.groups.operations import Operation
from hvdlite.groups.reporter import NoReporter, Reporter
from hvdlite.groups.standings import Announcements
from hvdlite.groups.transfers import Transfer, Transfers
from hvdlite.memory.group_area import GroupArea
from hvdlite.planes.base import Plane

JOIN_SECONDS: Final = 2.0
"""How long `close` waits for the worker thread."""


def _nothing() -> None:
    pass


class GroupEnd:
    """Implements `OrderedGroup`.

    Args:
        plane: has the group's ranks as process set 0.
        area: of this host.
        announcements: by which ranks on several hosts tell each other how far they are; None if all are on this host.
        transfers: sends and receives.
        members: for messages: the name of each rank.
        released: called once, when the group is closed.
        patience: seconds that a rank waits for others before it tells rank 0 of the runtime.

    Attributes:
        troubled: see `OrderedGroup.watch`.
    """

    def __init__(self, name: str, rank: int, size: int, timeout: float, plane: Plane, area: GroupArea, *,
                 announcements: Announcements | None = None, transfers: Transfers | None = None, members: Sequence[str] = (),
                 reporter: Reporter | None = None, released: Callable[[], object] = lambda: None,
                 patience: float = PATIENCE_SECONDS) -> None:
        self.name, self.rank, self.size, self.timeout = name, rank, size, timeout
        self.members = tuple(members) or tuple(map(str, range(size)))
        self._area, self._transfers, self._released = area, transfers, released
        self._reporter = reporter or NoReporter()
        self._executor = Executor(name, rank, size, plane, area, announcements, self.members, self._reporter, patience)
        self._waiter, self._long_waits = self._executor.waiter, self._executor.long_waits
        self.troubled: Callable[[], object] = _nothing
        self._pid = os.getpid()
        self._lock = threading.RLock()  # guards the following; a signal handler may make a call while its thread holds it
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Call] = deque()
        self._places = 0  # calls that have been queued
        self._runner = 0  # the thread that carries out a call
        self._under_way: Call | None = None  # the one that it carries out
        self._is_closed = False
        self._has_runtime = True
        self._worker: threading.Thread | None = None

    # --- calls --------------------------------------------------------------------------------------------------------

    def start(self, operations: Sequence[Operation], finish: Callable[[], None] | None = None, *,
              blocking: bool = False, timeout: float | None = None) -> Call:
        progress = self._reporter.progress
        call = Call(operations, finish, timeout, progress)
        call.help, call.interrupted = self._help, self._reporter.waits_changed
        if self._pid != os.getpid():
            call.end(ForkedProcessError(f"{self.name}: this process (pid {os.getpid()}) was forked from rank {self.rank} "
                                        f"(pid {self._pid}), to which the group belongs; start workers with the spawn "
                                        "method"))
            return call
        self._reporter.called()
        with self._lock:
            error = self._waiter.error
            is_nested = self._runner == threading.get_ident()
            if is_nested and self._executor.is_busy and error is None:
                error = HorovodInternalError(
                    f"{self.name}: a signal handler made a call inside call {self._executor.begun} of the same group and "
                    "thread, which it has interrupted; set a flag in the handler, and make the call afterwards")
            runs_here = not is_nested and blocking and not self._runner and not self._queue
            if error is None and runs_here:
                self._runner = threading.get_ident()
            elif error is None and not is_nested:
                self._queue.append(call)
                self._places = call.place = self._places + 1
                self._let_work()
        if error is not None:
            call.end(error)
        elif is_nested:
            self._carry_out(call)
        elif runs_here:
            begun = progress.block()
            try:
                self._carry_out(call)
            finally:
                self._idle()
                progress.unblock(begun)
        elif blocking:
            call.wait()
        return call

    def when_over(self, calls: Sequence[Call], callback: Callable[[], None]) -> None:
        under_way = [call for call in calls if not call.is_done]
        if any(isinstance(call, Transfer) for call in under_way):
            callback = self._long_waits.counted(callback)
        last = max(under_way, key=lambda call: call.place, default=None)
        if last is not None and last.place not in (0, self._places):
            last = self._marker()
        # First the one that ends last: so callbacks for which the same call is the last one come in the order of asking.
        when_all_done(under_way if last is None else [last, *under_way], callback)

    def _marker(self) -> Call:
        """Return a call without operations: it is over when what this rank has called before is."""
        return self.start(())

    def send(self, values: Array, to: int, tag: int) -> Call:
        return self._watched(self._messages().send(values, to, tag, self.timeout))

    def receive(self, values: Array, source: int | None, tag: int) -> Call:
        return self._watched(self._messages().receive(values, source, tag, self.timeout))

    def _watched(self, call: Transfer) -> Call:
        call.progress, call.long_waits = self._reporter.progress, self._long_waits
        return call

    def _messages(self) -> Transfers:
        if self._transfers is None:
            raise UnsupportedError(f"{self.name}: there is no other rank to exchange messages with")
        return self._transfers

    def past_calls(self) -> list[PastCall]:
        with self._lock:
            queue = list(self._queue)
        return self._executor.past_calls(queue)

    def watch(self, troubled: Callable[[], object]) -> None:
        self.troubled = troubled

    # --- the end ------------------------------------------------------------------------------------------------------

    def silence(self) -> None:
        """The runtime ends, on the other ranks too: they hear the reason from their own. Callable from any thread."""
        self._has_runtime = False

    def fail(self, error: Exception) -> None:
        """The runtime has ended; callable from any thread."""
        self.silence()
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Fail all calls under way and all later ones."""
        first = self._waiter.error or error
        # Of other errors, the other ranks are told; and if another rank has left, that is what they need to know.
        if isinstance(error, HorovodInternalError) and not isinstance(first, PeerLeftError) and self._has_runtime:
            self._executor.leave()  # without a runtime they hear the reason from their own
        self._waiter.fail(error)
        if self._transfers is not None:
            self._transfers.fail(error)
        with self._lock:
            waiting, self._queue = self._queue, deque()
        for call in waiting:
            call.end(self._waiter.error)

    @property
    def is_closed(self) -> bool:
        """Whether this rank has left the group."""
        return self._is_closed

    @property
    def is_waiting(self) -> bool:
        """Whether a call is under way, for which a thread most likely waits."""
        return self._runner != 0

    def abort(self, reason: str) -> None:
        self._fail(HorovodInternalError(f"{self.name} was aborted on this rank: {reason}"))

    def drain(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._runner == threading.get_ident():
                return
            is_idle = not self._runner and not self._queue
        if not is_idle:
            self._marker().wait(seconds)
        if self._transfers is not None:
            self._transfers.flush(until)

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            worker = self._worker
            self._changed.notify_all()
        self._fail(HorovodInternalError(f"{self.name} was destroyed on this rank before the call was complete"))
        with self._lock:
            while self._runner not in (0, threading.get_ident()):
                if not self._changed.wait(JOIN_SECONDS):
                    break
        if worker is not None and worker is not threading.current_thread():
            worker.join(JOIN_SECONDS)
        if self._transfers is not None:
            self._transfers.close()
        self._executor.close()
        self._area.release()
        self._released()

    def close_in_child(self) -> None:
        """In a forked child: close every descriptor; what is shared with the parent is left as it is."""
        if self._transfers is not None:
            self._transfers.close_in_child()
        self._executor.close_in_child()

    # ------------------------------------------------------------------------------------------------------------------

    def _let_work(self) -> None:
        """Let the worker thread look for calls."""
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name=f"hvdlite-group-{self.name}", daemon=True)
            self._worker.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._lock:
                while (self._runner or not self._queue) and not self._is_closed:
                    self._changed.wait()
                if not self._queue:
                    return
                self._runner = threading.get_ident()  # first, so that `blocked_threads` never sees neither
                call = self._queue.popleft()
            try:
                self._carry_out(call)
            finally:
                del call  # and with it the tensors
                self._idle()

    def _help(self, call: Call) -> None:
        """Carry out what is queued until a call is over, if a callback waits for it: no other thread can do so meanwhile."""
        while self._runner == threading.get_ident() and not self._executor.is_busy and not call.is_done:
            with self._lock:
                if not self._queue:
                    return
                first = self._queue.popleft()
            self._carry_out(first)

    def _idle(self) -> None:
        with self._lock:
            self._runner, self._under_way = 0, None
            if self._is_closed:
                self._changed.notify_all()
            elif self._queue:
                self._let_work()

    def _carry_out(self, call: Call) -> None:
        error: Exception | None = None
        self._under_way = call
        try:
            for operation in call.operations:
                self._executor.perform(operation, self.timeout if call.timeout is None else call.timeout)
        except MismatchError as mismatched:
            error = mismatched
            self.troubled()
        except Exception as failed:
            error = self._executor.reason(failed)
            self.troubled()  # before what is queued is given up
            self._fail(error)
            if not isinstance(error, HorovodInternalError):  # no memory, say: the others do not know of it
                self._reporter.failed(error)
        except BaseException as interruption:  # in the middle of a plan: what the others wait for does not come
            self.abort(f"a thread was interrupted in a call ({type(interruption).__name__})")
            call.end(self._waiter.error)
            raise
        try:
            if error is None and call.finish is not None:
                call.finish()
        except Exception as failed:  # all ranks have done their part
            error = failed
        call.end(error)

    # --- for reports: any thread calls these, without a lock -----------------------------------------------------------

    @property
    def begun(self) -> int:
        """The number of the call that this rank has begun last."""
        return self._executor.begun

    def long_waits(self) -> list[LongWait]:
        """Return the calls in which this rank has waited for long, sends and receives included."""
        found = self._long_waits.of_transfers(self.name)
        waiting = self._executor.long_wait()
        if waiting is not None:
            found.append(waiting)
        return found

    def blocked_threads(self) -> frozenset[int] | None:
        """Return the threads that cannot go on before a collective in which this rank has waited for long is over.

        None while calls are carried out that are not such a collective, and while a callback of a send or receive may make
        calls.
        """
        if self._long_waits.may_call_back:
            return None
        try:
            calls = [self._under_way, *self._queue]
        except RuntimeError:  # it changes
            return None
        runner = self._runner
        if not self._long_waits.since:
            return None if runner or len(calls) > 1 else frozenset()
        return frozenset((runner, *(thread for call in calls if call is not None and not call.is_done
                                    for thread in call.waiting)))

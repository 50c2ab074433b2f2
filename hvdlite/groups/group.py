"""A group of ranks whose collectives are carried out in the order of calls, without negotiation.

Every rank calls the same collectives in the same order, as in MPI and NCCL, so the number of a call is its name.

Theory of operation
- A blocking call in an idle group is carried out by the thread that makes it. Other calls are carried out by the group's
  worker thread, which begins with the first such call, and ends when it has had nothing to do for a while.
- What a callback of a call calls is carried out at once, before what is queued. This place must not depend on whether the
  call is over when a rank asks for the callback: see `when_over`, and docs/decisions/0046. If a callback waits for a queued
  call, its thread carries out the queue.
- Whoever waits in a group advances all its sends and receives; if nobody does, the worker.
- An operation is carried out by `execution.py`. If the ranks differ, all raise `MismatchError`, and the group goes on. Any
  other error ends the group on this rank: the others may be in the middle of a plan. They are notified of what they cannot
  see, such as a lack of memory.

The lock is held for moments, and never while a call is carried out. Rules: docs/protocol.md#groups.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from hvdlite.core.array import Array
from hvdlite.core.errors import HorovodInternalError, MismatchError, PeerLostError, UnsupportedError
from hvdlite.groups.call import Call, when_all_done
from hvdlite.groups.execution import GroupExecutor, PastCall
from hvdlite.groups.members import GroupMembers
from hvdlite.groups.messages import Messages
from hvdlite.groups.operation import Operation
from hvdlite.groups.reports import Reports
from hvdlite.groups.transfer import Transfer
from hvdlite.handoff.group_state import GroupState
from hvdlite.memory.area import DONE, UNUSED

JOIN_SECONDS: Final = 2.0
"""How long `close` waits for the threads that carry out calls."""
IDLE_SECONDS: Final = 1.0
"""After so long without work the worker thread ends."""
LINGER_SECONDS: Final = 0.005
"""How long sends and receives are left to the threads that may come and wait for them."""


class Group:
    """One rank's end of a group. Callable from any thread; calls of different threads are carried out in their order.

    Attributes:
        name: for messages.
        rank: this rank's index in the group.
        size: number of ranks.
        timeout: seconds after which a call fails on a rank that still waits.
        members: for messages: the name of each rank.
        state: what the background thread of the runtime sees.

    Args:
        execution: owned by this object, like `messages`.
        messages: sends and receives; None if this rank is the only one.
        report_error: sends the other ranks an error that they cannot see.
        released: called once, when the group is closed.
    """

    def __init__(self, members: GroupMembers, timeout: float, state: GroupState, execution: GroupExecutor,
                 messages: Messages | None, reports: Reports, *,
                 report_error: Callable[[Exception], object] = lambda error: None,
                 released: Callable[[], object] = lambda: None) -> None:
        self.name, self.rank, self.size, self.members = members.name, members.rank, members.size, members.names
        self.timeout = timeout
        self._ranks = members
        self.state = state
        self._execution = execution
        self._messages = messages
        self._reports = reports
        self._report_error = report_error
        self._released = released
        self._progress = reports.progress
        self._pid = os.getpid()
        self._lock = threading.RLock()  # guards the following; a signal handler may make a call while its thread holds it
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Call] = deque()
        state.queue = self._queue  # type: ignore[assignment]
        self._places = 0  # calls that have been queued
        self._is_closed = False
        self._worker: threading.Thread | None = None
        self._is_driving = False  # the worker carries out sends and receives, and sleeps on this rank's word
        if messages is not None:
            messages.let_work = self._let_work_from_anywhere
            if messages.needs_work:
                self._let_work_from_anywhere()

    # --- calls --------------------------------------------------------------------------------------------------------

    def start(self, operations: Sequence[Operation], finish: Callable[[], None] | None = None, *,
              blocking: bool = False, timeout: float | None = None) -> Call:
        """Start operations; return their call, which may be over.

        Arrays belong to the call until it is over. Its error is one of

        - `MismatchError`, on all ranks: they do not call the same. The rest of the call is not done; the group goes on.
        - `OperationTimeoutError`; `PeerLeftError` or another `PeerLostError`; `HorovodInternalError` for what was aborted or
          destroyed; and `MemoryError`, which is reported to the other ranks. The group cannot be used any more on this rank.
        - what `finish` raises; the group goes on.
        - `ForkedProcessError`, in a forked child.

        Args:
            finish: called when the operations are done, before the call is over; by the thread that carries them out.
            blocking: the calling thread waits for it anyway: it may carry the operations out itself, and the call is over.
            timeout: seconds from when its turn comes; by default the group's.
        """
        state = self.state
        call = Call(operations, self._progress, finish, timeout)
        call.help, call.state = self._help, state
        if self._pid != os.getpid():
            call.end(self._ranks.forked_error(self._pid))
            return call
        self._reports.called()
        with self._lock:
            error = state.error
            is_nested = state.runner == threading.get_ident()
            if is_nested and self._execution.is_busy and error is None:
                error = HorovodInternalError(
                    f"{self.name}: a signal handler made a call inside call {state.begun} of the same group and "
                    "thread, which it has interrupted; set a flag in the handler, and make the call afterwards")
            works_here = False  # no thread can be started
            runs_here = not is_nested and blocking and not state.runner and not self._queue
            if error is None and runs_here:
                state.runner = threading.get_ident()
            elif error is None and not is_nested:
                self._queue.append(call)
                self._places = call.place = self._places + 1
                if not self._let_work() and not state.runner:
                    state.runner = threading.get_ident()
                    works_here = True
        if error is not None:
            call.end(error)
        elif is_nested:
            self._carry_out(call)
        elif runs_here:
            begun = self._progress.block()
            try:
                self._carry_out(call, polls=True)
            finally:
                self._idle()
                self._progress.unblock(begun)
        elif works_here:
            self._work_here()
        elif blocking:
            call.wait()
        return call

    def when_over(self, calls: Sequence[Call], callback: Callable[[], None]) -> None:
        """Call a function when calls of this group are over: at this place in the order of calls.

        So collectives that the function calls are carried out after those that the rank has called before, and before those
        that it calls afterwards, on every rank. The function may wait for them. It runs on the thread that ends the last of
        the calls, or at once if they are over; if the rank has made other calls in the meantime, when those are over, too.
        Sends and receives have no place in the order.
        """
        under_way = [call for call in calls if not call.is_done]
        if any(isinstance(call, Transfer) for call in under_way):
            callback = self.state.counted(callback)
        last = max(under_way, key=lambda call: call.place, default=None)
        if last is not None and last.place not in (0, self._places):
            last = self.start(())  # a marker: it is over when what this rank has called before is
        # First the one that ends last: so callbacks for which the same call is the last one come in the order of asking.
        when_all_done(under_way if last is None else [last, *under_way], callback)

    def send(self, values: Array, to: int, tag: int) -> Call:
        """Send bytes (uint8, flat) to a rank; never waits for it. Messages of the same pair and tag arrive in order."""
        return self._sends_and_receives().send(values, to, tag, self.timeout)

    def receive(self, values: Array, source: int | None, tag: int) -> Call:
        """Receive bytes into `values` from a rank, or from any; their number must be the sender's. See `Call.source`."""
        return self._sends_and_receives().receive(values, source, tag, self.timeout)

    def _sends_and_receives(self) -> Messages:
        if self._messages is None:
            raise UnsupportedError(f"{self.name}: there is no other rank to exchange messages with")
        return self._messages

    def past_calls(self) -> list[PastCall]:
        """Return the last collectives that this rank has called, oldest first. Callable while others are under way."""
        with self._lock:
            queue = list(self._queue)
        return self._execution.past_calls(queue)

    def watch(self, on_report: Callable[[], object]) -> None:
        """Call a function when collectives fail, and whenever rank 0 gathers a report.

        It runs on the thread that finds out, which may be the runtime's background thread: it must not wait for other ranks,
        nor raise.
        """
        self.state.on_report = on_report

    # --- the end ------------------------------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        """Fail all calls under way and all later ones. The other ranks see it, unless it is reported to them otherwise."""
        state = self.state
        first = state.error or error
        # Other errors are reported to them; and what another rank has done they learn as this one has.
        if isinstance(first, HorovodInternalError) and not isinstance(first, PeerLostError) and state.has_runtime:
            self._execution.leave()
        state.fail(error)
        if self._messages is not None:
            self._messages.fail(first)
        with self._lock:
            waiting = list(self._queue)
            self._queue.clear()
        for call in waiting:
            call.end(first)

    def abort(self, reason: str) -> None:
        """Fail all calls under way and all later ones, on this rank."""
        self._fail(HorovodInternalError(f"{self.name} was aborted on this rank: {reason}"))

    def drain(self, seconds: float) -> None:
        """Wait at most so long until all collectives and sends of this rank are over; receives are not waited for.

        Returns at once in a callback of a call, and where a call has been interrupted by a signal: nothing can go on there.
        """
        until = time.monotonic() + seconds
        if self._pid != os.getpid():
            return
        with self._lock:
            if self.state.runner == threading.get_ident():
                return
            is_idle = not self.state.runner and not self._queue
        if not is_idle:
            self.start(()).wait(seconds)
        if self._messages is not None:
            self._messages.flush(until)

    def close(self) -> None:
        """Leave the group; the memory is freed when all ranks have left. Calls under way fail. Idempotent."""
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
            while self.state.runner not in (0, threading.get_ident()):
                if not self._changed.wait(JOIN_SECONDS):
                    break
        if worker is not None and worker is not threading.current_thread():
            worker.join(JOIN_SECONDS)
        may_be_used = self.state.runner not in (0, threading.get_ident()) or (  # a thread, which may still use the memory
            worker is not None and worker is not threading.current_thread() and worker.is_alive())
        let_go = 0 if may_be_used else DONE
        if self.state.has_runtime:
            self._execution.leave(is_reason=False)  # unless it has, with the reason
        if self._messages is not None:
            self._messages.leave()
            self._messages.close()
            let_go = min(let_go, UNUSED) if self._messages.keeps_looking else let_go
        self._execution.close()
        self.state.area.release(let_go)
        self._released()

    def close_in_child(self) -> None:
        """In a forked child: close every descriptor; what is shared with the parent is left as it is."""
        self._execution.close()

    # --- the worker thread ----------------------------------------------------------------------------------------------

    def _let_work(self) -> bool:
        """Let the worker thread look for work, with the lock; return False if there is none, and none can be started."""
        if self._worker is None:
            worker = threading.Thread(target=self._work, name=f"hvdlite-group-{self.name}", daemon=True)
            try:
                worker.start()
            except RuntimeError:  # a limit, or the interpreter ends
                return False
            self._worker = worker
        self._changed.notify_all()
        if self._is_driving:
            self.state.area.wake((self.state.area.index,))
        return True

    def _work_here(self) -> None:
        """Carry out what is queued on this thread, which is the runner."""
        try:
            while True:
                with self._lock:
                    if not self._queue:
                        return
                    call = self._queue.popleft()
                self._carry_out(call)
        finally:
            self._idle()

    def _let_work_from_anywhere(self) -> None:
        """Likewise without the lock; the background thread never waits for it: a signal handler may wait for that thread."""
        if self._lock.acquire(blocking=False):
            try:
                self._let_work_later()
            finally:
                self._lock.release()
        else:
            with contextlib.suppress(RuntimeError):  # then it is done by whoever waits next
                threading.Thread(target=self._let_work_later, name=f"hvdlite-group-{self.name}", daemon=True).start()

    def _let_work_later(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._let_work()

    def _work(self) -> None:
        while True:
            with self._lock:
                call = self._next_call()
                if call is None and not self._is_driving:
                    self._worker = None
                    return
            if call is None:
                try:
                    assert self._messages is not None
                    self._messages.drive(lambda: bool(self._queue or self.state.runner or self._is_closed))
                finally:
                    self._is_driving = False
                continue
            try:
                self._carry_out(call)
            finally:
                del call  # and with it the tensors
                self._idle()

    def _next_call(self) -> Call | None:
        """Wait for work, with the lock; return a call, or None: it is to drive, or to end."""
        state, messages = self.state, self._messages
        has_lingered = False
        while not self._is_closed:
            if self._queue and not state.runner:
                state.runner = threading.get_ident()  # first, so that `blocked_threads` never sees neither
                return self._queue.popleft()
            has_work = messages is not None and messages.needs_work and not state.runner
            if has_work and has_lingered:
                self._is_driving = True
                return None
            has_lingered = has_work
            if not self._changed.wait(LINGER_SECONDS if has_work else IDLE_SECONDS) and not (has_work or self._queue):
                return None
        if self._queue and not state.runner:
            state.runner = threading.get_ident()
            return self._queue.popleft()
        return None

    def _help(self, call: Call) -> None:
        """Carry out what is queued until a call is over, if a callback waits for it: no other thread can do so meanwhile."""
        while self.state.runner == threading.get_ident() and not self._execution.is_busy and not call.is_done:
            with self._lock:
                if not self._queue:
                    return
                first = self._queue.popleft()
            self._carry_out(first)

    def _idle(self) -> None:
        works_here = False
        with self._lock:
            self.state.runner = 0
            if self._is_closed:
                self._changed.notify_all()
            elif self._queue:
                works_here = not self._let_work()
                self.state.runner = threading.get_ident() if works_here else 0
            elif self._messages is not None and self._messages.needs_work:
                self._let_work()
        if works_here:
            self._work_here()

    def _carry_out(self, call: Call, *, polls: bool = False) -> None:
        error: Exception | None = None
        try:
            for operation in call.operations:
                self._execution.perform(operation, self.timeout if call.timeout is None else call.timeout, polls=polls)
        except MismatchError as mismatched:
            error = mismatched
            self.state.on_report()
        except Exception as failed:
            error = self._execution.reason(failed)
            self.state.on_report()  # before what is queued is given up
            self._fail(error)
            if not isinstance(error, HorovodInternalError):  # such as a lack of memory, which the others cannot see
                self._report_error(error)
        except BaseException as interruption:  # in the middle of a plan: what the others wait for does not come
            self.abort(f"a thread was interrupted in a call ({type(interruption).__name__})")
            call.end(self.state.error)
            raise
        try:
            if error is None and call.finish is not None:
                call.finish()
        except Exception as failed:  # all ranks have done their part
            error = failed
        call.end(error)

"""The waits of a thread that trains in torch's C++, where this backend sees only that somebody has asked for a future."""

from __future__ import annotations

import time

import torch

from hvdlite.diagnostics.progress import Progress
from hvdlite.groups.call import Call
from hvdlite_torch.gradients.runs import graph_task
from hvdlite_torch.uncompiled import leave_to_python


class BackwardWaits:
    """Counts how long a thread waits at the end of the backward passes in which it has begun collectives.

    DDP begins them while autograd computes, and waits for their futures in a callback, which autograd calls when nothing is
    left to compute. The callbacks of this object come before and after it. The time between them is a wait, without what
    the thread was running, and without waits that count themselves (of FSDP2, for works). It ends with the last call at the
    latest: other callbacks may write a file.
    """

    def __init__(self) -> None:
        self._pass = -1  # autograd's number for the last one
        self.last: Call | None = None  # begun in it
        self.is_waiting = False

    def begun(self, call: Call) -> None:
        """A collective has begun, for which its thread does not wait."""
        current = graph_task()
        if current != -1 or self.is_waiting:  # the others' threads run what follows the calls of a hook of DDP
            self.last = call
        if current in (-1, self._pass):
            return
        self._pass, progress = current, call.progress
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback

        def computed() -> None:
            wait = _Wait(self, progress)
            queue_callback(leave_to_python(lambda: wait.end()))
        queue_callback(leave_to_python(computed))


class _Wait:
    """A wait that goes on until `end` is called, or until autograd forgets it: another callback has failed."""

    def __init__(self, waits: BackwardWaits, progress: Progress) -> None:
        self._waits, self._progress = waits, progress
        self._ran, self._counted, self._is_over = time.thread_time(), progress.blocked, False
        waits.is_waiting, self._begun = True, progress.block()

    def end(self) -> None:
        if self._is_over:
            return
        now, last = time.monotonic(), self._waits.last
        self._is_over, self._waits.is_waiting, self._waits.last = True, False, None
        otherwise = time.thread_time() - self._ran + self._progress.blocked - self._counted
        until = last.ended if last is not None and last.is_done else now
        waited = min(until - self._begun, now - self._begun - otherwise)
        self._progress.unblock(now - max(0.0, waited))

    __del__ = end

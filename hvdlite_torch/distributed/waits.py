"""The waits of a thread that trains in torch's C++, where this backend sees only that somebody has asked for a future."""

from __future__ import annotations

import time

import torch

from hvdlite.diagnostics.progress import Progress
from hvdlite_torch.gradients.runs import graph_task
from hvdlite_torch.uncompiled import leave_to_python


class BackwardWaits:
    """Counts how long a thread waits at the end of the backward passes in which it has begun collectives.

    DDP begins them while autograd computes, and waits for their futures in a callback, which autograd calls when nothing is
    left to compute. The callbacks of this object come before and after it. The time between them is a wait, without what
    the thread was running, and without waits that count themselves (of FSDP2, for works).
    """

    def __init__(self) -> None:
        self._pass = -1  # autograd's number for the last one

    def begun(self, progress: Progress) -> None:
        """This thread has begun a collective for which it does not wait."""
        current = graph_task()
        if current in (-1, self._pass):
            return
        self._pass = current
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback

        def computed() -> None:
            begun, ran, counted = progress.block(), time.thread_time(), progress.blocked

            def waited() -> None:
                otherwise = time.thread_time() - ran + progress.blocked - counted
                progress.unblock(min(begun + otherwise, time.monotonic()))
            queue_callback(leave_to_python(waited))
        queue_callback(leave_to_python(computed))

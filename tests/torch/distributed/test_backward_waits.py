"""Waits for futures at the end of a backward pass, as DDP waits: they are counted, and nothing else. Ranks are threads."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from tests.torch.distributed.threads import HANGS_SECONDS, run

ENGINE = torch.autograd.Variable._execution_engine


class Passes(torch.autograd.Function):
    """The identity, whose derivative calls a function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Any) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return gradient, None


def wait_for(future: Any) -> None:
    """Wait as DDP does: autograd's callbacks return nothing."""
    future.wait()


def is_blocked(group: Any) -> bool:
    """Return whether a rank counts as blocked at the moment."""
    from hvdlite.diagnostics import progress
    counter = group._group._progress
    return bool(progress._BLOCKED.unpack_from(counter._memory, progress._HEAD.size)[1])


def test_a_wait_after_the_pass_counts_while_it_goes_on_and_work_during_it_does_not() -> None:
    computed, seen = threading.Event(), threading.Event()

    def step(group: Any) -> list[float]:
        progress, found = group._group._progress, []

        def hand_over() -> None:
            if group.rank() == 1:
                assert seen.wait(HANGS_SECONDS), "rank 0 never counted as blocked"
            future = group.allreduce([torch.ones(2)]).get_future()
            ENGINE.queue_callback(lambda: wait_for(future))

        def compute() -> None:  # with a call under way, on rank 0
            found.append((progress.blocked, is_blocked(group)))
            computed.set() if group.rank() == 0 else None

        def watch() -> None:
            computed.wait(HANGS_SECONDS)
            until = time.monotonic() + HANGS_SECONDS
            while time.monotonic() < until and not is_blocked(group):
                time.sleep(0.001)
            seen.set() if is_blocked(group) else None

        if group.rank() == 0:
            threading.Thread(target=watch, daemon=True).start()
        x = torch.ones(3, requires_grad=True)
        Passes.apply(Passes.apply(x, compute), hand_over).sum().backward()
        assert found == [(0.0, False)] and not is_blocked(group)
        return [progress.blocked]

    (first,), (_,) = run(2, step)
    assert first > 0


def test_a_wait_that_counts_itself_and_work_in_callbacks_count_once() -> None:
    def step(group: Any) -> tuple[float, float]:
        progress, total = group._group._progress, 0.0

        def hand_over() -> None:
            work, other = group.allreduce([torch.ones(2)]), group.allreduce([torch.ones(2)])

            def finish() -> None:
                if group.rank() == 1:
                    time.sleep(0.05)  # the others' next call waits
                work.wait()
                other.get_future().wait()
                group.allreduce([torch.ones(1)]).wait()
                until = time.thread_time() + 0.05
                while time.thread_time() < until:
                    pass
            ENGINE.queue_callback(finish)

        for _ in range(3):
            x = torch.ones(3, requires_grad=True)
            begun = time.monotonic()
            Passes.apply(x, hand_over).sum().backward()
            total += time.monotonic() - begun
        assert torch.autograd.grad(Passes.apply(x, lambda: None).sum(), x)[0].tolist() == [1.0] * 3
        return progress.blocked, total

    for blocked, total in run(2, step):
        assert 0 <= blocked <= total - 3 * 0.05, "what the thread was running is no wait"


def test_a_pass_that_fails_leaves_the_next_one_counted() -> None:
    def step(group: Any) -> float:
        def hand_over() -> None:
            future = group.allreduce([torch.ones(2)]).get_future()
            ENGINE.queue_callback(lambda: wait_for(future))
            if fails:
                raise ValueError("in the pass")

        for fails in (True, False):
            try:
                Passes.apply(torch.ones(3, requires_grad=True), hand_over).sum().backward()
            except ValueError:
                assert fails and not is_blocked(group)
        assert not is_blocked(group)
        return float(group._group._progress.blocked)

    assert all(blocked > 0 for blocked in run(2, step))


def test_the_wait_ends_with_the_last_call_also_where_a_callback_sleeps_or_fails() -> None:
    def step(group: Any) -> float:
        def hand_over() -> None:
            future = group.allreduce([torch.ones(2)]).get_future()
            ENGINE.queue_callback(lambda: wait_for(future))
            ENGINE.queue_callback(callback)

        def fail() -> None:
            raise ValueError("in a callback")

        for callback in (lambda: time.sleep(0.3), fail):
            try:
                Passes.apply(torch.ones(3, requires_grad=True), hand_over).sum().backward()
            except ValueError:
                assert callback is fail
            assert not is_blocked(group)
        return float(group._group._progress.blocked)

    assert all(0 < blocked < 0.3 for blocked in run(2, step))

"""Programs of test_waiting.py."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import torch

import hvdlite_torch as hvd
from hvdlite import api
from hvdlite.core.errors import DeadlockError
from tests.raising import raises


def a_gradient_that_is_read() -> None:
    a, _, first, _ = two_optimizers()
    if hvd.rank() == 0:
        a.sum().backward()
        torch.nn.utils.clip_grad_norm_([a], 0.1)
    hvd.allreduce(torch.ones(1), name="mean")
    first.step()


def steps_in_different_orders() -> None:
    a, b, first, second = two_optimizers()
    (a if hvd.rank() == 0 else b).sum().backward()
    for optimizer in [first, second][::1 if hvd.rank() == 0 else -1]:
        optimizer.step()


def collectives_in_different_orders() -> None:
    for name in "xy"[::1 if hvd.rank() == 0 else -1]:
        hvd.allreduce(torch.ones(1), name=name)


CIRCLES = {
    "a gradient that is read": (a_gradient_that_is_read, [
        "rank 0 waits for the gradients of 'torch.optimizer.0' (round 1), which rank 1 has not",
        "rank 1 waits for 'allreduce.mean', which rank 0 has not enqueued"]),
    "steps in different orders": (steps_in_different_orders, ["'torch.optimizer.0'", "'torch.optimizer.1'"]),
    "collectives in different orders": (collectives_in_different_orders, [
        "rank 0 waits for 'allreduce.x'", "rank 1 waits for 'allreduce.y'"]),
}


def two_optimizers(lr: float = 0.1) -> tuple[Any, ...]:
    a, b = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    return a, b, *(hvd.DistributedOptimizer(torch.optim.SGD([each], lr=lr)) for each in (a, b))


def a_circle_that_cannot_be_deferred_raises_on_all_ranks(circle: str) -> None:
    hvd.init()
    call, texts = CIRCLES[circle]
    try:
        call()
    except DeadlockError as error:
        for text in texts:
            assert text in str(error), error
    else:
        raise AssertionError("no error")


class Alarm(Exception):
    """Raised by the signal in the middle of a wait."""


def interrupt_the_next_wait() -> None:
    """Raise `Alarm` in the main thread when it blocks."""
    runtime, main = api.runtime(), threading.main_thread().ident
    assert main is not None

    def ring(*_: object) -> None:
        raise Alarm

    def until_blocked() -> None:
        while not runtime.handoff.waiters:
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGALRM)

    signal.signal(signal.SIGALRM, ring)
    threading.Thread(target=until_blocked).start()


def a_circle_is_only_told_while_another_thread_may_help() -> None:
    hvd.init()
    names, told = "xy"[::1 if hvd.rank() == 0 else -1], threading.Event()

    def help() -> None:
        told.wait(2.5)
        hvd.allreduce(torch.ones(1), name=names[1])

    helper = threading.Thread(target=help)
    helper.start()
    hvd.allreduce(torch.ones(1), name=names[0])
    helper.join()
    hvd.barrier()


def a_wait_inside_a_wait_of_the_same_thread() -> None:
    hvd.init()

    def handler(*_: object) -> None:
        hvd.allreduce(torch.ones(1), name="handler")

    if hvd.rank() == 0:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        hvd.allreduce(torch.ones(1), name="main")
    else:
        time.sleep(2.5)
        hvd.allreduce(torch.ones(1), name="handler")
        hvd.allreduce(torch.ones(1), name="main")
    hvd.barrier()


def after_an_interrupted_wait_gradients_are_still_final_when_read() -> None:
    hvd.init()
    a, b, first, second = two_optimizers(lr=1.0)
    if hvd.rank() == 0:
        interrupt_the_next_wait()
        raises(Alarm, "", lambda: (3 * a + b).sum().backward())
        hvd.allreduce(torch.ones(1), name="interrupted")
    else:
        hvd.allreduce(torch.ones(1), name="interrupted")
        (a + 3 * b).sum().backward()
    assert (a.grad == 2).all() and (b.grad == 2).all(), (a.grad, b.grad)
    torch.nn.utils.clip_grad_norm_([a, b], 1.0)
    first.step()
    second.step()
    torch.testing.assert_close(a.data, torch.full((4,), 1 - 8 ** -0.5))
    hvd.check_replicas({"a": a.data, "b": b.data})


def an_interrupted_wait_can_be_taken_up_again() -> None:
    hvd.init()
    hooks = hvd.comm_hooks
    for interrupt, hook in (True, None), (False, None), (True, hooks.AllReduce()), (True, hooks.PowerSGD(1, 1, 1.0)):
        model = torch.nn.Linear(4, 4)
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm_hook=hook)
        for step in range(6):
            if step == 1 and interrupt and hvd.rank() == 0:
                interrupt_the_next_wait()
                raises(Alarm, "", model(torch.ones(2, 4)).sum().backward)
                hvd.allreduce(torch.ones(1), name="interrupted")
                optimizer.zero_grad()
                continue
            if step == 1 and interrupt:
                hvd.allreduce(torch.ones(1), name="interrupted")
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            if step == 1:
                optimizer.zero_grad()
            else:
                optimizer.step()
        hvd.check_replicas(model.state_dict())

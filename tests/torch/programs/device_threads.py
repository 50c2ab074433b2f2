"""Program of test_device_threads.py: `python -m tests.torch.programs.device_threads CASE`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hvdlite.core.config import Config
from hvdlite.runtime.runtime import Runtime
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer
from tests import worlds
from tests.rank_threads import assemble_threads
from tests.torch.device_thread import OnDevice, install_device, on_device


def reentrant(model: Any, x: Any) -> Any:
    return checkpoint(model, x.requires_grad_(), use_reentrant=True, preserve_rng_state=False)


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "one segment after the other": lambda model, x: reentrant(model[1], reentrant(model[0], x)),
    "a layer in several segments": lambda model, x: reentrant(model[1], reentrant(model[0], reentrant(model[0], x))),
    "segments in segments": lambda model, x: reentrant(lambda y: model[1](reentrant(model[0], y)), x),
    "in a segment and outside of it": lambda model, x: model[1](model[0](reentrant(model[0], x))),
}


def layers() -> Any:
    generator = torch.Generator().manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def values(tensor: Any) -> Any:
    return (tensor.host if isinstance(tensor, OnDevice) else tensor).detach().clone()


def checkpoints(gpus: Any) -> None:
    """Gradients are those of one process; after the first steps, each backward pass makes one round, by buckets."""
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        for title, call in CALLS.items():
            model, plain, x = layers(), layers(), torch.ones(2, 3)
            hooked: list[bool] = []
            if rank == 0:
                on_device(model)
                model[0].weight.register_post_accumulate_grad_hook(
                    lambda _, hooked=hooked: hooked.append(isinstance(threading.current_thread(), threading._DummyThread)))
            optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), runtime=runtime)
            reference = torch.optim.SGD(plain.parameters(), lr=0.1, foreach=False)
            for turn in range(6):
                for each in (optimizer, reference):
                    each.zero_grad()
                for part in range(1 + turn % 2):
                    before = gpus.made[rank].launches.count("allReduce")
                    call(model, (OnDevice if rank == 0 else torch.clone)(x * (part + 1))).sum().backward()
                    call(plain, x * (part + 1)).sum().backward()
                    launched = gpus.made[rank].launches.count("allReduce") - before
                    assert turn < 4 or launched == 1, f"{title}: {launched} launches in turn {turn}"
                for own, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(values(own.grad), wanted.grad, msg=f"{title}, turn {turn}")
                for each in (optimizer, reference):
                    each.step()
            assert rank != 0 or (hooked and all(hooked)), "hooks run on torch's thread"
    worlds.threads(2, step)


def interrupt(gpus: Any) -> None:
    """Ctrl-C ends a backward pass whose gradients wait for another rank; they are final when they are read."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    settings = Config.from_environment({}, shutdown_timeout=20.0)
    runtimes = assemble_threads(2, settings, devices=gpus.plane)
    computed, interrupted = threading.Event(), threading.Event()

    def train(runtime: Runtime) -> Any:
        runtime.start()
        rank = runtime.world.rank
        model = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        if rank == 0:
            on_device(model)
            model.weight.register_post_accumulate_grad_hook(lambda _: computed.set())
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0, foreach=False), runtime=runtime)
        loss = model((OnDevice if rank == 0 else torch.clone)(torch.full((1, 3), rank + 1.0))).sum()
        if rank == 1:
            assert interrupted.wait(worlds.HANGS_SECONDS)
            loss.backward()
        else:
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
                threading.Event().wait(worlds.HANGS_SECONDS)  # the signal comes a little later
            interrupted.set()
        assert (values(model.weight.grad) == 1.5).all()
        optimizer.step()
        runtime.shutdown()
        return values(model.weight)

    def press() -> None:
        computed.wait()
        os.kill(os.getpid(), signal.SIGINT)
    others = [threading.Thread(target=press), threading.Thread(target=train, args=[runtimes[1]])]
    for thread in others:
        thread.start()
    assert (train(runtimes[0]) == -1.5).all()
    for thread in others:
        thread.join()


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patched:
        made = install_device(patched)
        {"checkpoints": checkpoints, "interrupt": interrupt}[sys.argv[1]](made)
        made.end()
    print("done", flush=True)
    os._exit(0)  # torch's thread for the device outlives Python's backend

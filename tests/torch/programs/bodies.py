"""Elastic trainings whose loop counts bodies; their parameters are those of an undisturbed run, whatever was lost."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import hvdlite_torch as hvd

ROWS = 12
"""Of a global batch, which all sizes of worlds here divide."""


def models() -> list[Any]:
    """Return two models of float64."""
    torch.manual_seed(3)
    return [torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2)).double() for _ in range(2)]


def optimizers(made: list[Any]) -> list[Any]:
    """Return an optimizer of each model."""
    return [torch.optim.SGD(made[0].parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(made[1].parameters(), lr=0.05)]


def rows(body: int) -> torch.Tensor:
    """Return the samples of a body, whatever the world."""
    return torch.randn(ROWS, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(body))


def step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    """Make a step."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def undisturbed(bodies: int) -> list[float]:
    """Return the parameters after so many bodies in one process."""
    made = models()
    made_optimizers = optimizers(made)
    for body in range(bodies):
        for model, optimizer in zip(made, made_optimizers, strict=True):
            step(model, optimizer, rows(body))
    return flat(made)


def flat(made: list[Any]) -> list[float]:
    """Return all parameters."""
    return [float(value) for model in made for parameter in model.parameters() for value in parameter.detach().flatten()]


def count(bodies: int, victim: int, where: str, at: int, commit_every: int) -> dict[str, Any]:
    """Train for some bodies, in one of which a member kills itself.

    Args:
        where: "before" the first optimizer's step, "between", "after" both, or at the "copy" of a boundary.
        commit_every: 0 for no commits.
    """
    hvd.init()
    made = models()
    state = hvd.elastic.TorchState(body=0, **{f"model{index}": each for index, each in enumerate(made)}, **{
        f"optimizer{index}": hvd.DistributedOptimizer(each, made[index].named_parameters())
        for index, each in enumerate(optimizers(made))})
    member = int(os.environ["HVDLITE_MEMBER"])
    ran: list[tuple[int, int]] = []
    numbers: list[tuple[int, int | None]] = []

    def fail(here: str) -> None:
        if (member, here, state.body) == (victim, where, at):
            os.kill(os.getpid(), signal.SIGKILL)

    _fail_at_copy(state, lambda: fail("copy"))

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.body < bodies:
            state._begin_body()
            numbers.append((state._commits, state._body))
            print(f"body {state.body} of {hvd.size()}", flush=True)
            share = ROWS // hvd.size()
            x = rows(state.body)[hvd.rank() * share:][:share]
            ran.append((state.body, hvd.size()))
            fail("before")
            step(made[0], state.optimizer0, x)
            fail("between")
            step(made[1], state.optimizer1, x)
            fail("after")
            state.body += 1
            if commit_every and state.body % commit_every == 0:
                state.commit()
        state._end_bodies()

    train(state)
    hvd.shutdown()
    return {"parameters": flat(made), "ran": ran, "numbers": numbers, "pid": os.getpid()}


def with_statistics(bodies: int, victim: int, at: int) -> dict[str, Any]:
    """Train with BatchNorm and Dropout; a member kills itself in the middle of a body.

    Returns:
        for each body that has begun: its number, the size of the world, the buffers, the state of each random generator as
        a digest, and the learning rate.
    """
    hvd.init()
    member = int(os.environ["HVDLITE_MEMBER"])
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Dropout(), torch.nn.Linear(7, 2))
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(100 + member)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    state = hvd.elastic.TorchState(model, hvd.DistributedOptimizer(optimizer), schedule=schedule, body=0)
    begun: list[tuple[Any, ...]] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.body < bodies:
            state._begin_body()
            generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
            buffers = [each.tolist() for each in model.buffers()]
            begun.append((state.body, hvd.size(), buffers, hashlib.sha256(repr([
                generators[0].tolist(), *generators[1:]]).encode()).hexdigest(), optimizer.param_groups[0]["lr"]))
            schedule.step()  # a body that fails must not do it twice
            x = torch.randn(4, 5) + random.random() + np.random.random()
            output = model(x).square().mean()
            if (member, state.body) == (victim, at):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            output.backward()
            optimizer.step()
            state.body += 1
        state._end_bodies()

    train(state)
    hvd.shutdown()
    return {"begun": begun, "parameters": flat([model])}


def half_stepped(bodies: int, donor: int, at: int) -> dict[str, Any]:
    """Train; once, in one body, a member fails before its step, which the others have made when they fail."""
    hvd.init()
    member = int(os.environ["HVDLITE_MEMBER"])
    model = models()[0]
    optimizer = hvd.DistributedOptimizer(optimizers([model, model])[0], model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, body=0)
    ran: list[tuple[int, float]] = []
    failed: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.body < bodies:
            state._begin_body()
            ran.append((state.body, random.random()))
            share = ROWS // hvd.size()
            optimizer.zero_grad()
            model(rows(state.body)[hvd.rank() * share:][:share]).square().mean().backward()
            is_lost, error = state.body == at and not failed, hvd.HorovodInternalError("a broken plane")
            failed.extend([at] * is_lost)
            if is_lost and member == donor:
                hvd.barrier()  # the others have stepped
                raise error
            optimizer.step()
            if is_lost:
                hvd.barrier()
                raise error
            state.body += 1
        state._end_bodies()

    train(state)
    hvd.shutdown()
    alone = models()
    alone_optimizer = optimizers(alone)[0]
    for body in range(bodies):
        step(alone[0], alone_optimizer, rows(body))
    return {"parameters": flat([model]), "alone": flat(alone[:1]), "ran": ran}


def grow(bodies: int, gate: str) -> dict[str, Any]:
    """Train until three are there and have trained for some bodies; then for the rest of `bodies`."""
    hvd.init()
    made = models()
    optimizer = hvd.DistributedOptimizer(optimizers(made)[0], made[0].named_parameters())
    state = hvd.elastic.TorchState(made[0], optimizer, body=0, end=0)
    ran: list[tuple[int, int]] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        while not state.end or state.body < state.end:
            state._begin_body()
            share = ROWS // hvd.size()
            is_open = hvd.allreduce(torch.tensor(float(os.path.exists(gate))), op=hvd.Max, name="gate")
            ran.append((state.body, hvd.size()))
            step(made[0], state.optimizer, rows(state.body)[hvd.rank() * share:][:share])
            state.body += 1
            if is_open and not state.end:
                state.end = state.body + bodies
            print(f"body {state.body} of {hvd.size()}", flush=True)
        state._end_bodies()

    train(state)
    hvd.shutdown()
    alone = models()
    alone_optimizer = optimizers(alone)[0]
    for body in range(state.end):
        step(alone[0], alone_optimizer, rows(body))
    return {"parameters": flat(made[:1]), "alone": flat(alone[:1]), "ran": ran}


def _fail_at_copy(state: Any, fail: Callable[[], None]) -> None:
    copy = state._small_copy

    def failing(room: Any) -> Any:
        fail()
        return copy(room)
    vars(state)["_small_copy"] = failing

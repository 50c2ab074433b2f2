"""Elastic trainings whose loop counts bodies; their parameters are those of an undisturbed run, whatever was lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

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


def _fail_at_copy(state: Any, fail: Callable[[], None]) -> None:
    copy = state._small_copy

    def failing(room: Any) -> Any:
        fail()
        return copy(room)
    vars(state)["_small_copy"] = failing

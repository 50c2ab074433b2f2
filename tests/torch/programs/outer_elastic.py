"""An elastic training with `outer=` of which each member writes down what it learns, and what it has when a world ends.

Each step adds a whole number, which depends on the member, to all values of a parameter. The first one is written down.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hvdlite_torch as hvd
from hvdlite import api
from hvdlite.core.errors import UnsupportedError
from hvdlite.training.outer.schedule import divide


def learned(member: int, number: int) -> list[int]:
    """Return what step `number` of a member, counted by itself, adds to each parameter."""
    draw = random.Random(1_000 * member + number)
    return [draw.randrange(1, 1_000), draw.randrange(1, 1_000)]


def local(parameters: list[Any]) -> list[float]:
    """Return the first value of each parameter."""
    return [float(each.detach()[0]) for each in parameters]


def snapshot(parameters: list[Any], optimizer: Any) -> dict[str, Any]:
    """Return what a member has: of each parameter the local value, the global one, and that at the begin of an exchange."""
    outer = optimizer.state_dict().get("outer")
    if outer is None:
        return {"step": -1, "local": local(parameters)}
    sizes = [each.numel() for each in parameters]
    parts = divide(sizes, len(outer["fragments"]))
    found: dict[str, Any] = {name: [] for name in ("global", "start", "merges", "waits")}
    for part, fragment in zip(parts, outer["fragments"], strict=True):
        ends = np.cumsum([sizes[index] for index in part])[:-1]
        for index in range(len(part)):
            place = ends[index - 1] if index else 0
            found["global"].append(float(fragment["weights"][place]))
            found["start"].append(None if fragment["start"] is None else float(fragment["start"][place]))
            found["merges"].append(fragment["merges"])
            found["waits"].append(fragment["due"] == fragment["begun"])
    return {"step": outer["step"], "local": local(parameters), **found}


def train(folder: str, steps: int, size: int, arguments: dict[str, Any], commit_every: int, pause: float) -> dict[str, Any]:
    """Train for so many steps of rank 0.

    Args:
        size: of the first of two parameters.
        arguments: of `DiLoCo`; only `every` and `workers` make it a `LocalSGD`.
        commit_every: 0 for a loop that counts bodies.
        pause: seconds that a step of some members takes at most, twice as many of others.
    """
    hvd.init()
    member = int(os.environ["HVDLITE_MEMBER"])
    torch.manual_seed(member)
    model = torch.nn.ParameterList([torch.zeros(each, dtype=torch.float64) for each in (size, size // 2)])
    parameters = list(model)
    outer = hvd.LocalSGD(**arguments) if arguments.keys() <= {"every", "workers"} else hvd.DiLoCo(**arguments)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), model.named_parameters(), outer=outer)
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    number, draw = 0, random.Random(member)

    def write(kind: str, **fields: Any) -> None:
        with Path(folder, f"{member}.log").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "epoch": api.worlds().coordinates.epoch, **fields}) + "\n")

    def body(state: Any) -> None:
        nonlocal number
        optimizer.zero_grad()
        added, number = learned(member, number), number + 1
        torch.stack([-value * each.sum() for value, each in zip(added, parameters, strict=True)]).sum().backward()
        before = local(parameters)
        time.sleep(draw.uniform(0, pause) * (member % 3))  # so workers drift apart
        optimizer.step()
        state.step += 1
        made = -1 if optimizer._outer is None else optimizer._outer.step
        write("step", step=made, before=before, added=added, after=local(parameters))

    @hvd.elastic.run
    def run(state: Any) -> list[float]:
        hvd.check_replicas(model.state_dict())
        write("began", rank=hvd.rank(), size=hvd.size(), workers=optimizer.workers, **snapshot(parameters, optimizer))
        try:
            while state.step < steps:
                if commit_every == 0:
                    state._begin_body()
                body(state)
                print(f"step {state.step} of {hvd.size()}", flush=True)
                if commit_every and state.step % commit_every == 0:
                    write("commit", **snapshot(parameters, optimizer))
                    state.commit()
            if commit_every == 0:
                state._end_bodies()
            optimizer.synchronize_outer()
        except BaseException:
            write("ended", **snapshot(parameters, optimizer))
            raise
        write("ended", **snapshot(parameters, optimizer))
        return local(parameters)

    found = run(state)
    hvd.check_replicas(model.state_dict())
    hvd.check_replicas(optimizer.global_weights())
    hvd.shutdown()
    return {"weights": found, "steps": state.step}


def grow(steps: int) -> dict[str, Any]:
    """Train with Adam until there are three ranks, which train for some steps.

    Returns:
        the moments with which this member ends its first world, and begins the second one, and its parameters there.
    """
    hvd.init()
    torch.manual_seed(int(os.environ["HVDLITE_MEMBER"]))
    model = torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters(),
                                         outer=hvd.DiLoCo(4, fragments=2, delay=1))
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    found: dict[str, Any] = {}

    def moments() -> list[float]:
        return [float(value) for each in optimizer.state.values() for value in each["exp_avg"].flatten()]

    @hvd.elastic.run
    def run(state: Any) -> None:
        found.setdefault("begun", [])
        if hvd.size() == 3:
            found["begun"] = moments()
            found["weights"] = [float(value) for each in model.parameters() for value in each.detach().flatten()]
            state.step = 0
        while hvd.size() < 3 or state.step < steps:
            state._begin_body()
            optimizer.zero_grad()
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(state.step)) + hvd.rank()
            model(x).square().mean().backward()
            optimizer.step()
            state.step += 1
            if hvd.size() < 3:
                found["ended"] = moments()
            print(f"step {state.step} of {hvd.size()}", flush=True)
        state._end_bodies()
        optimizer.synchronize_outer(model)

    run(state)
    hvd.check_replicas(model.state_dict())
    hvd.shutdown()
    return found


def refused(folder: str) -> list[str]:
    """Return what is said about other workers, durable checkpoints, and a state without the optimizer."""
    hvd.init()
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    said = []

    def said_by(call: Any) -> None:
        try:
            call()
        except UnsupportedError as error:
            said.append(str(error))

    model = torch.nn.Linear(3, 2)
    said_by(lambda: hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), outer=hvd.LocalSGD(2, workers=sets)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), outer=hvd.LocalSGD(2))
    said_by(lambda: hvd.elastic.TorchState(model, optimizer).checkpoint(folder))

    @hvd.elastic.run
    def run(state: Any) -> None:
        model(torch.ones(1, 3)).sum().backward()
        said_by(optimizer.step)

    run(hvd.elastic.TorchState(model))
    hvd.shutdown()
    return said

"""An elastic training with `outer=` of which each member writes down what it learns, and what it has when a world ends.

Each value of a parameter is the same number, to which each step adds a whole number that depends on the member.
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
from hvdlite.training.outer.schedule import divide

SIZES = (100_000, 60_000)


def learned(member: int, number: int) -> list[int]:
    """Return what step `number` of a member, counted by itself, adds to each parameter."""
    draw = random.Random(1_000 * member + number)
    return [draw.randrange(1, 1_000), draw.randrange(1, 1_000)]


def local(parameters: list[Any]) -> list[float]:
    """Return the value of each parameter."""
    assert all(torch.equal(each, each[:1].expand_as(each)) for each in parameters)
    return [float(each.detach()[0]) for each in parameters]


def snapshot(parameters: list[Any], optimizer: Any) -> dict[str, Any]:
    """Return what a member has: of each parameter the local value, the global one, and that at the begin of an exchange."""
    outer = optimizer.state_dict().get("outer")
    if outer is None:
        return {"step": -1, "local": local(parameters)}
    parts = divide(SIZES, len(outer["fragments"]))
    found: dict[str, Any] = {name: [] for name in ("global", "start", "merges", "waits")}
    for part, fragment in zip(parts, outer["fragments"], strict=True):
        ends = np.cumsum([SIZES[index] for index in part])[:-1]
        for index in range(len(part)):
            place = ends[index - 1] if index else 0
            found["global"].append(float(fragment["weights"][place]))
            found["start"].append(None if fragment["start"] is None else float(fragment["start"][place]))
            found["merges"].append(fragment["merges"])
            found["waits"].append(fragment["due"] == fragment["begun"])
    return {"step": outer["step"], "local": local(parameters), **found}


def train(folder: str, steps: int, arguments: dict[str, Any], commit_every: int, pause: float) -> dict[str, Any]:
    """Train for so many steps of rank 0.

    Args:
        arguments: of `DiLoCo`; only `every` and `workers` make it a `LocalSGD`.
        commit_every: 0 for a loop that counts bodies.
        pause: seconds that a step takes at most.
    """
    hvd.init()
    member = int(os.environ["HVDLITE_MEMBER"])
    torch.manual_seed(member)
    model = torch.nn.ParameterList([torch.zeros(size, dtype=torch.float64) for size in SIZES])
    parameters = list(model)
    outer = hvd.LocalSGD(**arguments) if arguments.keys() <= {"every", "workers"} else hvd.DiLoCo(**arguments)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), model.named_parameters(), outer=outer)
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    number, draw = 0, random.Random(member)
    file = Path(folder, f"{member}.log").open("a", encoding="utf-8")

    def write(kind: str, **fields: Any) -> None:
        file.write(json.dumps({"kind": kind, "epoch": api.worlds().coordinates.epoch, "member": member, **fields}) + "\n")
        file.flush()

    def body(state: Any) -> None:
        nonlocal number
        optimizer.zero_grad()
        added, number = learned(member, number), number + 1
        torch.stack([-value * each.sum() for value, each in zip(added, parameters, strict=True)]).sum().backward()
        before = local(parameters)
        time.sleep(draw.uniform(0, pause))
        optimizer.step()
        state.step += 1
        after = optimizer.state_dict().get("outer")
        write("step", step=-1 if after is None else after["step"], before=before, added=added, after=local(parameters))

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
        return local(parameters)

    found = run(state)
    hvd.check_replicas(model.state_dict())
    hvd.check_replicas(optimizer.global_weights())
    hvd.shutdown()
    return {"weights": found, "steps": state.step}

"""Members of an elastic job whose loop of its own divides batches at random, and gives passes their weights."""

from __future__ import annotations

import contextlib
import math
import random
import time
from pathlib import Path
from typing import Any

import torch

import hvdlite_torch as hvd
from hvdlite_torch.elastic import TorchState, run

ROWS, PASSES = 12, 2
"""Of a pass of all ranks together, and of a step."""
STEPS_OF_COMMIT = 3


def samples(step: int, number: int) -> torch.Tensor:
    """Return the rows of a pass."""
    return torch.randn(ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2 * step + number))


def cuts(step: int, number: int, size: int) -> list[int]:
    """Return where the ranks' rows begin and end; some ranks may have none."""
    draw = random.Random(f"{step} {number} {size}")
    return [0, *sorted(draw.randint(0, ROWS) for _ in range(size - 1)), ROWS]


def new_model() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.7, parameter.numel()).view_as(parameter))
    return model


def new_optimizer(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: Any, x: torch.Tensor) -> Any:
    return (model(x) - x.prod(1, keepdim=True)).square().mean()


def train(folder: str, compression: str, way: str) -> dict[str, Any]:
    """Train until the file "end" exists in a folder; `way` is "passes" or "no_sync"."""
    hvd.init()
    model = new_model()
    optimizer = hvd.DistributedOptimizer(new_optimizer(model), compression=getattr(hvd.Compression, compression),
                                         backward_passes_per_step=PASSES if way == "passes" else 1)
    state: Any = TorchState(model, optimizer, step=0)

    @run
    def loop(state: Any) -> None:
        while True:
            print(f"step {state.step} in {hvd.size()}", flush=True)
            optimizer.zero_grad()
            for number in range(PASSES):
                bounds = cuts(state.step, number, hvd.size())
                x = samples(state.step, number)[slice(*bounds[hvd.rank():hvd.rank() + 2])]
                optimizer.set_weight(len(x))
                is_local = way == "no_sync" and number + 1 < PASSES
                with optimizer.no_sync() if is_local else contextlib.nullcontext():
                    (loss_of(model, x) if len(x) else loss_of(model, torch.ones(1, 3).double()) * math.nan).backward()
            optimizer.step()
            state.step += 1
            if state.step % STEPS_OF_COMMIT == 0:
                state.commit()
                time.sleep(0.01)
                if hvd.allreduce(torch.tensor((Path(folder) / "end").exists()), op=hvd.Max):
                    return

    loop(state)
    hvd.shutdown()
    return {"steps": state.step, "parameters": [each.tolist() for each in model.parameters()]}


def replay(steps: int) -> list[Any]:
    """Return the parameters of one process after so many steps."""
    model = new_model()
    optimizer = new_optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(PASSES):
            loss_of(model, samples(step, number)).backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()]

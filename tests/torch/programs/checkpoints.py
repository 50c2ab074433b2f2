"""Ranks that save and load checkpoints."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

import hvdlite_torch as hvd


def losses(folder: str, save_after: int, steps: int, blocking: bool) -> list[float]:
    """Train with batches that differ between ranks, from the newest checkpoint on; return the losses of the steps.

    Args:
        save_after: save after so many steps; 0 not at all.
        steps: the number of the last one.
    """
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5),
                                torch.nn.Linear(8, 2)).double()
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    found = hvd.load(folder, model=model, optimizer=optimizer, schedule=schedule)
    result = []
    for step in range(found["step"] if found else 0, steps):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 6, dtype=torch.float64)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        result.append(loss.item())
        if step + 1 == save_after:
            hvd.save(folder, blocking=blocking, model=model, optimizer=optimizer, schedule=schedule, step=step + 1)
    hvd.shutdown()
    return result


def saves_for_ever(folder: str, blocking: bool) -> None:
    """Save again and again, until somebody ends this."""
    hvd.init()
    for step in range(10**6):
        hvd.save(folder, blocking=blocking, x=torch.full((100_000,), step, dtype=torch.float32), own=hvd.rank(), step=step)
        if step == 1:
            print("saves", flush=True)


def loads(folder: str) -> int:
    """Return the step of the checkpoint that there is, all of which is of that step."""
    hvd.init()
    found = hvd.load(folder)
    assert found is not None and (found["x"] == found["step"]).all() and found["own"] == hvd.rank() % 2
    hvd.shutdown()
    return int(found["step"])


def one_rank_cannot(folder: str) -> list[str]:
    """Return the errors of a save that rank 1 cannot make, and of an object that does not fit."""
    hvd.init()
    hvd.save(folder, x=torch.ones(3))
    errors = []
    for objects in ({"x": torch.ones(3), "y": object() if hvd.rank() == 1 else 1}, {"x": torch.ones(3, device="meta")}):
        try:
            hvd.save(folder, **objects)
        except hvd.CheckpointError as error:
            errors.append(str(error))
    hvd.shutdown()
    return errors


def ends_in_the_middle(folder: str) -> None:
    """Leave with a checkpoint that is still to be written; then die while one is."""
    hvd.init()
    hvd.save(folder, blocking=False, x=torch.ones(1000), own=hvd.rank(), step=1)
    hvd.shutdown()
    hvd.init()
    hvd.save(folder, blocking=False, x=torch.full((1000,), 2.0), own=hvd.rank(), step=2)
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

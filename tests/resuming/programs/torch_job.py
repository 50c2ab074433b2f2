"""A training with PyTorch that saves every few steps and when it is asked to stop, and writes down every finished step."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import hvdlite_torch as hvd

SAMPLES, BATCH, EPOCHS = 128, 8, 3
"""Divisible by all numbers of ranks, wherever an epoch goes on: no sample is repeated to pad, and each rank has two."""


class Numbered(Dataset[Any]):
    """Samples with their numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sequence[Any]:
        return index, torch.randn(6, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


def train(folder: str, ledger: str, run: int, workers: int, every: int, pause: float = 0.01) -> bool | None:
    """Train to the end, or until the stop; return whether it was stopped.

    Args:
        pause: seconds between two steps.
        ledger: the directory in which each rank writes a line for each finished step.
        run: the number of this run of the job.
        workers: of the DataLoader.
        every: steps between two checkpoints, which are written in the background.
    """
    hvd.init()
    torch.manual_seed(hvd.rank())
    data = Numbered()
    sampler: DistributedSampler[Any] = DistributedSampler(data, hvd.size(), hvd.rank(), seed=5)
    loader = hvd.resumable(DataLoader(data, BATCH, sampler=sampler, num_workers=workers))
    model = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.3),
                                torch.nn.Linear(64, 1)).double()
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    training = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    found = hvd.load(folder, **training)
    step = found["step"] if found else 0
    with open(f"{ledger}/{run}.{hvd.rank()}", "w", encoding="utf-8", buffering=1) as lines:
        lines.write(json.dumps({"begins": step}) + "\n")
        hvd.stop_requested()  # from the first call on, signals do not end the process
        print("trains", flush=True)
        for epoch in range(loader.epoch, EPOCHS):
            for numbers, x in loader:
                optimizer.zero_grad()
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                loss.backward()
                optimizer.step()
                schedule.step()
                step += 1
                done = {"step": step, "epoch": epoch, "samples": numbers.tolist(), "loss": loss.item()}
                lines.write(json.dumps(done) + "\n")
                time.sleep(pause)
                stops = hvd.stop_requested()
                if stops or step % every == 0:
                    hvd.save(folder, blocking=stops, **training, step=step)
                if stops:
                    hvd.shutdown()
                    return True
    hvd.save(folder, **training, step=step)
    print("has finished", flush=True)
    hvd.shutdown()
    return None


if __name__ == "__main__":
    was_stopped = train(sys.argv[1], sys.argv[2], int(os.environ.get("SLURM_RESTART_COUNT", "0")), 0, 1000, 0.3)
    sys.exit(75 if was_stopped else 0)

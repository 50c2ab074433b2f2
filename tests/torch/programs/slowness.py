"""Ranks of which one loads its batches slowly."""

from __future__ import annotations

import time
from typing import Any

import torch

import hvdlite_torch as hvd
from tests.torch.distributed.programs.ranks import begin


class Writer:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def log(self, values: dict[str, float], step: int) -> None:
        self.values = values


def slow_input(slow: int, under: str = "optimizer", folder: str = "") -> tuple[dict[str, Any], dict[str, float]]:
    """Train until the ledgers tell of some steps; return what `slowness` found, and what was logged.

    Args:
        under: "optimizer" (ours), "ddp" or "fsdp2".
        folder: for the other two: where the ranks' processes meet.
    """
    hvd.init()

    def collate(samples: list[Any]) -> torch.Tensor:
        if hvd.rank() == slow:
            time.sleep(0.05)
        return torch.ones(len(samples), 8)

    model: Any = torch.nn.Linear(8, 8)
    if under == "optimizer":
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    else:
        from torch.distributed.fsdp import fully_shard
        begin(folder)
        model = torch.nn.parallel.DistributedDataParallel(model) if under == "ddp" else fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.zeros(4 * 60))
    for batch in torch.utils.data.DataLoader(data, batch_size=4, collate_fn=collate):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    writer = Writer()
    found = hvd.slowness()
    assert hvd.log_slowness(1, writer) == found and found is not None
    hvd.shutdown()
    return found.as_dict(), writer.values

"""Memory of ranks that train."""

from __future__ import annotations

import torch

import hvdlite_torch as hvd


def train() -> tuple[list[dict[str, int]], list[dict[str, int]], str]:
    """Return the reports before training and after it."""
    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(1000, 500), torch.nn.BatchNorm1d(500))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    before = hvd.memory_report(model, optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 1000)).sum().backward()
        optimizer.step()
    hvd.allreduce(torch.zeros(1 << 20), name="large")
    model.tied = model[0].weight  # counts once
    after = hvd.memory_report(model, optimizer)
    hvd.shutdown()
    return list(before.ranks), list(after.ranks), str(after)

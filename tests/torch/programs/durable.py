"""Ranks whose state has durable checkpoints."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdlite_torch as hvd


def train(folder: str, epochs: int, fails_at: int) -> tuple[list[float], list[float]]:
    """Train with `state.loop`, with checkpoints as often as possible; return the losses of all bodies and the parameters.

    Args:
        fails_at: the body, counted over all epochs, in which rank 1 ends; 0: none.
    """
    hvd.init()
    torch.manual_seed(0)
    x = torch.randn(53, 4, dtype=torch.float64)
    model = torch.nn.Linear(4, 1).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    loader = DataLoader(TensorDataset(x), batch_size=10, shuffle=True, generator=torch.Generator().manual_seed(3))
    state = hvd.elastic.TorchState(model, optimizer, epoch=0, losses=[])
    state.checkpoint(folder, every=0)

    @hvd.elastic.run
    def body(state: Any) -> None:
        for (inputs,) in state.loop(loader, epochs=epochs):
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            sums = torch.tensor([loss.item() * len(inputs), len(inputs)], dtype=torch.float64)
            total, rows = hvd.allreduce(sums, op=hvd.Sum).tolist()
            state.losses = [*state.losses, total / rows]
            if len(state.losses) == fails_at and hvd.rank() == 1:
                os._exit(1)
    body(state)
    hvd.shutdown()
    return state.losses, [value for parameter in model.parameters() for value in parameter.reshape(-1).tolist()]

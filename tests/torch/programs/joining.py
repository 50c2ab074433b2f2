"""A member of an elastic job that makes its model before it has a world, as every script does."""

from __future__ import annotations

import os
from typing import Any

import torch

import hvdlite_torch as hvd
import hvdlite_torch.elastic


def join(gate: str) -> list[float]:
    """Train a little in each world until the file `gate` exists; return sums of the parameters."""
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert hvd.broadcast_object(before, root_rank=0) is not None
    state: Any = hvdlite_torch.elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @hvdlite_torch.elastic.run
    def loop(state: Any) -> None:
        while True:
            print(f"world of {hvd.size()}", flush=True)
            optimizer.zero_grad()
            model(torch.ones(3, 4) * (1 + hvd.rank())).sum().backward()
            optimizer.step()
            if hvd.allreduce(torch.tensor(float(os.path.exists(gate))), op=hvd.Max):
                return
            state.commit()

    loop(state)
    hvd.check_replicas(model.state_dict())
    return [float(tensor.sum()) for tensor in model.state_dict().values()]

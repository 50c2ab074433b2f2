"""Programs of test_join.py."""

from __future__ import annotations

from typing import Any

import numpy as np

import hvdlite as hvd


def an_optimizer_on_uneven_data() -> float:
    import torch

    import hvdlite_torch as hvd
    from tests.torch.models import by_bucket

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.ReLU(), torch.nn.Linear(300, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    seen = []
    for _ in range(3):
        for batch in range(6 + 2 * rank):
            optimizer.zero_grad()
            model(torch.full((4, 40), float(batch))).mean().backward()
            active = sum(batch < 6 + 2 * each for each in range(size))
            assert torch.allclose(model[2].bias.grad, torch.tensor([active / size])), (batch, model[2].bias.grad)
            optimizer.step()
            seen.append(by_bucket(optimizer))
        assert hvd.join() == size - 1
        hvd.broadcast_parameters(model.state_dict(), size - 1)  # a joined rank has missed the last steps
    for epoch in (1, 2):
        begin = epoch * (6 + 2 * rank)
        assert all(seen[begin:begin + 6]), (epoch, seen)
    return sum(parameter.double().sum().item() for parameter in model.parameters())


def a_rank_that_dies_while_others_have_joined_is_named(victim: int) -> None:
    hvd.init()
    own = hvd.rank()
    joins = [rank for rank in range(3) if rank != (victim + 1) % 3]
    print("ready", flush=True)
    try:
        if own in joins:
            hvd.join()
        while True:
            hvd.allreduce(np.ones(50_000))
    except hvd.PeerLostError as error:
        assert error.rank == victim, error
        print("named", flush=True)

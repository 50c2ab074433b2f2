"""Programs of test_mistakes.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hvdlite_torch as hvd


def made() -> torch.nn.Module:
    """Return a model with the same weights on all ranks, which were broadcast."""
    hvd.init()
    model = torch.nn.Linear(40, 30)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    """Step on another loss on each rank."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(2, 40) + hvd.rank()).sum().backward()
        optimizer.step()


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def not_wrapped() -> None:
    """The optimizer's state is broadcast and a metric averaged all the same."""
    model = made()
    optimizer = sgd(model)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    trained(model, optimizer)
    hvd.allreduce(torch.ones(3))


def different_models() -> None:
    hvd.init()
    with pytest.raises(hvd.MismatchError, match=r"models differ; make the same model on all ranks\. .*'broadcast"):
        hvd.broadcast_parameters(torch.nn.Linear(4, 2 + hvd.rank()).state_dict(), root_rank=0)


def of_another_model() -> None:
    model = made()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    trained(torch.nn.Linear(40, 30), optimizer)
    hvd.shutdown()


def beside_ddp(directory: str) -> None:
    model = made()
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=hvd.rank(), world_size=2)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    trained(torch.nn.parallel.DistributedDataParallel(model), optimizer)


def right() -> None:
    model = made()
    trained(model, hvd.DistributedOptimizer(sgd(model), model.named_parameters()))
    own = torch.nn.Linear(40, 30)  # of this rank
    trained(own, sgd(own))


def evaluated() -> None:
    with torch.no_grad():
        hvd.allreduce(made()(torch.ones(1, 40)).mean())


def averaged_now_and_then() -> None:
    """Local SGD: parameters are averaged instead of gradients."""
    model = made()
    trained(model, sgd(model))
    for parameter in model.parameters():
        hvd.allreduce_(parameter.data)


def reduced_by_hand() -> None:
    """One step, whose gradients are averaged before it."""
    model = made()
    model(torch.rand(2, 40) + hvd.rank()).sum().backward()
    for parameter in model.parameters():
        hvd.allreduce_(parameter.grad)
    sgd(model).step()


def reduced_in_a_closure() -> None:
    """One step, which evaluates the model often."""
    model = made()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.full((2, 40), 1.0 + hvd.rank())).square().sum()
        loss.backward()
        for parameter in model.parameters():
            hvd.allreduce_(parameter.grad)
        return hvd.allreduce(loss.detach())
    optimizer.step(closure)


def in_memory_of_another() -> None:
    """A model of this rank's own gets the memory of tensors that were broadcast."""
    hvd.init()
    memory = np.ones((30, 40), np.float32)
    hvd.broadcast_parameters([("mean", torch.from_numpy(memory))], root_rank=0)
    model = torch.nn.Linear(40, 30)
    model.weight.data = torch.from_numpy(memory)
    trained(model, sgd(model))


def alone() -> None:
    """Each rank trains a model of its own, from weights of its own."""
    hvd.init()
    model = torch.nn.Linear(40, 30)
    trained(model, sgd(model))

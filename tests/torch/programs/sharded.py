"""What ranks do in test_sharded.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import hvdlite_torch as hvd
from hvdlite.core.errors import ReplicaMismatchError, UnsupportedError

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    **{name: getattr(torch.optim, name) for name in ("Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax",
                                                     "Adadelta", "Rprop", "ASGD", "Adafactor")},
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "foreach": functools.partial(torch.optim.Adam, foreach=True, amsgrad=True),
    "Muon": torch.optim.Muon,
}


def model(seed: int = 3) -> torch.nn.Sequential:
    """Return a model with matrices of several sizes and memory formats."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), torch.nn.Flatten(), torch.nn.Linear(16, 31),
        torch.nn.Tanh(), torch.nn.Linear(31, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def parameters(name: str, module: torch.nn.Module) -> list[Any]:
    """Return what an optimizer gets: groups with other rates, or matrices alone."""
    own = list(module.parameters())
    if name == "Muon":
        for each in own:
            each.requires_grad_(each.dim() == 2)
        return [each for each in own if each.dim() == 2]
    return [{"params": own[:3]}, {"params": own[3:], "lr": 0.02}]


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range, closure: bool = False) -> None:
    """Train on batches that belong to this rank and the step."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        x = torch.randn(6, 2, 4, 4, generator=generator)

        def computed(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            return loss
        if closure:
            optimizer.step(computed)
        else:
            computed()
            optimizer.step()


def made(name: str, module: torch.nn.Module, *, sharded: bool) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(OPTIMIZERS[name](parameters(name, module)), sharded=sharded)


def same(module: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(map(torch.equal, module.parameters(), other.parameters()))


def equals_unsharded() -> None:
    """Bit for bit, with every optimizer; and each state is on one rank."""
    torch.set_num_threads(1)
    hvd.init()
    for name in OPTIMIZERS:
        for closure in (False, True):
            whole, shared = model(), model()
            plain, optimizer = made(name, whole, sharded=False), made(name, shared, sharded=True)
            train(whole, plain, range(5), closure)
            train(shared, optimizer, range(5), closure)
            assert same(whole, shared), (name, closure)
            counts = hvd.allgather_object(len(optimizer.state))
            assert sum(counts) == len(plain.state) and min(counts) > 0, (name, counts)
            hvd.check_replicas(shared.state_dict())


if __name__ == "__main__":
    globals()[__import__("sys").argv[1]]()

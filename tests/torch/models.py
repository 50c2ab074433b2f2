"""The models, batches and steps that most tests of the optimizer train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvdlite.runtime.runtime import Runtime
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer


def net() -> Any:
    generator = torch.Generator().manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def batches(count: int, size: int) -> Iterator[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield torch.randn(8 * size, 6, generator=generator), torch.randn(8 * size, 3, generator=generator)


def share(tensor: Any, runtime: Runtime) -> Any:
    return tensor.chunk(runtime.world.size)[runtime.world.rank]


def weights(model: Any) -> list[Any]:
    return [parameter.detach().clone() for parameter in model.parameters()]


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


def train(optimizer: Any, model: Any, x: Any, y: Any, clip: bool = False) -> None:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def reducer_of(optimizer: Any) -> Any:
    """Return the gradient reducer of a wrapped optimizer, which users do not see."""
    return optimizer._hooks.reducer


def by_bucket(optimizer: Any) -> bool:
    """Return whether the last round went by buckets."""
    return bool(reducer_of(optimizer).layout.is_used)


def has_learned(optimizer: Any) -> bool:
    """Return whether the set's buckets have been learned."""
    return reducer_of(optimizer).layout.plans is not None


def settle(runtime: Runtime, model: Any, optimizer: Any) -> None:
    """Train until the set is learned."""
    for _ in range(3):
        train(optimizer, model, torch.ones(4, 6), torch.ones(4, 3))
    assert by_bucket(optimizer)


def wrapped(runtime: Runtime, model: Any, **options: Any) -> Any:
    return wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model.named_parameters(),
                          runtime=runtime, **options)


def losses(runtime: Runtime, model: Any, optimizer: Any, steps: range) -> Iterator[Any]:
    """Yield the loss of each step; what follows is the caller's."""
    for turn in steps:
        generator = torch.Generator().manual_seed(100 * runtime.world.rank + turn)
        optimizer.zero_grad()
        yield model(torch.randn(4, 6, generator=generator).to(next(model.parameters()).dtype)).square().mean()

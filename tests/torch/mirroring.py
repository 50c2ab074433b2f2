"""The models, data and steps that tests of `MirroredStrategy` train."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import TensorDataset

from hvdlite.runtime.runtime import Runtime
from hvdlite_torch import MirroredStrategy
from tests.worlds import threads

SAMPLES = 101


class Net(torch.nn.Module):
    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x: Any) -> Any:
        return self.layers(x)


class Normal(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.last = torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)
        self.register_buffer("offset", torch.randn(3))
        self.frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: Any) -> Any:
        return self.last(self.norm(self.first(x))) + self.offset * self.frozen


def dataset(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(samples, 6, generator=generator), torch.randn(samples, 3, generator=generator))


def weights(model: Any) -> list[Any]:
    return [parameter.detach().clone() for parameter in model.parameters()]


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def strategy_on(runtime: Runtime, *arguments: Any, **named: Any) -> MirroredStrategy:
    """Return a strategy on the runtime of a rank that is a thread of this process."""
    kind = type(MirroredStrategy.__name__, (MirroredStrategy,), {"_runtime": runtime})
    strategy: MirroredStrategy = kind(*arguments, **named)
    return strategy


def registry_of(strategy: MirroredStrategy) -> Any:
    """Return what a strategy remembers of its scope, which users do not see: it holds only what is alive."""
    return strategy._registry


def train(model: Any, optimizer: Any, batches: Any, epochs: int, clip: bool,
          reduce: Callable[[Any], Any] = lambda loss: loss) -> list[float]:
    curve = []
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            curve.append(float(reduce(loss.detach())))
    return curve


def assert_close(ours: list[Any], theirs: list[Any], msg: str | None = None) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6, msg=msg)


def equal_one_process(case: Callable[[MirroredStrategy | None, Any], Any], size: int = 2, **config: object) -> None:
    """Run a case on ranks and without a strategy; it gets the strategy and what makes a scope, and returns tensors."""
    expected = case(None, contextlib.nullcontext)

    def step(runtime: Runtime) -> Any:
        strategy = strategy_on(runtime)
        return case(strategy, strategy.scope)
    results = threads(size, step, **config)
    for ours in results:
        assert all(torch.equal(mine, first) for mine, first in zip(ours, results[0], strict=True)), "ranks differ"
        assert_close(ours, expected)


def shards(strategy: MirroredStrategy | None, batches: Any) -> Any:
    return batches if strategy is None else strategy.distribute(batches)

"""Ranks that train with a resumable loader, stop anywhere, and go on with new objects."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hvdlite_torch as hvd

EPOCHS, SAMPLES, BATCH = 3, 26, 4


class Training:
    """A model with dropout, its optimizer and a loader."""

    def __init__(self, workers: int) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)).double()
        plain = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.optimizer = hvd.DistributedOptimizer(plain, self.model.named_parameters())
        x = torch.randn(SAMPLES, 3, dtype=torch.float64)
        data = TensorDataset(x, x.sum(1, keepdim=True))
        sampler: DistributedSampler[Any] = DistributedSampler(data, hvd.size(), hvd.rank())
        self.loader = hvd.resumable(DataLoader(data, BATCH, sampler=sampler, num_workers=workers))
        self.losses: list[float] = []
        torch.manual_seed(10 + hvd.rank())  # of the dropout

    def train(self, steps: int = 1000) -> None:
        for _ in range(self.loader.epoch, EPOCHS):
            for x, y in self.loader:
                self.optimizer.zero_grad()
                loss = (self.model(x) - y).square().mean()
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.item())
                if len(self.losses) == steps:
                    return

    def state(self) -> Any:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                "loader": self.loader.state_dict(), "random": torch.get_rng_state()}

    def load(self, state: Any) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        torch.set_rng_state(state["random"])


def resume(workers: int) -> list[float]:
    """Compare an undisturbed training with those that stop at a step and go on; return the losses."""
    hvd.init()
    whole = Training(workers)
    whole.train()
    for steps in (1, 4, 6) if workers else range(1, len(whole.losses)):
        begun, rest = Training(workers), Training(workers)
        begun.train(steps)
        rest.load(begun.state())
        rest.train()
        assert begun.losses + rest.losses == whole.losses, steps
    return whole.losses

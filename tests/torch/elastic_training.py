"""A small training for the tests of elastic states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite_torch.elastic import TorchState  # noqa: E402
from tests.torch.test_state import WideMoments  # noqa: E402


def network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3),
    "wide": lambda model: WideMoments(model.parameters()),
}


class Training:
    """A model, an optimizer and a schedule."""

    def __init__(self, kind: str = "sgd", seed: int = 0) -> None:
        self.model = network(seed)
        if kind == "wide":
            self.model = self.model.bfloat16()
        self.optimizer = OPTIMIZERS[kind](self.model)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def state(self, **more: Any) -> TorchState:
        return TorchState(self.model, self.optimizer, schedule=self.schedule, step=0, **more)

    def train(self, first: int, last: int) -> None:
        for number in range(first, last):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(5, 6, generator=generator).to(self.model[0].weight.dtype)

            def closure(x: Any = x) -> Any:
                self.optimizer.zero_grad()
                loss = self.model(x).float().square().mean()
                loss.backward()
                return loss
            closure()
            self.optimizer.step(closure) if isinstance(self.optimizer, torch.optim.LBFGS) else self.optimizer.step()
            self.schedule.step()

    def bits(self) -> list[Any]:
        """Return copies of all tensors and numbers."""
        found: list[Any] = []

        def visit(value: Any) -> None:
            if isinstance(value, dict):
                for key in sorted(value, key=str):
                    visit(value[key])
            elif isinstance(value, (list, tuple)):
                for each in value:
                    visit(each)
            elif isinstance(value, torch.Tensor):
                found.append((str(value.dtype), value.tolist()))
            else:
                found.append(value)
        visit([self.model.state_dict(), self.optimizer.state_dict(), self.schedule.state_dict()])
        return found

"""The parts of a training step that `hvdrun --profile` shows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.diagnostics.progress import Progress  # noqa: E402
from hvdlite_torch.step_parts import StepParts  # noqa: E402


class Training:
    """A clock, what is counted by it, and optimizers and modules that take as long as told."""

    def __init__(self) -> None:
        self.now, self.progress = 0.0, Progress()

    def perf_counter(self) -> float:
        return self.now

    def forward(self, seconds: float) -> None:
        Taking(self, seconds)(torch.ones(1))

    def step(self, within: Callable[[], object], optimizer: type[Any] | None = None) -> None:
        (optimizer or Calling)([torch.zeros(1)], {}).step(within)

    def passes(self, seconds: float) -> None:
        self.now += seconds


class Taking(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, training: Training, seconds: float) -> None:
        super().__init__()
        self.training_of, self.seconds = training, seconds

    def forward(self, x: Any) -> Any:
        self.training_of.now += self.seconds
        return x


class Calling(torch.optim.Optimizer):  # type: ignore[misc]
    def step(self, closure: Any = None) -> None:
        closure()


class Derived(Calling):
    """Its step is prepared for hooks, and its base class's, too."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    made = Training()
    monkeypatch.setattr("hvdlite_torch.step_parts.time", made)
    handles = StepParts(made.progress).install()
    yield made
    for handle in handles:
        handle.remove()


def test_accumulated_gradients_and_modules_that_are_called_again(training: Training) -> None:
    for _ in range(2):
        training.forward(3)
        training.passes(5)
        training.forward(2)  # activation checkpointing: in backward()
        training.passes(4)
        training.passes(7)
        training.progress.loaded(7, 0)  # the next batch
    training.step(lambda: None)
    training.passes(50)
    training.forward(1)
    assert training.progress.parts == {"forward": 11.0, "backward": 18.0, "optimizer": 0.0}


def test_a_step_that_raises_and_one_with_a_closure(training: Training) -> None:
    def closure() -> None:
        training.passes(4)
        training.forward(1)
        training.passes(8)

    with pytest.raises(ZeroDivisionError):
        training.step(lambda: 1 / 0)
    for _ in range(2):
        training.forward(1)
        training.passes(2)
        training.step(closure)
    assert training.progress.parts == {"forward": 4.0, "backward": 4.0, "optimizer": 16.0}


def test_steps_of_other_threads_do_not_count(training: Training) -> None:
    training.forward(1)
    thread = threading.Thread(target=training.step, args=(lambda: training.passes(4),))
    thread.start()
    thread.join()
    training.step(lambda: None)
    assert training.progress.parts == {"forward": 1.0, "backward": 4.0, "optimizer": 0.0}


@pytest.mark.parametrize("optimizer", [Calling, Derived])
def test_parts_are_counted_once_and_without_waits(training: Training, optimizer: Any) -> None:
    def wrapped() -> None:
        training.passes(1)
        training.step(lambda: training.passes(1))

    def step(trains: bool) -> None:
        with torch.set_grad_enabled(trains):
            torch.nn.Sequential(Taking(training, 1), Taking(training, 2))(torch.ones(1))
        if trains:
            training.passes(5)
            training.progress.blocked += 1  # a wait at the end of backward()
            training.step(wrapped, optimizer)

    Calling([torch.zeros(1)], {})  # so that the step of a base class is hooked, too
    step(True)
    step(False)
    step(True)
    training.passes(100)
    training.step(lambda: training.passes(1))  # a step without a forward pass before it
    assert training.progress._parts == {"forward": 6.0, "backward": 8.0, "optimizer": 5.0}

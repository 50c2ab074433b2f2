"""The parts of a training step that `hvdrun --profile` shows."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hvdlite.diagnostics.progress import Progress  # noqa: E402
from hvdlite_torch.step_parts import StepParts  # noqa: E402


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_parts_are_counted_once_and_without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, progress = Clock(), Progress()
    monkeypatch.setattr("hvdlite_torch.step_parts.time", clock)
    parts = StepParts(progress)
    model, optimizer = torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)])

    def step(training: bool) -> None:
        with torch.set_grad_enabled(training):
            parts._enter_module(model, ())
            parts._enter_module(model, ())  # a module in a module
            clock.now += 3
            parts._leave_module(model, (), None)
            parts._leave_module(model, (), None)
        if training:
            clock.now += 5
            progress._blocked += 1  # a wait at the end of backward()
            parts._enter_step(optimizer)
            parts._enter_step(optimizer)  # a wrapped optimizer
            clock.now += 2
            parts._leave_step(optimizer)
            parts._leave_step(optimizer)

    step(True)
    step(False)
    step(True)
    clock.now += 100
    parts._enter_step(optimizer)  # a step without a forward pass before it
    clock.now += 1
    parts._leave_step(optimizer)
    assert progress._parts == {"forward": 6.0, "backward": 8.0, "optimizer": 5.0}

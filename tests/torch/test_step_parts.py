"""The parts of a training step that `hvdrun --profile` shows."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.diagnostics.progress import Progress  # noqa: E402
from hvdlite_torch.step_parts import StepParts  # noqa: E402


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def training(monkeypatch: pytest.MonkeyPatch) -> tuple[Clock, Progress, StepParts, Any]:
    clock, progress = Clock(), Progress()
    monkeypatch.setattr("hvdlite_torch.step_parts.time", clock)
    return clock, progress, StepParts(progress), torch.optim.SGD([torch.zeros(1)])


def forward(clock: Clock, parts: StepParts, seconds: float) -> None:
    parts._enter_module(torch.nn.Identity(), ())
    clock.now += seconds
    parts._leave_module(torch.nn.Identity(), (), None)


def test_accumulated_gradients_and_modules_that_are_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, progress, parts, optimizer = training(monkeypatch)
    for _ in range(2):
        forward(clock, parts, 3)
        clock.now += 5
        forward(clock, parts, 2)  # activation checkpointing: in backward()
        clock.now += 4
        clock.now += 7
        progress.loaded(7, 0)  # the next batch
    parts._enter_step(optimizer)
    parts._leave_step(optimizer)
    clock.now += 50
    forward(clock, parts, 1)
    assert progress.parts == {"forward": 11.0, "backward": 18.0, "optimizer": 0.0}


def test_a_step_that_raises_and_one_with_a_closure(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, progress, parts, optimizer = training(monkeypatch)
    parts._enter_step(optimizer)  # raises
    for _ in range(2):
        forward(clock, parts, 1)
        clock.now += 2
        parts._enter_step(optimizer)
        clock.now += 4
        forward(clock, parts, 1)  # the closure
        clock.now += 8
        parts._leave_step(optimizer)
    assert progress.parts == {"forward": 4.0, "backward": 4.0, "optimizer": 16.0}


def test_steps_of_other_threads_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, progress, parts, optimizer = training(monkeypatch)
    forward(clock, parts, 1)
    for step in (parts._enter_step, parts._leave_step):
        clock.now += 2
        thread = threading.Thread(target=step, args=(optimizer,))
        thread.start()
        thread.join()
    parts._enter_step(optimizer)
    assert progress.parts == {"forward": 1.0, "backward": 4.0, "optimizer": 0.0}


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

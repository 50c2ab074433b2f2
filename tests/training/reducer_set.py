"""One reducer of five slots for its tests, and what a script and autograd do with it. There are no other ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdlite.core.types import ReduceOp
from hvdlite.training.gradients.arrays import Slot
from hvdlite.training.gradients.before_step import BeforeStep
from hvdlite.training.gradients.members import GradientState, Origin
from hvdlite.training.gradients.reducer import Reducer
from hvdlite.training.gradients.round import WaitIn
from tests.training.fake_runtime import LABEL, FakeRuntime, Written

SIZES = [2, 3, 5000, 4, 6000]
"""Of five gradients: small ones, and two that are copied as soon as they come."""


class Set:
    """One reducer of five slots, and what a script and autograd do with it."""

    def __init__(self, *, by_bucket: bool = False, op: ReduceOp = ReduceOp.AVERAGE, passes: int = 1,
                 wait_in: WaitIn = WaitIn.BACKWARD) -> None:
        self.runtime = FakeRuntime()
        self.slots = [Slot((size,), np.dtype(np.float32), is_expected=True) for size in SIZES]
        self.reducer: Reducer[Slot] = Reducer(
            self.runtime, Written(2), LABEL, op=op, prescale=1.0, postscale=1.0, passes=passes,  # type: ignore[arg-type]
            wait_in=wait_in, is_idempotent=op is ReduceOp.AVERAGE)
        self.before_step = BeforeStep(self.reducer)
        for number, slot in enumerate(self.slots):
            self.reducer.add(slot, str(number))
        if by_bucket:
            self.runtime.learn(self.slots, [member.name for member in self.reducer.members], op)

    def accumulate(self, number: int, value: float = 1.0) -> None:
        """As autograd does, before it calls the hook."""
        slot = self.slots[number]
        if slot.gradient is None:
            slot.gradient = np.zeros(SIZES[number], np.float32)
        slot.gradient += np.float32(value)  # type: ignore[operator]
        self.reducer.accumulated(slot)

    def backward(self, *numbers: int, value: float = 1.0) -> None:
        """A whole backward pass."""
        for number in numbers:
            self.accumulate(number, value)
        if self.reducer.end_pass():
            self.reducer.wait_and_make_due(deferrable=True)
        self.reducer.check_invariants()

    def step(self) -> None:
        """The optimizer's."""
        self.before_step.make_final(in_step=True)
        self.reducer.check_invariants()
        self.before_step.stepped()
        self.reducer.check_invariants()

    def clear(self) -> None:
        """By the script itself."""
        for slot in self.slots:
            slot.gradient = None

    def state(self, number: int) -> GradientState:
        return list(self.reducer.members)[number].state

    def origin(self, number: int) -> Origin:
        members = self.reducer.members
        member = list(members)[number]
        return members.origin(member, members.gradient(member))

    def value(self, number: int) -> float | None:
        gradient: Any = self.slots[number].gradient
        if gradient is None:
            return None
        assert (gradient == gradient[0]).all()
        return float(gradient[0])

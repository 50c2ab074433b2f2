"""The reducer by itself: random events beside a small model."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.core.types import ReduceOp
from hvdlite.training.gradients.members import REDUCED
from hvdlite.training.gradients.round import WaitIn
from tests.training.reducer_set import Set


class Model:
    """What gradients have to be: of each slot the sum of all ranks' averages since it was cleared.

    The other rank computes three times as much as this one whenever this one computes something. An average of
    (reduced + local) is reduced + the average of the local parts, however rounds and passes come.
    """

    def __init__(self, own: Set) -> None:
        self.own = own
        self.totals: dict[int, float] = {}

    def backward(self, numbers: list[int], value: float, suspended: bool) -> None:
        for number in numbers:
            self.totals[number] = self.totals.get(number, 0.0) + 2 * value
        if suspended:
            with self.own.reducer.suspended():
                self.own.backward(*numbers, value=value)
        else:
            self.own.backward(*numbers, value=value)

    def other(self, number: int, mine: Any) -> Any:
        """The model knows what the sum is to be, where this rank has something that is not reduced yet."""
        return None if mine is None else 2 * np.float32(self.reduced_with(number, mine)) - mine

    def reduced_with(self, number: int, mine: Any) -> Any:
        member = list(self.own.reducer.members)[number]
        base = self.bases.get(number, 0.0) if member.before is REDUCED else 0.0
        self.bases[number] = base + 2 * (mine[0] - base)
        return np.full_like(mine, self.bases[number])

    bases: dict[int, float]
    """What was reduced last of each slot."""


EVENTS = st.lists(st.one_of(
    st.tuples(st.just("backward"), st.sets(st.integers(0, 4)), st.integers(1, 3), st.booleans()),
    st.just(("defer",)), st.just(("step", True)), st.just(("step", False)), st.just(("clear",)), st.just(("learn",)),
    st.just(("zero",))), max_size=25)


@settings(deadline=None, max_examples=150)
@given(EVENTS, st.sampled_from(WaitIn), st.integers(1, 2))
def test_random_events(events: list[Any], wait_in: WaitIn, passes: int) -> None:
    own = Set(wait_in=wait_in, passes=passes)
    model = Model(own)
    model.bases = {}
    own.runtime.other = model.other
    for event, *arguments in [*events, ("step", True)]:
        if event == "backward":
            numbers, value, suspended = arguments
            model.backward(sorted(numbers), float(value), suspended)
        elif event == "defer":
            own.runtime.defers = True
        elif event == "learn":
            own.runtime.learn(own.slots, [member.name for member in own.reducer.members], ReduceOp.AVERAGE)
        else:
            own.runtime.defers = False
            own.before_step.make_final(in_step=event == "step")
            assert [own.value(number) for number in range(5)] == [model.totals.get(number) for number in range(5)]
            own.reducer.check_invariants()
            if event == "step" and arguments[0]:
                own.before_step.stepped()
                own.clear()
            elif event == "clear":
                own.clear()
            else:
                own.before_step.cleared()
                own.clear()
            model.totals, model.bases = {}, {}

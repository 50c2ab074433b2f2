"""A reducer that leaves the reduction of a whole round to a function: for lossy schemes with state of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.core.errors import HvdliteError
from hvdlite.training.framework import Parameter
from hvdlite.training.gradient_reducer import GradientReducer, Phase

ReduceRound = Callable[[Sequence[tuple[str, Parameter, bool]]], Sequence[tuple[Parameter, Any]]]
"""Reduce the gradients of (name, parameter, has one here); return the parameters that have a reduced one, and marks."""


class HookedReducer(GradientReducer[Parameter]):
    """Like `GradientReducer`, but everything is reduced at the end of the outermost backward pass, by `reduce_round`."""

    def use(self, reduce_round: ReduceRound[Parameter]) -> None:
        """Take the function; before the first round."""
        self._reduce_round = reduce_round
        self._present: dict[int, bool] = {}

    def _begin(self) -> None:
        self._admit()
        self._number += 1
        self._present = {}

    def _close_round(self) -> None:
        if self._phase is Phase.CLOSED:
            return
        self._begin_round()
        self._phase = Phase.CLOSED
        self._rounds += 1
        self._passes_done = 0
        self._touched, self._missed = self._missed, False

    def _give(self, member: Any, present: bool) -> None:
        self._present[id(member.parameter)] = present
        member.given = self._number

    def _collect(self, errors: list[HvdliteError], deferrable: bool) -> None:
        """Reduce what the closed round has."""
        try:
            reduced = self._reduce_round([(member.name, member.parameter, self._present.get(id(member.parameter), False)
                                           or self._is_present(member)) for member in self._members.values()])
        except HvdliteError as error:
            errors.append(error)
            return
        except BaseException:
            self._end_round()  # it cannot be taken up again in the middle
            raise
        for parameter, mark in reduced:
            self._mark(self._members[id(parameter)], mark)

"""A later call of a step's closure: whether its gradients are computed anew or accumulated."""

from __future__ import annotations

from typing import Generic

import numpy as np

from hvdlite.core.errors import HvdliteError
from hvdlite.core.types import ReduceOp
from hvdlite.training.framework import Parameter
from hvdlite.training.gradient_set import GradientSet
from hvdlite.training.order_errors import accumulated_alone
from hvdlite.training.round import Round


class LaterCall(Generic[Parameter]):
    """One such call, where reduced gradients can be reduced again.

    A rank that computes nothing in it cannot know whether the others clear their gradients first. It leaves its own out, as
    if it had cleared them. That is wrong where another rank accumulates, so ranks compare what they did.

    Attributes:
        incomplete: the first error of this call's rounds; raised at its end, when all ranks have compared.
    """

    __slots__ = ("_accumulates", "_is_decided", "_leaves_out", "incomplete")

    def __init__(self) -> None:
        self.incomplete: HvdliteError | None = None
        self._is_decided = self._accumulates = self._leaves_out = False

    def close(self, gradient_set: GradientSet[Parameter], current: Round[Parameter]) -> None:
        """Before members that were not handed over are given to a round of this call."""
        if not self._is_decided:
            self._is_decided, self._accumulates = True, current.has_again
            self._leaves_out = not current.has_again and gradient_set.gradients.leave_out(gradient_set.members)

    def check(self, gradient_set: GradientSet[Parameter]) -> None:
        """After the last round of this call: compare with the other ranks, which do so too.

        Raises:
            GradientOrderError: on all ranks, when some accumulated onto gradients that others left out.
        """
        flags = np.array([self._accumulates, self._leaves_out], np.uint8)
        gradient_set.runtime.allreduce(f"{gradient_set.label}.closure", flags, flags, ReduceOp.MAX,
                                   process_set=gradient_set.process_set_id).wait()
        if flags.all():
            raise accumulated_alone(gradient_set.rank, self._accumulates)
        if self.incomplete is not None:
            raise self.incomplete
